"""Deltas of a topic in causal order, as nodes release them: as objects, or as columns.

Each partition has a subscription at the node that coordinates it; what arrives waits in one queue,
whose length the credit of these subscriptions bounds. A frame says up to which position everything
has now been sent (it is *settled*); urgent deltas may have come before it. After a failure the next
subscription begins behind the settled position, and what came early is not taken twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final, Literal, Self, TypedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.client.network.connection import ChangeStream, Connection, SubscriptionStart
from penstock.client.network.link import passing
from penstock.client.topic import Topic
from penstock.errors import InvalidArgument
from penstock.model.columns import Binary, Columns
from penstock.model.delta import Delta, Op, decode, vector_hash
from penstock.model.delta_batch import DeltaBatch
from penstock.model.entries import CHANGES
from penstock.model.plain import headers_of
from penstock.wire.messages import Changes, OpenSubscription

Start = int | Mapping[int, int] | Literal["now"]
Place = tuple[int, int]  # position and sequence
CREDIT_ENTRIES: Final = 10_000
CREDIT_BYTES: Final = 8 << 20
VECTOR: Final = slice(64, 80)  # of a delta: the hash of its vector
_NUMBERS: Final = ("sequence", "position", "ordinal", "time_ms")  # the columns of `Released`


class What(TypedDict, total=False):
    """What a subscriber may say about the deltas that it wants."""

    namespace: str | None
    vector_id: str | None
    op: Op | None
    routes: Sequence[str]  # as sinks have them; a delta is wanted if any of them takes it
    from_sequence: Start  # the first position; by default 1, which is all that the log has
    from_time: datetime | int | None  # unix milliseconds if a number
    positions: Mapping[int, int]  # partitions that go on behind a position, before all else
    cursor: str | None  # the durable name under which the nodes keep how far this reader is
    coalesce_ms: int  # a vector's changes within this time become one
    batch_ms: int  # how long the first of a batch may wait for others
    credits: int  # deltas of a partition that may be on their way, or wait here
    credit_bytes: int


class Released(msgspec.Struct, frozen=True, kw_only=True):
    """A delta, and how it stands in the log."""

    delta: Delta
    partition: int
    sequence: int  # the place of the delta in the log
    position: int  # the place of the delta whose arrival released it
    ordinal: int  # how many deltas the partition had released with it
    time_ms: int  # when the log took it
    headers: dict[str, Any]  # of its message


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which deltas a subscriber wants: all of this must hold."""

    namespace: str | None = None
    vector_id: str | None = None
    op: Op | None = None

    @property
    def vector(self) -> bytes | None:
        """The hash of the one vector that it asks for."""
        if self.namespace is None or self.vector_id is None:
            return None
        return vector_hash(self.namespace, self.vector_id)

    def divided(self, what: What) -> tuple[list[str], Filter]:
        """The routes that the node is asked to follow: those given, or the condition that takes
        least; and what is left to look at here."""
        if given := list(what.get("routes", ())):
            return given, self
        if self.namespace is None:
            return ([] if self.op is None else [f"op={self.op.name}"]), Filter()
        if self.vector_id is None:
            return [f"namespace={self.namespace}"], Filter(op=self.op)
        if "/" in self.namespace:  # It could not be told from the vector in a route.
            return [f"namespace={self.namespace}"], self
        return [f"vector={self.namespace}/{self.vector_id}"], Filter(op=self.op)

    def rows(self, payloads: Binary) -> list[int] | None:
        """The rows that it holds for; None: there is no condition."""
        if self == Filter():
            return None
        deltas = DeltaBatch.of(payloads)
        mask = np.ones(len(deltas), np.bool_)
        if self.op is not None:
            mask &= deltas.op == self.op
        if self.vector is not None:
            mask &= (deltas.vector == np.frombuffer(self.vector, "<u8")).all(axis=1)
        found: list[int] = np.flatnonzero(mask).tolist()
        if self.namespace is None or self.vector is not None:
            return found
        names, wanted = deltas.names(), self.namespace.encode()
        return [row for row in found if names[row][0] == wanted]


