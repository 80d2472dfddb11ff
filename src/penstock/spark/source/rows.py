"""Log batches as rows of Arrow: the buffers of a batch are wrapped, not copied message by message.

A mode is a list of columns. Each column knows how to make itself out of *pieces*, the parts of
consecutive batches that lie in the range that is read, so a reader that was asked for some columns
only decodes those.

*Messages* are the columns of the log. *Deltas* are the columns of a `DeltaBatch`. Spark has no
unsigned numbers and no fixed-size binary: indices are ints, ids are binary. A row without indices
(`create`, `dense`, `scale`) has null there, not 0, 1, 2 …, so that a delta written back is the
delta that was read. *Envelopes* are whole log batches, the cheapest way to bring a log through
Spark: `body` is a batch as it is stored, header and all: `penstock.model.batch.decode` opens it.
`first` and `last` say which of its sequences belong to the row, in case a range began or ended
inside it; `count` is the number of messages there. Nothing is decompressed on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.model.batch import Batch
from penstock.model.columns import Binary, Columns
from penstock.model.delta_batch import DeltaBatch
from penstock.model.delta_format import HAS_INDICES, Op
from penstock.model.delta_format import Source as DeltaOrigin
from penstock.model.plain import headers_of
from penstock.sinks import arrays

_HEADERS_CACHED: Final = 4096
_TEXT_MAP: Final = pa.map_(pa.string(), pa.string())


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

    @property
    def whole(self) -> bool:
        return self.count == self.batch.entries

    def sequences(self) -> NDArray[np.int64]:
        if self.batch.compacted:
            return self.columns.fixed("sequence")[self.low : self.high].astype(np.int64)
        first = self.batch.first
        return np.arange(first + self.low, first + self.high, dtype=np.int64)

    def fixed(self, name: str) -> NDArray[Any]:
        return self.columns.fixed(name)[self.low : self.high]


def pieces(batches: Iterable[Batch], *, first: int, last: int) -> list[BatchPiece]:
    """What lies in `[first, last]` of each batch; batches with nothing there are left out."""
    found = []
    for batch in batches:
        columns = batch.columns()
        if batch.compacted:
            held = columns.fixed("sequence")
            low = int(np.searchsorted(held, first, "left"))
            high = int(np.searchsorted(held, last, "right"))
        else:
            low = max(0, first - batch.first)
            high = min(batch.entries, last - batch.first + 1)
        if low < high:
            found.append(BatchPiece(batch, columns, low, high))
    return found


@dataclass(frozen=True, slots=True)
class RowSource:
    """Where the pieces of one record batch come from."""

    topic: str
    pieces: Sequence[BatchPiece]
    count: int


Make = Callable[[Any], Any]  # from a source of rows to an array of as many values


def wrap(column: Binary | None, piece: BatchPiece, *, nullable: bool = False) -> pa.Array:
    """A binary column of a piece without a copy; `nullable`: empty values are null."""
    if column is None:
        if nullable:
            return pa.nulls(piece.count, pa.binary())
        return pa.repeat(pa.scalar(b"", pa.binary()), piece.count)
    array = arrays.ragged(column.offsets, column.blob, pa.binary(), empty_is_null=nullable)
    return array if piece.whole else array.slice(piece.low, piece.count)


def joined(chunks: Sequence[pa.Array]) -> pa.Array:
    return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)


def binary(name: str, *, nullable: bool = False) -> Make:
    return lambda source: joined(
        [wrap(p.columns.binary(name), p, nullable=nullable) for p in source.pieces]
    )


def fixed(name: str) -> Make:
    return lambda source: np.concatenate([p.fixed(name) for p in source.pieces])


def topic_name(source: RowSource) -> pa.Array:
    return pa.repeat(pa.scalar(source.topic, pa.string()), source.count)


def partition_number(source: RowSource) -> NDArray[np.int32]:
    return np.full(source.count, source.pieces[0].batch.partition, np.int32)


def sequences(source: RowSource) -> NDArray[np.int64]:
    return np.concatenate([p.sequences() for p in source.pieces])


def log_times(source: RowSource) -> NDArray[np.int64]:
    """In microseconds, as Spark counts."""
    times = [p.batch.time_ms * 1000 for p in source.pieces]
    return np.repeat(np.array(times, np.int64), [p.count for p in source.pieces])


def header_maps(source: RowSource) -> pa.Array:
    """Headers as map<string, string>; values that are no text stand as JSON."""
    if not any("headers" in piece.columns.views for piece in source.pieces):
        return pa.nulls(source.count, _TEXT_MAP)
    offsets: list[int | None] = []
    names: list[str] = []
    values: list[str] = []
    for piece in source.pieces:
        column = piece.columns.binary("headers")
        if column is None:
            offsets += [None] * piece.count
            continue
        for cell in column.tolist()[piece.low : piece.high]:
            offsets.append(len(names) if cell else None)
            for name, value in _header_pairs(cell):
                names.append(name)
                values.append(value)
    offsets.append(len(names))
    return pa.MapArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.array(names, pa.string()), pa.array(values, pa.string())
    )


@lru_cache(maxsize=_HEADERS_CACHED)
def _header_pairs(cell: bytes) -> tuple[tuple[str, str], ...]:
    return tuple(
        (name, value if isinstance(value, str) else msgspec.json.encode(value).decode())
        for name, value in headers_of(cell).items()
    )


class RowColumn(NamedTuple):
    """A column of a mode: its type in Spark's words, and how it is made."""

    type: str
    make: Make


