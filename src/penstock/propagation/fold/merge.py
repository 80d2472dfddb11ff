"""Merge released deltas into the states of their vectors.

A vector's state is the fold of its deltas in the order of their stamps. It is made of registers,
which are maxima, and of the operations beside them, which are kept apart in order: so it is a
function of the *set* of deltas that were merged, not of their arrival or of how they were cut into
batches.

There is one exception, and it is a bound: a delta that is stamped before a vector's last fold of
operations is *late*. It counts as seen, but is refused, and a new delta has to say it again.

**Registers: the last writer wins.** Components, existence and metadata are columns of registers.
Every delta has a *stamp*: its time and its origin, compared by time and then by the origin's bytes.
Times are made strictly ascending within a chain first (`ascending`), so no two deltas of a vector
have the same stamp. A register keeps the value with the greatest stamp that it was given: a
maximum, and so it does not matter in which order, how often or in which batches values come.

    component   set by CREATE and DENSE (all of them) and SPARSE (the named ones)
    existence   alive by CREATE and DENSE, dead by DELETE; alive on zeros if nobody said
    metadata    set by METADATA, and by CREATE and DENSE that carry some; cleared by DELETE, and by
                CREATE that carries none

A stamp of time 0 is that of nobody.

**Operations: SCALE and OFFSET, applied in the order of their stamps.** An operation changes what a
component was when it was stamped: those set after it (with a greater stamp) are untouched. As
arrivals come in any order, the result cannot be computed once and changed later: float32 sums and
products depend on their order. So a vector keeps its operations sorted by stamp, and its value is
computed from its components when asked for:

    for each operation, oldest first: each component it names, if set before it: x·f or x+d

An operation all of whose components were set later has no effect and is dropped. That makes the
list a function of what was merged, whatever the order. Results that leave float32's range are held
at its ends, so a value is always finite.

The list is bounded: past `operations_max` its older half is *folded* into the components, for good.
What is stamped before the fold's last operation comes too late after that: it is refused.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.model.columns import Binary
from penstock.model.delta import HAS_INDICES, Op, PriorityClass
from penstock.model.delta_batch import DeltaBatch
from penstock.propagation.fold.ledger import Ledger
from penstock.propagation.fold.order import ReleasedDeltas
from penstock.propagation.fold.table import Numbers, Table, beginnings, stable_order
from penstock.propagation.options import PropagationOptions

ALIVE: Final = 1  # 0: nobody has said anything of it
DEAD: Final = 2
CODES_SMALL: Final = 1 << 16  # origins that two bytes tell apart

Mask = NDArray[np.bool_]


@dataclass(slots=True)
class StampedDeltas:
    """Deltas with the numbers of their vectors, and their stamps: times and codes of writers."""

    batch: DeltaBatch
    vectors: Numbers
    times: Numbers
    writers: Numbers

    def take(self, rows: NDArray[Any]) -> StampedDeltas:
        return StampedDeltas(
            self.batch.take(rows), self.vectors[rows], self.times[rows], self.writers[rows]
        )


class Registers:
    """One row per vector. `values`, `times` and `writers` have a column per component."""

    def __init__(self, ledger: Ledger, dimensions: int) -> None:
        self.ledger, self.dimensions = ledger, dimensions
        self.table = Table(
            {
                "values": (np.float32, dimensions),
                "times": (np.int64, dimensions),
                "writers": (np.uint16, dimensions),
                "existence": np.uint8,
                "existence_time": np.int64,
                "existence_writer": np.uint32,
                "metadata_time": np.int64,
                "metadata_writer": np.uint32,
            }
        )
        self.metadata: dict[int, bytes] = {}  # by vector; none: no metadata

    def widen(self) -> None:
        if len(self.ledger.ranks) > CODES_SMALL and self.table["writers"].dtype == np.uint16:
            self.table["writers"] = self.table["writers"].astype(np.uint32)

    def set(self, rows: StampedDeltas, *, newest: bool = False) -> None:
        """Offer deltas, ascending by stamp, to the registers. `newest`: each has a greater time
        than anything that its vector was given before, so that no component has to be compared."""
        self.widen()
        op = rows.batch.op
        whole = op <= Op.DENSE
        for mask, offer in ((whole, self._set_rows), (op == Op.SPARSE, self._set_components)):
            if mask.any():
                offer(rows if mask.all() else rows.take(mask), newest=newest)
                newest = False  # than what has just been set
        living = self._say("existence", rows, whole | (op == Op.DELETE))
        state = np.where(living.batch.op == Op.DELETE, DEAD, ALIVE)
        self.table["existence"][living.vectors] = state
        saying = (op == Op.CREATE) | (op == Op.DELETE) | (rows.batch.fixed["metadata_bytes"] > 0)
        told = self._say("metadata", rows, saying)
        texts = told.batch.metadata_of(np.arange(len(told.vectors)))
        for vector, data in zip(told.vectors.tolist(), texts, strict=True):
            if data:
                self.metadata[vector] = data
            else:
                self.metadata.pop(vector, None)

    def _set_rows(self, rows: StampedDeltas, *, newest: bool) -> None:
        table, vectors, ranks = self.table, rows.vectors, self.ledger.ranks
        values = rows.batch.components()[2].reshape(-1, self.dimensions)
        time, writer = rows.times[:, None], rows.writers[:, None]
        if not newest:
            before = table["times"][vectors]
            newer = time > before
            if not newer.all():
                old = table["writers"][vectors]
                newer |= (time == before) & (ranks[writer] > ranks[old])
                values = np.where(newer, values, table["values"][vectors])
                time, writer = np.where(newer, time, before), np.where(newer, writer, old)
        # Of two rows of a vector the last stays; where it is not the newer one, the old value is.
        table["times"][vectors] = time
        table["writers"][vectors] = writer
        table["values"][vectors] = values

    def _set_components(self, rows: StampedDeltas, *, newest: bool) -> None:
        _, indices, values = rows.batch.components()
        n = rows.batch.n.astype(np.int64)
        place = np.repeat(rows.vectors * self.dimensions, n)
        place += indices
        time, writer = np.repeat(rows.times, n), np.repeat(rows.writers, n)
        old_times = self.table["times"].reshape(-1)
        old_writers = self.table["writers"].reshape(-1)
        if not newest:
            newer = self._newer(time, writer, old_times, old_writers, place)
            if not newer.all():
                place, time, writer = place[newer], time[newer], writer[newer]
                values = values[newer]
        # Where a component is named twice the last assignment stays: that of the greater stamp.
        old_times[place] = time
        old_writers[place] = writer
        self.table["values"].reshape(-1)[place] = values

    def _say(self, name: str, rows: StampedDeltas, saying: Mask) -> StampedDeltas:
        """Stamp a register by those of the rows that say something newer of it: these rows."""
        rows = rows.take(saying)
        times, writers = self.table[f"{name}_time"], self.table[f"{name}_writer"]
        newer = self._newer(rows.times, rows.writers, times, writers, rows.vectors)
        if not newer.all():
            rows = rows.take(newer)
        times[rows.vectors], writers[rows.vectors] = rows.times, rows.writers
        return rows

    def _newer(
        self, time: Numbers, writer: Numbers, times: Numbers, writers: Numbers, place: Numbers
    ) -> Mask:
        """Which stamps are greater than those that registers have at these places."""
        before, ranks = times[place], self.ledger.ranks
        newer: Mask = time > before
        if not newer.all():
            tied = np.flatnonzero(time == before)
            newer[tied] = ranks[writer[tied]] > ranks[writers[place[tied]]]
        return newer


def ascending(times: Numbers, chains: Numbers, last: Numbers) -> Numbers:
    """Times made strictly ascending within each chain, and after what `last` has of it.

    Rows are in the order of release, so those of a chain are in the order of its counters. A time
    that does not exceed the one before it (a clock stepped back, or two deltas in one tick) becomes
    that one plus one: what an origin did later stays later. `last` is brought up to date.
    """
    if (times[1:] > times[:-1]).all() and (times > last[chains]).all():
        last[chains] = times
        return times
    order = stable_order(chains)
    chain, time = chains[order], times[order]
    begins = beginnings(chain)
    before = np.empty_like(time)
    before[1:] = time[:-1]
    before[begins] = last[chain[begins]]
    if (time <= before).any():
        time = _lifted(time, before, begins)
    ends = np.ones(len(order), np.bool_)
    ends[:-1] = begins[1:]
    last[chain[ends]] = time[ends]
    found = np.empty_like(times)
    found[order] = time
    return found


def _lifted(time: Numbers, before: Numbers, begins: Mask) -> Numbers:
    """One by one: rare, and each depends on the one before it."""
    lifted, least = time.tolist(), 0
    starts, firsts = begins.tolist(), before.tolist()
    for i, own in enumerate(lifted):
        least = firsts[i] + 1 if starts[i] else least + 1
        least = lifted[i] = max(own, least)
    return np.array(lifted, np.int64)


LIMIT: Final = np.finfo(np.float32).max


class VectorOperation(NamedTuple):
    """`indices` of None: every component. `values`: one factor of a SCALE, else what is added."""

    time: int
    origin: bytes  # sorts as stamps do
    writer: int
    scale: bool
    indices: NDArray[np.uint16] | None
    values: NDArray[np.float32]

    @property
    def stamp(self) -> tuple[int, bytes]:
        return self.time, self.origin


class _View:
    """A vector's components with the stamps that they were set with."""

    def __init__(self, registers: Registers, vector: int) -> None:
        table, self._ranks = registers.table, registers.ledger.ranks
        self.values: NDArray[np.float32] = table["values"][vector].copy()
        # A component that nobody set comes before every stamp: its time is 0.
        self.times, self.writers = table["times"][vector], table["writers"][vector]
        self.ranks = self._ranks[self.writers]

    def before(self, operation: VectorOperation) -> Mask:
        """Which components were set before the operation, of those that it names."""
        times, ranks, rank = self.times, self.ranks, self._ranks[operation.writer]
        if operation.indices is not None:
            times, ranks = times[operation.indices], ranks[operation.indices]
        mask: Mask = (times < operation.time) | ((times == operation.time) & (ranks < rank))
        return mask

    def apply(self, operation: VectorOperation) -> NDArray[Any]:
        """Change the components that were set before the operation; these."""
        mask = self.before(operation)
        named = np.flatnonzero(mask) if operation.indices is None else operation.indices[mask]
        old = self.values[named]
        with np.errstate(over="ignore"):
            if operation.scale:
                new = old * operation.values[0]
            else:
                new = old + operation.values[mask]
        self.values[named] = np.clip(new, -LIMIT, LIMIT)
        return named

    def fold(self, operation: VectorOperation) -> None:
        """The same for good: the components are the operation's from now on."""
        named = self.apply(operation)
        self.times[named], self.writers[named] = operation.time, operation.writer
        self.ranks[named] = self._ranks[operation.writer]


