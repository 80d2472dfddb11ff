"""The ready index: messages by (key, sequence), best first, in a few sorted runs.

    push ─► fresh ─┬─► front   sorted, small: the best messages; all that a look reads
                   └─► back    in order of arrival ─► runs   sorted, large, some to a size

Everything in back and runs is worse than `bound`, and everything not worse than `bound` is in the
front. So a look (`best`) sorts in only those fresh pairs that beat the bound. The others wait in
the back, unsorted, until the front runs dry (`_refill`) or the back is large (`SEAL`): then the
back becomes a run, and the front takes the heads of all runs (see `runs`). Until the first look
there is no front, and a push is a copy into a buffer.

Deletion is lazy: nobody tells the index that a message was leased or purged. A pair is *valid*
while its message is still in the state that this index is about, which `valid` answers in bulk.
Invalid pairs are cut off when they reach the front's head, left out when a run is made or merged,
and swept out of everything when they outnumber the valid ones. A message that left and came back
may be in here twice; both pairs are equal, both fall on the same side of the bound, and sorting
keeps one.

Runs come in tiers of size. When enough of one tier (or smaller) have gathered they are merged, so a
pair is merged once per eightfold growth, and the number of runs grows with the logarithm of the
backlog.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

CHUNK: Final = 4096
FRONT: Final = 2048  # so many pairs a refill brings to the front
FRONT_MAX: Final = 8192  # beyond this the front gives its worse part to the back
SCALAR_STEPS: Final = 16  # stale pairs that a look for one message passes before it looks in bulk
SEAL: Final = 1 << 18  # the back becomes a run at this size
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

    def copy(self) -> Pairs:
        return Pairs(self.keys.copy(), self.sequences.copy())

    def at(self, index: int) -> tuple[int, int]:
        return int(self.keys[index]), int(self.sequences[index])


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
    fresh = packed[1:] != packed[:-1]
    if not fresh.all():
        packed = packed[np.concatenate(([True], fresh))]
    low = packed & np.uint64((1 << bits) - 1)
    low += np.uint64(sequence_low)
    packed >>= np.uint64(bits)
    high = packed.view(np.int64)
    high += np.int64(key_low)
    return Pairs(high, low)


def _sorted_wide(pairs: Pairs) -> Pairs:
    keys, sequences = pairs
    order = np.lexsort((sequences, keys))
    ranked, moved = keys[order], sequences[order]
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


class PairBuffer:
    """Pairs with room behind them, and a gap before them where the first were taken away.

    Pushes copy into the buffer, which at least doubles when it is full, so that a million pushes of
    one cost no million small arrays. `keys` and `sequences` are views of the whole buffer, for
    single pairs: several times faster than numpy.
    """

    __slots__ = ("_pairs", "_room", "end", "keys", "sequences", "start")

    def __init__(self) -> None:
        self._renew(0)

    def _renew(self, room: int) -> None:
        self._room, self.start, self.end = room, 0, 0
        self._pairs = Pairs(np.empty(room, np.int64), np.empty(room, np.uint64))
        self.keys, self.sequences = self._pairs.keys.data, self._pairs.sequences.data

    def _grow(self, more: int) -> None:
        held = self.cut()
        self._renew(max(FRONT, 2 * (held.size + more)))
        self.add(held)

    @property
    def size(self) -> int:
        return self.end - self.start

    def add_one(self, key: int, sequence: int) -> None:
        if self.end == self._room:
            self._grow(1)
        at = self.end
        self.keys[at] = key
        self.sequences[at] = sequence
        self.end = at + 1

    def add(self, pairs: Pairs) -> None:
        if self.end + pairs.size > self._room:
            self._grow(pairs.size)
        start, self.end = self.end, self.end + pairs.size
        self._pairs.keys[start : self.end], self._pairs.sequences[start : self.end] = pairs

    def replace(self, pairs: Pairs) -> None:
        self.start = self.end = 0
        self.add(pairs)

    def cut(self, start: int = 0, count: int | None = None) -> Pairs:
        """A view of `count` pairs, or of as many as there are, behind the first `start`."""
        at = self.start + start
        return self._pairs.cut(at, self.end if count is None else min(at + count, self.end))

    def take(self) -> Pairs:
        """Everything; the buffer is empty then."""
        taken = self.cut()
        if taken.size < CHUNK // 2:  # little is copied, and the room serves on
            taken, self.start, self.end = taken.copy(), 0, 0
        else:
            self._renew(0)
        return taken


Valid = Callable[[Pairs], NDArray[np.bool_]]


def _tier(run: Pairs) -> int:
    return run.size.bit_length() // TIER_BITS


def _trim(run: Pairs) -> Pairs:
    """Let go of a run's memory once more than half of it was consumed."""
    base = run.keys.base
    return run.copy() if base is not None and 2 * run.size < len(base) else run


