"""Log batches as rows of Arrow: the buffers of a batch are wrapped, not copied message by message.

A mode is a table of columns. Each column knows how to make itself out of *pieces*, the parts of
consecutive batches that lie in the range that is read, so a reader that was asked for some columns
only decodes those.

*Messages* are the columns of the log. *Deltas* are the columns of a `DeltaBatch`. Spark has no
unsigned numbers and no fixed-size binary: indices are ints, ids are binary. A row without indices
(`create`, `dense`, `scale`) has null there, not 0, 1, 2 …, so that a delta written back is the
delta that was read. *Envelopes* are whole log batches, the cheapest way to bring a log through
Spark: `body` is a batch as it is stored, header and all: `penstock.model.batch.decode` opens it.
`first` and `last` say which of its sequences belong to the row, in case a range began or ended
inside it; `count` is the number of messages there. Nothing is decompressed on the way. *Ranges* are
what is to be read, not yet read.

*Released* deltas and *vectors* are what the fold of a partition gives (`penstock.spark.frames`):
their columns are made of the same parts, and are described here with all the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.errors import InvalidArgument
from penstock.model.batch import Batch
from penstock.model.columns import Binary, Columns
from penstock.model.delta import HAS_INDICES, Op
from penstock.model.delta import Source as DeltaOrigin
from penstock.model.delta_batch import DeltaBatch
from penstock.model.plain import headers_of
from penstock.propagation.fold.merge import VectorStates
from penstock.sinks import arrays
from penstock.sinks.texts import json_of
from penstock.spark.source.ranges import Ranges, ReadRange

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from penstock.spark.source.options import ReadOptions

_HEADERS_CACHED: Final = 4096
_TEXT_MAP: Final = pa.map_(pa.string(), pa.string())
_BINARY_MAP: Final = pa.map_(pa.string(), pa.binary())
Sequences = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class BatchPiece:
    """The entries `[low, high)` of a batch."""

    batch: Batch
    columns: Columns
    low: int
    high: int

    @property
    def count(self) -> int:
        return self.high - self.low

    def sequences(self) -> NDArray[np.int64]:
        if self.batch.compacted:
            return self.columns.fixed("sequence")[self.low : self.high].astype(np.int64)
        first = self.batch.first
        return np.arange(first + self.low, first + self.high, dtype=np.int64)


def pieces(batches: Iterable[Batch], *, first: int, last: int) -> list[BatchPiece]:
    """What lies in `[first, last]` of each batch; batches with nothing there are left out."""
    found = []
    for batch in batches:
        low, high = _within(batch, first, last)
        if low < high:
            found.append(BatchPiece(batch, batch.columns(), low, high))
    return found


def _within(batch: Batch, first: int, last: int) -> tuple[int, int]:
    """The entries `[low, high)` of a batch that lie in `[first, last]`."""
    if first <= batch.first and batch.last <= last:
        return 0, batch.entries
    if batch.compacted:
        held = batch.columns().fixed("sequence")
        return int(np.searchsorted(held, first)), int(np.searchsorted(held, last, "right"))
    return max(0, first - batch.first), min(batch.entries, last - batch.first + 1)


@dataclass(frozen=True, slots=True)
class RowSource:
    topic: str
    pieces: Sequence[BatchPiece]

    @property
    def count(self) -> int:
        return sum(piece.count for piece in self.pieces)

    @property
    def partition(self) -> int:
        return self.pieces[0].batch.partition

    def fixed(self, name: str) -> NDArray[Any]:
        return np.concatenate([p.columns.fixed(name)[p.low : p.high] for p in self.pieces])

    def binary(self, name: str) -> Binary | None:
        """The values of all pieces in one column, joined once: what follows has one blob however
        small the log's batches were. None if no piece has the column; where some have not, their
        values are empty."""
        columns = [piece.columns.binary(name) for piece in self.pieces]
        if all(column is None for column in columns):
            return None
        if len(columns) == 1 and columns[0] is not None:
            only = self.pieces[0]
            return Binary(columns[0].offsets[only.low : only.high + 1], columns[0].blob)
        sizes: list[NDArray[np.int32]] = []
        blobs: list[memoryview] = []
        for column, piece in zip(columns, self.pieces, strict=True):
            if column is None:
                sizes.append(np.zeros(piece.count, np.int32))
                continue
            offsets = column.offsets[piece.low : piece.high + 1]
            sizes.append(np.diff(offsets))
            blobs.append(memoryview(column.blob)[int(offsets[0]) : int(offsets[-1])])
        ends = np.zeros(self.count + 1, np.int32)
        np.cumsum(np.concatenate(sizes), out=ends[1:])
        return Binary(ends, b"".join(blobs))

    def sequences(self) -> NDArray[np.int64]:
        return np.concatenate([piece.sequences() for piece in self.pieces])

    def times_ms(self) -> NDArray[np.int64]:
        times = np.array([piece.batch.time_ms for piece in self.pieces], np.int64)
        return np.repeat(times, [piece.count for piece in self.pieces])


class RowColumn(NamedTuple):
    """A column of a mode: its type in Spark's words, and how it is made of a source of rows."""

    type: str
    make: Callable[[Any], Any]


