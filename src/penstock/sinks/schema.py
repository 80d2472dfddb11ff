"""What a sink is handed: states and deltas as Arrow tables, and how they are made.

STATES has one row per vector and says how it is now; DELTAS one row per released delta. Vectors of
one table have the same number of dimensions. A state's `revision` grows with every change of its
vector: of two states of a vector the one with the higher revision is the newer, wherever and
whenever they come from. A delta's `ordinal` counts the released deltas of its log partition from 1
without a gap; `position` is the sequence whose arrival released it.

The converters take what the kernels return. They look at columns only and copy no values: the
tables share memory with the arrays they were made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.model.columns import Binary
from penstock.sinks import arrays

STATE_FIELDS: Final = (
    pa.field("metadata", pa.binary()),  # msgpack map, null: none
    pa.field("deleted", pa.bool_(), nullable=False),
    pa.field("revision", pa.int64(), nullable=False),
    pa.field("time", pa.int64(), nullable=False),  # newest hybrid time merged
    pa.field("sequence", pa.int64(), nullable=False),  # newest log sequence merged
    pa.field("partition", pa.int32(), nullable=False),
    pa.field("topic", pa.utf8(), nullable=False),
    pa.field("log_time_ms", pa.int64(), nullable=False),  # of that sequence
    pa.field("lane", pa.int8(), nullable=False),
)

DELTAS: Final = pa.schema(
    [
        pa.field("topic", pa.utf8(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        pa.field("ordinal", pa.int64(), nullable=False),
        pa.field("delta_id", pa.binary(16), nullable=False),
        pa.field("parent", pa.binary(16)),
        pa.field("namespace", pa.utf8(), nullable=False),
        pa.field("vector_id", pa.utf8(), nullable=False),
        pa.field("op", pa.int8(), nullable=False),
        pa.field("origin", pa.utf8(), nullable=False),
        pa.field("time", pa.int64(), nullable=False),
        pa.field("clock", pa.binary(), nullable=False),  # msgpack map: origin → counter
        pa.field("indices", pa.list_(pa.uint16())),
        pa.field("values", pa.list_(pa.float32())),
        pa.field("metadata", pa.binary()),
        pa.field("headers", pa.binary()),
        pa.field("priority", pa.int8(), nullable=False),
        pa.field("source", pa.int8(), nullable=False),
        pa.field("log_time_ms", pa.int64(), nullable=False),
        pa.field("payload", pa.binary()),  # the delta as it was sent, for sinks that ask for it
    ]
)

# The fixed start of a delta's payload.
HEADER: Final = np.dtype(
    [
        ("version", "u1"), ("op", "u1"), ("priority", "u1"), ("source", "u1"), ("n", "<u2"),
        ("n_clock", "u1"), ("flags", "u1"), ("delta_id", "u1", 16), ("parent", "u1", 16),
        ("origin", "u1", 16), ("time", "<i8"), ("vector", "u1", 16), ("namespace", "<u2"),
        ("vector_id", "<u2"), ("metadata", "<u4"),
    ]
)  # fmt: skip
_PARENT, _INDICES = 1, 2  # header flags


def states_schema(dimensions: int) -> pa.Schema:
    """The columns of STATES for vectors of so many dimensions."""
    return pa.schema(
        [
            pa.field("namespace", pa.utf8(), nullable=False),
            pa.field("vector_id", pa.utf8(), nullable=False),
            pa.field("vector", pa.list_(pa.float32(), dimensions), nullable=False),
            *STATE_FIELDS,
        ]
    )


def dimensions_of(states: pa.Table | pa.Schema) -> int:
    """How many dimensions the vectors of a STATES table have."""
    schema = states if isinstance(states, pa.Schema) else states.schema
    return int(schema.field("vector").type.list_size)


class States(Protocol):
    """The columns of `VectorStates` that a table is made of."""

    namespace: Binary | Sequence[str]
    vector_id: Binary | Sequence[str]
    values: NDArray[np.float32]
    metadata: Binary
    deleted: NDArray[np.bool_]
    revision: NDArray[np.uint64]
    time: NDArray[np.int64]
    sequence: NDArray[np.uint64]
    log_time_ms: NDArray[np.int64]
    lane: NDArray[np.uint8]


class Deltas(Protocol):
    """The columns of `DeltaBatch` that a table is made of."""

    payloads: Binary
    sequences: NDArray[np.uint64]
    log_times_ms: NDArray[np.int64]
    headers: Binary | None

    def components(self) -> tuple[NDArray[Any], NDArray[np.uint16], NDArray[np.float32]]: ...
    def clocks(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.uint64]]: ...


class Released(Protocol):
    """The part of an `Outcome` that says what was released."""

    released: Any  # Deltas
    positions: NDArray[np.uint64]
    ordinals: NDArray[np.uint64]


def states_table(states: States, *, topic: str, partition: int) -> pa.Table:
    """STATES rows of one log partition."""
    count, dimensions = states.values.shape
    columns = [
        _text(states.namespace),
        _text(states.vector_id),
        arrays.vectors(states.values),
        _bytes(states.metadata, empty_is_null=True),
        arrays.flags(np.asarray(states.deleted, np.bool_)),
        arrays.fixed(states.revision, pa.int64()),
        arrays.fixed(states.time, pa.int64()),
        arrays.fixed(states.sequence, pa.int64()),
        arrays.same(partition, count, pa.int32()),
        arrays.same(topic, count, pa.utf8()),
        arrays.fixed(states.log_time_ms, pa.int64()),
        arrays.fixed(states.lane, pa.int8()),
    ]
    return pa.table(columns, schema=states_schema(dimensions))


def deltas_table(
    outcome: Released, *, topic: str, partition: int, payloads: bool = False
) -> pa.Table:
    """DELTAS rows of what one log partition released, in the order of release."""
    batch: Deltas = outcome.released
    count = len(batch.sequences)
    blob, starts, header = _headers(batch.payloads)
    namespace, vector_id, metadata = _parts(starts, header)
    offsets, indices, values = batch.components()
    columns = {
        "topic": arrays.same(topic, count, pa.utf8()),
        "partition": arrays.same(partition, count, pa.int32()),
        "sequence": arrays.fixed(batch.sequences, pa.int64()),
        "position": arrays.fixed(outcome.positions, pa.int64()),
        "ordinal": arrays.fixed(outcome.ordinals, pa.int64()),
        "delta_id": arrays.ids(header["delta_id"]),
        "parent": arrays.ids(header["parent"], valid=(header["flags"] & _PARENT) != 0),
        "namespace": arrays.ragged(*arrays.sliced(blob, *namespace), pa.utf8()),
        "vector_id": arrays.ragged(*arrays.sliced(blob, *vector_id), pa.utf8()),
        "op": arrays.fixed(header["op"], pa.int8()),
        "origin": _origins(header["origin"]),
        "time": arrays.fixed(header["time"], pa.int64()),
        "clock": clock_column(*batch.clocks()),
        "indices": arrays.lists(offsets, indices, pa.uint16()),
        "values": arrays.lists(offsets, values, pa.float32()),
        "metadata": arrays.ragged(*arrays.sliced(blob, *metadata), pa.binary(), empty_is_null=True),
        "headers": _optional(batch.headers, count),
        "priority": arrays.fixed(header["priority"], pa.int8()),
        "source": arrays.fixed(header["source"], pa.int8()),
        "log_time_ms": arrays.fixed(batch.log_times_ms, pa.int64()),
        "payload": _bytes(batch.payloads) if payloads else pa.nulls(count, pa.binary()),
    }
    return pa.table([columns[name] for name in DELTAS.names], schema=DELTAS)


def clock_column(
    offsets: NDArray[Any], origins: NDArray[Any], counters: NDArray[np.uint64]
) -> pa.Array:
    """Clocks as msgpack maps. Written as a matrix of bytes of which each entry takes its own:

    map header (1, or 3 past 15 entries; first entry of a clock only) | string header | origin
    (up to 16) | 0xCF | counter, big-endian
    """
    count = len(counters)
    sizes = np.diff(offsets)
    firsts = np.asarray(offsets[:-1], np.int64)[sizes > 0]
    entries = np.repeat(sizes, sizes)  # the size of each entry's clock
    names = np.ascontiguousarray(origins).view(np.uint8).reshape(count, 16)
    lengths = _lengths(names)
    matrix = np.zeros((count, 29), np.uint8)
    matrix[:, 0] = np.where(entries > 15, 0xDE, 0x80 | np.minimum(entries, 15))
    matrix[:, 2] = entries
    matrix[:, 3] = 0xA0 | lengths
    matrix[:, 4:20] = names
    matrix[:, 20] = 0xCF
    matrix[:, 21:] = np.ascontiguousarray(counters, ">u8").view(np.uint8).reshape(count, 8)
    mask = np.ones((count, 29), np.bool_)
    mask[:, :3] = False
    mask[firsts, 0] = True
    mask[:, 1:3] = (mask[:, 0] & (entries > 15))[:, None]
    mask[:, 4:20] = np.arange(16) < lengths[:, None]
    ends, blob = arrays.masked(matrix, mask)
    return arrays.ragged(ends[np.asarray(offsets, np.int64)], blob, pa.binary())


def _headers(
    payloads: Binary,
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[Any]]:
    """The payloads' bytes, where each begins, and their headers in one array."""
    blob = np.frombuffer(payloads.blob, np.uint8)
    starts = np.asarray(payloads.offsets[:-1], np.int64)
    if not len(starts):
        return blob, starts, np.zeros(0, HEADER)
    windows = np.lib.stride_tricks.sliding_window_view(blob, HEADER.itemsize)
    return blob, starts, windows[starts].view(HEADER).reshape(len(starts))


