"""The spine: the best messages over all partitions of a topic, with a bound on their rank.

A pop that was begun when message *m* had rank *r* (so many ready messages of the topic have a
strictly better key) may return *m* only if *r* < K. Looking at all partitions completely would be
exact and slow; the spine looks at the best F = ceil(K / P) candidates of each. That alone bounds
nothing: one partition may hold the best thousand messages. The rule that makes it sound: **never
pass a partition whose list is used up while it has more.** Refill its list first. Then every
message better than the chosen one was in some list, and was chosen before it, so lists that are
fresh give rank error 0, and the bound K is what is left for candidates that go stale between the
look and the lease.

A source on another node cannot be refilled within a pick: it tells its best keys and whether it
has more (`cut`). When such a list is used up, the pick ends there, with fewer messages than were
wanted; whoever picks asks for fresh lists and goes on. Between the list and the lease others may
arrive. They go first if they are better, which leaves behind as many of those that were picked, and
these may be better than what is leased elsewhere: so at most floor(K / P) do (`bounded`), and all
partitions together leave at most K behind.

Keys compare between partitions, sequences do not: equal keys are taken in turn, partition by
partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from typing import Protocol

import numpy as np

from penstock.heap.index import Keys, Sequences

Picked = list[tuple[int, Sequences]]


class CandidateSource(Protocol):
    """A partition as the spine sees it (`Heap` is one)."""

    @property
    def cut(self) -> bool:
        """Whether it has more than it can tell now."""

    def candidates(self, n: int, now: int) -> tuple[Keys, Sequences]: ...

    def rank(self, key: int, sequence: int, now: int) -> int: ...


class Spine:
    def __init__(self, k: int, partitions: int, *, stretch: int = 1) -> None:
        if k < 1 or partitions < 1 or stretch < 1:
            raise ValueError("a spine needs k, partitions and a stretch of at least 1")
        self.k, self.partitions = k, partitions
        self.stretch = stretch  # so many equal keys of a partition are taken in one turn
        self.fan_out = -(-k // partitions)
        self._turn = 0  # which partition wins a tie next

    def pick(self, sources: Sequence[CandidateSource], n: int, now: int) -> Picked:
        """The best `n` messages: (partition, its share, best first), without empty shares. Fewer
        than `n`, though there are more, only if a source that is `cut` was used up."""
        count, stretch = len(sources), self.stretch
        if not count:
            return []  # no partition of the topic is served just now
        width = min(n, max(self.fan_out, -(-n // count)))
        lists = [_Candidates(source, width, now) for source in sources]
        self._turn = (self._turn + 1) % count
        # Of equal keys, the partition goes first of which less was taken; then it goes by turns.
        heap = [
            (own.keys[0], 0, (p - self._turn) % count, p) for p, own in enumerate(lists) if own.keys
        ]
        heapify(heap)
        left = 0 if any(own.dry for own in lists) else n
        while heap and left:
            _, _, turn, p = heap[0]
            left -= 1
            key = lists[p].take()
            if key is not None:
                heapreplace(heap, (key, lists[p].taken // stretch, turn, p))
            elif lists[p].dry:
                break
            else:
                heappop(heap)
        return [(p, own.sequences[: own.taken]) for p, own in enumerate(lists) if own.taken]

    def rank_error(self, sources: Sequence[CandidateSource], picked: Picked, now: int) -> int:
        """How many ready messages that were not picked beat the worst one that was. Exact, by key;
        must be asked before the picked ones are leased."""
        worst: int | None = None
        picked_keys: list[Keys] = []
        for p, sequences in picked:
            keys = _keys_of(sources[p], sequences, now)
            picked_keys.append(keys)
            if len(keys):
                worst = int(keys.max()) if worst is None else max(worst, int(keys.max()))
        if worst is None:
            return 0
        better = sum(source.rank(worst, 0, now) for source in sources)
        mine = sum(int(np.count_nonzero(keys < worst)) for keys in picked_keys)
        return better - mine


class _Candidates:
    """One partition's list. `taken` of them are chosen; a used up list is refilled, doubled."""

    __slots__ = ("_now", "_source", "keys", "sequences", "taken", "width")

    def __init__(self, source: CandidateSource, width: int, now: int) -> None:
        self._source, self._now, self.width = source, now, width
        self.taken = 0
        self._fill()

    def _fill(self) -> None:
        keys, self.sequences = self._source.candidates(self.width, self._now)
        self.keys: list[int] = keys.tolist()

    @property
    def dry(self) -> bool:
        """Used up, though the partition has more: nothing may be taken past it."""
        return self._source.cut and self.taken == len(self.keys)

    def take(self) -> int | None:
        """Choose the head; returns the key of the next, None if the partition has no more."""
        self.taken += 1
        if self.taken == len(self.keys) == self.width:
            self.width *= 2
            self._fill()
        return self.keys[self.taken] if self.taken < len(self.keys) else None


def bounded(
    source: CandidateSource, count: int, now: int, *, bound: int, last: int, spare: int
) -> Sequences:
    """The best `count` messages no worse than `bound`, best first, as of now. Of those that came
    after sequence `last`, at most `spare` take the place of an older one."""
    width = count
    while True:
        keys, sequences = source.candidates(width, now)
        sequences = sequences[: int(keys.searchsorted(bound, side="right"))]
        late = sequences[:count] > last
        if int(np.count_nonzero(late)) <= spare:
            return sequences[:count]
        late = sequences > last
        old = np.flatnonzero(~late)
        if len(old) >= count - spare or len(sequences) < width:
            break
        width *= 2
    # Older messages come first. The best of those that came late get the room that is left, which
    # is at least `spare`.
    kept = old[: count - spare]
    room = count - len(kept)
    chosen = np.sort(np.concatenate([kept, np.flatnonzero(late)[:room]]))
    best: Sequences = sequences[chosen]
    return best


def _keys_of(source: CandidateSource, sequences: Sequences, now: int) -> Keys:
    """Keys of messages that are among the source's best."""
    width = max(1, len(sequences))
    while True:
        keys, best = source.candidates(width, now)
        found = np.isin(best, sequences)
        if int(np.count_nonzero(found)) == len(sequences) or len(best) < width:
            return keys[found]
        width *= 2
