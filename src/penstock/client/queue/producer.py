"""Puts become requests: gathered while others are in flight, bounded, retried with the same key.

Every put of one turn of the loop, and every put that comes while `requests_max` requests wait for
their answer, joins the next request. A request that fails for now is sent again as it is; one that
is refused because of an entry is sent again entry by entry, so that a put fails only for its own
fault. Each entry keeps its producer key then: of a request to several partitions some may have
been written.

A request names the topic's id. If another topic has its name by then, nothing is written, and what
was gathered goes into that one as its configuration asks for.

A client whose producer has a lasting name takes the place of earlier clients of that name. A
partition refuses an earlier client once it has heard of the later one. So before its first put a
client has its epoch written into every partition of the topic; it does so again when the topic has
other partitions than then, and before partitions forget it, as they do with a producer that is
silent for the topic's `dedup_ms`. A client with a name of its own has nobody to succeed, and pays
nothing.

At a cluster each request goes to the node that coordinates its partition, and what was gathered is
parted by node. A request stays with its partition however often it is sent; puts that may go
anywhere keep away from partitions that some request has trouble with. They stay with a partition
for a moment: every partition that is written to costs a sync on each of its replicas, now for the
messages and later for their leases, however few they are. Over time all get the same.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from random import randrange
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from penstock.client.network.link import Link, Where
from penstock.client.queue.entries import EntryGroup, ProducerIdentity, PutEntry
from penstock.errors import Backpressure, Corruption, InvalidArgument, NotFound, PenstockError
from penstock.model.columns import Binary
from penstock.model.entries import ENQ
from penstock.model.ids import MessageId, message_ids, partitions_of, partitions_of_deltas
from penstock.model.topic import TopicConfig, TopicKind
from penstock.wire.frame import FrameType, pack
from penstock.wire.messages import Enqueue, Enqueued, Part

TELL_AGAIN: Final = 0.5  # the part of `dedup_ms` after which partitions are told again


class KeyedPart(NamedTuple):
    partition: int
    first: int  # producer sequence
    entries: int
    columns: dict[str, Any]


class Shipment(NamedTuple):
    """A request that may be sent again, byte for byte, to any node. It holds the producer key (id,
    epoch, sequence) of every entry. Repeating it repeats the keys, by which a node knows what it
    has written already."""

    at: Where  # Whoever coordinates its first partition forwards the others' parts.
    question: tuple[Any, ...]
    parts: list[KeyedPart]
    order: list[int] | None = None  # from a place in the request to the caller's, if they differ

    def keyed(self) -> Iterator[tuple[int, int, int]]:
        """Each entry's index as the caller counts, its partition and its producer sequence."""
        at = 0
        for part in self.parts:
            for sequence in range(part.first, part.first + part.entries):
                yield at if self.order is None else self.order[at], part.partition, sequence
                at += 1

    def ids(self, answer: Enqueued) -> list[str]:
        """The message id of each entry, in the caller's order."""
        count = sum([part.entries for part in self.parts])
        found = ids_in(answer, count)
        if len(found) != count or not all(found):
            raise Corruption("the answer to an enqueue does not name every message")
        if self.order is None:
            return found
        sorted_ids = [""] * count
        for at, index in enumerate(self.order):
            sorted_ids[index] = found[at]
        return sorted_ids


def ids_in(answer: Enqueued, count: int) -> list[str]:
    """The message id of each of `count` entries; empty where the answer names none."""
    ids = [""] * count
    for run in answer.placed:
        sequences = range(run.sequence, run.sequence + run.count)
        ids[run.index : run.index + run.count] = message_ids(
            run.time_ms, answer.topic, run.partition, sequences
        )
    for known in answer.duplicates:
        place = MessageId(known.time_ms, answer.topic, known.partition, known.sequence)
        ids[known.index] = str(place)
    return ids


