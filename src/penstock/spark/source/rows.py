"""Log batches as rows of Arrow: the buffers of a batch are wrapped, not copied message by message.

A mode is a list of columns. Each column knows how to make itself out of *pieces*, the parts of
consecutive batches that lie in the range that is read, so a reader that was asked for some columns
only decodes those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.model.batch import Batch
from penstock.model.columns import Binary, Columns

_HEADERS_CACHED: Final = 4096
_TEXT_MAP: Final = pa.map_(pa.string(), pa.string())


@dataclass(frozen=True, slots=True)
class Piece:
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


def pieces(batches: Iterable[Batch], *, first: int, last: int) -> list[Piece]:
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
            found.append(Piece(batch, columns, low, high))
    return found


@dataclass(frozen=True, slots=True)
class Source:
    """Where the pieces of one record batch come from."""

    topic: str
    pieces: Sequence[Piece]
    count: int


Make = Callable[[Any], Any]  # from a source of rows to an array of as many values


def wrap(column: Binary | None, piece: Piece, *, nullable: bool = False) -> pa.Array:
    """A binary column of a piece without a copy; `nullable`: empty values are null."""
    if column is None:
        if nullable:
            return pa.nulls(piece.count, pa.binary())
        return pa.repeat(pa.scalar(b"", pa.binary()), piece.count)
    offsets = column.offsets
    validity = None
    if nullable:
        filled = offsets[1:] > offsets[:-1]
        if not filled.all():
            validity = pa.py_buffer(np.packbits(filled, bitorder="little"))
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(column.blob)]
    array = pa.Array.from_buffers(pa.binary(), len(column), buffers)
    return array if piece.whole else array.slice(piece.low, piece.count)


def joined(arrays: Sequence[pa.Array]) -> pa.Array:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def binary(name: str, *, nullable: bool = False) -> Make:
    return lambda source: joined(
        [wrap(p.columns.binary(name), p, nullable=nullable) for p in source.pieces]
    )


def fixed(name: str) -> Make:
    return lambda source: np.concatenate([p.fixed(name) for p in source.pieces])


def topic_name(source: Source) -> pa.Array:
    return pa.repeat(pa.scalar(source.topic, pa.string()), source.count)


def partition_number(source: Source) -> NDArray[np.int32]:
    return np.full(source.count, source.pieces[0].batch.partition, np.int32)


def sequences(source: Source) -> NDArray[np.int64]:
    return np.concatenate([p.sequences() for p in source.pieces])


def log_times(source: Source) -> NDArray[np.int64]:
    """In microseconds, as Spark counts."""
    times = [p.batch.time_ms * 1000 for p in source.pieces]
    return np.repeat(np.array(times, np.int64), [p.count for p in source.pieces])


def header_maps(source: Source) -> pa.Array:
    """Headers as map<string, string>; values that are no text stand as JSON."""
    if not any("headers" in piece.columns for piece in source.pieces):
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
    if not cell:
        return ()
    decoded: dict[str, Any] = msgspec.msgpack.decode(cell)
    return tuple(
        (str(name), value if isinstance(value, str) else msgspec.json.encode(value).decode())
        for name, value in decoded.items()
    )


class Column(NamedTuple):
    """A column of a mode: its type in Spark's words, and how it is made."""

    type: str
    make: Make


MESSAGES: Final[dict[str, Column]] = {
    "topic": Column("string", topic_name),
    "partition": Column("int", partition_number),
    "sequence": Column("bigint", sequences),
    "time": Column("timestamp", log_times),
    "priority": Column("bigint", fixed("priority")),
    "key": Column("binary", binary("key", nullable=True)),
    "headers": Column("map<string,string>", header_maps),
    "value": Column("binary", binary("payload")),
}


def source_of(topic: str, found: Sequence[Piece]) -> Source:
    return Source(topic, found, sum(piece.count for piece in found))


def record_batch(columns: dict[str, Column], schema: pa.Schema, source: Any) -> pa.RecordBatch:
    """Rows with the columns that `schema` names, in its order and with its types."""
    made = [_typed(columns[field.name].make(source), field.type) for field in schema]
    return pa.RecordBatch.from_arrays(made, schema=schema)


def _typed(values: Any, type_: pa.DataType) -> pa.Array:
    if isinstance(values, np.ndarray):
        plain = pa.array(values)
        return plain.view(type_) if pa.types.is_timestamp(type_) else plain.cast(type_)
    return values if values.type == type_ else values.cast(type_)