class Operations:
    def __init__(self, registers: Registers, *, operations_max: int) -> None:
        self.registers, self.operations_max = registers, operations_max
        self.lists: dict[int, list[VectorOperation]] = {}
        self.folds: dict[int, tuple[int, bytes]] = {}  # by vector: the last stamp folded

    def count(self, vector: int) -> int:
        return len(self.lists.get(vector, ()))

    def add(
        self, vector: int, time: int, writer: int, *, scale: bool,
        indices: NDArray[np.uint16] | None, values: NDArray[np.float32],
    ) -> None:  # fmt: skip
        origin = self.registers.ledger.origin_name(writer)
        operation = VectorOperation(time, origin, writer, scale, indices, values)
        insort(self.lists.setdefault(vector, []), operation, key=attrgetter("stamp"))

    def is_late(self, vector: int, time: int, origin: bytes) -> bool:
        """Whether a stamp comes before the last fold of its vector's operations."""
        last = self.folds.get(vector)
        return last is not None and (time, origin) <= last

    def prune(self, vector: int) -> None:
        """Drop what was overwritten."""
        operations = self.lists.get(vector)
        if not operations:
            return
        times = self.registers.table["times"][vector]
        view: _View | None = None
        oldest, kept = int(times.min()), []
        for operation in operations:
            named = operation.indices
            if (oldest if named is None else times[named].min()) >= operation.time:
                view = view or _View(self.registers, vector)
                if not view.before(operation).any():
                    continue
            kept.append(operation)
        if kept:
            self.lists[vector] = kept
        else:
            del self.lists[vector]

    def fold(self, vector: int) -> None:
        """Past the bound, apply the older half to the components for good."""
        operations = self.lists.get(vector, [])
        if len(operations) <= self.operations_max:
            return
        folded = operations[: len(operations) // 2]
        self.lists[vector] = operations[len(folded) :]
        view = _View(self.registers, vector)
        for operation in folded:
            view.fold(operation)
        self.registers.table["values"][vector] = view.values
        self.folds[vector] = folded[-1].stamp

    def value(self, vector: int) -> NDArray[np.float32]:
        view = _View(self.registers, vector)
        for operation in self.lists.get(vector, ()):
            view.apply(operation)
        return view.values

    def validate(self) -> None:
        for vector, operations in self.lists.items():
            assert 0 < len(operations) <= self.operations_max
            stamps = [operation.stamp for operation in operations]
            assert all(a < b for a, b in pairwise(stamps)), "equal stamps"
            view = _View(self.registers, vector)
            assert all(view.before(operation).any() for operation in operations)
            assert vector not in self.folds or self.folds[vector] < stamps[0]


@dataclass(frozen=True, slots=True)
class VectorStates:
    """One row per vector, ascending by `sequence`; a deleted vector has zeros and no metadata."""

    namespace: Binary
    vector_id: Binary
    values: NDArray[np.float32]  # (rows, dimensions)
    metadata: Binary  # msgpack, empty where there is none
    deleted: NDArray[np.bool_]
    revision: NDArray[np.uint64]  # deltas merged into the vector so far
    time: NDArray[np.int64]  # the newest hybrid time merged
    sequence: NDArray[np.uint64]  # the newest log sequence merged
    log_time_ms: NDArray[np.int64]  # of that
    lane: NDArray[np.uint8]  # the most urgent class among the deltas merged in this feed

    def __len__(self) -> int:
        return len(self.revision)


NO_LANE: Final = 255


class Merge:
    def __init__(self, ledger: Ledger, dimensions: int, options: PropagationOptions) -> None:
        self.ledger = ledger
        self.registers = Registers(ledger, dimensions)
        self.operations = Operations(self.registers, operations_max=options.operations_max)
        self.table = Table(
            {
                "revision": np.int64,
                "time": np.int64,
                "sequence": np.uint64,
                "log_time_ms": np.int64,
                "lane": np.uint8,
                "row": np.int64,  # scratch
            }
        )
        self.noting = True  # whether somebody will ask for the vectors that are touched
        self.touched: list[Numbers] = []  # vectors changed in this feed

    def merge(self, released: ReleasedDeltas) -> Mask:
        """Merge deltas in the order of release; says which were merged, and not late."""
        self.reserve()
        chains = self.ledger.chains.table
        times = ascending(released.batch.time, released.chains, chains["time"])
        writers = chains["high"][released.chains].view(np.int64)
        rows = StampedDeltas(released.batch, released.vectors, times, writers)
        merged = np.ones(len(times), np.bool_)
        careful = self._careful(rows)
        if careful.any():
            for row in np.flatnonzero(careful).tolist():
                merged[row] = self._merge_one(rows.take(np.array([row])))
            self._apply(rows.take(~careful))
        else:
            self._apply(rows, newest=bool((times > self.table["time"][rows.vectors]).all()))
        self._count(rows if merged.all() else rows.take(merged))
        return merged

    def reserve(self) -> None:
        more = len(self.ledger.vectors) - self.table.count
        if more > 0:
            self.registers.table.extend(more)
            first = self.table.extend(more)
            self.table["lane"][first : self.table.count] = NO_LANE

    def _careful(self, rows: StampedDeltas) -> Mask:
        """Rows of vectors that have been folded, or may be by this batch: they go one by one."""
        operations, op = self.operations, rows.batch.op
        affine = (op == Op.SCALE) | (op == Op.OFFSET)
        special = set(operations.folds)
        if affine.any():
            changed, counts = np.unique(rows.vectors[affine], return_counts=True)
            most = operations.operations_max
            special |= {
                vector
                for vector, more in zip(changed.tolist(), counts.tolist(), strict=True)
                if operations.count(vector) + more > most
            }
        if not special:
            return np.zeros(len(op), np.bool_)
        return np.isin(rows.vectors, np.array(sorted(special), np.int64))

    def _merge_one(self, one: StampedDeltas) -> bool:
        vector, origin = int(one.vectors[0]), self.ledger.origin_name(int(one.writers[0]))
        if self.operations.is_late(vector, int(one.times[0]), origin):
            return False
        self._apply(one)
        self.operations.fold(vector)
        return True

    def _apply(self, rows: StampedDeltas, *, newest: bool = False) -> None:
        op, times = rows.batch.op, rows.times
        for row in np.flatnonzero((op == Op.SCALE) | (op == Op.OFFSET)).tolist():
            self._operate(rows, row)
        if not (times[1:] > times[:-1]).all():
            rows = rows.take(np.lexsort((self.ledger.ranks[rows.writers], times)))
        self.registers.set(rows, newest=newest)
        if self.operations.lists:
            for vector in self.operations.lists.keys() & set(rows.vectors.tolist()):
                self.operations.prune(vector)

    def _operate(self, rows: StampedDeltas, row: int) -> None:
        offsets, indices, values = rows.batch.components()
        some = slice(offsets[row], offsets[row + 1])
        self.operations.add(
            int(rows.vectors[row]),
            int(rows.times[row]),
            int(rows.writers[row]),
            scale=bool(rows.batch.op[row] == Op.SCALE),
            indices=indices[some].copy() if rows.batch.fixed["flags"][row] & HAS_INDICES else None,
            values=values[some].copy(),
        )

    def _count(self, rows: StampedDeltas) -> None:
        batch, vectors, table = rows.batch, rows.vectors, self.table
        np.add.at(table["revision"], vectors, 1)
        np.maximum.at(table["time"], vectors, rows.times)
        np.maximum.at(table["sequence"], vectors, batch.sequences)
        np.maximum.at(table["log_time_ms"], vectors, batch.log_times_ms)
        if self.noting:
            np.minimum.at(table["lane"], vectors, batch.priority)
            numbers = np.arange(len(vectors))
            table["row"][vectors] = numbers
            self.touched.append(vectors[table["row"][vectors] == numbers])

    # --- results ---

    def take_touched(self) -> VectorStates:
        touched, self.touched = self.touched, []
        if len(touched) > 1:
            vectors = np.unique(np.concatenate(touched))
        else:
            vectors = touched[0] if touched else np.empty(0, np.int64)
        found = self.states(vectors)
        self.table["lane"][vectors] = NO_LANE
        return found

    def states(self, vectors: Numbers | None = None) -> VectorStates:
        """States by vector number, all of them by default."""
        self.reserve()
        table = self.table
        if vectors is None:
            vectors = np.flatnonzero(table.rows("revision"))
        vectors = vectors[np.argsort(table["sequence"][vectors])]
        deleted = self.registers.table["existence"][vectors] == DEAD
        lane = table["lane"][vectors]
        return VectorStates(
            namespace=self.ledger.namespaces.take(vectors),
            vector_id=self.ledger.vector_ids.take(vectors),
            values=self._values(vectors, deleted),
            metadata=self._metadata(vectors, deleted),
            deleted=deleted,
            revision=table["revision"][vectors].view(np.uint64),
            time=table["time"][vectors],
            sequence=table["sequence"][vectors],
            log_time_ms=table["log_time_ms"][vectors],
            lane=np.where(lane == NO_LANE, np.uint8(PriorityClass.NORMAL), lane),
        )

    def _metadata(self, vectors: Numbers, deleted: Mask) -> Binary:
        known = self.registers.metadata
        if not known:
            return Binary(np.zeros(len(vectors) + 1, np.int32), b"")
        pairs = zip(vectors.tolist(), deleted.tolist(), strict=True)
        return Binary.of([b"" if gone else known.get(vector, b"") for vector, gone in pairs])

    def _values(self, vectors: Numbers, deleted: Mask) -> NDArray[np.float32]:
        values: NDArray[np.float32] = self.registers.table["values"][vectors]
        values[deleted] = 0
        if self.operations.lists:
            for i, vector in enumerate(vectors.tolist()):
                if vector in self.operations.lists and not deleted[i]:
                    values[i] = self.operations.value(vector)
        return values

    def validate(self) -> None:
        assert self.table.count == self.registers.table.count
        self.operations.validate()
