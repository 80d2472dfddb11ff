"""Sorted runs of (key, sequence): the large part of an index, merged now and then.

Runs come in tiers of size. When enough of one tier (or smaller) have gathered they are merged, so a
pair is merged once per eightfold growth, and the number of runs grows with the logarithm of the
backlog. Merging drops pairs that are not valid any more, and all but one of equal pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.heap.pairs import Pairs, join, rank_in, sorted_pairs

FAN: Final = 12  # runs of one tier that are merged
TIER_BITS: Final = 3  # sizes within a factor of 8 are one tier
HEAD_MIN: Final = 64  # pairs of each run that are looked at first

Bound = tuple[int, int]
Valid = Callable[[Pairs], NDArray[np.bool_]]


class Runs:
    def __init__(self, valid: Valid) -> None:
        self._valid = valid
        self.items: list[Pairs] = []  # each sorted and not empty

    @property
    def size(self) -> int:
        return sum(run.size for run in self.items)

    def add(self, pairs: Pairs) -> None:
        """Make a run of pairs in any order."""
        run = sorted_pairs(pairs.where(self._valid(pairs)))
        if not run.size:
            return
        tier = _tier(run)
        peers = [other for other in self.items if _tier(other) <= tier]
        if len(peers) + 1 < FAN:
            self.items.append(run)
            return
        self.items = [other for other in self.items if _tier(other) > tier]
        self.add(join([*peers, run]))

    def take_heads(self, wanted: int) -> tuple[Pairs, Bound]:
        """Cut all pairs up to a bound off the runs, `wanted` or somewhat more; and that bound."""
        runs = self.items
        width = max(HEAD_MIN, 2 * wanted // len(runs))
        while True:
            # The bound is the least end of a head that has more behind it: no run can hold a
            # better pair that was not looked at. Runs made one after the other in time hardly
            # overlap when priorities are alike; then the heads must be longer.
            partial = [run.at(width - 1) for run in runs if width < run.size]
            if not partial:
                self.items = []
                taken = sorted_pairs(join(runs))
                return taken, taken.last()
            bound = min(partial)
            cuts = [rank_in(run, bound, inclusive=True) for run in runs]
            if width >= wanted or 2 * sum(cuts) >= wanted:
                break
            width *= 2
        heads = [run.cut(0, cut) for run, cut in zip(runs, cuts, strict=True) if cut]
        rest = [_trim(run.cut(cut)) if cut else run for run, cut in zip(runs, cuts, strict=True)]
        self.items = [run for run in rest if run.size]
        return sorted_pairs(join(heads)), bound

    def below(self, bound: Bound) -> list[Pairs]:
        """What comes strictly before the bound, run by run."""
        return [run.cut(0, rank_in(run, bound, inclusive=False)) for run in self.items]

    def sweep(self) -> None:
        """Drop every pair that is not valid."""
        swept = [run.where(self._valid(run)) for run in self.items]
        self.items = [run for run in swept if run.size]


def _tier(run: Pairs) -> int:
    return run.size.bit_length() // TIER_BITS


def _trim(run: Pairs) -> Pairs:
    """Let go of a run's memory once more than half of it was consumed."""
    base = run.keys.base
    if base is not None and 2 * run.size < len(base):
        return Pairs(run.keys.copy(), run.sequences.copy())
    return run