def _bytes(name: str, *, empty_is_null: bool = False) -> Callable[[RowSource], pa.Array]:
    def make(source: RowSource) -> pa.Array:
        column = source.binary(name) or Binary(np.zeros(source.count + 1, np.int32), b"")
        offsets, blob = column.offsets, column.blob
        return arrays.ragged(offsets, blob, pa.binary(), empty_is_null=empty_is_null)

    return make


def header_maps(source: RowSource, *, kind: pa.DataType = _TEXT_MAP) -> pa.Array:
    """Headers as a map. Values that are no text stand as JSON; bytes stay bytes where they may."""
    return _header_maps(source.binary("headers"), source.count, kind)


def _header_maps(column: Binary | None, count: int, kind: pa.DataType) -> pa.Array:
    if column is None:
        return pa.nulls(count, kind)
    plain = (str, bytes) if kind is _BINARY_MAP else (str,)
    rows = [_header_pairs(cell, plain) if cell else None for cell in column]
    return pa.array(rows, kind)


@lru_cache(maxsize=_HEADERS_CACHED)
def _header_pairs(cell: bytes, plain: tuple[type, ...]) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (name, value if isinstance(value, plain) else msgspec.json.encode(value).decode())
        for name, value in headers_of(cell).items()
    )


MESSAGES: Final[dict[str, RowColumn]] = {
    "topic": RowColumn("string", lambda s: arrays.same(s.topic, s.count, pa.string())),
    "partition": RowColumn("int", lambda s: arrays.same(s.partition, s.count, pa.int32())),
    "sequence": RowColumn("bigint", RowSource.sequences),
    "time": RowColumn("timestamp", lambda s: s.times_ms() * 1000),
    "priority": RowColumn("bigint", lambda s: s.fixed("priority")),
    "key": RowColumn("binary", _bytes("key", empty_is_null=True)),
    "headers": RowColumn("map<string,string>", header_maps),
    "value": RowColumn("binary", _bytes("payload")),
}

# Made of a sequence of ranges with their sizes.
RANGES: Final[dict[str, RowColumn]] = {
    "topic": RowColumn("string", lambda rows: [found.topic for found, _ in rows]),
    "partition": RowColumn("int", lambda rows: [found.partition for found, _ in rows]),
    "from": RowColumn("bigint", lambda rows: [found.first for found, _ in rows]),
    "to": RowColumn("bigint", lambda rows: [found.last for found, _ in rows]),
    "bytes": RowColumn("bigint", lambda rows: [size for _, size in rows]),
}

# Made of a range, and of its batches with the number of messages of each.
ENVELOPES: Final[dict[str, RowColumn]] = {
    "topic": RowColumn("string", lambda e: [e[0].topic] * len(e[1])),
    "partition": RowColumn("int", lambda e: [e[0].partition] * len(e[1])),
    "first": RowColumn("bigint", lambda e: [max(b.first, e[0].first) for b, _ in e[1]]),
    "last": RowColumn("bigint", lambda e: [min(b.last, e[0].last) for b, _ in e[1]]),
    "count": RowColumn("int", lambda e: [count for _, count in e[1]]),
    "body": RowColumn("binary", lambda e: [batch.encode() for batch, _ in e[1]]),
}


