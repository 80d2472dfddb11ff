"""The state of a fold as bytes, and as one number.

`dump` gives the bytes, and `restore` the fold that goes on exactly as the dumped one would:

    magic 4 | u32 length of the head | u64 xxh3 of what follows | head (msgpack) | blocks

The checksum is seeded with the head's length. The head holds what is small, and for every column
its name, type, shape and the sizes of its blocks. A block is up to BLOCK bytes of a column, the
bytes of its numbers sorted by significance (their upper bytes are nearly equal, and lz4 finds that
out), compressed by lz4.

A snapshot is a *base*, which has all vectors, or an *increment*, which has those that are new or
changed since the one before it (`Propagator.on_saved`), or that deltas wait for, and the ids that
are new or not what they were. Both have the same columns. Vectors, chains and origins are numbered
within a snapshot and named in it: how a fold numbers them depends on how its log was cut, and what
one fold wrote another may take over. So an increment fits on whatever says how the fold was at the
sequence that it begins from. `restore` takes a base and its increments in order, and the last one
says what waits.

`digest` gives the number: equal for equal histories, however they were cut into feeds. Numbers of
vectors, chains and origins depend on the cuts, so rows are sorted by what they stand for and
origins go by their rank.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final

import lz4.block
import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.errors import Corruption, FailedPrecondition
from penstock.model.columns import Buffer
from penstock.propagation.fold.ledger import CHANGED, WAITS, WaitingDelta
from penstock.propagation.fold.merge import NO_LANE
from penstock.propagation.fold.propagator import Propagator
from penstock.propagation.fold.registers import EXISTENCE, FOLDED, OPERATED, SAID
from penstock.propagation.fold.sparse_stamps import COLUMNS
from penstock.propagation.fold.table import MEMORY, KeyTable, Numbers, Space
from penstock.propagation.options import PropagationOptions

VERSION: Final = 3
BLOCK: Final = 8 << 20
DIGEST_ROWS: Final = 4096  # of vectors whose components are looked at together
_PREFIX: Final = struct.Struct("<4sIQ")
_MAGIC: Final = b"PSP1"
_CHAIN: Final = ("seen", "time", "head")
_ASIDE: Final = ("death_time", "death_writer", "metadata_time", "metadata_writer")
_MERGE: Final = ("revision", "time", "sequence", "log_time_ms")

Column = NDArray[Any]


def dump(fold: Propagator, *, increment: bool = False) -> list[Buffer]:
    """Buffers that together are a snapshot, a base unless told otherwise; none of them changes
    with the fold."""
    if fold.paused:
        raise FailedPrecondition("a paused fold has no snapshot: resolve what is missing first")
    fold.merge.reserve()
    content = _Content.of(fold, increment=increment)
    blocks: list[Buffer] = []
    described = []
    for name, column in _columns(fold, content):
        sizes = []
        for packed in _blocks(column):
            blocks.append(packed)
            sizes.append(len(packed))
        described.append([name, column.dtype.str, list(column.shape), sizes])
    head = msgspec.msgpack.encode({**_head(fold, content), "columns": described})
    checksum = xxhash.xxh3_64(head, seed=len(head))
    for block in blocks:
        checksum.update(block)
    return [_PREFIX.pack(_MAGIC, len(head), checksum.intdigest()), head, *blocks]


def restore(
    *snapshots: Buffer, options: PropagationOptions | None = None, space: Space = MEMORY
) -> Propagator:
    """The fold that was dumped as a base and increments; raises `Corruption` for bytes that `dump`
    did not write, and for increments that do not follow."""
    loaded = map(_load, snapshots)
    head, columns = next(loaded, ({"base": False, "dimensions": 1, "since": 0}, {}))
    if not head["base"]:
        raise Corruption("a fold is restored from a base")
    fold = Propagator(head["dimensions"], options, space=space)
    taken = _Taking(fold, head, columns)
    for head, columns in loaded:
        if head["base"] or not head["since"] <= fold.sequence <= head["sequence"]:
            raise Corruption(
                f"a snapshot of what came after sequence {head['since']} does not follow one of"
                f" {fold.sequence}"
            )
        taken = _Taking(fold, head, columns)
    taken.take_waiting()
    fold.on_saved()
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


@dataclass(slots=True)
class _Content:
    """Which rows of a fold are in a snapshot, and the number that each has there (-1: none)."""

    increment: bool
    vectors: Numbers
    vector_places: Numbers
    chains: Numbers
    chain_places: Numbers
    ids: Numbers

    @staticmethod
    def of(fold: Propagator, *, increment: bool) -> _Content:
        ledger = fold.ledger
        wanted = (ledger.vectors.table.rows("flags") & (CHANGED | WAITS)) > 0
        wanted[ledger.vectors_saved if increment else 0 :] = True
        chains = wanted[ledger.chains.table.rows("low")]
        ids = ledger.remembered()
        if increment:
            ids[: ledger.ids_saved] = False
            ids[sorted(ledger.ids_changed)] = True
        return _Content(increment, *_numbered(wanted), *_numbered(chains), np.flatnonzero(ids))


def _numbered(wanted: NDArray[np.bool_]) -> tuple[Numbers, Numbers]:
    rows = np.flatnonzero(wanted)
    places = np.full(len(wanted), -1, np.int64)
    places[rows] = np.arange(len(rows))
    return rows, places


def _columns(fold: Propagator, content: _Content) -> Iterator[tuple[str, Column]]:
    for part in (_ledger_columns, _register_columns):
        yield from part(fold, content)
    for name in _MERGE:
        yield f"merge.{name}", fold.merge.table[name][content.vectors]


def _ledger_columns(fold: Propagator, content: _Content) -> Iterator[tuple[str, Column]]:
    ledger, vectors, chains = fold.ledger, content.vectors, content.chains
    for name in ("low", "high"):
        yield f"vectors.{name}", ledger.vectors.table[name][vectors]
        yield f"origins.{name}", ledger.origins.table.rows(name)
    names = ledger.names
    yield "names.namespace", names.table["namespace"][vectors]
    yield from _texts("namespaces", names.namespaces.take(np.arange(len(names.namespaces))))
    yield from _texts("vector_ids", names.ids_of(vectors))
    table = ledger.chains.table
    yield "chains.vector", content.vector_places[table["low"][chains]]
    yield "chains.origin", table["high"][chains]
    for name in _CHAIN:
        yield f"chains.{name}", table[name][chains]
    ids = ledger.ids.table
    for name in ("low", "high", "log_time_ms"):
        yield f"ids.{name}", ids[name][content.ids]
    states = ids["vector"][content.ids].astype(np.int64)
    released = states > 0
    states[released] = content.vector_places[states[released] - 1] + 1
    yield "ids.vector", states


def _register_columns(fold: Propagator, content: _Content) -> Iterator[tuple[str, Column]]:
    registers, vectors = fold.merge.registers, content.vectors
    table = registers.table
    for name in ("values", "time", "writer"):
        yield f"registers.{name}", table[name][vectors]
    flags = table["flags"][vectors]
    yield "registers.flags", flags & np.uint8(EXISTENCE | SAID)
    some = np.flatnonzero(table["stamps"][vectors] < 0)
    yield "sparse.vector", some
    rows = -1 - table["stamps"][vectors[some]].astype(np.int64)
    for name, column in registers.sparse.columns(rows).items():
        yield f"sparse.{name}", column
    some = np.flatnonzero(table["stamps"][vectors] > 0)
    yield "stamps.vector", some
    rows = table["stamps"][vectors[some]] - 1
    for name in ("times", "writers"):
        yield f"stamps.{name}", registers.stamps[name][rows]
    some = np.flatnonzero(table["aside"][vectors])
    yield "asides.vector", some
    rows = table["aside"][vectors[some]] - 1
    for name in _ASIDE:
        yield f"asides.{name}", registers.asides[name][rows]
    hidden = np.zeros(len(some), np.bool_)
    yield from _texts("metadata", registers.metadata_of(vectors[some], hidden=hidden))
    some = np.flatnonzero(flags & (OPERATED | FOLDED))
    packed = [fold.merge.operations.packed(vector) for vector in vectors[some].tolist()]
    yield "operations.vector", some
    yield "operations.size", np.fromiter(map(len, packed), np.int64, len(packed))
    yield "operations.bytes", np.frombuffer(b"".join(packed), np.uint8)


def _texts(name: str, texts: Any) -> Iterator[tuple[str, Column]]:
    yield f"{name}.size", np.diff(texts.offsets).astype(np.int64)
    yield f"{name}.bytes", np.frombuffer(texts.blob, np.uint8)


# --- the head ---


def _head(fold: Propagator, content: _Content) -> dict[str, Any]:
    return {
        "version": VERSION,
        "base": not content.increment,
        "since": fold.saved if content.increment else 0,
        "dimensions": fold.dimensions,
        "sequence": fold.sequence,
        "ordinal": fold.ordinal,
        "time_ms": fold.ledger.time_ms,
        "pending": [
            _waiting(waiting, content.vector_places, content.chain_places)
            for waiting in fold.waitlist.arrivals
            if not waiting.done
        ],
    }


def _waiting(w: WaitingDelta, vectors: Numbers, chains: Numbers) -> list[Any]:
    assert w.key is not None, "what waits has a key"
    lacks_parent = isinstance(w.key[1], bytes)
    key = [int((vectors if lacks_parent else chains)[w.key[0]]), w.key[1]]
    others = [[int(chains[chain]), counter] for chain, counter in w.others]
    return [
        w.sequence, w.log_time_ms, w.id, w.parent, int(vectors[w.vector]), int(chains[w.chain]),
        w.counter, others, w.payload, w.headers, key,
    ]  # fmt: skip


class _Taking:
    """Takes a snapshot into a fold, in place of what that knew of the same vectors."""

    def __init__(self, fold: Propagator, head: dict[str, Any], columns: dict[str, Column]) -> None:
        self._fold, self._head, self._columns = fold, head, columns
        fold.sequence, fold.ordinal = head["sequence"], head["ordinal"]
        fold.ledger.time_ms = head["time_ms"]
        self._take_keys()
        self._take_chains()
        self._take_registers()
        self._take_operations()
        self._take_ids()
        table = fold.merge.table
        for name in _MERGE:
            table[name][self._vectors] = self._columns[f"merge.{name}"]
        table["lane"][: table.count] = NO_LANE

    def _take_keys(self) -> None:
        ledger, columns = self._fold.ledger, self._columns
        before = len(ledger.vectors)
        self._vectors = _entered(ledger.vectors, columns["vectors.low"], columns["vectors.high"])
        new = np.flatnonzero(self._vectors >= before)
        new = new[np.argsort(self._vectors[new])]
        known = self._listed("namespaces")
        names = self._listed("vector_ids")
        codes = columns["names.namespace"][new].tolist()
        ledger.names.extend([known[code] for code in codes], [names[row] for row in new.tolist()])
        self._fold.merge.reserve()
        self._origins = _entered(ledger.origins, columns["origins.low"], columns["origins.high"])
        ledger.rank_origins()
        self._fold.merge.registers.widen()

    def _listed(self, name: str) -> list[bytes]:
        data = self._columns[f"{name}.bytes"].tobytes()
        ends = accumulate(self._columns[f"{name}.size"].tolist(), initial=0)
        return [data[a:b] for a, b in pairwise(ends)]

    def _take_chains(self) -> None:
        chains, columns = self._fold.ledger.chains, self._columns
        vectors = self._vectors[columns["chains.vector"]]
        origins = self._origins[columns["chains.origin"]]
        if not len(chains):
            chains.fill(vectors, origins)
            self._chains = np.arange(len(chains))
        else:
            self._chains = chains.of(vectors, origins)
        for name in _CHAIN:
            chains.table[name][self._chains] = columns[f"chains.{name}"]

    def _take_registers(self) -> None:
        registers, columns, vectors = self._fold.merge.registers, self._columns, self._vectors
        table = registers.table
        for name in ("values", "time", "flags"):
            table[name][vectors] = columns[f"registers.{name}"]
        table["writer"][vectors] = self._codes("registers.writer")
        stamps = columns["stamps.times"], self._codes("stamps.writers")
        registers.put_stamps(vectors, vectors[columns["stamps.vector"]], stamps)
        few = {name: columns[f"sparse.{name}"] for name in COLUMNS}
        few["writers"] = self._codes("sparse.writers")
        registers.put_sparse(vectors[columns["sparse.vector"]], few)
        asides = {name: columns[f"asides.{name}"] for name in _ASIDE}
        for name in ("death_writer", "metadata_writer"):
            asides[name] = self._codes(f"asides.{name}")
        some = vectors[columns["asides.vector"]]
        registers.put_asides(vectors, some, asides)
        if len(some):
            registers.put_metadata(table["aside"][some] - 1, self._listed("metadata"))

    def _codes(self, name: str) -> Column:
        """Writers as this fold numbers them. One that stands for nobody may be any."""
        writers = self._columns[name]
        return self._origins[writers] if len(self._origins) else writers

    def _take_operations(self) -> None:
        operations, flags = self._fold.merge.operations, self._fold.merge.registers.table["flags"]
        packed = self._listed("operations")
        some = self._vectors[self._columns["operations.vector"]].tolist()
        for vector in operations.lists.keys() | operations.folds.keys():
            if not flags[vector] & (OPERATED | FOLDED):
                operations.take_over(vector, b"")
        for vector, data in zip(some, packed, strict=True):
            operations.take_over(vector, data)

    def _take_ids(self) -> None:
        ids, columns = self._fold.ledger.ids, self._columns
        entries = _entered(ids, columns["ids.low"], columns["ids.high"])
        states = columns["ids.vector"]
        released = np.flatnonzero(states > 0)
        numbers = states.copy()
        numbers[released] = self._vectors[states[released] - 1] + 1
        ids.table["vector"][entries] = numbers
        ids.table["log_time_ms"][entries] = columns["ids.log_time_ms"]

    def take_waiting(self) -> None:
        waitlist = self._fold.waitlist
        waitlist.look()
        vectors, chains = self._vectors.tolist(), self._chains.tolist()
        for *place, vector, chain, counter, others, payload, headers, key in self._head["pending"]:
            causes = [(chains[cause], count) for cause, count in others]
            own: list[Any] = [-1, -1, *place, vectors[vector], chains[chain], counter, causes]
            waiting = WaitingDelta(*own)
            waiting.payload, waiting.headers = payload, headers
            number, lacking = key
            numbers = vectors if isinstance(lacking, bytes) else chains
            waitlist.wait(waiting, (numbers[number], lacking))


def _entered(keys: KeyTable, low: Column, high: Column) -> Numbers:
    """Rows of keys, each given once; where there were none they are in the order given."""
    if len(keys):
        return keys.add(low, high)
    keys.table.extend(len(low))
    keys.table.rows("low")[:], keys.table.rows("high")[:] = low, high
    numbers = np.arange(len(low))
    keys.keep(numbers)  # which gives each key its place
    return numbers


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
    ledger, merge, registers = fold.ledger, fold.merge, fold.merge.registers
    vectors = _sorted_vectors(fold)
    vectors = vectors[merge.table["revision"][vectors] > 0]
    for name in ("low", "high"):
        found.update(ledger.vectors.table[name][vectors])
    found.update(merge.table["revision"][vectors].astype(np.int64))
    for name in ("time", "sequence", "log_time_ms"):
        found.update(merge.table[name][vectors])
    told = [registers.existence_stamps(vectors), registers.metadata_stamps(vectors)]
    _by_parts(found, vectors, lambda some: registers.table["values"][some])
    _by_parts(found, vectors, lambda some: registers.component_stamps(some)[0])
    found.update(registers.table["flags"][vectors] & np.uint8(EXISTENCE))
    for times, _ in told:
        found.update(times)
    _by_parts(found, vectors, lambda some: _ranked(fold, *registers.component_stamps(some)))
    for times, writers in told:
        found.update(_ranked(fold, times, writers))
    _add_words(found, fold, vectors)


def _by_parts(found: Any, vectors: Numbers, column: Callable[[Numbers], Column]) -> None:
    """Components of all vectors at once would be as large as the state."""
    for at in range(0, len(vectors), DIGEST_ROWS):
        found.update(np.ascontiguousarray(column(vectors[at : at + DIGEST_ROWS])))


def _ranked(fold: Propagator, times: Numbers, writers: Column) -> Numbers:
    ranks: Numbers = np.where(times > 0, fold.ledger.ranks[writers], 0)
    return ranks


def _add_words(found: Any, fold: Propagator, vectors: Numbers) -> None:
    """Metadata and operations, of those that have some."""
    registers, operations = fold.merge.registers, fold.merge.operations
    metadata = registers.metadata_of(vectors, hidden=np.zeros(len(vectors), np.bool_))
    flags = registers.table["flags"][vectors] & np.uint8(OPERATED | FOLDED)
    for row in np.flatnonzero((np.diff(metadata.offsets) > 0) | (flags > 0)).tolist():
        vector = int(vectors[row])
        found.update(metadata[row])
        found.update(repr(operations.last_fold(vector)).encode())
        for operation in operations.of(vector):
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
    vector = place[table["low"][chains]]
    rank = fold.ledger.ranks[table["high"][chains]]
    order = np.lexsort((rank, vector))
    for column in (vector, rank, *(table[name][chains] for name in _CHAIN)):
        found.update(np.ascontiguousarray(column[order]))


def _add_ids(found: Any, fold: Propagator) -> None:
    ledger, table = fold.ledger, fold.ledger.ids.table
    recent = table.rows("log_time_ms") >= ledger.time_ms - ledger.dedup_ms
    ids = np.flatnonzero((table.rows("vector") > 0) & recent)
    order = ids[np.lexsort((table["low"][ids], table["high"][ids]))]
    for name in ("low", "high", "log_time_ms"):
        found.update(table[name][order])
