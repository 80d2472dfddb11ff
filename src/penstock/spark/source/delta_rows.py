"""Deltas as rows: the columns of a `DeltaBatch`, wrapped for Spark.

Spark has no unsigned numbers and no fixed-size binary: indices are ints, ids are binary. A row
without indices (`create`, `dense`, `scale`) has null there, not 0, 1, 2 …, so that a delta written
back is the delta that was read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.model.delta_format import HAS_INDICES, Op
from penstock.model.delta_format import Source as DeltaOrigin
from penstock.model.deltas import DeltaBatch
from penstock.sinks import arrays
from penstock.sinks.requests import binary as binary_of
from penstock.spark.source import rows
from penstock.spark.source.rows import Column, Piece, Source

_OPS: Final = pa.array([op.name.lower() for op in Op], pa.string())
_SOURCES: Final = pa.array([source.name.lower() for source in DeltaOrigin], pa.string())


class Deltas:
    """The deltas of some pieces; names and clocks are made once, and only if asked for."""

    def __init__(self, source: Source) -> None:
        self.topic = source.topic
        self.partition = source.pieces[0].batch.partition
        self.batch = DeltaBatch.of(
            binary_of(rows.binary("payload")(source)),
            sequences=rows.sequences(source).view(np.uint64),
            log_times_ms=rows.log_times(source) // 1000,
        )
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


def _text(pairs: NDArray[np.uint64]) -> pa.Array:
    """Sixteen bytes each, padded with zeros, as strings."""
    letters = np.ascontiguousarray(pairs).view(np.uint8).reshape(-1, 16)
    return arrays.ragged(*arrays.masked(letters, letters != 0), pa.string())


def _ids(pairs: NDArray[np.uint64], *, zero_is_null: bool = False) -> pa.Array:
    data = np.ascontiguousarray(pairs)
    mask = arrays.bits((data != 0).any(axis=1)) if zero_is_null else None
    ends = np.arange(0, 16 * len(data) + 1, 16, dtype=np.int32)
    buffers = [mask, pa.py_buffer(ends), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(data), buffers)


def _clock(deltas: Deltas) -> pa.Array:
    offsets, origins, counters = deltas.batch.clocks()
    return pa.MapArray.from_arrays(
        pa.array(offsets.astype(np.int32)), _text(origins), pa.array(counters.astype(np.int64))
    )


def _indices(deltas: Deltas) -> pa.Array:
    batch = deltas.batch
    _, indices, _ = batch.components()
    named = (batch.fixed["flags"] & HAS_INDICES) != 0
    count = np.where(named, batch.n, 0).astype(np.int32)
    kept = indices[np.repeat(named, batch.n)].astype(np.int32)
    offsets = np.concatenate((np.zeros(1, np.int32), np.cumsum(count, dtype=np.int32)))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(kept), mask=pa.array(~named))


def _values(deltas: Deltas) -> pa.Array:
    offsets, _, values = deltas.batch.components()
    return arrays.lists(offsets, values, pa.float32())


def _metadata(deltas: Deltas) -> pa.Array:
    """As JSON text; null where a delta has none."""
    found: list[str | None] = [None] * len(deltas.batch)
    for row in np.flatnonzero(deltas.batch.fixed["metadata_bytes"]).tolist():
        decoded = msgspec.msgpack.decode(deltas.batch.metadata(row))
        found[row] = msgspec.json.encode(decoded).decode()
    return pa.array(found, pa.string())


def _same(name: str) -> Callable[[Deltas], Any]:
    return lambda d: pa.repeat(pa.scalar(getattr(d, name)), len(d.batch))


def _fixed(name: str) -> Callable[[Deltas], Any]:
    return lambda deltas: np.ascontiguousarray(deltas.batch.fixed[name])


DELTAS: Final[dict[str, Column]] = {
    "topic": Column("string", _same("topic")),
    "partition": Column("int", _same("partition")),
    "sequence": Column("bigint", lambda d: d.batch.sequences.view(np.int64)),
    "time": Column("timestamp", lambda d: d.batch.log_times_ms * 1000),
    "delta_id": Column("binary", lambda d: _ids(d.batch.delta_id)),
    "parent": Column("binary", lambda d: _ids(d.batch.parent, zero_is_null=True)),
    "namespace": Column("string", lambda d: d.names[0]),
    "vector_id": Column("string", lambda d: d.names[1]),
    "op": Column("string", lambda d: _OPS.take(pa.array(d.batch.op))),
    "origin": Column("string", lambda d: _text(d.batch.origin)),
    "delta_time": Column("bigint", _fixed("time")),
    "clock": Column("map<string,bigint>", _clock),
    "indices": Column("array<int>", _indices),
    "values": Column("array<float>", _values),
    "metadata": Column("string", _metadata),
    "priority": Column("int", _fixed("priority")),
    "source": Column("string", lambda d: _SOURCES.take(pa.array(d.batch.source))),
    "headers": Column("map<string,string>", lambda d: d.headers),
}


def delta_batch(
    found: Sequence[Piece],
    schema: pa.Schema,
    *,
    topic: str,
    namespaces: frozenset[str] | None = None,
) -> pa.RecordBatch:
    """The deltas of the pieces; of these namespaces only, if any are named."""
    source = rows.source_of(topic, found)
    deltas = Deltas(source)
    if "headers" in schema.names:
        deltas.headers = rows.header_maps(source)
    if namespaces is not None:
        deltas.only(pc.is_in(deltas.names[0], pa.array(sorted(namespaces), pa.string())))
    return rows.record_batch(DELTAS, schema, deltas)
