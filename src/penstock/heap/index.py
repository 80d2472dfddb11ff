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
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Final

import numpy as np

from penstock.heap.runs import (
    CHUNK,
    EMPTY,
    Collector,
    Keys,
    Pairs,
    Runs,
    Sequences,
    Valid,
    join,
    merged_pairs,
    rank_in,
    sorted_pairs,
)

FRONT: Final = 2048  # so many pairs a refill brings to the front
FRONT_MAX: Final = 8192  # beyond this the front gives its worse part to the back
SCALAR_STEPS: Final = 16  # stale pairs that a look for one message passes before it looks in bulk
SEAL: Final = 1 << 18  # the back becomes a run at this size


class RunIndex:
    """`valid` says which pairs still count, `valid_one` the same of one (key, sequence), and `live`
    how many messages should be found in here."""

    _front: Pairs
    _at: int
    _end: int

    def __init__(
        self, valid: Valid, valid_one: Callable[[int, int], bool], live: Callable[[], int]
    ) -> None:
        self._valid, self._valid_one, self._live = valid, valid_one, live
        self.clear()

    def clear(self) -> None:
        self._looked = False
        self._fresh = Collector()
        self._back = Collector()
        self._runs = Runs(self._valid)
        self._bound = (0, 0)  # meaningful while anything is behind the front
        self._set_front(0)

    @property
    def size(self) -> int:
        """Pairs held, valid or not."""
        return self._end - self._at + self._fresh.size + self._back.size + self._runs.size

    # --- changes ---

    def push(self, keys: Keys, sequences: Sequences, *, ascending: bool = False) -> None:
        """Add pairs; `ascending` promises that the sequences are, which saves work."""
        if self._looked:
            self._fresh.add(keys, sequences, ascending=ascending)
            if self._fresh.size >= CHUNK:
                self._absorb()
        else:
            self._back.add(keys, sequences, ascending=ascending)
            self._seal_if_large()

    def push_one(self, key: int, sequence: int) -> None:
        if self._looked:
            self._fresh.add_one(key, sequence)
            if self._fresh.size >= CHUNK:
                self._absorb()
        else:
            self._back.add_one(key, sequence)
            self._seal_if_large()

    def drop_head(self, sequences: Sequences) -> None:
        """A hint: if these are the front's head in this order, they are gone."""
        end = self._at + len(sequences)
        if end <= self._end:
            head = self._front.sequences[self._at : end]
            if head[0] == sequences[0] and (len(sequences) == 1 or (head == sequences).all()):
                self._at = end

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
            at = self._at
            return Pairs(
                self._front.keys[at : at + 1].copy(), self._front.sequences[at : at + 1].copy()
            )
        if self._end - self._at < missing:
            self._sweep_if_stale()
        found: list[Pairs] = []
        seen, width = 0, missing  # seen: how far behind _at this look has come
        while missing:
            if self._at + seen >= self._end and not self._refill(missing):
                break
            start = self._at + seen
            window = self._front.cut(start, min(start + width, self._end))
            good = self._valid(window)
            hits = int(np.count_nonzero(good))
            if hits == window.size:
                found.append(window.cut(0, missing))
            else:
                if not found:  # nothing valid before these: cut them off
                    gone = int(good.argmax()) if hits else window.size
                    self._at += gone
                    seen -= gone
                if hits:
                    found.append(window.where(good).cut(0, missing))
            missing -= min(hits, missing)
            seen += window.size
            width = max(missing, 2 * width)
        pairs = join(found)
        # The caller gets a copy, because the front changes under views of it.
        return Pairs(pairs.keys.copy(), pairs.sequences.copy()) if len(found) == 1 else pairs

    def _find_one(self) -> bool:
        """Whether the front holds a valid pair, which is its first then."""
        keys, sequences, valid_one = self._key_view, self._sequence_view, self._valid_one
        for at in range(self._at, min(self._end, self._at + SCALAR_STEPS)):
            if valid_one(keys[at], sequences[at]):
                self._at = at
                return True
        return False

    def count_below(self, key: int, sequence: int) -> int:
        """Valid pairs strictly before (key, sequence)."""
        if not self._live():
            return 0
        self._look()
        bound = (key, sequence)
        front = self._front_pairs()
        parts = [front.cut(0, rank_in(front, bound, inclusive=False))]
        if self._behind() and bound > self._bound:
            self._seal()
            parts += self._runs.below(bound)
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
        return bool(self._back.size or self._runs.items)

    def _front_pairs(self) -> Pairs:
        return self._front.cut(self._at, self._end)

    def _absorb(self) -> None:
        if not self._fresh.size:
            return
        if self._fresh.single and self._absorb_one():
            return
        pairs = self._fresh.take_sorted()
        better = pairs.size
        if self._behind():
            better = rank_in(pairs, self._bound, inclusive=True)
        if better < pairs.size:
            behind = pairs.cut(better)
            self._back.add(behind.keys, behind.sequences, ascending=False)
            self._seal_if_large()
        if better:
            self._into_front(pairs.cut(0, better))

    def _absorb_one(self) -> bool:
        """Absorb a single pair if it goes to either end, which most do."""
        pair = self._fresh.peek_one()
        end = self._end
        if self._behind() and pair > self._bound:
            self._back.add_one(*pair)
            self._seal_if_large()
        elif end < self._front.size and (
            self._at == end or pair > (self._key_view[end - 1], self._sequence_view[end - 1])
        ):
            self._key_view[end], self._sequence_view[end] = pair
            self._end = end + 1
            if self._end - self._at > FRONT_MAX:
                self._spill()
        else:
            return False
        self._fresh.drop_one()
        return True

    def _into_front(self, pairs: Pairs) -> None:
        if self._at == self._end or (pairs.keys[0], pairs.sequences[0]) > (
            self._front.keys[self._end - 1],
            self._front.sequences[self._end - 1],
        ):
            self._append(pairs)
        else:
            merged = merged_pairs(self._front_pairs(), pairs)
            self._at = self._end = 0
            self._append(merged)
        if self._end - self._at > FRONT_MAX:
            self._spill()

    def _append(self, pairs: Pairs) -> None:
        """Put pairs that are worse than the whole front behind it."""
        end = self._end + pairs.size
        if end > self._front.size:
            old = self._front_pairs()
            self._set_front(old.size + pairs.size + FRONT)
            self._front.keys[: old.size], self._front.sequences[: old.size] = old
            self._end = old.size
            end = old.size + pairs.size
        self._front.keys[self._end : end], self._front.sequences[self._end : end] = pairs
        self._end = end

    def _set_front(self, room: int) -> None:
        """An empty front with this much room."""
        # The front is [_at, _end) of these columns; the views are for single pairs.
        self._front = Pairs(np.empty(room, np.int64), np.empty(room, np.uint64))
        self._key_view, self._sequence_view = self._front.keys.data, self._front.sequences.data
        self._at = self._end = 0

    def _spill(self) -> None:
        pairs = self._front_pairs()
        pairs = pairs.where(self._valid(pairs))
        self._at = self._end = 0
        if pairs.size > FRONT_MAX:
            worse = pairs.cut(FRONT)
            pairs = pairs.cut(0, FRONT)
            self._back.add(worse.keys, worse.sequences, ascending=False)
            self._bound = pairs.last()
        self._append(pairs)

    # --- back to runs, runs to front ---

    def _seal_if_large(self) -> None:
        if self._back.size >= SEAL:
            self._seal()
            self._sweep_if_stale()

    def _seal(self) -> None:
        """Make the back a run."""
        if self._back.size:
            self._runs.add(self._back.take())

    def _refill(self, wanted: int) -> bool:
        """Bring the best of what is behind into the front; False if nothing valid is left.

        The front only grows here: a look holds positions in it.
        """
        self._seal()
        wanted = max(wanted, FRONT)
        while self._runs.items:
            taken, self._bound = self._runs.take_heads(wanted)
            taken = taken.where(self._valid(taken))
            if taken.size:
                self._append(taken)
                return True
            wanted *= 2
        return False

    # --- stale pairs ---

    def _sweep_if_stale(self) -> None:
        if self.size > 2 * self._live() + SEAL:
            self._sweep()

    def _sweep(self) -> None:
        """Drop every invalid pair."""
        front = self._front_pairs()
        self._at = self._end = 0
        self._append(front.where(self._valid(front)))
        self._runs.sweep()
        back = self._back.take()
        back = back.where(self._valid(back))
        self._back.add(back.keys, back.sequences, ascending=False)

    # --- checks ---

    def everything(self) -> Pairs:
        """All pairs held, in no order, for checks."""
        return join(
            [self._front_pairs(), *self._fresh.peek(), *self._back.peek(), *self._runs.items]
        )

    def validate(self) -> None:
        for run in (self._front_pairs(), *self._runs.items):
            pairs = list(zip(run.keys.tolist(), run.sequences.tolist(), strict=True))
            assert all(a < b for a, b in pairwise(pairs)), "a run is unsorted"
        behind = join([*self._back.peek(), *self._runs.items])
        if behind.size and self._looked and self._end > self._at:
            key, sequence = self._bound
            worse = (behind.keys > key) | (
                (behind.keys == key) & (behind.sequences > np.uint64(sequence))
            )
            assert worse.all(), "something behind the front beats its bound"
            assert self._front_pairs().last() <= self._bound
        everything = self.everything()
        good = everything.where(self._valid(everything))
        assert len(np.unique(good.sequences)) == self._live(), "a live message is not in the index"