class SubscriptionProgress:
    """How far a partition's subscription has come, over all the streams that it has had."""

    def __init__(self, request: OpenSubscription) -> None:
        self.request = request
        self.began: int | None = None  # the position behind which the first stream started
        self._settled: int | None = None  # everything up to here has arrived; None: not even begun
        # Of each vector the place of the last delta that arrived beyond the settled position. Those
        # of a vector come in order, and a coalesced one stands for others before it: so up to this
        # place nothing of the vector is new.
        self._last: dict[bytes, Place] = {}
        self._again: dict[bytes, Place] = {}  # the same as of earlier streams
        self._stream: ChangeStream | None = None  # the one that is open, or was last
        self._handled = 0  # the reader is done with everything up to here
        self._topic_id = request.topic_id  # of the topic that positions are places in

    def next_request(self) -> OpenSubscription:
        self._again = dict(self._last)
        if self._settled is None:
            return self.request
        return msgspec.structs.replace(
            self.request, start="sequence", at=self._settled + 1, topic_id=self._topic_id
        )

    def on_opened(self, stream: ChangeStream, answer: SubscriptionStart) -> None:
        self._settle(answer["position"])
        self._topic_id = answer.get("topic", 0)
        if self.began is None:
            self.began = answer["position"]
        self._stream = stream
        if self._handled:
            stream.acknowledge(self._handled)  # The stream before may not have told the node.

    def acknowledge(self, position: int) -> None:
        self._handled = max(self._handled, position)
        if self._stream is not None:
            self._stream.acknowledge(self._handled)

    def on_changes(self, changes: Changes, columns: Columns | None) -> list[int] | None:
        """Take note of a frame; the rows in it that are new, None: all of them."""
        fresh = None
        if columns is not None:
            positions = columns.fixed("position").tolist()
            ahead = max(positions) > changes.position
            if ahead or self._again:
                places = zip(positions, columns.fixed("sequence").tolist(), strict=True)
                rows = list(zip(_vectors(columns), places, strict=True))
                if self._again:
                    fresh = [row for row, place in enumerate(rows) if not self._came(*place)]
                if ahead:
                    self._last.update(rows if fresh is None else [rows[row] for row in fresh])
        self._settle(changes.position)
        return fresh

    def _came(self, vector: bytes, place: Place) -> bool:
        """Whether the last that came of the vector stands for this one, or is it."""
        last = self._again.get(vector)
        if last is None:
            return False
        if place[0] > last[0] or place == last:
            del self._again[vector]
        return place[0] <= last[0]

    def _settle(self, position: int) -> None:
        settled = self._settled = max(position, self._settled or 0)
        self._last = {v: last for v, last in self._last.items() if last[0] > settled}
        self._again = {v: last for v, last in self._again.items() if last[0] > settled}


def _vectors(columns: Columns) -> list[bytes]:
    payloads = columns.binary("payload")
    return [b""] * columns.count if payloads is None else [found[VECTOR] for found in payloads]


class Arrived(msgspec.Struct, frozen=True, gc=False):
    """A frame of changes that waits for the reader."""

    place: SubscriptionProgress
    stream: ChangeStream
    changes: Changes
    columns: Columns | None  # None: the frame tells a position and nothing else
    rows: list[int] | None  # those that are new; None: all


