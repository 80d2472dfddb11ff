"""What the state of a vector is made of: registers, and the operations beside them.

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
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.model.delta import Op
from penstock.model.delta_batch import DeltaBatch
from penstock.propagation.fold.table import Numbers, Table, beginnings, stable_order

ALIVE: Final = 1  # 0: nobody has said anything of it
DEAD: Final = 2
CODES_SMALL: Final = 1 << 16  # origins that two bytes tell apart

Mask = NDArray[np.bool_]
Ranks = Numbers | None  # of origins; None: nothing is to be compared


class Registers:
    """One row per vector. `values`, `times` and `writers` have a column per component."""

    def __init__(self, dimensions: int) -> None:
        self.dimensions = dimensions
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

    def reserve(self, vectors: int) -> None:
        if vectors > self.table.count:
            self.table.extend(vectors - self.table.count)

    def widen(self, origins: int) -> None:
        """Make room for the codes of so many origins."""
        if origins > CODES_SMALL and self.table["writers"].dtype == np.uint16:
            self.table["writers"] = self.table["writers"].astype(np.uint32)

    def set(
        self, batch: DeltaBatch, vectors: Numbers, times: Numbers, *, writers: Numbers,
        ranks: Numbers, newest: bool = False,
    ) -> None:  # fmt: skip
        """Offer deltas, ascending by stamp, to the registers.

        `newest`: each has a greater time than anything that its vector was given before, so that
        no component has to be compared.
        """
        self.widen(len(ranks))
        op = batch.op
        for mask, offer in (
            (op <= Op.DENSE, self._set_rows),
            (op == Op.SPARSE, self._set_components),
        ):
            rivals = None if newest else ranks
            if mask.all():
                offer(batch, vectors, times, writers, rivals)
            elif mask.any():
                offer(batch.take(mask), vectors[mask], times[mask], writers[mask], rivals)
                newest = False  # than what has just been set
        existing = (op <= Op.DENSE) | (op == Op.DELETE)
        if existing.any():
            newer = existing & self._newer("existence", vectors, times, writers, ranks)
            state = np.where(op[newer] == Op.DELETE, DEAD, ALIVE)
            self._write("existence", vectors[newer], times[newer], writers[newer])
            self.table["existence"][vectors[newer]] = state
        self._set_metadata(batch, vectors, times, writers, ranks)

    def _set_rows(
        self, batch: DeltaBatch, vectors: Numbers, times: Numbers, writers: Numbers, ranks: Ranks
    ) -> None:
        """All components at once."""
        table = self.table
        values = batch.components()[2].reshape(-1, self.dimensions)
        time, writer = times[:, None], writers[:, None]
        if ranks is not None:
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

    def _set_components(
        self, batch: DeltaBatch, vectors: Numbers, times: Numbers, writers: Numbers, ranks: Ranks
    ) -> None:
        _, indices, values = batch.components()
        n = batch.n.astype(np.int64)
        place = np.repeat(vectors * self.dimensions, n)
        place += indices
        time, writer = np.repeat(times, n), np.repeat(writers, n)
        old_times = self.table["times"].reshape(-1)
        old_writers = self.table["writers"].reshape(-1)
        if ranks is not None:
            before = old_times[place]
            newer = time > before
            if not newer.all():
                tied = np.flatnonzero(time == before)
                newer[tied] = ranks[writer[tied]] > ranks[old_writers[place[tied]]]
                place, time, writer = place[newer], time[newer], writer[newer]
                values = values[newer]
        # Where a component is named twice the last assignment stays: that of the greater stamp.
        old_times[place] = time
        old_writers[place] = writer
        self.table["values"].reshape(-1)[place] = values

    def _set_metadata(
        self, batch: DeltaBatch, vectors: Numbers, times: Numbers, writers: Numbers, ranks: Numbers
    ) -> None:
        op, size = batch.op, batch.fixed["metadata_bytes"]
        saying = (op == Op.CREATE) | (op == Op.DELETE) | (size > 0)
        if not saying.any():
            return
        newer = saying & self._newer("metadata", vectors, times, writers, ranks)
        self._write("metadata", vectors[newer], times[newer], writers[newer])
        rows = np.flatnonzero(newer)
        for vector, data in zip(vectors[rows].tolist(), batch.metadata_of(rows), strict=True):
            if data:
                self.metadata[vector] = data
            else:
                self.metadata.pop(vector, None)

    def _newer(
        self, name: str, vectors: Numbers, times: Numbers, writers: Numbers, ranks: Numbers
    ) -> Mask:
        before = self.table[f"{name}_time"][vectors]
        newer = times > before
        tied = np.flatnonzero(times == before)
        if len(tied):
            old = self.table[f"{name}_writer"][vectors[tied]]
            newer[tied] = ranks[writers[tied]] > ranks[old]
        return newer

    def _write(self, name: str, vectors: Numbers, times: Numbers, writers: Numbers) -> None:
        self.table[f"{name}_time"][vectors] = times
        self.table[f"{name}_writer"][vectors] = writers


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


@dataclass(slots=True)
class _View:
    """A vector's components with the stamps that they were set with."""

    values: NDArray[np.float32]
    times: Numbers
    ranks: Numbers

    def before(self, operation: VectorOperation, rank: int) -> Mask:
        """Which components were set before the operation, of those that it names."""
        times, ranks = self.times, self.ranks
        if operation.indices is not None:
            times, ranks = times[operation.indices], ranks[operation.indices]
        mask: Mask = (times < operation.time) | ((times == operation.time) & (ranks < rank))
        return mask

    def apply(self, operation: VectorOperation, mask: Mask) -> None:
        named = np.flatnonzero(mask) if operation.indices is None else operation.indices[mask]
        old = self.values[named]
        with np.errstate(over="ignore"):
            if operation.scale:
                new = old * operation.values[0]
            else:
                new = old + operation.values[mask]
        self.values[named] = np.clip(new, -LIMIT, LIMIT)