class Producer:
    def __init__(self, link: Link, config: TopicConfig, identity: ProducerIdentity) -> None:
        self.config = config
        self._link, self._identity, self._options = link, identity, link.options
        self._loop = asyncio.get_running_loop()
        self._gathered: deque[EntryGroup] = deque()
        self._requests = 0
        # What was accepted and is not answered; neither number is ever below zero.
        self.inflight_entries = self.inflight_bytes = 0
        self._answered = asyncio.Event()  # set when one of them was
        self._scheduled = False
        self._sticky = 0
        self._stay_until = 0.0
        self._stayed = 0  # entries that went to the partition since it was chosen
        # What all partitions have been told of a lasting name: the topic's id, how many they are,
        # and until when that is enough, by the loop's clock.
        self._told = (0, 0, 0.0)
        self._telling = asyncio.Lock()

    # --- one by one ---

    @property
    def ready(self) -> bool:
        if self._full or self._link.closed:
            return False
        return not self._identity.lasting or self._succeeded()

    @property
    def _full(self) -> bool:
        return (
            self.inflight_entries >= self._options.inflight_entries_max
            or self.inflight_bytes >= self._options.inflight_bytes_max
        )

    def _succeeded(self) -> bool:
        """Whether all partitions refuse earlier clients of the name, and will for a while."""
        *topic, until = self._told
        return topic == [self.config.id, self.config.partitions] and self._loop.time() < until

    async def _succeed(self) -> None:
        """Have all partitions refuse them; raises `StaleProducer` if there is a later client."""
        async with self._telling:
            if not self._identity.lasting or self._succeeded():
                return
            config, identity = self.config, self._identity
            until = self._loop.time() + config.dedup_ms / 1000 * TELL_AGAIN
            whose = {"producer": identity.name, "epoch": identity.epoch}
            await self._link.call("producer_begin", topic=config.name, **whose)
            self._told = (config.id, config.partitions, until)

    async def room(self, room_by: float | None = None) -> None:
        """Wait until another put is within the bounds; raises `Backpressure` at `room_by`. Before
        the first one, earlier clients of the same producer are shut out."""
        self._link.raise_if_closed()
        await self._succeed()
        while self._full:
            self._answered.clear()
            try:
                async with asyncio.timeout_at(room_by):
                    await self._answered.wait()
            except TimeoutError:
                message = f"{self.inflight_entries} puts of this client are under way"
                raise Backpressure(message) from None

    async def drain(self) -> None:
        while self.inflight_entries:
            self._answered.clear()
            await self._answered.wait()

    def add(self, entry: PutEntry) -> asyncio.Future[str]:
        """Take one checked entry; the future gets its message id once it is durable."""
        options, gathered = self._options, self._gathered
        if (
            not gathered
            or len((last := gathered[-1]).waiters) >= options.batch_entries_max
            or last.bytes >= options.batch_bytes_max
        ):
            last = EntryGroup()
            gathered.append(last)
        before = last.bytes
        last.add(entry)
        self.inflight_entries += 1
        self.inflight_bytes += last.bytes - before
        waiter: asyncio.Future[str] = self._loop.create_future()
        last.waiters.append(waiter)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)
        return waiter

    def _flush(self) -> None:
        """End of a turn: send what was gathered, as far as requests may be in flight."""
        self._scheduled = False
        link, topic = self._link, self.config.name
        most = self._options.requests_max * (1 if link.fleet is None else link.fleet.size)
        while self._gathered and self._requests < most:
            partition = self._turn(len(self._gathered[0].waiters))
            connection = link.toward(topic, partition)
            if connection is not None and connection.slow and not link.closed:
                slow = connection.slow_until(topic)
                if slow:
                    self._scheduled = True
                    self._loop.call_at(slow, self._flush)
                    return
            self._send(self._gathered.popleft(), partition)

    def _send(self, group: EntryGroup, partition: int) -> None:
        self._requests += 1
        try:
            if self._link.closed:
                raise PenstockError("the client closed before the put was sent")
            parts = [group]
            if self._link.fleet is not None and len(rows := self._apart(group, partition)) > 1:
                parts = [group.only(some) for some in rows]
            shipments = [self._seal(part, partition) for part in parts]
        except Exception as error:  # noqa: BLE001 - it is told to those who wait for it
            group.fail(_told(error))
            self._end(group)
            return
        self._requests += len(parts) - 1
        for part, shipment in zip(parts, shipments, strict=True):
            ended = partial(self._on_answer, part, shipment)
            self._link.begin(shipment.question, at=shipment.at, ended=ended)

    def _turn(self, entries: int) -> int:
        """The partition of the next batch's entries without a key."""
        fleet = self._link.fleet
        if fleet is not None and fleet.size > 1:
            known = fleet.partitions(self.config.name)
            if (
                known > self.config.partitions
            ):  # The topic was given some while this client is open.
                self.config = msgspec.structs.replace(self.config, partitions=known)
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
            if (fleet is None and not self._link.troubled) or not self._in_trouble(self._sticky):
                break
        return self._sticky

    def _in_trouble(self, partition: int) -> bool:
        where = (self.config.name, partition)
        return where in self._link.troubled or self._link.coordinator(*where) == ""

    # --- requests ---

    def _apart(self, entries: EntryGroup, partition: int) -> list[Sequence[int]]:
        """The rows that belong together because one node coordinates their partitions."""
        by_node: dict[str | None, list[int]] = {}
        for target, rows in self._groups(entries, partition).items():
            node = self._link.coordinator(self.config.name, target)
            by_node.setdefault(node, []).extend(rows)
        return [sorted(rows) for rows in by_node.values()]

    def _groups(self, entries: EntryGroup, sticky: int) -> dict[int, Sequence[int]]:
        """The rows of each partition: those with a key go where it belongs, others to `sticky`."""
        config, keys = self.config, [entry[2] for entry in entries.rows]
        if config.kind is TopicKind.DELTA:
            targets = partitions_of_deltas([entry[0] for entry in entries.rows], config.partitions)
        elif not any(keys):
            return {sticky: range(len(keys))}
        else:
            targets = partitions_of(keys, config.partitions)
            targets[np.fromiter((not key for key in keys), bool, len(keys))] = sticky
        return {int(p): np.flatnonzero(targets == p).tolist() for p in np.unique(targets)}

    def _seal(self, entries: EntryGroup, partition: int, **how: Any) -> Shipment:
        groups: dict[int, Sequence[int]] = {0: range(len(entries.rows))}
        if self.config.partitions > 1:
            groups = self._groups(entries, partition)
        order = None
        if len(groups) > 1:
            order = [row for rows in groups.values() for row in rows]
        keyed = [
            KeyedPart(target, self._identity.take(target, len(rows)), len(rows),
                      entries.columns(None if order is None else rows))
            for target, rows in groups.items()
        ]  # fmt: skip
        return self._shipment(keyed, order, **how)

    def _shipment(
        self, keyed: list[KeyedPart], order: list[int] | None = None, **how: Any
    ) -> Shipment:
        parts, bodies = [], []
        for partition, first, entries, columns in keyed:
            columns |= self._identity.run(partition, first, entries)
            bodies.append(ENQ.encode(entries, columns, runs=1))
            parts.append(Part(partition, entries, len(bodies[-1])))
        config = self.config
        request = pack(Enqueue(config.name, parts, topic_id=config.id, **how))
        at = (config.name, parts[0].partition)
        return Shipment(at, (FrameType.BATCH, Enqueued, request, *bodies), keyed, order)

    # --- the answer ---

    def _on_answer(
        self, group: EntryGroup, shipment: Shipment, answer: asyncio.Future[Enqueued]
    ) -> None:
        try:
            group.answer(shipment.ids(answer.result()))
        except Exception as error:  # noqa: BLE001 - it is told to those who wait for it
            if not self._link.closed and (self._made_again(error) or _shared_fault(group, error)):
                self._link.spawn(self._mend(group, shipment, error))
                return
            group.fail(_told(error))
        self._end(group)

    def _end(self, group: EntryGroup) -> None:
        self._requests -= 1
        self._release(len(group.waiters), group.bytes)
        if self._gathered and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _release(self, entries: int, size: int) -> None:
        self.inflight_entries -= entries
        self.inflight_bytes -= size
        if self.inflight_entries < 0 or self.inflight_bytes < 0:
            raise RuntimeError(
                f"in flight: {self.inflight_entries} entries, {self.inflight_bytes} bytes"
            )
        self._answered.set()

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

    async def _mend(self, group: EntryGroup, shipment: Shipment, failed: BaseException) -> None:
        """Try something else for puts that were refused, for which they may not be at fault."""
        try:
            if _shared_fault(group, failed):
                await self._deliver_apart(group, shipment)
                return
            await self._renew()  # The topic of this name may have other partitions now.
            group.answer(await self._put_once(group))
        except Exception as error:  # noqa: BLE001 - it is told to those who wait for it
            group.fail(_told(error))
        except BaseException as error:
            group.fail(PenstockError(f"the put was given up: {error!r}"))
            raise
        finally:
            self._end(group)

    async def _renew(self) -> None:
        found = await self._link.call("topic_get", topic=self.config.name)
        self.config = msgspec.convert(found, TopicConfig)
        await self._succeed()

    async def _deliver_apart(self, group: EntryGroup, shipment: Shipment) -> None:
        """Entry by entry, in their order, each under the key that it had."""
        for row, partition, sequence in shipment.keyed():
            one = group.only((row,))
            alone = self._shipment([KeyedPart(partition, sequence, 1, one.columns())])
            try:
                one.answer(alone.ids(await self._sent(alone)))
            except PenstockError as error:
                one.fail(error)

    async def _sent(self, shipment: Shipment, room_by: float | None = None) -> Enqueued:
        """The answer to a request that is sent when the node wants it. `room_by`, a time of the
        loop: a node that has no room by then is given up; None: never."""
        while room_by is None:  # With a time limit a node is tried, even if it asked for a pause.
            connection = self._link.toward(*shipment.at)
            slow = 0.0 if connection is None else connection.slow_until(self.config.name)
            if not slow:
                break
            await asyncio.sleep(slow - self._loop.time())
        return await self._link.request(
            lambda connection: connection.ask(*shipment.question), at=shipment.at, room_by=room_by
        )

    # --- many at once ---

    async def put_many(
        self, entries: EntryGroup, *, room_by: float | None = None, **how: Any
    ) -> list[str]:
        """One request of its own for `entries`, or one for each node; their message ids. `how` are
        the conditions of an `Enqueue`."""
        async with self._admitted(len(entries.rows), entries.bytes, room_by):
            try:
                return await self._put_once(entries, room_by, **how)
            except NotFound as error:
                if not self._made_again(error, how.get("expected_sequence")):
                    raise
            await self._renew()
            return await self._put_once(entries, room_by, **how)

    async def _put_once(
        self, entries: EntryGroup, room_by: float | None = None, *, atomic: bool = False, **how: Any
    ) -> list[str]:
        partition = self._turn(len(entries.rows))
        rows: list[Sequence[int]] = []
        if not atomic and self._link.fleet is not None:
            rows = self._apart(entries, partition)
        if len(rows) <= 1:
            shipment = self._seal(entries, partition, atomic=atomic, **how)
            return shipment.ids(await self._sent(shipment, room_by))
        shipments = [self._seal(entries.only(some), partition) for some in rows]
        sending = [self._sent(shipment, room_by) for shipment in shipments]
        answers = await asyncio.gather(*sending, return_exceptions=True)
        found = [""] * len(entries.rows)
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
        count = len(payloads)
        columns: dict[str, Any] = {"payload": payloads}
        if headers:
            columns["headers"] = [headers] * count
        async with self._admitted(count, len(payloads.blob), room_by):
            first = self._identity.take(partition, count)
            shipment = self._shipment([KeyedPart(partition, first, count, columns)])
            await self._sent(shipment, room_by)

    @asynccontextmanager
    async def _admitted(
        self, entries: int, size: int, room_by: float | None
    ) -> AsyncIterator[None]:
        """Entries are under way, once there is room for them."""
        await self.room(room_by)
        self.inflight_entries += entries
        self.inflight_bytes += size
        try:
            yield
        finally:
            self._release(entries, size)


def _shared_fault(group: EntryGroup, error: BaseException) -> bool:
    """Whether some put of several is at fault, and nobody knows which."""
    return isinstance(error, InvalidArgument) and len(group.waiters) > 1


def _told(error: Exception) -> PenstockError:
    """An error as callers get it: theirs to catch, whatever went wrong."""
    if isinstance(error, PenstockError):
        return error
    told = PenstockError(f"a request could not be made or read: {error!r}")
    told.__cause__ = error
    return told