class ReleasedBatch:
    """Deltas of one partition in columns; objects are made of those rows that are asked for."""

    def __init__(self, arrived: Arrived, columns: Columns, rows: list[int] | None) -> None:
        self._arrived, self._columns = arrived, columns
        changes = arrived.changes
        self.partition = changes.partition
        self.position = changes.position  # Nothing that was asked for is missing up to here.
        self.sequence_committed = changes.sequence_committed  # the partition's last, when sent
        self.folded = changes.folded  # deltas that coalescing has merged into these
        self._rows: Sequence[int] = range(columns.count) if rows is None else rows
        self._whole = rows is None
        payloads = columns.binary("payload")
        assert payloads is not None
        self._payloads, self._headers = payloads, columns.binary("headers")

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Released]:
        columns = self._columns
        numbers = [columns.fixed(name).tolist() for name in _NUMBERS]
        for row in self._rows:
            yield self._released(row, [column[row] for column in numbers])

    def __getitem__(self, index: int) -> Released:
        row, columns = self._rows[index], self._columns
        return self._released(row, [int(columns.fixed(name)[row]) for name in _NUMBERS])

    def __repr__(self) -> str:
        return f"<{len(self)} deltas of partition {self.partition} up to {self.position}>"

    @property
    def positions(self) -> NDArray[np.uint64]:
        return self._column("position")

    @property
    def ordinals(self) -> NDArray[np.uint64]:
        return self._column("ordinal")

    @property
    def sequences(self) -> NDArray[np.uint64]:
        return self._column("sequence")

    @property
    def times_ms(self) -> NDArray[np.int64]:
        return self._column("time_ms")

    @property
    def payloads(self) -> list[bytes]:
        """The deltas as they are stored."""
        return [self._payloads[row] for row in self._rows]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each row, its delta and its message's headers."""
        found = np.diff(self._payloads.offsets).astype(np.int64)
        if self._headers is not None:
            found += np.diff(self._headers.offsets)
        return self._chosen(found)

    def _column(self, name: str) -> NDArray[Any]:
        return self._chosen(self._columns.fixed(name))

    def _chosen(self, found: NDArray[Any]) -> NDArray[Any]:
        return found if self._whole else found[np.asarray(self._rows, np.int64)]

    def _released(self, row: int, numbers: list[int]) -> Released:
        packed = b"" if self._headers is None else self._headers[row]
        sequence, position, ordinal, time_ms = numbers
        return Released(
            delta=decode(self._payloads[row], checked=True),
            partition=self.partition,
            sequence=sequence,
            position=position,
            ordinal=ordinal,
            time_ms=time_ms,
            headers=headers_of(packed) if packed else {},
        )

    def ack(self) -> None:
        """All of it is handled, and all that came before: the cursor, if there is one, moves."""
        self._arrived.place.acknowledge(self.position)

    def ack_before(self, index: int) -> None:
        """The same up to a row that is not handled yet. Where rows stand for several deltas, any
        that is left may stand for the first of the batch: then nothing of it counts before all is
        handled."""
        if self.folded:
            return
        left = self._columns.fixed("position")[self._rows[index] :]
        position = min(self.position, int(left.min()) - 1)
        if position > 0:
            self._arrived.place.acknowledge(position)


class DeltaSubscription:
    """Partitions that are followed for ever, until it is closed. A batch is acknowledged when the
    next one is asked for."""

    def __init__(
        self,
        topic: Topic[Any],
        requests: list[OpenSubscription],
        wanted: Filter,
        *,
        topic_id: int = 0,
    ) -> None:
        self._topic, self._wanted = topic, wanted
        self.topic_id = topic_id  # of the topic whose positions it gives
        self._arrived: deque[Arrived] = deque()
        self._taken: Arrived | None = None  # what the reader has at the moment
        self._changed = asyncio.Event()  # something arrived, opened or failed
        self._failed: BaseException | None = None
        # A generator may be left by another task than entered it: no task group, but each ends.
        self._places = [SubscriptionProgress(request) for request in requests]
        self._followers = [asyncio.create_task(self._follow(place)) for place in self._places]
        for follower in self._followers:
            follower.add_done_callback(self._on_done)

    async def began(self, besides: Container[int] = ()) -> dict[int, int]:
        """By partition, `besides` some, the position behind which it started; once all of them are
        open."""
        while True:
            found = {place.request.partition: place.began for place in self._places}
            asked = {partition: at for partition, at in found.items() if partition not in besides}
            known = {partition: at for partition, at in asked.items() if at is not None}
            if len(known) == len(asked):
                return known
            await self._news()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ReleasedBatch:
        while True:
            if self._taken is not None:
                self._taken.place.acknowledge(self._taken.changes.position)
                self._taken = None
            self._taken = await self.next()
            batch = _batch(self._taken, self._wanted)
            if batch is not None:
                return batch

    async def next(self) -> Arrived:
        """What arrived first. The reader has it, so its credit goes back."""
        while not self._arrived:
            await self._news()
        found = self._arrived.popleft()
        found.stream.took(found.changes.count, len(found.columns.body) if found.columns else 0)
        return found

    async def _news(self) -> None:
        """Wait for something to happen; raises what ended a partition's subscription for good."""
        if self._failed is not None:
            raise self._failed
        self._changed.clear()
        await self._changed.wait()

    async def close(self) -> None:
        for follower in self._followers:
            follower.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)
        self._arrived.clear()

    async def _follow(self, place: SubscriptionProgress) -> None:
        link = self._topic.link
        at = (self._topic.name, place.request.partition)
        while True:
            stream = await link.request(partial(self._open, place), at=at)
            try:
                error = await asyncio.shield(stream.ended)
            finally:
                await stream.close()
            if error is not None and not passing(error):
                raise error
            # The stream was opened, so the link has not waited. A node that ends each one at once
            # must not be asked without a pause.
            await asyncio.sleep(link.options.retry_wait_s)

    async def _open(self, place: SubscriptionProgress, connection: Connection) -> ChangeStream:
        stream, answer = await connection.subscribe(
            place.next_request(), partial(self._on_changes, place)
        )
        place.on_opened(stream, answer)
        self._changed.set()
        return stream

    def _on_changes(
        self, place: SubscriptionProgress, stream: ChangeStream, changes: Changes, body: memoryview
    ) -> None:
        columns = CHANGES.decode(body, changes.count) if changes.count else None
        rows = place.on_changes(changes, columns)
        self._arrived.append(Arrived(place, stream, changes, columns, rows))
        self._changed.set()

    def _on_done(self, follower: asyncio.Task[None]) -> None:
        if not follower.cancelled() and self._failed is None:
            self._failed = follower.exception()
            self._changed.set()