MESSAGES: Final[dict[str, RowColumn]] = {
    "topic": RowColumn("string", topic_name),
    "partition": RowColumn("int", partition_number),
    "sequence": RowColumn("bigint", sequences),
    "time": RowColumn("timestamp", log_times),
    "priority": RowColumn("bigint", fixed("priority")),
    "key": RowColumn("binary", binary("key", nullable=True)),
    "headers": RowColumn("map<string,string>", header_maps),
    "value": RowColumn("binary", binary("payload")),
}


def source_of(topic: str, found: Sequence[BatchPiece]) -> RowSource:
    return RowSource(topic, found, sum(piece.count for piece in found))


def record_batch(columns: dict[str, RowColumn], schema: pa.Schema, source: Any) -> pa.RecordBatch:
    """Rows with the columns that `schema` names, in its order and with its types."""
    made = [_typed(columns[field.name].make(source), field.type) for field in schema]
    return pa.RecordBatch.from_arrays(made, schema=schema)


def _typed(values: Any, type_: pa.DataType) -> pa.Array:
    if isinstance(values, np.ndarray):
        plain = pa.array(values)
        return plain.view(type_) if pa.types.is_timestamp(type_) else plain.cast(type_)
    return values if values.type == type_ else values.cast(type_)


ENVELOPES: Final[dict[str, str]] = {
    "topic": "string",
    "partition": "int",
    "first": "bigint",
    "last": "bigint",
    "count": "int",
    "body": "binary",
}