Pieces = tuple[NDArray[np.int64], NDArray[np.int64]]


def _parts(starts: NDArray[np.int64], header: NDArray[Any]) -> tuple[Pieces, Pieces, Pieces]:
    """Where namespace, vector id and metadata lie, and how long they are."""
    wide = {name: header[name].astype(np.int64) for name in ("n", "n_clock", "flags")}
    namespace, vector_id, metadata = (
        header[name].astype(np.int64) for name in ("namespace", "vector_id", "metadata")
    )
    indexed = (wide["flags"] & _INDICES) != 0
    at = starts + HEADER.itemsize + 24 * wide["n_clock"] + wide["n"] * np.where(indexed, 6, 4)
    second, third = at + namespace, at + namespace + vector_id
    return (at, namespace), (second, vector_id), (third, metadata)


def _lengths(names: NDArray[np.uint8]) -> NDArray[np.int64]:
    """How many bytes stand before the zeros that pad each row."""
    count: NDArray[np.int64] = (names != 0).sum(axis=1)
    return count


def _origins(names: NDArray[np.uint8]) -> pa.Array:
    mask = np.arange(16) < _lengths(names)[:, None]
    return arrays.ragged(*arrays.masked(np.ascontiguousarray(names), mask), pa.utf8())


def _text(values: Binary | Sequence[str]) -> pa.Array:
    if isinstance(values, Binary):
        return arrays.ragged(values.offsets, values.blob, pa.utf8())
    return pa.array(values, pa.utf8())


def _bytes(values: Binary, *, empty_is_null: bool = False) -> pa.Array:
    return arrays.ragged(values.offsets, values.blob, pa.binary(), empty_is_null=empty_is_null)


def _optional(values: Binary | None, count: int) -> pa.Array:
    if values is None:
        return pa.nulls(count, pa.binary())
    return _bytes(values, empty_is_null=True)
