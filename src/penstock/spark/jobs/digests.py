"""Digests: what is compared of a vector, of a delta and of a message, in some hundred bytes.

Both sides of an audit make them where they are, and only digests move. One table holds all kinds.
`key` is what rows are found by: the hash of the vector's name, or of the delta's place among the
released ones, or the id of a message's delta. `content` is what must be equal then:

    vector    u32 dimensions | u64 hash of the values' bits | u64 hash of the metadata
    delta     u64 hash of all columns | u32 for each of them, which tells them apart
    message   nothing: it is there or not

`takers` has a bit for each sink whose routes take an expected row. The rest is there to show it.

Metadata are compared by what they say: none and null are the same, and of JSON text the order of
names is not looked at, which not every store keeps.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from penstock.sinks import arrays
from penstock.sinks.schema import DELTAS
from penstock.sinks.texts import sorted_of

EXPECTED, HELD, DEAD = range(3)  # which side a digest is of
KEY: Final = np.dtype("S16")
Keys = NDArray[np.bytes_]
Table = Any  # a table or a record batch
ALL: Final = -1  # takers: every sink
COMPARED: Final = [name for name in DELTAS.names if name not in ("payload", "original")]
_COMPARED_SCHEMA: Final = pa.schema([DELTAS.field(n).with_nullable(True) for n in COMPARED])
STATE: Final = np.dtype([("dimensions", "<u4"), ("values", "<u8"), ("metadata", "<u8")])
DELTA: Final = np.dtype([("row", "<u8"), ("columns", "<u4", (len(COMPARED),))])
DIGEST: Final = pa.schema(
    [
        pa.field("side", pa.int8()),
        pa.field("takers", pa.int64()),
        pa.field("key", pa.binary(16)),
        pa.field("content", pa.binary()),
        pa.field("revision", pa.int64()),
        pa.field("deleted", pa.bool_()),
        pa.field("topic", pa.utf8()),
        pa.field("partition", pa.int32()),
        pa.field("ordinal", pa.int64()),
        pa.field("sequence", pa.int64()),
        pa.field("namespace", pa.utf8()),
        pa.field("vector_id", pa.utf8()),
    ]
)
_NOTHING: Final = np.uint64(0x9E3779B97F4A7C15)  # the hash of a null


def keys_of(table: Table) -> Keys:
    """The hashes of vectors' names, sixteen bytes each."""
    pairs = zip(table["namespace"].to_pylist(), table["vector_id"].to_pylist(), strict=True)
    digests = [xxhash.xxh3_128_digest(f"{space}\0{name}".encode()) for space, name in pairs]
    return np.frombuffer(b"".join(digests), KEY)


def as_keys(pairs: NDArray[np.uint64]) -> Keys:
    """Rows of two numbers, as hashes and ids of a `DeltaBatch` are, by their sixteen bytes."""
    return np.ascontiguousarray(pairs).view(KEY).reshape(-1)


def shares_of_keys(keys: Keys, shares: int) -> NDArray[np.int64]:
    """The share of each key, of so many."""
    low = np.frombuffer(keys.tobytes(), "<u8")[::2]
    return (low % np.uint64(shares)).astype(np.int64)


def state_digests(table: Table, side: int, takers: NDArray[np.int64] | None = None) -> pa.Table:
    """Of STATES, or of the rows of a scan."""
    content = np.zeros(table.num_rows, STATE)
    content["dimensions"] = _lengths(table["vector"])
    content["values"] = _list_hashes(table["vector"])
    content["metadata"] = _said(table["metadata"])
    return _digests(table, side, keys_of(table), takers, content=content)


def delta_digests(table: Table, side: int, takers: NDArray[np.int64] | None = None) -> pa.Table:
    """Of DELTAS, or of the rows of a lake's history, which has fewer types."""
    compared = _table(table).select(COMPARED).cast(_COMPARED_SCHEMA)
    hashes = np.stack([_hashes(compared[name]) for name in COMPARED], axis=1)
    content = np.zeros(table.num_rows, DELTA)
    content["columns"] = hashes.astype(np.uint32)
    content["row"] = _joined(hashes)
    return _digests(table, side, _places(compared), takers, content=content)


def message_digests(ids: Keys, side: int, takers: NDArray[np.int64] | None = None) -> pa.Table:
    return _digests(pa.table({"n": np.zeros(len(ids), np.int8)}), side, ids, takers)


def ids_of(deltas: Table) -> Keys:
    return np.frombuffer(b"".join(deltas["delta_id"].to_pylist()), KEY)


