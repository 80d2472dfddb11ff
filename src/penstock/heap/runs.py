"""Columns of (key, sequence): collected one push at a time, sorted, and kept in sorted runs.

Runs are the large part of an index, merged now and then. They come in tiers of size. When enough of
one tier (or smaller) have gathered they are merged, so a pair is merged once per eightfold growth,
and the number of runs grows with the logarithm of the backlog. Merging drops pairs that are not
valid any more, and all but one of equal pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

CHUNK: Final = 4096
Keys = NDArray[np.int64]
Sequences = NDArray[np.uint64]
FAN: Final = 12  # runs of one tier that are merged
TIER_BITS: Final = 3  # sizes within a factor of 8 are one tier
HEAD_MIN: Final = 64  # pairs of each run that are looked at first
Bound = tuple[int, int]


class Pairs(NamedTuple):
    keys: Keys
    sequences: Sequences

    @property
    def size(self) -> int:
        return len(self.keys)

    def cut(self, start: int, end: int | None = None) -> Pairs:
        return Pairs(self.keys[start:end], self.sequences[start:end])

    def where(self, mask: NDArray[np.bool_]) -> Pairs:
        return Pairs(self.keys[mask], self.sequences[mask])

    def at(self, index: int) -> tuple[int, int]:
        return int(self.keys[index]), int(self.sequences[index])

    def last(self) -> tuple[int, int]:
        return self.at(-1)


EMPTY: Final = Pairs(np.empty(0, np.int64), np.empty(0, np.uint64))


def join(parts: list[Pairs]) -> Pairs:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return EMPTY
    return Pairs(
        np.concatenate([p.keys for p in parts]), np.concatenate([p.sequences for p in parts])
    )


def sorted_pairs(pairs: Pairs) -> Pairs:
    """In ascending order, each pair once.

    When the ranges of both columns fit into 64 bits together (nearly always: priorities are small
    or sequences are near each other) one sort of packed integers does it, which numpy vectorises.
    """
    if pairs.size < 2:
        return pairs
    keys, sequences = pairs
    key_low, sequence_low = int(keys.min()), int(sequences.min())
    bits = (int(sequences.max()) - sequence_low).bit_length()
    if (int(keys.max()) - key_low).bit_length() + bits > 64:
        return _sorted_wide(pairs)
    packed = (keys - np.int64(key_low)).view(np.uint64)
    packed <<= np.uint64(bits)
    packed |= sequences - np.uint64(sequence_low)
    packed.sort()
    packed = _once(packed)
    low = packed & np.uint64((1 << bits) - 1)
    low += np.uint64(sequence_low)
    packed >>= np.uint64(bits)
    high = packed.view(np.int64)
    high += np.int64(key_low)
    return Pairs(high, low)


def _once(packed: NDArray[np.uint64]) -> NDArray[np.uint64]:
    fresh = packed[1:] != packed[:-1]
    if fresh.all():
        return packed
    return packed[np.concatenate(([True], fresh))]


def _sorted_wide(pairs: Pairs) -> Pairs:
    keys, sequences = pairs
    order = np.argsort(keys)
    ranked = keys[order]
    if (ranked[1:] == ranked[:-1]).any():
        order = np.lexsort((sequences, keys))
        ranked = keys[order]
    moved = sequences[order]
    same = (ranked[1:] == ranked[:-1]) & (moved[1:] == moved[:-1])
    found = Pairs(ranked, moved)
    return found.where(np.concatenate(([True], ~same))) if same.any() else found


def merged_pairs(old: Pairs, new: Pairs) -> Pairs:
    """Two sorted columns as one; quick when `new` is small and its ties came later."""
    right = old.keys.searchsorted(new.keys, side="right")
    before = np.maximum(right, 1) - 1  # the last pair of `old` not after each new one, by key
    tied = (old.keys[before] == new.keys) & (old.sequences[before] >= new.sequences)
    if tied.any():
        return sorted_pairs(join([old, new]))
    at = right + np.arange(new.size)
    kept = np.ones(old.size + new.size, np.bool_)
    kept[at] = False
    merged = Pairs(np.empty(len(kept), np.int64), np.empty(len(kept), np.uint64))
    for column, olds, news in zip(merged, old, new, strict=True):
        column[at] = news
        column[kept] = olds
    return merged


def rank_in(pairs: Pairs, bound: tuple[int, int], *, inclusive: bool) -> int:
    """How many of the sorted pairs come before `bound` (or are equal to it)."""
    if not pairs.size or pairs.at(0) > bound:
        return 0
    key, sequence = np.int64(bound[0]), np.uint64(bound[1])
    left = int(pairs.keys.searchsorted(key))
    right = int(pairs.keys.searchsorted(key, side="right"))
    equals = pairs.sequences[left:right]
    return left + int(equals.searchsorted(sequence, side="right" if inclusive else "left"))


class Collector:
    """Pairs in order of arrival: a buffer, and the full buffers before it.

    A push copies into the buffer, so that a million pushes of one cost no million small arrays.
    """

    __slots__ = (
        "_full", "_key_view", "_keys", "_last", "_sequence_view", "_sequences", "_used",
        "ascending", "size",
    )  # fmt: skip

    def __init__(self) -> None:
        self._full: list[Pairs] = []
        self.size = 0
        self.ascending = True  # whether sequences came in strictly ascending order
        self._last = -1
        self._renew()

    def _renew(self) -> None:
        self._keys = np.empty(CHUNK, np.int64)
        self._sequences = np.empty(CHUNK, np.uint64)
        self._key_view = self._keys.data
        self._sequence_view = self._sequences.data
        self._used = 0

    def add_one(self, key: int, sequence: int) -> None:
        used = self._used
        if used == CHUNK:
            self._retire()
            used = 0
        if sequence <= self._last:
            self.ascending = False
        self._last = sequence
        self._key_view[used] = key
        self._sequence_view[used] = sequence
        self._used = used + 1
        self.size += 1

    def add(self, keys: Keys, sequences: Sequences, *, ascending: bool) -> None:
        """Push many; `ascending` says that the sequences among themselves are."""
        count = len(keys)
        if not count:
            return
        if not ascending or int(sequences[0]) <= self._last:
            self.ascending = False
        self._last = int(sequences[-1])
        if self._used + count > CHUNK:
            self._retire()
            if count > CHUNK // 2:
                self._full.append(Pairs(keys.copy(), sequences.copy()))
                self.size += count
                return
        used = self._used
        self._keys[used : used + count] = keys
        self._sequences[used : used + count] = sequences
        self._used = used + count
        self.size += count

    def peek(self) -> list[Pairs]:
        if not self._used:
            return list(self._full)
        return [*self._full, Pairs(self._keys[: self._used], self._sequences[: self._used])]

    @property
    def single(self) -> bool:
        return self.size == self._used == 1

    def peek_one(self) -> tuple[int, int]:
        """The pair, when there is a single one."""
        return self._key_view[0], self._sequence_view[0]

    def drop_one(self) -> None:
        self._used = self.size = 0
        self.ascending, self._last = True, -1

    def take(self) -> Pairs:
        """Everything collected; the collector is empty then."""
        self._retire()
        taken, self._full, self.size = self._full, [], 0
        self.ascending, self._last = True, -1
        return join(taken)

    def take_sorted(self) -> Pairs:
        """`take` in order, each pair once."""
        if not self.ascending or self.size > CHUNK:
            return sorted_pairs(self.take())
        keys, sequences = self.take()
        if len(keys) == 1:
            return Pairs(keys, sequences)
        order = keys.argsort(kind="stable")  # arrival order breaks ties, and is by sequence
        return Pairs(keys[order], sequences[order])

    def _retire(self) -> None:
        if not self._used:
            return
        if self._used < CHUNK // 2:  # what is left of the buffer serves on
            used = slice(0, self._used)
            self._full.append(Pairs(self._keys[used].copy(), self._sequences[used].copy()))
            self._used = 0
        else:
            self._full.append(Pairs(self._keys[: self._used], self._sequences[: self._used]))
            self._renew()


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
