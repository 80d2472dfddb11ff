"""The spine: the best messages over all partitions of a topic, with a bound on their rank.

A pop that was begun when message *m* had rank *r* (so many ready messages of the topic have a
strictly better key) may return *m* only if *r* < K. Looking at all partitions completely would be
exact and slow; the spine looks at the best F = ceil(K / P) candidates of each. That alone bounds
nothing: one partition may hold the best thousand messages. The rule that makes it sound: **never
pass a partition whose list is used up while it has more.** Refill its list first. Then every
message better than the chosen one was in some list, and was chosen before it, so lists that are
fresh give rank error 0, and the bound K is what is left for candidates that go stale between the
look and the lease.

Keys compare between partitions, sequences do not: equal keys are taken in turn, partition by
partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
Sequences = NDArray[np.uint64]
Picked = list[tuple[int, Sequences]]


class Source(Protocol):
    """A partition as the spine sees it (`Heap` is one)."""

    def candidates(self, n: int, now: int) -> tuple[Keys, Sequences]: ...

    def rank(self, key: int, sequence: int, now: int) -> int: ...


class Spine:
    def __init__(self, k: int, partitions: int) -> None:
        if k < 1 or partitions < 1:
            raise ValueError("a spine needs k and partitions of at least 1")
        self.k, self.partitions = k, partitions
        self.fan_out = -(-k // partitions)
        self._turn = 0  # which partition wins a tie next

    def pick(self, sources: Sequence[Source], n: int, now: int) -> Picked:
        """The best `n` messages: (partition, its share, best first), without empty shares."""
        count = len(sources)
        width = min(n, max(self.fan_out, -(-n // count)))
        lists = [_Candidates(source, width, now) for source in sources]
        self._turn = (self._turn + 1) % count
        # Ties by how much of a partition was taken, then by turn.
        heap = [
            (own.keys[0], 0, (p - self._turn) % count, p) for p, own in enumerate(lists) if own.keys
        ]
        heapify(heap)
        left = n
        while heap and left:
            _, _, turn, p = heap[0]
            left -= 1
            key = lists[p].take()
            if key is None:
                heappop(heap)
            else:
                heapreplace(heap, (key, lists[p].taken, turn, p))
        return [(p, own.sequences[: own.taken]) for p, own in enumerate(lists) if own.taken]

    def rank_error(self, sources: Sequence[Source], picked: Picked, now: int) -> int:
        """How many ready messages that were not picked beat the worst one that was.

        Exact, by key; must be asked before the picked ones are leased.
        """
        worst: int | None = None
        picked_keys: list[NDArray[np.int64]] = []
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

    def __init__(self, source: Source, width: int, now: int) -> None:
        self._source, self._now, self.width = source, now, width
        self.taken = 0
        self._fill()

    def _fill(self) -> None:
        keys, self.sequences = self._source.candidates(self.width, self._now)
        self.keys: list[int] = keys.tolist()

    def take(self) -> int | None:
        """Choose the head; returns the key of the next, None if the partition has no more."""
        self.taken += 1
        if self.taken == len(self.keys) == self.width:
            self.width *= 2
            self._fill()
        return self.keys[self.taken] if self.taken < len(self.keys) else None


def _keys_of(source: Source, sequences: Sequences, now: int) -> Keys:
    """Keys of messages that are among the source's best."""
    width = max(1, len(sequences))
    while True:
        keys, best = source.candidates(width, now)
        found = np.isin(best, sequences)
        if int(np.count_nonzero(found)) == len(sequences) or len(best) < width:
            return keys[found]
        width *= 2