def deltas_of(found: Sequence[BatchPiece]) -> DeltaBatch:
    """The messages of some pieces of the log, in their order, as the columns that the kernels
    take."""
    if not found:
        return DeltaBatch.empty()
    source = RowSource("", found)
    return DeltaBatch.of(
        source.binary("payload") or Binary(np.zeros(source.count + 1, np.int32), b""),
        sequences=source.sequences().astype(np.uint64),
        log_times_ms=source.times_ms(),
        headers=source.binary("headers"),
    )


class DeltaRows:
    """Deltas of one partition."""

    def __init__(self, batch: DeltaBatch, *, topic: str, partition: int) -> None:
        self.batch, self.topic, self.partition = batch, topic, partition

    def mask(self, namespaces: frozenset[str]) -> NDArray[np.bool_]:
        """Which of them are in these namespaces."""
        return is_among(self.namespaces(), namespaces)

    def same(self, value: Any, kind: pa.DataType) -> pa.Array:
        return arrays.same(value, len(self.batch), kind)

    def headers(self, *, kind: pa.DataType = _TEXT_MAP) -> pa.Array:
        return _header_maps(self.batch.headers, len(self.batch), kind)

    def namespaces(self) -> pa.Array:
        return self._texts(self.batch.names_at, "namespace_bytes")

    def vector_ids(self) -> pa.Array:
        after = self.batch.names_at + self.batch.fixed["namespace_bytes"]
        return self._texts(after, "vector_id_bytes")

    def _texts(self, starts: NDArray[np.int64], size: str) -> pa.Array:
        blob = np.frombuffer(self.batch.blob, np.uint8)
        lengths = self.batch.fixed[size].astype(np.int64)
        return arrays.ragged(*arrays.sliced(blob, starts, lengths), pa.string())


class ReleasedDeltaRows(DeltaRows):
    """Deltas in the order of their release. `positions`: the sequence whose arrival released each;
    `ordinals` number what the partition releases, from 1 and without a gap."""

    def __init__(
        self, batch: DeltaBatch, positions: Sequences, ordinals: Sequences, **place: Any
    ) -> None:
        super().__init__(batch, **place)
        self.positions, self.ordinals = positions, ordinals

    def take(self, rows: NDArray[np.bool_]) -> ReleasedDeltaRows:
        place = {"topic": self.topic, "partition": self.partition}
        batch, positions = self.batch.take(rows), self.positions[rows]
        return ReleasedDeltaRows(batch, positions, self.ordinals[rows], **place)


class VectorRows:
    """The rows `[low, high)` of some states, each with what has become of its vector."""

    def __init__(
        self, states: VectorStates, kinds: NDArray[np.str_], *, topic: str, partition: int,
        low: int, high: int,
    ) -> None:  # fmt: skip
        self.states, self.topic, self.partition = states, topic, partition
        self.kinds, self.rows = kinds[low:high], slice(low, high)
        self.gone: NDArray[np.bool_] = states.deleted[self.rows]

    def same(self, value: Any, kind: pa.DataType) -> pa.Array:
        return arrays.same(value, len(self.gone), kind)

    def texts(self, column: Binary) -> pa.Array:
        offsets = column.offsets[self.rows.start : self.rows.stop + 1]
        return arrays.ragged(offsets, column.blob, pa.string())

    def values(self) -> pa.Array:
        """A vector that was deleted is null."""
        values = self.states.values[self.rows]
        offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
        flat, mask = pa.array(values.reshape(-1)), pa.array(self.gone)
        return pa.ListArray.from_arrays(pa.array(offsets), flat, mask=mask)

    def metadata(self) -> pa.Array:
        column = self.states.metadata
        offsets = column.offsets[self.rows.start : self.rows.stop + 1]
        found = [json_of(data) if data else None for data in Binary(offsets, column.blob)]
        return pa.array(found, pa.string())


def is_among(texts: pa.Array, wanted: frozenset[str]) -> NDArray[np.bool_]:
    return np.asarray(pc.is_in(texts, value_set=pa.array(sorted(wanted), pa.string())))