def _batch(arrived: Arrived, wanted: Filter) -> ReleasedBatch | None:
    columns, rows = arrived.columns, arrived.rows
    if columns is None:
        return None
    payloads = columns.binary("payload")
    if payloads is None:
        raise InvalidArgument("changes came without their deltas", field="payload")
    chosen = wanted.rows(payloads)
    if rows is not None and chosen is not None:
        rows = sorted(set(rows).intersection(chosen))
    elif rows is None:
        rows = chosen
    return None if rows == [] else ReleasedBatch(arrived, columns, rows)


async def request_of(
    topic: Topic[Any], partition: int, *, what: What, routes: list[str]
) -> OpenSubscription:
    cursor = what.get("cursor") or ""
    start, at = start_of(what, partition)
    if cursor and partition not in what.get("positions", {}):
        start, at = "cursor", await _first(topic, partition, start=start, at=at)
    return OpenSubscription(
        topic.name,
        partition,
        routes,
        start,
        at,
        cursor=cursor,
        credit_entries=what.get("credits", CREDIT_ENTRIES),
        credit_bytes=what.get("credit_bytes", CREDIT_BYTES),
        batch_ms=what.get("batch_ms", 0),
        coalesce_ms=what.get("coalesce_ms", 0),
    )


def start_of(what: What, partition: int) -> tuple[str, int]:
    """How a request says it. A position that the reader has comes before a time, and that before
    a sequence, of which 0 is the first that the log still has."""
    known, since = what.get("positions", {}), what.get("from_time")
    if partition in known:
        return "sequence", _not_negative("positions", known[partition]) + 1
    if since is not None:
        return "time", round(since.timestamp() * 1000) if isinstance(since, datetime) else since
    start = what.get("from_sequence", 1)
    if start == "now":
        return "now", 0
    found = start if isinstance(start, int) else start.get(partition, 1)
    return "sequence", 0 if found == 1 else _not_negative("from_sequence", found)


def _not_negative(field: str, value: int) -> int:
    if value < 0:
        raise InvalidArgument(f"{field} must not be negative", field=field)
    return value


async def _first(topic: Topic[Any], partition: int, *, start: str, at: int) -> int:
    """The position where a cursor begins that is not there yet; 0: now."""
    if start == "now":
        return 0
    if start == "sequence" and at:
        return at
    time_ms = at if start == "time" else 0
    found = await topic.ask("log_find", partition=partition, time_ms=time_ms)
    return max(1, int(found["sequence"]))
