"""The state of a fold as bytes, and as one number.

`dump` gives the bytes, and `restore` the fold that goes on exactly as the dumped one would:

    magic 4 | u32 length of the head | u64 xxh3 of what follows | head (msgpack) | blocks

The checksum is seeded with the head's length. The head holds what is small, and for every column
its name, type, shape and the sizes of its blocks. A block is up to BLOCK bytes of a column, the
bytes of its numbers sorted by significance (their upper bytes are nearly equal, and lz4 finds that
out), compressed by lz4. Places of keys and lists of waiting deltas are not stored: they are a
function of the rest.

`digest` gives the number: equal for equal histories, however they were cut into feeds. Numbers of
vectors, chains and origins depend on the cuts, so rows are sorted by what they stand for and
origins go by their rank.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any, Final

import lz4.block
import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.errors import Corruption, FailedPrecondition
from penstock.model.columns import Buffer
from penstock.propagation.fold.ledger import WaitingDelta
from penstock.propagation.fold.merge import NO_LANE
from penstock.propagation.fold.propagator import Propagator
from penstock.propagation.fold.table import Numbers, Table, Texts
from penstock.propagation.options import PropagationOptions

VERSION: Final = 1
BLOCK: Final = 8 << 20
_PREFIX: Final = struct.Struct("<4sIQ")
_MAGIC: Final = b"PSP1"
_SCRATCH: Final = frozenset({"mark", "row", "first", "waiting", "lane"})

Column = NDArray[Any]


def dump(fold: Propagator) -> list[Buffer]:
    """Buffers that together are the snapshot; none of them changes with the fold."""
    if fold.paused:
        raise FailedPrecondition("a paused fold has no snapshot: resolve what is missing first")
    blocks: list[Buffer] = []
    described = []
    for name, column in _columns(fold):
        sizes = []
        for packed in _blocks(column):
            blocks.append(packed)
            sizes.append(len(packed))
        described.append([name, column.dtype.str, list(column.shape), sizes])
    head = msgspec.msgpack.encode({**_head(fold), "columns": described})
    checksum = xxhash.xxh3_64(head, seed=len(head))
    for block in blocks:
        checksum.update(block)
    return [_PREFIX.pack(_MAGIC, len(head), checksum.intdigest()), head, *blocks]


def restore(data: Buffer, options: PropagationOptions | None = None) -> Propagator:
    """The fold that was dumped; raises `Corruption` for bytes that `dump` did not write."""
    head, columns = _load(data)
    fold = Propagator(head["dimensions"], options)
    _fill(fold, head, columns)
    return fold


def _load(data: Buffer) -> tuple[dict[str, Any], dict[str, Column]]:
    view = memoryview(data).cast("B")
    if len(view) < _PREFIX.size:
        raise Corruption("a snapshot is shorter than its prefix")
    magic, size, checksum = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise Corruption("not a snapshot of a fold")
    if xxhash.xxh3_64_intdigest(view[_PREFIX.size :], seed=size) != checksum:
        raise Corruption("a snapshot's checksum does not match")
    at = _PREFIX.size + size
    head = msgspec.msgpack.decode(view[_PREFIX.size : at])
    if head["version"] != VERSION:
        raise Corruption(f"snapshot version {head['version']} is not {VERSION}")
    columns = {}
    for name, dtype, shape, sizes in head["columns"]:
        columns[name] = _column(view[at : at + sum(sizes)], np.dtype(dtype), shape, sizes)
        at += sum(sizes)
    return head, columns


# --- columns ---


def _blocks(column: Column) -> Iterator[bytes]:
    flat = np.ascontiguousarray(column).reshape(-1)
    step = BLOCK // flat.itemsize
    for at in range(0, len(flat), step):
        part = flat[at : at + step].view(np.uint8).reshape(-1, flat.itemsize)
        yield lz4.block.compress(part.T.tobytes(), store_size=False)


def _column(data: memoryview, dtype: np.dtype[Any], shape: list[int], sizes: list[int]) -> Column:
    flat = np.empty(int(np.prod(shape, dtype=np.int64)), dtype)
    step = BLOCK // dtype.itemsize
    for number, (start, end) in enumerate(pairwise(accumulate(sizes, initial=0))):
        part = flat[number * step : (number + 1) * step]
        raw = lz4.block.decompress(data[start:end], uncompressed_size=part.nbytes)
        part[:] = (
            np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, -1).T.copy().view(dtype)[:, 0]
        )
    return flat.reshape(shape)


def _columns(fold: Propagator) -> Iterator[tuple[str, Column]]:
    ledger, registers = fold.ledger, fold.merge.registers
    for name, table in _tables(fold).items():
        for column in table.names():
            if column not in _SCRATCH:
                yield f"{name}.{column}", table.rows(column)
    ids = ledger.ids.table
    kept = ledger.remembered()
    for column in ("low", "high", "vector", "log_time_ms"):
        yield f"ids.{column}", ids.rows(column)[kept]
    metadata = Texts()
    metadata.extend(list(registers.metadata.values()))
    yield "metadata.vector", np.fromiter(registers.metadata, np.int64, len(registers.metadata))
    for name, texts in _texts(fold, metadata):
        yield f"{name}.size", texts.table.rows("size")
        yield f"{name}.bytes", texts.joined()


def _texts(fold: Propagator, metadata: Texts) -> list[tuple[str, Texts]]:
    ledger = fold.ledger
    return [
        ("namespaces", ledger.namespaces),
        ("vector_ids", ledger.vector_ids),
        ("metadata", metadata),
    ]


def _tables(fold: Propagator) -> dict[str, Table]:
    ledger, merge = fold.ledger, fold.merge
    return {
        "vectors": ledger.vectors.table,
        "origins": ledger.origins.table,
        "chains": ledger.chains.table,
        "registers": merge.registers.table,
        "merge": merge.table,
    }


# --- the head ---


def _head(fold: Propagator) -> dict[str, Any]:
    operations = fold.merge.operations
    return {
        "version": VERSION,
        "dimensions": fold.dimensions,
        "sequence": fold.sequence,
        "ordinal": fold.ordinal,
        "time_ms": fold.ledger.time_ms,
        "operations": [
            [vector, o.time, o.writer, o.scale, _raw(o.indices), _raw(o.values)]
            for vector, some in operations.lists.items()
            for o in some
        ],
        "folds": [[vector, *stamp] for vector, stamp in operations.folds.items()],
        "pending": [
            [
                w.sequence, w.log_time_ms, w.id, w.parent, w.vector, w.chain, w.counter, w.others,
                w.payload, w.headers, w.key,
            ]
            for w in fold.waitlist.arrivals
            if not w.done
        ],
    }  # fmt: skip


def _raw(column: Column | None) -> bytes | None:
    return None if column is None else column.tobytes()


def _fill(fold: Propagator, head: dict[str, Any], columns: dict[str, Column]) -> None:
    fold.sequence, fold.ordinal = head["sequence"], head["ordinal"]
    ledger, merge = fold.ledger, fold.merge
    for name, table in _tables(fold).items():
        _fill_table(table, columns, name)
    _fill_table(ledger.ids.table, columns, "ids")
    for keys in (ledger.vectors, ledger.origins, ledger.chains, ledger.ids):
        keys.keep(np.arange(len(keys)))  # which gives each key its place
    ledger.time_ms = head["time_ms"]
    metadata = Texts()
    for name, texts in _texts(fold, metadata):
        texts.append(columns[f"{name}.bytes"].tobytes(), columns[f"{name}.size"])
    ledger.rank_origins()
    vectors = columns["metadata.vector"].tolist()
    merge.registers.metadata = {vector: metadata[i] for i, vector in enumerate(vectors)}
    merge.table["lane"][: merge.table.count] = NO_LANE
    for vector, time, writer, scale, indices, values in head["operations"]:
        named = None if indices is None else np.frombuffer(indices, np.uint16)
        factors = np.frombuffer(values, np.float32)
        merge.operations.add(vector, time, writer, scale=scale, indices=named, values=factors)
    merge.operations.folds = {vector: (time, origin) for vector, time, origin in head["folds"]}
    fold.waitlist.look()
    for *fields, others, payload, headers, key in head["pending"]:
        own: list[Any] = [-1, -1, *fields, [(chain, counter) for chain, counter in others]]
        waiting = WaitingDelta(*own)
        waiting.payload, waiting.headers = payload, headers
        fold.waitlist.wait(waiting, (key[0], key[1]))


def _fill_table(table: Table, columns: dict[str, Column], name: str) -> None:
    own = {c: columns[f"{name}.{c}"] for c in table.names() if f"{name}.{c}" in columns}
    table.extend(len(next(iter(own.values()))))
    for column, data in own.items():
        if table[column].dtype != data.dtype:  # origins may have outgrown two bytes
            table[column] = table[column].astype(data.dtype)
        table[column][: table.count] = data


def digest(fold: Propagator) -> int:
    """Over merged states, chains, remembered ids and pending deltas."""
    found = xxhash.xxh3_64()
    found.update(msgspec.msgpack.encode([fold.dimensions, fold.sequence, fold.ordinal]))
    _add_vectors(found, fold)
    _add_chains(found, fold)
    _add_ids(found, fold)
    for waiting in sorted(fold.waitlist.by_id.values()):
        found.update(waiting.payload)
    return found.intdigest()


def _add_vectors(found: Any, fold: Propagator) -> None:
    ledger, merge = fold.ledger, fold.merge
    vectors = _sorted_vectors(fold)
    vectors = vectors[merge.table["revision"][vectors] > 0]
    for name in ("low", "high"):
        found.update(ledger.vectors.table[name][vectors])
    for name in ("revision", "time", "sequence", "log_time_ms"):
        found.update(merge.table[name][vectors])
    table = merge.registers.table
    for name in ("values", "times", "existence", "existence_time", "metadata_time"):
        found.update(table[name][vectors])
    for name in ("writers", "existence_writer", "metadata_writer"):
        time = table["times" if name == "writers" else name.replace("writer", "time")][vectors]
        writer = table[name][vectors]
        found.update(np.where(time > 0, ledger.ranks[writer], 0))
    operations, metadata = merge.operations, merge.registers.metadata
    for vector in vectors.tolist():
        if vector in operations.lists or vector in operations.folds or vector in metadata:
            found.update(metadata.get(vector, b""))
            found.update(repr(operations.folds.get(vector)).encode())
            for operation in operations.lists.get(vector, ()):
                found.update(repr((operation.stamp, operation.scale)).encode())
                found.update(b"" if operation.indices is None else operation.indices.tobytes())
                found.update(operation.values.tobytes())


def _sorted_vectors(fold: Propagator) -> Numbers:
    fold.merge.reserve()
    table = fold.ledger.vectors.table
    return np.lexsort((table.rows("low"), table.rows("high")))


def _add_chains(found: Any, fold: Propagator) -> None:
    """Chains of which anything was seen, by vector and origin."""
    table = fold.ledger.chains.table
    chains = np.flatnonzero(table.rows("seen"))
    place = np.empty(len(fold.ledger.vectors), np.int64)
    place[_sorted_vectors(fold)] = np.arange(len(place))
    vector = place[table["low"][chains].view(np.int64)]
    rank = fold.ledger.ranks[table["high"][chains].view(np.int64)]
    order = np.lexsort((rank, vector))
    for column in (vector, rank, *(table[name][chains] for name in ("seen", "time", "head"))):
        found.update(np.ascontiguousarray(column[order]))


def _add_ids(found: Any, fold: Propagator) -> None:
    ledger, table = fold.ledger, fold.ledger.ids.table
    recent = table.rows("log_time_ms") >= ledger.time_ms - ledger.dedup_ms
    ids = np.flatnonzero((table.rows("vector") > 0) & recent)
    order = ids[np.lexsort((table["low"][ids], table["high"][ids]))]
    for name in ("low", "high", "log_time_ms"):
        found.update(table[name][order])