OPS: Final = pa.array([op.name.lower() for op in Op], pa.string())
SOURCES: Final = pa.array([source.name.lower() for source in DeltaOrigin], pa.string())


def _parents(deltas: DeltaRows) -> pa.Array:
    parents = deltas.batch.parent
    return arrays.ids(arrays.sixteen(parents), valid=(parents != 0).any(axis=1))


def _clock(deltas: DeltaRows) -> pa.Array:
    offsets, origins, counters = deltas.batch.clocks()
    return pa.MapArray.from_arrays(
        pa.array(offsets.astype(np.int32)),
        arrays.names(origins),
        pa.array(counters.astype(np.int64)),
    )


def _indices(deltas: DeltaRows) -> pa.Array:
    batch = deltas.batch
    _, indices, _ = batch.components()
    named = (batch.fixed["flags"] & HAS_INDICES) != 0
    count = np.where(named, batch.n, 0).astype(np.int32)
    kept = indices[np.repeat(named, batch.n)].astype(np.int32)
    offsets = np.concatenate((np.zeros(1, np.int32), np.cumsum(count, dtype=np.int32)))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(kept), mask=pa.array(~named))


def _values(deltas: DeltaRows) -> pa.Array:
    offsets, _, values = deltas.batch.components()
    return arrays.lists(offsets, values, pa.float32())


def _metadata(deltas: DeltaRows) -> pa.Array:
    """As JSON text; null where a delta has none."""
    found: list[str | None] = [None] * len(deltas.batch)
    rows = np.flatnonzero(deltas.batch.fixed["metadata_bytes"])
    for row, data in zip(rows.tolist(), deltas.batch.metadata_of(rows), strict=True):
        found[row] = json_of(data).decode()
    return pa.array(found, pa.string())


def _fixed(name: str) -> Callable[[DeltaRows], Any]:
    return lambda deltas: np.ascontiguousarray(deltas.batch.fixed[name])


DELTAS: Final[dict[str, RowColumn]] = {
    "topic": RowColumn("string", lambda d: d.same(d.topic, pa.string())),
    "partition": RowColumn("int", lambda d: d.same(d.partition, pa.int32())),
    "sequence": RowColumn("bigint", lambda d: d.batch.sequences.view(np.int64)),
    "time": RowColumn("timestamp", lambda d: d.batch.log_times_ms * 1000),
    "delta_id": RowColumn("binary", lambda d: arrays.ids(arrays.sixteen(d.batch.delta_id))),
    "parent": RowColumn("binary", _parents),
    "namespace": RowColumn("string", DeltaRows.namespaces),
    "vector_id": RowColumn("string", DeltaRows.vector_ids),
    "op": RowColumn("string", lambda d: OPS.take(pa.array(d.batch.op))),
    "origin": RowColumn("string", lambda d: arrays.names(d.batch.origin)),
    "delta_time": RowColumn("bigint", _fixed("time")),
    "clock": RowColumn("map<string,bigint>", _clock),
    "indices": RowColumn("array<int>", _indices),
    "values": RowColumn("array<float>", _values),
    "metadata": RowColumn("string", _metadata),
    "priority": RowColumn("int", _fixed("priority")),
    "source": RowColumn("string", lambda d: SOURCES.take(pa.array(d.batch.source))),
    "headers": RowColumn("map<string,string>", DeltaRows.headers),
}
RELEASED: Final[dict[str, RowColumn]] = DELTAS | {
    "position": RowColumn("bigint", lambda d: d.positions.view(np.int64)),
    "ordinal": RowColumn("bigint", lambda d: d.ordinals.view(np.int64)),
}

