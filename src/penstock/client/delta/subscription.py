"""Deltas of a topic in causal order, as a node releases them: as objects, or as columns."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, Self, TypedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.client.delta.arrivals import Arrivals, Arrived
from penstock.client.topic import Topic
from penstock.errors import InvalidArgument
from penstock.model.columns import Binary, Columns
from penstock.model.delta import Delta, Op, decode, vector_hash
from penstock.model.delta_batch import DeltaBatch
from penstock.model.plain import headers_of
from penstock.wire.messages import OpenSubscription

Start = int | Mapping[int, int] | Literal["now"]
CREDIT_ENTRIES: Final = 10_000
CREDIT_BYTES: Final = 8 << 20
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

    def routes(self, what: What) -> list[str]:
        """What the node is asked for: the given routes, or the condition that takes least."""
        if given := list(what.get("routes", ())):
            return given
        if self.namespace is not None:
            # A namespace with a slash in it could not be told from the vector in a route.
            if self.vector_id is None or "/" in self.namespace:
                return [f"namespace={self.namespace}"]
            return [f"vector={self.namespace}/{self.vector_id}"]
        return [] if self.op is None else [f"op={self.op.name}"]

    def beside(self, what: What) -> Filter:
        """What is left to look at here, where the node has followed the routes."""
        if what.get("routes"):
            return self
        if self.namespace is None:
            return Filter()
        if self.vector_id is not None and "/" in self.namespace:
            return self
        return Filter(op=self.op)

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
        namespaces, _ = deltas.name_bytes()
        return [row for row in found if namespaces[row] == self.namespace.encode()]


class ReleasedBatch:
    """Deltas of one partition in columns; objects are made of those rows that are asked for."""

    def __init__(self, arrived: Arrived, columns: Columns, rows: list[int] | None) -> None:
        self._arrived, self._columns = arrived, columns
        self._rows: Sequence[int] = range(columns.count) if rows is None else rows
        self._whole = rows is None
        payloads = columns.binary("payload")
        assert payloads is not None
        self._payloads, self._headers = payloads, columns.binary("headers")

    @property
    def partition(self) -> int:
        return self._arrived.changes.partition

    @property
    def position(self) -> int:
        """Nothing that was asked for is missing up to here."""
        return self._arrived.changes.position

    @property
    def sequence_committed(self) -> int:
        """The partition's last, when this was sent."""
        return self._arrived.changes.sequence_committed

    @property
    def folded(self) -> int:
        """Deltas that coalescing has merged into these."""
        return self._arrived.changes.folded

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

    # --- columns ---

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
        return found if self._whole else found[np.asarray(self._rows, np.int64)]

    def _column(self, name: str) -> NDArray[Any]:
        found = self._columns.fixed(name)
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
            headers=headers_of(packed),
        )

    # --- being done ---

    def ack(self) -> None:
        """All of it is handled, and all that came before: the cursor, if there is one, moves."""
        self._arrived.place.acknowledge(self.position)

    def ack_before(self, index: int) -> None:
        """The same up to a row that is not handled yet.

        Where rows stand for several deltas, any that is left may stand for the first of the batch:
        then nothing of it counts before all is handled.
        """
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
        self._arrivals, self._wanted = Arrivals(topic, requests), wanted
        self.topic_id = topic_id  # of the topic whose positions it gives
        self._taken: Arrived | None = None  # what the reader has at the moment

    async def began(self, besides: Container[int] = ()) -> dict[int, int]:
        """By partition, `besides` some, the position behind which it started; once all of them are
        open."""
        return await self._arrivals.began(besides)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ReleasedBatch:
        while True:
            if self._taken is not None:
                self._taken.place.acknowledge(self._taken.changes.position)
                self._taken = None
            self._taken = await self._arrivals.next()
            batch = _batch(self._taken, self._wanted)
            if batch is not None:
                return batch

    async def close(self) -> None:
        await self._arrivals.close()


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
    topic: Topic[Any], partition: int, *, what: What, wanted: Filter
) -> OpenSubscription:
    """What is asked of a partition's node."""
    cursor = what.get("cursor") or ""
    start, at = start_of(what, partition)
    if cursor and partition not in what.get("positions", {}):
        start, at = "cursor", await _first(topic, partition, start=start, at=at)
    return OpenSubscription(
        topic.name,
        partition,
        wanted.routes(what),
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
    found = await topic.handle.ask("log_find", partition=partition, time_ms=time_ms)
    return max(1, int(found["sequence"]))
