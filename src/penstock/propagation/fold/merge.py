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

Where the tables lie elsewhere than in this process (see `table.Space`), lists of operations are
written aside when a step is over, and read when a vector is next looked at.

The list is bounded: past `operations_max` its older half is *folded* into the components, for good.
What is stamped before the fold's last operation comes too late after that: it is refused.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.model.columns import Binary
from penstock.model.delta import HAS_INDICES, Op, PriorityClass
from penstock.propagation.fold.ledger import CHANGED, Ledger
from penstock.propagation.fold.order import ReleasedDeltas
from penstock.propagation.fold.registers import (
    ALIVE,
    DEAD,
    FOLDED,
    OPERATED,
    Mask,
    Registers,
    StampedDeltas,
)
from penstock.propagation.fold.table import (
    MEMORY,
    Numbers,
    Space,
    Table,
    beginnings,
    distinct,
    stable_order,
)
from penstock.propagation.options import PropagationOptions


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


AT_HAND_MAX: Final = 10_000  # lists of operations that are kept when they are written aside too
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
        self._ranks = registers.ledger.ranks
        self.values: NDArray[np.float32] = registers.table["values"][vector].copy()
        self.times, self.writers = registers.stamps_of(vector)
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
    def __init__(self, registers: Registers, *, operations_max: int, aside: bool) -> None:
        """`aside`: lists are written aside by `settle`, for whoever goes on from there."""
        self.registers, self.operations_max = registers, operations_max
        self.lists: dict[int, list[VectorOperation]] = {}
        self.folds: dict[int, tuple[int, bytes]] = {}  # by vector: the last stamp folded
        self._unsettled: set[int] | None = set() if aside else None

    def of(self, vector: int) -> list[VectorOperation]:
        if not self.registers.table["flags"][vector] & OPERATED:
            return []
        if vector not in self.lists:
            self._load(vector)
        return self.lists[vector]

    def count(self, vector: int) -> int:
        return len(self.of(vector))

    def add(
        self, vector: int, time: int, writer: int, *, scale: bool,
        indices: NDArray[np.uint16] | None, values: NDArray[np.float32],
    ) -> None:  # fmt: skip
        origin = self.registers.ledger.origin_name(writer)
        operation = VectorOperation(time, origin, writer, scale, indices, values)
        operations = self.of(vector)
        insort(operations, operation, key=attrgetter("stamp"))
        self.put(vector, operations)

    def put(self, vector: int, operations: list[VectorOperation]) -> None:
        flags = self.registers.table["flags"]
        if operations:
            self.lists[vector] = operations
            flags[vector] |= OPERATED
        else:
            self.lists.pop(vector, None)
            flags[vector] &= ~np.uint8(OPERATED)
        if self._unsettled is not None:
            self._unsettled.add(vector)

    def put_fold(self, vector: int, stamp: tuple[int, bytes]) -> None:
        self.folds[vector] = stamp
        self.registers.table["flags"][vector] |= FOLDED
        if self._unsettled is not None:
            self._unsettled.add(vector)

    def last_fold(self, vector: int) -> tuple[int, bytes] | None:
        if not self.registers.table["flags"][vector] & FOLDED:
            return None
        if vector not in self.folds:
            self._load(vector)
        return self.folds[vector]

    def is_late(self, vector: int, time: int, origin: bytes) -> bool:
        """Whether a stamp comes before the last fold of its vector's operations."""
        last = self.last_fold(vector)
        return last is not None and (time, origin) <= last

    def prune(self, vector: int) -> None:
        """Drop what was overwritten."""
        operations = self.of(vector)
        if not operations:
            return
        times, _ = self.registers.stamps_of(vector)
        view: _View | None = None
        oldest, kept = int(times.min()), []
        for operation in operations:
            named = operation.indices
            if (oldest if named is None else times[named].min()) >= operation.time:
                view = view or _View(self.registers, vector)
                if not view.before(operation).any():
                    continue
            kept.append(operation)
        if len(kept) < len(operations):
            self.put(vector, kept)

    def fold(self, vector: int) -> None:
        """Past the bound, apply the older half to the components for good."""
        operations = self.of(vector)
        if len(operations) <= self.operations_max:
            return
        folded = operations[: len(operations) // 2]
        if self.registers.table["stamps"][vector] <= 0:
            self.registers.expand(np.array([vector]))
        view = _View(self.registers, vector)
        for operation in folded:
            view.fold(operation)
        self.registers.table["values"][vector] = view.values
        self.put(vector, operations[len(folded) :])
        self.put_fold(vector, folded[-1].stamp)

    # --- for whoever goes on ---

    def settle(self) -> None:
        """Write aside what changed."""
        assert self._unsettled is not None, "these operations stay where they are"
        registers, flags = self.registers, self.registers.table["flags"]
        for vector in self._unsettled:
            told = flags[vector] & (OPERATED | FOLDED)
            data = self.packed(vector) if told else b""
            row = registers.aside_of(vector)
            registers.asides["operations_at"][row] = registers.words.append(data)
            registers.asides["operations_bytes"][row] = len(data)
        self._unsettled.clear()
        if len(self.lists) + len(self.folds) > AT_HAND_MAX:
            self.lists.clear()
            self.folds.clear()
        registers.pack_when_due()

    def packed(self, vector: int) -> bytes:
        """The last fold and the operations of a vector, for `take_over`."""
        return msgspec.msgpack.encode(
            [
                self.last_fold(vector),
                [
                    [o.time, o.origin, o.scale, _raw(o.indices), _raw(o.values)]
                    for o in self.of(vector)
                ],
            ]
        )

    def take_over(self, vector: int, data: bytes) -> None:
        """Have what was packed elsewhere instead of what there is; no data: nothing."""
        self.lists.pop(vector, None)
        self.folds.pop(vector, None)
        self.registers.table["flags"][vector] &= ~np.uint8(OPERATED | FOLDED)
        if data:
            self._unpack(vector, data)
        if self._unsettled is not None:
            self._unsettled.add(vector)

    def _unpack(self, vector: int, data: bytes) -> None:
        fold, listed = msgspec.msgpack.decode(data)
        flags, codes = self.registers.table["flags"], self.registers.ledger.codes
        if fold is not None:
            self.folds[vector] = (fold[0], fold[1])
            flags[vector] |= FOLDED
        if listed:
            self.lists[vector] = [
                VectorOperation(
                    time, origin, codes[origin], scale,
                    None if indices is None else np.frombuffer(indices, np.uint16),
                    np.frombuffer(values, np.float32),
                )
                for time, origin, scale, indices, values in listed
            ]  # fmt: skip
            flags[vector] |= OPERATED

    def _load(self, vector: int) -> None:
        asides, row = self.registers.asides, int(self.registers.table["aside"][vector]) - 1
        at, size = asides["operations_at"][row], asides["operations_bytes"][row]
        self._unpack(vector, self.registers.words.get(int(at), int(size)))

    # --- results ---

    def value(self, vector: int) -> NDArray[np.float32]:
        view = _View(self.registers, vector)
        for operation in self.of(vector):
            view.apply(operation)
        return view.values

    def validate(self) -> None:
        flags = self.registers.table.rows("flags")
        for vector in np.flatnonzero(flags & OPERATED).tolist():
            operations = self.of(vector)
            assert 0 < len(operations) <= self.operations_max
            stamps = [operation.stamp for operation in operations]
            assert all(a < b for a, b in pairwise(stamps)), "equal stamps"
            view = _View(self.registers, vector)
            assert all(view.before(operation).any() for operation in operations)
            last = self.last_fold(vector)
            assert last is None or last < stamps[0]


def _raw(column: NDArray[Any] | None) -> bytes | None:
    return None if column is None else column.tobytes()


@dataclass(frozen=True, slots=True)
class VectorStates:
    """One row per vector, ascending by `sequence`; a deleted vector has zeros and no metadata."""

    number: Numbers  # of the vector in its fold, for as long as that lasts
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
    def __init__(
        self,
        ledger: Ledger,
        dimensions: int,
        options: PropagationOptions,
        space: Space = MEMORY,
    ) -> None:
        self.ledger = ledger
        self.registers = Registers(ledger, dimensions, space)
        self.operations = Operations(
            self.registers, operations_max=options.operations_max, aside=space is not MEMORY
        )
        self.table = Table(
            {
                "revision": np.uint32,
                "time": np.int64,
                "sequence": np.uint64,
                "log_time_ms": np.int64,
                "lane": np.uint8,
            },
            space=space,
            name="merge",
        )
        self.noting = True  # whether somebody will ask for the vectors that are touched
        self.touched: list[Numbers] = []  # vectors changed in this feed

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.registers.nbytes

    def merge(self, released: ReleasedDeltas) -> Mask:
        """Merge deltas in the order of release; says which were merged, and not late."""
        self.reserve()
        chains = self.ledger.chains.table
        times = ascending(released.batch.time, released.chains, chains["time"])
        writers = chains["high"][released.chains].astype(np.int64)
        rows = StampedDeltas(released.batch, released.vectors, times, writers)
        merged = np.ones(len(times), np.bool_)
        self.ledger.vectors.table["flags"][rows.vectors] |= CHANGED
        careful = self._careful(rows)
        if careful.any():
            for row in np.flatnonzero(careful).tolist():
                merged[row] = self._merge_one(rows.take(np.array([row])))
            rows_plain = rows.take(~careful)
            self._apply(rows_plain, rows_plain.times > self.table["time"][rows_plain.vectors])
        else:
            self._apply(rows, times > self.table["time"][rows.vectors])
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
        careful: Mask = (self.registers.table["flags"][rows.vectors] & FOLDED) > 0
        affine = (op == Op.SCALE) | (op == Op.OFFSET)
        if affine.any():
            changed, counts = np.unique(rows.vectors[affine], return_counts=True)
            most = operations.operations_max
            special = [
                vector
                for vector, more in zip(changed.tolist(), counts.tolist(), strict=True)
                if operations.count(vector) + more > most
            ]
            if special:
                careful |= np.isin(rows.vectors, np.array(special, np.int64))
        return careful

    def _merge_one(self, one: StampedDeltas) -> bool:
        vector, origin = int(one.vectors[0]), self.ledger.origin_name(int(one.writers[0]))
        if self.operations.is_late(vector, int(one.times[0]), origin):
            return False
        self._apply(one, np.zeros(1, np.bool_))
        self.operations.fold(vector)
        return True

    def _apply(self, rows: StampedDeltas, fresh: Mask) -> None:
        op, times = rows.batch.op, rows.times
        for row in np.flatnonzero((op == Op.SCALE) | (op == Op.OFFSET)).tolist():
            self._operate(rows, row)
        if not (times[1:] > times[:-1]).all():
            order = np.lexsort((self.ledger.ranks[rows.writers], times))
            rows, fresh = rows.take(order), fresh[order]
        self.registers.set(rows, fresh)
        operated = (self.registers.table["flags"][rows.vectors] & OPERATED) > 0
        if operated.any():
            vectors = distinct(rows.vectors[operated])
            self.registers.expand(vectors[self.registers.table["stamps"][vectors] < 0])
            for vector in vectors.tolist():
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
            self.touched.append(distinct(vectors))

    # --- results ---

    def take_touched(self) -> VectorStates:
        touched, self.touched = self.touched, []
        if len(touched) > 1:
            vectors = distinct(np.concatenate(touched))
        else:
            vectors = touched[0] if touched else np.empty(0, np.int64)
        found = self.states(vectors)
        self.table["lane"][vectors] = NO_LANE
        return found

    def living(self) -> Mask:
        """Which vectors are there, by number: those that something was said of, and not deleted."""
        self.reserve()
        said: Mask = self.table.rows("revision") > 0
        said &= (self.registers.table.rows("flags") & DEAD) == 0
        return said

    def states(self, vectors: Numbers | None = None) -> VectorStates:
        """States by vector number, all of them by default."""
        self.reserve()
        table = self.table
        if vectors is None:
            vectors = np.flatnonzero(table.rows("revision"))
        vectors = vectors[np.argsort(table["sequence"][vectors])]
        flags = self.registers.table["flags"][vectors]
        deleted = (flags & DEAD) > 0
        lane = table["lane"][vectors]
        return VectorStates(
            number=vectors,
            namespace=self.ledger.names.namespaces_of(vectors),
            vector_id=self.ledger.names.ids_of(vectors),
            values=self._values(vectors, flags),
            metadata=self.registers.metadata_of(vectors, hidden=deleted),
            deleted=deleted,
            revision=table["revision"][vectors].astype(np.uint64),
            time=table["time"][vectors],
            sequence=table["sequence"][vectors],
            log_time_ms=table["log_time_ms"][vectors],
            lane=np.where(lane == NO_LANE, np.uint8(PriorityClass.NORMAL), lane),
        )

    def _values(self, vectors: Numbers, flags: NDArray[np.uint8]) -> NDArray[np.float32]:
        values: NDArray[np.float32] = self.registers.table["values"][vectors]
        if (flags > ALIVE).any():
            values[(flags & DEAD) > 0] = 0
            for i in np.flatnonzero((flags & (OPERATED | DEAD)) == OPERATED).tolist():
                values[i] = self.operations.value(int(vectors[i]))
        return values

    def validate(self) -> None:
        assert self.table.count == self.registers.table.count
        self.registers.validate()
        self.operations.validate()
