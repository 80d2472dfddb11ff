"""Puts become requests: gathered while others are in flight, bounded, retried with the same key.

Every put of one turn of the loop, and every put that comes while `requests_max` requests wait for
their answer, joins the next request. A request that fails for now is sent again as it is; one that
is refused because of an entry is sent again entry by entry, so that a put fails only for its own
fault. Each entry keeps its producer key then: of a request to several partitions some may have
been written.

At a cluster each request goes to the node that coordinates its partition, and what was gathered is
parted by node. A request stays with its partition however often it is sent; puts that may go
anywhere keep away from partitions that some request has trouble with. They stay with a partition
for a moment: every partition that is written to costs a sync on each of its replicas, now for the
messages and later for their leases, however few they are. Over time all get the same.

Invariant: `_entries` and `_bytes` count what was accepted and is not answered; never below zero.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial
from random import randrange
from typing import Any

import msgspec

from penstock.client.entries import (
    Entries,
    Identity,
    Shipment,
    apart,
    sealed,
    sealed_again,
    sealed_payloads,
)
from penstock.client.gathering import Gathering
from penstock.client.link import Link, passing
from penstock.client.shipping import Shipping
from penstock.errors import Backpressure, InvalidArgument, PenstockError
from penstock.model.columns import Binary
from penstock.model.topic import TopicConfig
from penstock.wire.messages import Enqueued


class Producer:
    """The enqueueing half of one topic."""

    def __init__(self, link: Link, config: TopicConfig, identity: Identity) -> None:
        self.config = config
        self._link, self._identity, self._options = link, identity, link.options
        self._shipping = Shipping(link, config.name)
        self._loop = asyncio.get_running_loop()
        self._gathered: deque[Gathering] = deque()
        self._requests = 0
        self._entries = 0
        self._bytes = 0
        self._room: list[asyncio.Future[None]] = []
        self._scheduled = False
        self._sticky = 0
        self._stay_until = 0.0
        self._stayed = 0  # entries that went to the partition since it was chosen
        self._idle: list[asyncio.Future[None]] = []

    @property
    def inflight(self) -> tuple[int, int]:
        """Entries and bytes that were accepted and are not answered."""
        return self._entries, self._bytes

    # --- one by one ---

    @property
    def ready(self) -> bool:
        """Whether an entry may be added right now."""
        return not (self.full or self._link.closed)

    @property
    def full(self) -> bool:
        options = self._options
        return (
            self._entries >= options.inflight_entries_max
            or self._bytes >= options.inflight_bytes_max
        )

    async def room(self, room_by: float | None = None) -> None:
        """Wait until another put is within the bounds; raises `Backpressure` at `room_by`."""
        self._link.raise_if_closed()
        while self.full:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._room.append(waiter)
            try:
                async with asyncio.timeout_at(room_by):
                    await waiter
            except TimeoutError:
                raise Backpressure(f"{self._entries} puts of this client are under way") from None

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
        if gathered and len((last := gathered[-1]).waiters) < options.batch_entries_max:
            entries = last.entries
            if entries.bytes >= options.batch_bytes_max:
                last = self._start()
        else:
            last = self._start()
        entries = last.entries
        before = entries.bytes
        entries.add(
            payload, priority, key=key, headers=headers, delay_ms=delay_ms, max_retries=max_retries
        )
        self._entries += 1
        self._bytes += entries.bytes - before
        waiter: asyncio.Future[str] = self._loop.create_future()
        last.waiters.append(waiter)
        if not self._scheduled and self._requests < self._requests_max:
            self._scheduled = True
            self._loop.call_soon(self._flush)
        return waiter

    def _start(self) -> Gathering:
        gathering = Gathering()
        self._gathered.append(gathering)
        return gathering

    def _flush(self) -> None:
        """End of a turn: send what was gathered, as far as requests may be in flight."""
        self._scheduled = False
        while self._gathered and self._requests < self._requests_max:
            if self._link.closed:
                gathering = self._gathered.popleft()
                self._requests += 1
                self._fail(gathering, PenstockError("the client closed before the put was sent"))
                continue
            partition = self._turn(len(self._gathered[0].waiters))
            connection = self._shipping.toward(partition)
            slow = 0.0 if connection is None else connection.slow_until(self.config.name)
            if slow:
                self._scheduled = True
                self._loop.call_at(slow, self._flush)
                return
            gathering = self._gathered.popleft()
            for part in self._parted(gathering, partition):
                self._send(part, partition)

    @property
    def _requests_max(self) -> int:
        return self._options.requests_max * self._link.nodes

    def _parted(self, gathering: Gathering, partition: int) -> list[Gathering]:
        """By the node that each entry goes to; nearly always that is one."""
        if self._link.nodes == 1:
            return [gathering]
        rows = self._apart(gathering.entries, partition)
        return [gathering] if len(rows) == 1 else [gathering.only(some) for some in rows]

    def _apart(self, entries: Entries, partition: int) -> list[Sequence[int]]:
        name = self.config.name
        return apart(
            entries,
            self.config,
            partition=partition,
            node_of=lambda target: self._link.coordinator(name, target),
        )

    def _send(self, gathering: Gathering, partition: int) -> None:
        shipment = self._seal(gathering.entries, partition)
        self._requests += 1
        connection = self._shipping.toward(shipment.partition)
        if connection is None:
            self._link.spawn(self._deliver(gathering, shipment, None))
            return
        answer = connection.enqueue_nowait(shipment.request, shipment.bodies)
        answer.add_done_callback(partial(self._on_answer, gathering, shipment))

    def _seal(self, entries: Entries, partition: int, **how: Any) -> Shipment:
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
            if stays and not self._shipping.in_trouble(self._sticky):
                return self._sticky
            if not self._stay_until:  # clients that live briefly shall not all begin with the same
                self._sticky = randrange(self.config.partitions)
            self._stay_until, self._stayed = now + options.stay_s, entries
        count = self.config.partitions
        for _ in range(count):
            self._sticky = (self._sticky + 1) % count
            if not self._shipping.in_trouble(self._sticky):
                break
        return self._sticky

    def _grow(self) -> None:
        """Use partitions that the topic was given while this client was open."""
        known = self._link.partitions(self.config.name)
        if known > self.config.partitions:
            self.config = msgspec.structs.replace(self.config, partitions=known)

    def _on_answer(
        self, gathering: Gathering, shipment: Shipment, answer: asyncio.Future[Enqueued]
    ) -> None:
        error = answer.exception()
        if error is None:
            self._resolve(gathering, shipment, answer.result())
        elif isinstance(error, PenstockError) and passing(error) and not self._link.closed:
            self._link.spawn(self._deliver(gathering, shipment, error))
        elif _shared_fault(gathering, error) and not self._link.closed:
            self._link.spawn(self._deliver_apart(gathering, shipment))
        else:
            self._fail(gathering, error)

    async def _deliver(
        self, gathering: Gathering, shipment: Shipment, failed: PenstockError | None
    ) -> None:
        """The slow way: after a first try that failed, or without a connection."""
        try:
            answer = await self._shipping.ship(shipment, failed=failed)
        except PenstockError as error:
            if _shared_fault(gathering, error):
                await self._deliver_apart(gathering, shipment)
            else:
                self._fail(gathering, error)
        except BaseException as error:
            self._fail(gathering, PenstockError(f"the put was given up: {error!r}"))
            raise
        else:
            self._resolve(gathering, shipment, answer)

    async def _deliver_apart(self, gathering: Gathering, shipment: Shipment) -> None:
        """Entry by entry, in their order, each under the key that it had."""
        try:
            for row, partition, sequence in shipment.keyed():
                one = gathering.only((row,))
                alone = sealed_again(
                    one.entries,
                    config=self.config,
                    identity=self._identity,
                    partition=partition,
                    sequence=sequence,
                )
                await self._deliver_one(one, alone)
        except BaseException as error:
            self._fail(gathering, PenstockError(f"the put was given up: {error!r}"))
            raise
        self._done(gathering)

    async def _deliver_one(self, one: Gathering, shipment: Shipment) -> None:
        try:
            one.resolve(shipment.ids(await self._shipping.sent(shipment)))
        except PenstockError as error:
            one.fail(error)

    # --- the answer ---

    def _resolve(self, gathering: Gathering, shipment: Shipment, answer: Enqueued) -> None:
        try:
            ids = shipment.ids(answer)
        except PenstockError as error:
            self._fail(gathering, error)
            return
        gathering.resolve(ids)
        self._done(gathering)

    def _fail(self, gathering: Gathering, error: BaseException) -> None:
        gathering.fail(error)
        self._done(gathering)

    def _done(self, gathering: Gathering) -> None:
        self._requests -= 1
        self.release(len(gathering.waiters), gathering.entries.bytes)
        self._schedule()

    def _schedule(self) -> None:
        if self._gathered and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    # --- many at once ---

    async def reserve(self, entries: Entries, room_by: float | None = None) -> None:
        """Count `entries` as in flight, when there is room; `release` ends it."""
        if self.full:
            await self.room(room_by)
        self._entries += len(entries)
        self._bytes += entries.bytes

    def release(self, entries: int, size: int) -> None:
        self._entries -= entries
        self._bytes -= size
        if self._entries < 0 or self._bytes < 0:
            raise RuntimeError(f"in flight: {self._entries} entries, {self._bytes} bytes")
        if self._room and not self.full:
            _wake(self._room)
        if not self._entries:
            _wake(self._idle)

    async def put_many(
        self,
        entries: Entries,
        *,
        atomic: bool,
        expected_sequence: int | None,
        room_by: float | None = None,
    ) -> list[str]:
        """One request of its own for `entries`, or one for each node; their message ids."""
        await self.reserve(entries, room_by)
        partition = self._turn(len(entries))
        try:
            if not atomic and self._link.nodes > 1:
                rows = self._apart(entries, partition)
                if len(rows) > 1:
                    return await self._put_apart(entries, partition, rows, room_by)
            shipment = self._seal(
                entries, partition, atomic=atomic, expected_sequence=expected_sequence
            )
            return shipment.ids(await self._shipping.sent(shipment, room_by))
        finally:
            self.release(len(entries), entries.bytes)

    async def _put_apart(
        self,
        entries: Entries,
        partition: int,
        rows: Sequence[Sequence[int]],
        room_by: float | None,
    ) -> list[str]:
        shipments = [self._seal(entries.only(some), partition) for some in rows]
        sending = [self._shipping.sent(shipment, room_by) for shipment in shipments]
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
        self._entries += len(payloads)
        self._bytes += size
        try:
            await self._shipping.sent(
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
            self.release(len(payloads), size)

    async def drain(self) -> None:
        """Wait until everything that was accepted is answered."""
        while self._entries:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._idle.append(waiter)
            await waiter


def _shared_fault(gathering: Gathering, error: BaseException) -> bool:
    """Whether some put of several is at fault, and nobody knows which."""
    return isinstance(error, InvalidArgument) and len(gathering.waiters) > 1


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()
