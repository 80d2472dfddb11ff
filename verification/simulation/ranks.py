"""The rank bound, held against a plain reading of the heaps.

A node picks over all partitions that it serves by the real spine, from the real heaps. What is
ready is then read off their tables, without any index: lists that are fresh leave nothing behind
that is better than what was picked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from penstock.heap.machine import Heap
from penstock.heap.spine import Spine
from penstock.heap.table import MessageState

if TYPE_CHECKING:
    from verification.simulation.tenure import Tenure

_WAITING: Final = frozenset({MessageState.READY, MessageState.DELAYED})


class _Source:
    """A tenure's heap at the tenure's own time."""

    cut = False

    def __init__(self, tenure: Tenure) -> None:
        self.heap, self.now_ms = tenure.heap, tenure.now_ms

    def candidates(self, n: int, now: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        return self.heap.candidates(n, self.now_ms)

    def rank(self, key: int, sequence: int, now: int) -> int:
        return self.heap.rank(key, sequence, self.now_ms)


def left_behind(tenures: Iterable[Tenure], count: int, *, spine: Spine) -> int:
    """How many ready messages beat the worst of the best `count`; if there are fewer, how many
    were not picked."""
    sources = [_Source(tenure) for tenure in tenures]
    picked = dict(spine.pick(sources, count, 0))
    kept: list[int] = []
    taken: list[int] = []
    for at, source in enumerate(sources):
        keys, sequences = ready(source.heap, source.now_ms)
        mine = np.isin(sequences, picked.get(at, np.empty(0, np.uint64)))
        taken += keys[mine].tolist()
        kept += keys[~mine].tolist()
    if len(taken) < count:
        return len(kept)
    return sum(key < max(taken) for key in kept)


def ready(heap: Heap, now_ms: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Keys and sequences of what may be leased now, in no order."""
    table = heap.table
    sequences = table.all_in(_WAITING)
    places = table.places(sequences)
    due = (table.state[places] == MessageState.READY) | (table.until_ms[places] <= now_ms)
    return table.key[places[due]], sequences[due]
