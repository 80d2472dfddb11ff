"""Columns of (key, sequence): sorting them, and collecting them one push at a time."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

CHUNK: Final = 4096

Keys = NDArray[np.int64]
Sequences = NDArray[np.uint64]


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
