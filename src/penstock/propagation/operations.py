"""SCALE and OFFSET: kept beside the components, and applied in the order of their stamps.

An operation changes what a component was when it was stamped: those set after it (with a greater
stamp) are untouched. As arrivals come in any order, the result cannot be computed once and changed
later: float32 sums and products depend on their order. So a vector keeps its operations sorted by
stamp, and its value is computed from its components when asked for:

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
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.propagation.registers import Registers
from penstock.propagation.table import Numbers

LIMIT: Final = np.finfo(np.float32).max

Mask = NDArray[np.bool_]


class Operation(NamedTuple):
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


def _stamp(operation: Operation) -> tuple[int, bytes]:
    return operation.stamp


@dataclass(slots=True)
class _View:
    """A vector's components with the stamps that they were set with."""

    values: NDArray[np.float32]
    times: Numbers
    ranks: Numbers

    def before(self, operation: Operation, rank: int) -> Mask:
        """Which components were set before the operation, of those that it names."""
        times, ranks = self.times, self.ranks
        if operation.indices is not None:
            times, ranks = times[operation.indices], ranks[operation.indices]
        mask: Mask = (times < operation.time) | ((times == operation.time) & (ranks < rank))
        return mask

    def apply(self, operation: Operation, mask: Mask) -> None:
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
        self.lists: dict[int, list[Operation]] = {}
        self.folds: dict[int, tuple[int, bytes]] = {}  # by vector: the last stamp folded

    def count(self, vector: int) -> int:
        return len(self.lists.get(vector, ()))

    def add(self, vector: int, operation: Operation) -> None:
        insort(self.lists.setdefault(vector, []), operation, key=_stamp)

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