VECTORS: Final[dict[str, RowColumn]] = {
    "topic": RowColumn("string", lambda v: v.same(v.topic, pa.string())),
    "partition": RowColumn("int", lambda v: v.same(v.partition, pa.int32())),
    "sequence": RowColumn("bigint", lambda v: v.states.sequence[v.rows]),
    "time": RowColumn("timestamp", lambda v: v.states.log_time_ms[v.rows] * 1000),
    "namespace": RowColumn("string", lambda v: v.texts(v.states.namespace)),
    "vector_id": RowColumn("string", lambda v: v.texts(v.states.vector_id)),
    "vector": RowColumn("array<float>", VectorRows.values),
    "metadata": RowColumn("string", VectorRows.metadata),
    "revision": RowColumn("bigint", lambda v: v.states.revision[v.rows]),
    "delta_time": RowColumn("bigint", lambda v: v.states.time[v.rows]),
    "_change_type": RowColumn("string", lambda v: v.kinds.tolist()),
}


COLUMNS: Final[dict[str, dict[str, RowColumn]]] = {
    "messages": MESSAGES,
    "deltas": DELTAS,
    "released": RELEASED,
    "vectors": VECTORS,
    "envelopes": ENVELOPES,
    "ranges": RANGES,
}


_BINARY_HEADERS: Final = {
    "messages": RowColumn("map<string,binary>", partial(header_maps, kind=_BINARY_MAP)),
    "deltas": RowColumn("map<string,binary>", partial(DeltaRows.headers, kind=_BINARY_MAP)),
    "released": RowColumn("map<string,binary>", partial(DeltaRows.headers, kind=_BINARY_MAP)),
}


def columns_of(options: ReadOptions) -> dict[str, RowColumn]:
    binary = _BINARY_HEADERS.get(options.mode) if options.headers == "binary" else None
    return COLUMNS[options.mode] | ({"headers": binary} if binary else {})


def schema_of(options: ReadOptions) -> str:
    return ", ".join(f"`{name}` {column.type}" for name, column in columns_of(options).items())


def check_schema(schema: StructType, options: ReadOptions) -> None:
    """A caller may ask for some of a mode's columns (`.schema(...)`), each with its own type."""
    for field in schema:
        kind, known = field.dataType.simpleString(), columns_of(options).get(field.name)
        if known is None or known.type != kind:
            raise InvalidArgument(
                f"mode {options.mode} has no column {field.name} {kind}:"
                f" it has {schema_of(options)}",
                field="schema",
            )


def read(
    options: ReadOptions, schema: StructType, part: Any, *, namespaces: frozenset[str] | None = None
) -> Iterator[pa.RecordBatch]:
    arrow = arrow_schema(schema)
    if isinstance(part, Ranges) and part.rows:
        yield record_batch(RANGES, arrow, part.rows)
    if not isinstance(part, ReadRange):
        return  # Spark makes up a partition where there is nothing to read
    slices = options.node.access().read_range(part.topic, part.partition, part.first, part.last)
    for batches in slices:
        source: Any = None
        if options.mode == "envelopes":
            spans = [(batch, _within(batch, part.first, part.last)) for batch in batches]
            rows = [(batch, high - low) for batch, (low, high) in spans if low < high]
            source = (part, rows) if rows else None
        elif found := pieces(batches, first=part.first, last=part.last):
            source = RowSource(part.topic, found)
            if options.mode == "deltas":
                source = _delta_rows(source, namespaces)
        if source is not None:
            yield record_batch(columns_of(options), arrow, source)


def _delta_rows(source: RowSource, namespaces: frozenset[str] | None) -> DeltaRows:
    place: dict[str, Any] = {"topic": source.topic, "partition": source.partition}
    found = DeltaRows(deltas_of(source.pieces), **place)
    if namespaces is None:
        return found
    return DeltaRows(found.batch.take(found.mask(namespaces)), **place)


def arrow_schema(schema: StructType) -> pa.Schema:
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


def record_batch(columns: dict[str, RowColumn], schema: pa.Schema, source: Any) -> pa.RecordBatch:
    """Rows with the columns that `schema` names, in its order and with its types."""
    made = [_typed(columns[field.name].make(source), field.type) for field in schema]
    return pa.RecordBatch.from_arrays(made, schema=schema)


def _typed(values: Any, type_: pa.DataType) -> pa.Array:
    if isinstance(values, list):
        return pa.array(values, type_)
    if isinstance(values, np.ndarray):
        plain = pa.array(values)
        return plain.view(type_) if pa.types.is_timestamp(type_) else plain.cast(type_)
    return values if values.type == type_ else values.cast(type_)
