"""Puts become requests: gathered while others are in flight, bounded, retried with the same key.

Every put of one turn of the loop, and every put that comes while `requests_max` requests wait for
their answer, joins the next request. A request that fails for now is sent again as it is; one that
is refused because of an entry is sent again entry by entry, so that a put fails only for its own
fault. Each entry keeps its producer key then: of a request to several partitions some may have
been written.

A request names the topic's id. If another topic has its name by then, nothing is written, and what
was gathered goes into that one as its configuration asks for.

At a cluster each request goes to the node that coordinates its partition, and what was gathered is
parted by node. A request stays with its partition however often it is sent; puts that may go
anywhere keep away from partitions that some request has trouble with. They stay with a partition
for a moment: every partition that is written to costs a sync on each of its replicas, now for the
messages and later for their leases, however few they are. Over time all get the same.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from random import randrange
from typing import Any

import msgspec

from penstock.client.network.connection import Connection
from penstock.client.network.link import Link, passing
from penstock.client.options import Options
from penstock.client.queue.entries import EntryColumns
from penstock.client.queue.shipment import (
    ProducerIdentity,
    Shipment,
    Succession,
    apart,
    sealed,
    sealed_again,
    sealed_payloads,
)
from penstock.errors import Backpressure, InvalidArgument, NotFound, PenstockError
from penstock.model.columns import Binary
from penstock.model.topic import TopicConfig, TopicKind
from penstock.wire.messages import Enqueued


class Producer:
    """The enqueueing half of one topic."""

    def __init__(self, link: Link, config: TopicConfig, identity: ProducerIdentity) -> None:
        self.config = config
        self._link, self._identity, self._options = link, identity, link.options
        self._loop = asyncio.get_running_loop()
        self._gathered: deque[PutGroup] = deque()
        self._requests = 0
        self.inflight = Inflight(self._options)
        self._scheduled = False
        self._sticky = 0
        self._stay_until = 0.0
        self._stayed = 0  # entries that went to the partition since it was chosen
        self._troubled = Counter[int]()  # requests of a partition that are tried again
        self._succession = Succession(link, identity)

    # --- one by one ---

    @property
    def ready(self) -> bool:
        """Whether an entry may be added right now."""
        if self.inflight.full or self._link.closed:
            return False
        return self._succession.known(self.config)

    async def room(self, room_by: float | None = None) -> None:
        """Wait until another put is within the bounds; raises `Backpressure` at `room_by`. Before
        the first one, earlier clients of the same producer are shut out."""
        self._link.raise_if_closed()
        await self._succession.tell(self.config)
        await self.inflight.room(room_by)

    def add(
        self,
        payload: bytes,
        priority: int,
        *,
        key: bytes = b"",
        headers: bytes = b"",
        delay_ms: int = 0,
        max_retries: int = -1,
    ) -> asyncio.Future[str]:
        """Take one checked entry; the future gets its message id once it is durable."""
        options = self._options
        gathered = self._gathered
        if (
            not gathered
            or len((last := gathered[-1]).waiters) >= options.batch_entries_max
            or last.entries.bytes >= options.batch_bytes_max
        ):
            last = PutGroup()
            gathered.append(last)
        entries = last.entries
        before = entries.bytes
        entries.add(
            payload, priority, key=key, headers=headers, delay_ms=delay_ms, max_retries=max_retries
        )
        self.inflight.take(1, entries.bytes - before)
        waiter: asyncio.Future[str] = self._loop.create_future()
        last.waiters.append(waiter)
        if not self._scheduled and self._requests < self._requests_max:
            self._scheduled = True
            self._loop.call_soon(self._flush)
        return waiter

    def _flush(self) -> None:
        """End of a turn: send what was gathered, as far as requests may be in flight."""
        self._scheduled = False
        while self._gathered and self._requests < self._requests_max:
            if self._link.closed:
                closed = PenstockError("the client closed before the put was sent")
                self._give_up(self._gathered.popleft(), closed)
                continue
            partition = self._turn(len(self._gathered[0].waiters))
            connection = self._link.toward(self.config.name, partition)
            slow = 0.0 if connection is None else connection.slow_until(self.config.name)
            if slow:
                self._scheduled = True
                self._loop.call_at(slow, self._flush)
                return
            group = self._gathered.popleft()
            try:
                parts = self._parted(group, partition)
            except Exception as error:  # noqa: BLE001 - it is told to those who wait for it
                self._give_up(group, _told(error))
                continue
            for part in parts:
                self._send(part, partition)

    @property
    def _requests_max(self) -> int:
        return self._options.requests_max * self._link.nodes

    def _parted(self, group: PutGroup, partition: int) -> list[PutGroup]:
        """By the node that each entry goes to; nearly always that is one."""
        if self._link.nodes == 1:
            return [group]
        rows = self._apart(group.entries, partition)
        return [group] if len(rows) == 1 else [group.only(some) for some in rows]

    def _apart(self, entries: EntryColumns, partition: int) -> list[Sequence[int]]:
        name = self.config.name
        return apart(
            entries,
            self.config,
            partition=partition,
            node_of=lambda target: self._link.coordinator(name, target),
        )

    def _send(self, group: PutGroup, partition: int) -> None:
        try:
            shipment = self._seal(group.entries, partition)
        except Exception as error:  # noqa: BLE001 - it is told to those who wait for it
            self._give_up(group, _told(error))
            return
        self._requests += 1
        connection = self._link.toward(self.config.name, shipment.partition)
        if connection is None:
            self._link.spawn(self._deliver(group, shipment, None))
            return
        try:
            answer = connection.enqueue_nowait(shipment.request, shipment.bodies)
        except PenstockError as lost:
            self._link.spawn(self._deliver(group, shipment, lost))
        else:
            answer.add_done_callback(partial(self._on_answer, group, shipment))

    def _seal(self, entries: EntryColumns, partition: int, **how: Any) -> Shipment:
        return sealed(
            entries, config=self.config, identity=self._identity, partition=partition, **how
        )

    def _turn(self, entries: int) -> int:
        """The partition of the next batch's entries without a key."""
        if self._link.nodes > 1:
            self._grow()
            now, options = self._loop.time(), self._options
            self._stayed += entries
            stays = now < self._stay_until and self._stayed <= options.stay_entries
            if stays and not self._in_trouble(self._sticky):
                return self._sticky
            if not self._stay_until:  # Clients that live briefly shall not all begin with one.
                self._sticky = randrange(self.config.partitions)
            self._stay_until, self._stayed = now + options.stay_s, entries
        count = self.config.partitions
        for _ in range(count):
            self._sticky = (self._sticky + 1) % count
            if not self._in_trouble(self._sticky):
                break
        return self._sticky

    def _grow(self) -> None:
        """Use partitions that the topic was given while this client was open."""
        known = self._link.partitions(self.config.name)
        if known > self.config.partitions:
            self.config = msgspec.structs.replace(self.config, partitions=known)

    def _in_trouble(self, partition: int) -> bool:
        return self._troubled[partition] > 0 or (
            self._link.coordinator(self.config.name, partition) == ""
        )

    # --- the answer ---

    def _on_answer(
        self, group: PutGroup, shipment: Shipment, answer: asyncio.Future[Enqueued]
    ) -> None:
        error = answer.exception()
        if error is None:
            group.answer(shipment, answer.result())
        elif isinstance(error, PenstockError) and self._mends(group, error):
            self._link.spawn(self._deliver(group, shipment, error))
            return
        else:
            group.fail(error)
        self._done(group)

    def _mends(self, group: PutGroup, error: PenstockError) -> bool:
        """Whether the puts may succeed all the same if something else is tried."""
        return not self._link.closed and (
            passing(error) or self._made_again(error) or _shared_fault(group, error)
        )

    def _made_again(self, error: BaseException, expected_sequence: int | None = None) -> bool:
        """Whether nothing was written because another topic has the name by now, whose messages
        these may be just as well. Deltas build on others, which it has not got; and an expected
        sequence was one of the other log."""
        return (
            isinstance(error, NotFound)
            and "topic_id" in error.details
            and self.config.kind is not TopicKind.DELTA
            and expected_sequence is None
        )

    def _done(self, group: PutGroup) -> None:
        self._requests -= 1
        self._release(group)

    def _give_up(self, group: PutGroup, error: PenstockError) -> None:
        """What was gathered does not become a request: nobody may wait for one."""
        group.fail(error)
        self._release(group)

    def _release(self, group: PutGroup) -> None:
        self.inflight.release(len(group.waiters), group.entries.bytes)
        if self._gathered and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    # --- the slow way: after a first try that failed, or without a connection ---

    async def _deliver(
        self, group: PutGroup, shipment: Shipment, failed: PenstockError | None
    ) -> None:
        try:
            await self._try_again(group, shipment, failed)
        except PenstockError as error:
            group.fail(error)
        except BaseException as error:
            group.fail(PenstockError(f"the put was given up: {error!r}"))
            raise
        finally:
            self._done(group)

    async def _try_again(
        self, group: PutGroup, shipment: Shipment, failed: PenstockError | None
    ) -> None:
        if failed is None or passing(failed):
            try:
                group.answer(shipment, await self._ship(shipment, failed=failed))
                return
            except PenstockError as error:
                failed = error
        if self._made_again(failed):
            await self._renew()  # The topic of this name may have other partitions now.
            shipment = self._seal(group.entries, self._turn(len(group.waiters)))
            group.answer(shipment, await self._ship(shipment))
        elif _shared_fault(group, failed):
            await self._deliver_apart(group, shipment)
        else:
            raise failed

    async def _renew(self) -> None:
        found = await self._link.call("topic_get", topic=self.config.name)
        self.config = msgspec.convert(found, TopicConfig)
        await self._succession.tell(self.config)

    async def _deliver_apart(self, group: PutGroup, shipment: Shipment) -> None:
        """Entry by entry, in their order, each under the key that it had."""
        for row, partition, sequence in shipment.keyed():
            one = group.only((row,))
            alone = sealed_again(
                one.entries,
                config=self.config,
                identity=self._identity,
                partition=partition,
                sequence=sequence,
            )
            try:
                one.answer(alone, await self._sent(alone))
            except PenstockError as error:
                one.fail(error)

    async def _sent(self, shipment: Shipment, room_by: float | None = None) -> Enqueued:
        """The answer to a request that is sent when the node wants it. `room_by`, a time of the
        loop: a node that has no room by then is given up; None: never."""
        topic = self.config.name
        connection = self._link.toward(topic, shipment.partition)
        while (
            room_by is None  # With a time limit the node is tried, even if it asked for a pause.
            and connection is not None
            and (slow := connection.slow_until(topic))
        ):
            await asyncio.sleep(slow - self._loop.time())
            connection = self._link.toward(topic, shipment.partition)
        if connection is None:
            return await self._ship(shipment, room_by=room_by)
        try:
            return await connection.enqueue_nowait(shipment.request, shipment.bodies)
        except PenstockError as error:
            if not passing(error):
                raise
            return await self._ship(shipment, failed=error, room_by=room_by)

    async def _ship(
        self,
        shipment: Shipment,
        *,
        failed: PenstockError | None = None,
        room_by: float | None = None,
    ) -> Enqueued:
        """Send, and send again with the same bytes, until there is an answer."""

        async def send(connection: Connection) -> Enqueued | Backpressure:
            try:
                return await connection.enqueue_nowait(shipment.request, shipment.bodies)
            except Backpressure as refusal:
                if room_by is None:
                    raise
                return refusal

        at = shipment.partition
        self._troubled[at] += 1
        try:
            while True:
                if room_by is not None and isinstance(failed, Backpressure):
                    await self._wait_for_room(failed, room_by)
                    failed = None
                found = await self._link.request(send, failed=failed, at=(self.config.name, at))
                if not isinstance(found, Backpressure):
                    return found
                failed = found
        finally:
            self._troubled[at] -= 1

    async def _wait_for_room(self, refusal: Backpressure, room_by: float) -> None:
        """As long as the node says, but a last try is made when the time is over."""
        left = room_by - self._loop.time()
        if left <= 0:
            raise refusal
        await asyncio.sleep(min(refusal.retry_after_s, left))

    # --- many at once ---

    async def put_many(
        self,
        entries: EntryColumns,
        *,
        atomic: bool,
        expected_sequence: int | None,
        room_by: float | None = None,
    ) -> list[str]:
        """One request of its own for `entries`, or one for each node; their message ids."""
        await self.room(room_by)
        self.inflight.take(len(entries), entries.bytes)
        put = partial(
            self._put_once,
            entries,
            atomic=atomic,
            expected_sequence=expected_sequence,
            room_by=room_by,
        )
        try:
            try:
                return await put()
            except NotFound as error:
                if not self._made_again(error, expected_sequence):
                    raise
            await self._renew()
            return await put()
        finally:
            self.inflight.release(len(entries), entries.bytes)

    async def _put_once(
        self,
        entries: EntryColumns,
        *,
        atomic: bool,
        expected_sequence: int | None,
        room_by: float | None,
    ) -> list[str]:
        partition = self._turn(len(entries))
        if not atomic and self._link.nodes > 1:
            rows = self._apart(entries, partition)
            if len(rows) > 1:
                return await self._put_apart(entries, partition, rows, room_by)
        shipment = self._seal(
            entries, partition, atomic=atomic, expected_sequence=expected_sequence
        )
        return shipment.ids(await self._sent(shipment, room_by))

    async def _put_apart(
        self,
        entries: EntryColumns,
        partition: int,
        rows: Sequence[Sequence[int]],
        room_by: float | None,
    ) -> list[str]:
        shipments = [self._seal(entries.only(some), partition) for some in rows]
        sending = [self._sent(shipment, room_by) for shipment in shipments]
        answers = await asyncio.gather(*sending, return_exceptions=True)
        found = [""] * len(entries)
        for some, shipment, answer in zip(rows, shipments, answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            for row, message_id in zip(some, shipment.ids(answer), strict=True):
                found[row] = message_id
        return found

    async def put_payloads(
        self,
        payloads: Binary,
        *,
        partition: int,
        headers: bytes = b"",
        room_by: float | None = None,
    ) -> None:
        """One request of its own for payloads that belong to one partition."""
        size = len(payloads.blob)
        await self.room(room_by)
        self.inflight.take(len(payloads), size)
        try:
            await self._sent(
                sealed_payloads(
                    payloads,
                    config=self.config,
                    identity=self._identity,
                    partition=partition,
                    headers=headers,
                ),
                room_by,
            )
        finally:
            self.inflight.release(len(payloads), size)

    async def drain(self) -> None:
        """Wait until everything that was accepted is answered."""
        await self.inflight.idle()


class PutGroup:
    """Puts that will share a request, and who waits for each of them."""

    __slots__ = ("entries", "waiters")

    def __init__(self) -> None:
        self.entries = EntryColumns()
        self.waiters: list[asyncio.Future[str]] = []

    def only(self, rows: Sequence[int]) -> PutGroup:
        """Some of it by itself."""
        some = PutGroup()
        some.entries = self.entries.only(rows)
        some.waiters = [self.waiters[row] for row in rows]
        return some

    def answer(self, shipment: Shipment, answer: Enqueued) -> None:
        """Tell everybody the id of the message, out of the answer to the request."""
        try:
            ids = shipment.ids(answer)
        except Exception as error:  # noqa: BLE001 - it is told to those who wait for it
            self.fail(_told(error))
            return
        for waiter, message_id in zip(self.waiters, ids, strict=True):
            if not waiter.done():
                waiter.set_result(message_id)

    def fail(self, error: BaseException) -> None:
        """For those that have no answer yet."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(error)


class Inflight:
    """What was accepted and is not answered, in entries and bytes; neither is ever below zero."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.entries = self.bytes = 0
        self._waiting: list[asyncio.Future[None]] = []  # those who wait for room
        self._idle: list[asyncio.Future[None]] = []  # those who wait for the last answer

    @property
    def full(self) -> bool:
        options = self._options
        return (
            self.entries >= options.inflight_entries_max or self.bytes >= options.inflight_bytes_max
        )

    async def room(self, room_by: float | None = None) -> None:
        """Wait until more is within the bounds; raises `Backpressure` at `room_by`."""
        while self.full:
            try:
                async with asyncio.timeout_at(room_by):
                    await _in_line(self._waiting)
            except TimeoutError:
                raise Backpressure(f"{self.entries} puts of this client are under way") from None

    def take(self, entries: int, size: int) -> None:
        self.entries += entries
        self.bytes += size

    def release(self, entries: int, size: int) -> None:
        self.entries -= entries
        self.bytes -= size
        if self.entries < 0 or self.bytes < 0:
            raise RuntimeError(f"in flight: {self.entries} entries, {self.bytes} bytes")
        if self._waiting and not self.full:
            _wake(self._waiting)
        if not self.entries:
            _wake(self._idle)

    async def idle(self) -> None:
        """Wait until everything is answered."""
        while self.entries:
            await _in_line(self._idle)


async def _in_line(waiters: list[asyncio.Future[None]]) -> None:
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiters.append(waiter)
    await waiter


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()


def _shared_fault(group: PutGroup, error: BaseException) -> bool:
    """Whether some put of several is at fault, and nobody knows which."""
    return isinstance(error, InvalidArgument) and len(group.waiters) > 1


def _told(error: Exception) -> PenstockError:
    """An error as callers get it: theirs to catch, whatever went wrong."""
    if isinstance(error, PenstockError):
        return error
    told = PenstockError(f"a request could not be made or read: {error!r}")
    told.__cause__ = error
    return told