def content_of(digests: pa.Table, kind: np.dtype[Any]) -> NDArray[Any]:
    return np.frombuffer(b"".join(digests["content"].to_pylist()), kind)


def keys_in(digests: pa.Table) -> Keys:
    return np.frombuffer(b"".join(digests["key"].to_pylist()), KEY)


def _digests(
    table: Table,
    side: int,
    keys: Keys,
    takers: NDArray[np.int64] | None,
    *,
    content: NDArray[Any] | None = None,
) -> pa.Table:
    count, present = table.num_rows, set(table.schema.names)
    made: dict[str, Any] = {
        "side": arrays.same(side, count, pa.int8()),
        "takers": arrays.same(ALL, count, pa.int64()) if takers is None else pa.array(takers),
        "key": _fixed(keys.tobytes(), 16, count),
    }
    if content is not None:
        size = content.dtype.itemsize
        made["content"] = _fixed(content.tobytes(), size, count).cast(pa.binary())
    for field in DIGEST:
        if field.name not in made:
            shown = field.name in present
            column = table[field.name] if shown else pa.nulls(count, field.type)
            made[field.name] = column.cast(field.type)
    return pa.table([made[name] for name in DIGEST.names], schema=DIGEST)


def _fixed(data: bytes, size: int, count: int) -> pa.Array:
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(size), count, [None, pa.py_buffer(data)])


def _table(table: Table) -> pa.Table:
    return pa.Table.from_batches([table]) if isinstance(table, pa.RecordBatch) else table


def _places(deltas: pa.Table) -> Keys:
    """The hashes of deltas' places among what was released."""
    columns = (deltas[name].to_pylist() for name in ("topic", "partition", "ordinal"))
    rows = zip(*columns, strict=True)
    digests = [xxhash.xxh3_128_digest(f"{t}\0{p}\0{n}".encode()) for t, p, n in rows]
    return np.frombuffer(b"".join(digests), KEY)


# --- hashes of columns ---


def _hashes(column: pa.ChunkedArray) -> NDArray[np.uint64]:
    kind = column.type
    if pa.types.is_list(kind):
        return _list_hashes(column)
    if pa.types.is_integer(kind):
        return _mixed(column.to_numpy().astype(np.int64).view(np.uint64))
    return _distinct_hashes(column)


def _distinct_hashes(column: pa.ChunkedArray) -> NDArray[np.uint64]:
    """Of texts and bytes; equal ones are hashed once."""
    found = column.combine_chunks().dictionary_encode()
    texts = found.dictionary.cast(pa.binary()).to_pylist()
    hashes = np.array([*map(xxhash.xxh3_64_intdigest, texts), _NOTHING], np.uint64)
    rows = pc.fill_null(found.indices, len(texts)).to_numpy(zero_copy_only=False)
    return np.asarray(hashes[rows])


def _lengths(column: Any) -> NDArray[np.int64]:
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    return np.asarray(lengths).astype(np.int64)


def _list_hashes(column: Any) -> NDArray[np.uint64]:
    """Of lists of numbers, by their bits; null and empty are the same."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    flat = np.ascontiguousarray(pc.list_flatten(column).to_numpy(zero_copy_only=False))
    ends = np.cumsum(_lengths(column)) * flat.dtype.itemsize
    starts, data = ends - _lengths(column) * flat.dtype.itemsize, flat.view(np.uint8).data
    spans = zip(starts.tolist(), ends.tolist(), strict=True)
    return np.array([xxhash.xxh3_64_intdigest(data[a:b]) for a, b in spans], np.uint64)


def _said(column: Any) -> NDArray[np.uint64]:
    """Of metadata, by what they say."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_binary(column.type):
        column = pc.fill_null(column, b"")
        return _distinct_hashes(pa.chunked_array([column]))
    distinct = pc.fill_null(column, "").dictionary_encode()
    texts = pa.array(map(sorted_of, distinct.dictionary.to_pylist()), pa.binary())
    return _distinct_hashes(pa.chunked_array([texts.take(distinct.indices)]))


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit of a number in every bit of its hash (the finaliser of splitmix64)."""
    found = numbers + _NOTHING
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        found = (found ^ (found >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(found ^ (found >> np.uint64(31)))


def _joined(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One hash of each row, in which the place of a column counts."""
    found = np.zeros(len(hashes), np.uint64)
    for column in hashes.T:
        found = _mixed(found ^ column)
    return found