class RunIndex:
    """`valid` says which pairs still count, `valid_one` the same of one (key, sequence), and `live`
    how many messages should be found in here."""

    def __init__(
        self, valid: Valid, valid_one: Callable[[int, int], bool], live: Callable[[], int]
    ) -> None:
        self._valid, self._valid_one, self._live = valid, valid_one, live
        self.clear()

    def clear(self) -> None:
        self._looked = False
        # Only the front has a gap; the others are used up as a whole, so their end is their size.
        self._front, self._fresh, self._back = PairBuffer(), PairBuffer(), PairBuffer()
        self._runs: list[Pairs] = []  # each sorted and not empty
        self._bound = (0, 0)  # meaningful while anything is behind the front

    @property
    def size(self) -> int:
        """Pairs held, valid or not."""
        in_runs = sum([run.size for run in self._runs])
        return self._front.size + self._fresh.end + self._back.end + in_runs

    # --- changes ---

    def push(self, keys: Keys, sequences: Sequences) -> None:
        pairs = Pairs(keys, sequences)
        if self._looked:
            self._fresh.add(pairs)
            if self._fresh.end >= CHUNK:
                self._absorb()
        else:
            self._back.add(pairs)
            self._seal_if_large()

    def push_one(self, key: int, sequence: int) -> None:
        if self._looked:
            self._fresh.add_one(key, sequence)
            if self._fresh.end >= CHUNK:
                self._absorb()
        else:
            self._back.add_one(key, sequence)
            if self._back.end >= SEAL:
                self._seal_if_large()

    def drop_head(self, sequences: Sequences) -> None:
        """A hint: if these are the front's head in this order, they are gone."""
        front, count = self._front, len(sequences)
        end = front.start + count
        if end > front.end or front.sequences[front.start] != sequences[0]:
            return
        if count == 1 or np.count_nonzero(front.cut(0, count).sequences == sequences) == count:
            front.start = end

    # --- looks ---

    def best(self, count: int) -> Pairs:
        """The best `count` valid pairs, in order; fewer if there are no more."""
        live = self._live()
        missing = min(count, live)
        if missing <= 0:
            if not live and self.size > CHUNK:
                self.clear()  # every pair that is held is stale
            return EMPTY
        self._look()
        if count == 1 and self._find_one():
            return self._front.cut(0, 1).copy()
        if self._front.size < missing:
            self._sweep_if_stale()
        found: list[Pairs] = []
        seen, width = 0, missing  # seen: how far into the front this look has come
        while missing:
            if seen >= self._front.size and not self._refill(missing):
                break
            window = self._front.cut(seen, width)
            good = self._valid(window)
            hits = int(np.count_nonzero(good))
            if hits == window.size:
                found.append(window.cut(0, missing))
            else:
                if not found:  # nothing valid before these: cut them off
                    gone = int(good.argmax()) if hits else window.size
                    self._front.start += gone
                    seen -= gone
                if hits:
                    found.append(window.where(good).cut(0, missing))
            missing -= min(hits, missing)
            seen += window.size
            width = max(missing, 2 * width)
        pairs = join(found)
        # The caller gets a copy, because the front changes under views of it.
        return pairs.copy() if len(found) == 1 else pairs

    def _find_one(self) -> bool:
        """Whether the front holds a valid pair, which is its first then."""
        front, valid_one = self._front, self._valid_one
        for at in range(front.start, min(front.end, front.start + SCALAR_STEPS)):
            if valid_one(front.keys[at], front.sequences[at]):
                front.start = at
                return True
        return False

    def count_below(self, key: int, sequence: int) -> int:
        """Valid pairs strictly before (key, sequence)."""
        if not self._live():
            return 0
        self._look()
        bound = (key, sequence)
        front = self._front.cut()
        parts = [front.cut(0, rank_in(front, bound, inclusive=False))]
        if self._behind() and bound > self._bound:
            self._seal()
            parts += [run.cut(0, rank_in(run, bound, inclusive=False)) for run in self._runs]
        below = join(parts)
        return sorted_pairs(below.where(self._valid(below))).size

    def _look(self) -> None:
        """Before anything is read: give the front a bound, or bring it up to date."""
        if self._looked:
            self._absorb()
        else:
            self._looked = True
            self._sweep_if_stale()
            self._refill(FRONT)

    # --- fresh to front and back ---

    def _behind(self) -> bool:
        return bool(self._back.end or self._runs)

    def _absorb(self) -> None:
        if not self._fresh.end:
            return
        if self._fresh.end == 1 and self._absorb_one():
            return
        pairs = sorted_pairs(self._fresh.take())
        better = pairs.size
        if self._behind():
            better = rank_in(pairs, self._bound, inclusive=True)
        if better < pairs.size:
            self._back.add(pairs.cut(better))
            self._seal_if_large()
        if better:
            self._into_front(pairs.cut(0, better))

    def _absorb_one(self) -> bool:
        """Absorb a single pair if it goes to either end, which most do."""
        fresh, front = self._fresh, self._front
        pair, last = (fresh.keys[0], fresh.sequences[0]), front.end - 1
        if self._behind() and pair > self._bound:
            self._back.add_one(*pair)
            self._seal_if_large()
        elif front.start > last or pair > (front.keys[last], front.sequences[last]):
            front.add_one(*pair)
            if front.size > FRONT_MAX:
                self._spill()
        else:
            return False
        fresh.end = 0
        return True

    def _into_front(self, pairs: Pairs) -> None:
        front = self._front.cut()
        if not front.size or pairs.at(0) > front.at(-1):
            self._front.add(pairs)
        else:
            self._front.replace(merged_pairs(front, pairs))
        if self._front.size > FRONT_MAX:
            self._spill()

    def _spill(self) -> None:
        pairs = self._front.cut()
        pairs = pairs.where(self._valid(pairs))
        if pairs.size > FRONT_MAX:
            self._back.add(pairs.cut(FRONT))
            pairs = pairs.cut(0, FRONT)
            self._bound = pairs.at(-1)
        self._front.replace(pairs)

    # --- back to runs, runs to front ---

    def _seal_if_large(self) -> None:
        if self._back.end >= SEAL:
            self._seal()
            self._sweep_if_stale()

    def _seal(self) -> None:
        if self._back.end:
            self._add_run(self._back.take())

    def _add_run(self, pairs: Pairs) -> None:
        run = sorted_pairs(pairs.where(self._valid(pairs)))
        if not run.size:
            return
        tier = _tier(run)
        peers = [other for other in self._runs if _tier(other) <= tier]
        if len(peers) + 1 < FAN:
            self._runs.append(run)
            return
        self._runs = [other for other in self._runs if _tier(other) > tier]
        self._add_run(join([*peers, run]))

    def _refill(self, wanted: int) -> bool:
        """Bring the best of what is behind into the front; False if nothing valid is left. The
        front only grows here: a look holds positions in it."""
        self._seal()
        wanted = max(wanted, FRONT)
        while self._runs:
            taken, self._bound = self._take_heads(wanted)
            taken = taken.where(self._valid(taken))
            if taken.size:
                self._front.add(taken)
                return True
            wanted *= 2
        return False

    def _take_heads(self, wanted: int) -> tuple[Pairs, Bound]:
        """Cut all pairs up to a bound off the runs, `wanted` or somewhat more; and that bound."""
        runs = self._runs
        width = max(HEAD_MIN, 2 * wanted // len(runs))
        while True:
            # The bound is the least end of a head that has more behind it: no run can hold a
            # better pair that was not looked at. Runs made one after the other in time hardly
            # overlap when priorities are alike; then the heads must be longer.
            partial = [run.at(width - 1) for run in runs if width < run.size]
            if not partial:
                self._runs = []
                taken = sorted_pairs(join(runs))
                return taken, taken.at(-1)
            bound = min(partial)
            cuts = [rank_in(run, bound, inclusive=True) for run in runs]
            if width >= wanted or 2 * sum(cuts) >= wanted:
                break
            width *= 2
        heads = [run.cut(0, cut) for run, cut in zip(runs, cuts, strict=True) if cut]
        rest = [_trim(run.cut(cut)) if cut else run for run, cut in zip(runs, cuts, strict=True)]
        self._runs = [run for run in rest if run.size]
        return sorted_pairs(join(heads)), bound

    # --- stale pairs ---

    def _sweep_if_stale(self) -> None:
        if self.size > 2 * self._live() + SEAL:
            self._sweep()

    def _sweep(self) -> None:
        front = self._front.cut()
        self._front.replace(front.where(self._valid(front)))
        swept = [run.where(self._valid(run)) for run in self._runs]
        self._runs = [run for run in swept if run.size]
        back = self._back.take()
        self._back.add(back.where(self._valid(back)))

    # --- checks ---

    def everything(self) -> Pairs:
        """All pairs held, in no order, for checks."""
        return join([self._front.cut(), self._fresh.cut(), self._back.cut(), *self._runs])

    def validate(self) -> None:
        for run in (self._front.cut(), *self._runs):
            pairs = list(zip(run.keys.tolist(), run.sequences.tolist(), strict=True))
            assert all(a < b for a, b in pairwise(pairs)), "a run is unsorted"
        behind = join([self._back.cut(), *self._runs])
        if behind.size and self._looked and self._front.size:
            key, sequence = self._bound
            worse = (behind.keys > key) | (
                (behind.keys == key) & (behind.sequences > np.uint64(sequence))
            )
            assert worse.all(), "something behind the front beats its bound"
            assert self._front.cut().at(-1) <= self._bound
        everything = self.everything()
        good = everything.where(self._valid(everything))
        assert len(np.unique(good.sequences)) == self._live(), "a live message is not in the index"
