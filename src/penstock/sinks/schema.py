"""What a sink is handed: states and deltas as Arrow tables, and how they are made.

STATES has one row per vector and says how it is now; DELTAS one row per released delta. Vectors of
one table have the same number of dimensions. A state's `revision` grows with every change of its
vector: of two states of a vector the one with the higher revision is the newer, wherever and
whenever they come from (`newest`). A delta's `ordinal` counts the released deltas of its log
partition from 1 without a gap; `position` is the sequence whose arrival released it.

Metadata, headers and clocks are JSON text (`penstock.sinks.texts`). Where that cannot say exactly
what a message holds, the row has the message itself as `original`.

The converters take what the kernels return. They look at columns and copy no numbers: the tables
share memory with the arrays they were made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.model.columns import Binary
from penstock.model.delta_batch import DeltaBatch, blank
from penstock.propagation.fold.merge import VectorStates
from penstock.sinks import arrays, texts

STATE_FIELDS: Final = (
    pa.field("metadata", pa.utf8()),  # JSON object, null: none
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
        pa.field("clock", pa.utf8(), nullable=False),  # JSON object: origin → counter
        pa.field("indices", pa.list_(pa.uint16())),
        pa.field("values", pa.list_(pa.float32())),
        pa.field("metadata", pa.utf8()),  # JSON object, null: none
        pa.field("headers", pa.utf8()),  # the same
        pa.field("priority", pa.int8(), nullable=False),
        pa.field("source", pa.int8(), nullable=False),
        pa.field("log_time_ms", pa.int64(), nullable=False),
        pa.field("payload", pa.binary()),  # the delta as it was sent, for sinks that ask for it
        # msgpack array of payload and headers, where metadata or headers are no exact JSON
        pa.field("original", pa.binary()),
    ]
)
AS_SENT: Final = frozenset({"payload", "original"})  # columns of DELTAS that only repeat others

SCANNED: Final = ["namespace", "vector_id", "vector", "metadata", "revision"]  # of `Sink.scan`


def scanned_rows(
    rows: Iterable[tuple[str, str, NDArray[np.float32], str | None, int]],
) -> pa.RecordBatch:
    """Rows of SCANNED whose vectors have the same number of dimensions; there must be one."""
    namespaces, vector_ids, vectors, metadata, revisions = zip(*rows, strict=True)
    columns = [
        pa.array(namespaces, pa.utf8()),
        pa.array(vector_ids, pa.utf8()),
        arrays.vectors(np.stack(vectors)),
        pa.array(metadata, pa.utf8()),
        pa.array(revisions, pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(columns, names=SCANNED)


def states_schema(dimensions: int) -> pa.Schema:
    return pa.schema(
        [
            pa.field("namespace", pa.utf8(), nullable=False),
            pa.field("vector_id", pa.utf8(), nullable=False),
            pa.field("vector", pa.list_(pa.float32(), dimensions), nullable=False),
            *STATE_FIELDS,
        ]
    )


def dimensions_of(states: pa.Table | pa.Schema) -> int:
    schema = states if isinstance(states, pa.Schema) else states.schema
    return int(schema.field("vector").type.list_size)


def states_by_dimensions(rows: pa.Table) -> Iterator[pa.Table]:
    """STATES of rows whose vectors are lists of any length, those of one length together."""
    sizes = pc.list_value_length(rows["vector"])
    for size in sorted(pc.unique(sizes).to_pylist()):
        yield rows.filter(pc.equal(sizes, size)).cast(states_schema(size))


def states_table(states: VectorStates, *, topic: str, partition: int) -> pa.Table:
    count, dimensions = states.values.shape
    columns = [
        _column(states.namespace, pa.utf8()),
        _column(states.vector_id, pa.utf8()),
        arrays.vectors(states.values),
        texts.json_column(_column(states.metadata, pa.binary(), empty_is_null=True)),
        pa.array(np.asarray(states.deleted, np.bool_)),
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
    batch: DeltaBatch,
    *,
    positions: NDArray[np.uint64],
    ordinals: NDArray[np.uint64],
    topic: str,
    partition: int,
    payloads: bool = False,
) -> pa.Table:
    """DELTAS rows of what one log partition released, in the order of release."""
    count = len(batch)
    namespaces, vector_ids, packed = _named(batch)
    metadata, odd = texts.judged_column(arrays.ragged(*packed, pa.binary(), empty_is_null=True))
    sent = _column(batch.headers or blank(count), pa.binary(), empty_is_null=True)
    headers, odd_headers = texts.judged_column(sent)
    offsets, indices, values = batch.components()
    columns = {
        "topic": arrays.same(topic, count, pa.utf8()),
        "partition": arrays.same(partition, count, pa.int32()),
        "sequence": arrays.fixed(batch.sequences, pa.int64()),
        "position": arrays.fixed(positions, pa.int64()),
        "ordinal": arrays.fixed(ordinals, pa.int64()),
        "delta_id": arrays.ids(arrays.sixteen(batch.delta_id)),
        "parent": arrays.ids(arrays.sixteen(batch.parent), valid=(batch.parent != 0).any(axis=1)),
        "namespace": arrays.ragged(*namespaces, pa.utf8()),
        "vector_id": arrays.ragged(*vector_ids, pa.utf8()),
        "op": arrays.fixed(batch.op, pa.int8()),
        "origin": arrays.names(batch.origin),
        "time": arrays.fixed(batch.time, pa.int64()),
        "clock": texts.clock_column(*batch.clocks()),
        "indices": arrays.lists(offsets, indices, pa.uint16()),
        "values": arrays.lists(offsets, values, pa.float32()),
        "metadata": metadata,
        "headers": headers,
        "priority": arrays.fixed(batch.priority, pa.int8()),
        "source": arrays.fixed(batch.source, pa.int8()),
        "log_time_ms": arrays.fixed(batch.log_times_ms, pa.int64()),
        "payload": _column(batch.payloads, pa.binary())
        if payloads
        else pa.nulls(count, pa.binary()),
        "original": _originals(batch, sent, odd | odd_headers),
    }
    return pa.table([columns[name] for name in DELTAS.names], schema=DELTAS)


def _named(batch: DeltaBatch) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
    """Namespaces, vector ids and metadata, which lie one behind the other in each payload."""
    blob, at = np.frombuffer(batch.blob, np.uint8), batch.names_at
    for name in ("namespace_bytes", "vector_id_bytes", "metadata_bytes"):
        yield arrays.sliced(blob, at, batch.fixed[name])
        at = at + batch.fixed[name]


def _originals(batch: DeltaBatch, headers: pa.Array, rows: NDArray[np.bool_]) -> pa.Array:
    if not rows.any():
        return pa.nulls(len(batch), pa.binary())
    found: list[bytes | None] = [None] * len(batch)
    for row in np.flatnonzero(rows).tolist():
        found[row] = msgspec.msgpack.encode((batch.payload(row), headers[row].as_py()))
    return pa.array(found, pa.binary())


def _column(values: Binary, kind: pa.DataType, *, empty_is_null: bool = False) -> pa.Array:
    return arrays.ragged(values.offsets, values.blob, kind, empty_is_null=empty_is_null)


# --- the newest of several states of a vector ---
# Keys and revisions of all rows are looked at first, in bounded memory per row; the vectors
# themselves are then streamed, and only the rows that won are taken.


def vector_keys(table: pa.Table | pa.RecordBatch, *, topics: bool = False) -> pa.Array:
    """One text per row that names its vector; with `topics`, a vector of two topics is two."""
    names = ("topic", "namespace", "vector_id") if topics else ("namespace", "vector_id")
    joined = pc.binary_join_element_wise(*(table[name] for name in names), "\0")
    return joined.combine_chunks() if isinstance(joined, pa.ChunkedArray) else joined


def newest(keys: pa.Array | pa.ChunkedArray, revisions: NDArray[np.int64]) -> NDArray[np.bool_]:
    """True for one row of each key: the one with the highest revision, of equals the last."""
    encoded = keys.dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    if len(encoded.dictionary) == len(encoded):
        return np.ones(len(encoded), np.bool_)
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    order = np.lexsort((revisions, codes))
    sorted_codes = codes[order]
    last = np.ones(len(order), np.bool_)
    last[:-1] = sorted_codes[1:] != sorted_codes[:-1]
    chosen = np.zeros(len(order), np.bool_)
    chosen[order[last]] = True
    return chosen


def newest_of(states: pa.Table, *, topics: bool = False) -> pa.Table:
    """STATES with the newest row of each vector only, in the order of their appearance."""
    chosen = newest(vector_keys(states, topics=topics), states["revision"].to_numpy())
    return states if chosen.all() else states.filter(pa.array(chosen))


def winners(batches: Iterable[pa.RecordBatch]) -> NDArray[np.bool_]:
    """`newest` over a stream of rows with namespace, vector_id and revision."""
    keys: list[pa.Array] = []
    revisions: list[NDArray[np.int64]] = []
    for batch in batches:
        keys.append(vector_keys(batch).cast(pa.large_utf8()))
        revisions.append(batch["revision"].to_numpy())
    if not keys:
        return np.zeros(0, np.bool_)
    return newest(pa.chunked_array(keys), np.concatenate(revisions))


def chosen_rows(
    batches: Iterable[pa.RecordBatch], chosen: NDArray[np.bool_]
) -> Iterator[pa.RecordBatch]:
    """The chosen rows of a stream, which must come in the order in which they were judged."""
    at = 0
    for batch in batches:
        mask = chosen[at : at + len(batch)]
        at += len(batch)
        if mask.all():
            yield batch
        elif mask.any():
            yield batch.filter(pa.array(mask))