class Operations:
    def __init__(self, registers: Registers, *, operations_max: int) -> None:
        self.registers, self.operations_max = registers, operations_max
        self.lists: dict[int, list[VectorOperation]] = {}
        self.folds: dict[int, tuple[int, bytes]] = {}  # by vector: the last stamp folded

    def count(self, vector: int) -> int:
        return len(self.lists.get(vector, ()))

    def add(self, vector: int, operation: VectorOperation) -> None:
        insort(self.lists.setdefault(vector, []), operation, key=attrgetter("stamp"))

    def _view(self, vector: int, ranks: Numbers) -> _View:
        table = self.registers.table
        times = table["times"][vector]
        # A component that nobody set comes before every stamp: its time is 0.
        return _View(table["values"][vector].copy(), times, ranks[table["writers"][vector]])

    def prune(self, vector: int, ranks: Numbers) -> None:
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
                view = view or self._view(vector, ranks)
                if not view.before(operation, int(ranks[operation.writer])).any():
                    continue
            kept.append(operation)
        if kept:
            self.lists[vector] = kept
        else:
            del self.lists[vector]

    def fold(self, vector: int, ranks: Numbers) -> None:
        """Past the bound, apply the older half to the components for good."""
        operations = self.lists.get(vector, [])
        if len(operations) <= self.operations_max:
            return
        folded = operations[: len(operations) // 2]
        self.lists[vector] = operations[len(folded) :]
        table = self.registers.table
        view = self._view(vector, ranks)
        times, writers = table["times"][vector], table["writers"][vector]
        for operation in folded:
            mask = view.before(operation, int(ranks[operation.writer]))
            view.apply(operation, mask)
            named = np.flatnonzero(mask) if operation.indices is None else operation.indices[mask]
            times[named], writers[named] = operation.time, operation.writer
            view.ranks[named] = ranks[operation.writer]
        table["values"][vector] = view.values
        self.folds[vector] = folded[-1].stamp

    def value(self, vector: int, ranks: Numbers) -> NDArray[np.float32]:
        """A vector's components with its operations applied."""
        view = self._view(vector, ranks)
        for operation in self.lists.get(vector, ()):
            view.apply(operation, view.before(operation, int(ranks[operation.writer])))
        return view.values

    def validate(self, ranks: Numbers) -> None:
        for vector, operations in self.lists.items():
            assert 0 < len(operations) <= self.operations_max
            stamps = [operation.stamp for operation in operations]
            assert all(a < b for a, b in pairwise(stamps)), "equal stamps"
            view = self._view(vector, ranks)
            assert all(view.before(o, int(ranks[o.writer])).any() for o in operations)
            assert vector not in self.folds or self.folds[vector] < stamps[0]