def envelope_batch(
    batches: Sequence[Batch], schema: pa.Schema, *, topic: str, first: int, last: int
) -> pa.RecordBatch | None:
    """One row per batch that has messages in `[first, last]`."""
    rows = [(b, _count(b, first, last)) for b in batches if b.first <= last and b.last >= first]
    rows = [(batch, count) for batch, count in rows if count]
    if not rows:
        return None
    values: dict[str, list[Any]] = {
        "topic": [topic] * len(rows),
        "partition": [batch.partition for batch, _ in rows],
        "first": [max(batch.first, first) for batch, _ in rows],
        "last": [min(batch.last, last) for batch, _ in rows],
        "count": [count for _, count in rows],
    }
    if "body" in schema.names:
        values["body"] = [batch.encode() for batch, _ in rows]
    made = [pa.array(values[field.name], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(made, schema=schema)


def _count(batch: Batch, first: int, last: int) -> int:
    """The messages of a batch in `[first, last]`."""
    if first <= batch.first and batch.last <= last:
        return batch.entries
    if not batch.compacted:
        return min(batch.last, last) - max(batch.first, first) + 1
    held = batch.columns().fixed("sequence")
    return int(np.searchsorted(held, last, "right") - np.searchsorted(held, first, "left"))


_OPS: Final = pa.array([op.name.lower() for op in Op], pa.string())
_SOURCES: Final = pa.array([source.name.lower() for source in DeltaOrigin], pa.string())


def deltas_of(found: Sequence[BatchPiece]) -> DeltaBatch:
    """The messages of some pieces of the log, in their order, as the columns that the kernels take.

    Their payloads are joined once, so that what follows has one blob and one array per column
    however small the log's batches were.
    """
    if not found:
        return DeltaBatch.empty()
    headers = [piece.columns.binary("headers") for piece in found]
    return DeltaBatch.of(
        _joined([piece.columns.binary("payload") for piece in found], found),
        sequences=np.concatenate([piece.sequences() for piece in found]).astype(np.uint64),
        log_times_ms=np.repeat(
            np.array([piece.batch.time_ms for piece in found], np.int64),
            [piece.count for piece in found],
        ),
        headers=_joined(headers, found) if any(headers) else None,
    )


def _joined(columns: Sequence[Binary | None], found: Sequence[BatchPiece]) -> Binary:
    """The values of all pieces in one column; where a piece has no such column they are empty."""
    if len(found) == 1 and columns[0] is not None:
        return Binary(columns[0].offsets[found[0].low : found[0].high + 1], columns[0].blob)
    sizes: list[np.ndarray[tuple[int, ...], np.dtype[np.int32]]] = []
    blobs: list[memoryview] = []
    for column, piece in zip(columns, found, strict=True):
        if column is None:
            sizes.append(np.zeros(piece.count, np.int32))
            continue
        offsets = column.offsets[piece.low : piece.high + 1]
        sizes.append(np.diff(offsets))
        blobs.append(memoryview(column.blob)[int(offsets[0]) : int(offsets[-1])])
    ends = np.zeros(sum(map(len, sizes)) + 1, np.int32)
    np.cumsum(np.concatenate(sizes), out=ends[1:])
    return Binary(ends, b"".join(blobs))


class DeltaRows:
    """The deltas of some pieces; names and clocks are made once, and only if asked for."""

    def __init__(self, source: RowSource) -> None:
        self.topic = source.topic
        self.partition = source.pieces[0].batch.partition
        self.batch = deltas_of(source.pieces)
        self.headers: pa.Array | None = None

    def only(self, mask: pa.BooleanArray) -> None:
        """Keep the rows of a mask."""
        if self.headers is not None:
            self.headers = self.headers.filter(mask)
        self.batch = self.batch.take(np.asarray(mask))
        self.__dict__.pop("names", None)

    @cached_property
    def names(self) -> tuple[pa.Array, pa.Array]:
        """Namespaces and vector ids."""
        batch = self.batch
        blob = np.frombuffer(batch.blob, np.uint8)
        at, size = batch.names_at, batch.fixed["namespace_bytes"].astype(np.int64)
        namespaces = arrays.ragged(*arrays.sliced(blob, at, size), pa.string())
        after = batch.fixed["vector_id_bytes"].astype(np.int64)
        return namespaces, arrays.ragged(*arrays.sliced(blob, at + size, after), pa.string())


def _ids(pairs: NDArray[np.uint64], *, zero_is_null: bool = False) -> pa.Array:
    data = np.ascontiguousarray(pairs)
    mask = arrays.bits((data != 0).any(axis=1)) if zero_is_null else None
    ends = np.arange(0, 16 * len(data) + 1, 16, dtype=np.int32)
    buffers = [mask, pa.py_buffer(ends), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(data), buffers)


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
    for row in np.flatnonzero(deltas.batch.fixed["metadata_bytes"]).tolist():
        found[row] = _json(deltas.batch.metadata(row))
    return pa.array(found, pa.string())


def _json(metadata: bytes) -> str:
    """Metadata as JSON. A log may be older than the rule for its values: then what JSON cannot
    carry is shown as `headers_of` shows it, and the rows beside it are read all the same."""
    try:
        return msgspec.json.encode(msgspec.msgpack.decode(metadata)).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        return msgspec.json.encode(headers_of(metadata)).decode()


def _same(name: str) -> Callable[[DeltaRows], Any]:
    return lambda d: pa.repeat(pa.scalar(getattr(d, name)), len(d.batch))


def _fixed(name: str) -> Callable[[DeltaRows], Any]:
    return lambda deltas: np.ascontiguousarray(deltas.batch.fixed[name])


DELTAS: Final[dict[str, RowColumn]] = {
    "topic": RowColumn("string", _same("topic")),
    "partition": RowColumn("int", _same("partition")),
    "sequence": RowColumn("bigint", lambda d: d.batch.sequences.view(np.int64)),
    "time": RowColumn("timestamp", lambda d: d.batch.log_times_ms * 1000),
    "delta_id": RowColumn("binary", lambda d: _ids(d.batch.delta_id)),
    "parent": RowColumn("binary", lambda d: _ids(d.batch.parent, zero_is_null=True)),
    "namespace": RowColumn("string", lambda d: d.names[0]),
    "vector_id": RowColumn("string", lambda d: d.names[1]),
    "op": RowColumn("string", lambda d: _OPS.take(pa.array(d.batch.op))),
    "origin": RowColumn("string", lambda d: arrays.names(d.batch.origin)),
    "delta_time": RowColumn("bigint", _fixed("time")),
    "clock": RowColumn("map<string,bigint>", _clock),
    "indices": RowColumn("array<int>", _indices),
    "values": RowColumn("array<float>", _values),
    "metadata": RowColumn("string", _metadata),
    "priority": RowColumn("int", _fixed("priority")),
    "source": RowColumn("string", lambda d: _SOURCES.take(pa.array(d.batch.source))),
    "headers": RowColumn("map<string,string>", lambda d: d.headers),
}


def delta_batch(
    found: Sequence[BatchPiece],
    schema: pa.Schema,
    *,
    topic: str,
    namespaces: frozenset[str] | None = None,
) -> pa.RecordBatch:
    """The deltas of the pieces; of these namespaces only, if any are named."""
    source = source_of(topic, found)
    deltas = DeltaRows(source)
    if "headers" in schema.names:
        deltas.headers = header_maps(source)
    if namespaces is not None:
        deltas.only(pc.is_in(deltas.names[0], pa.array(sorted(namespaces), pa.string())))
    return record_batch(DELTAS, schema, deltas)
