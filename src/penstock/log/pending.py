"""Batches that are staged and not durable yet, for a sender that need not wait for the disk."""

from __future__ import annotations

from collections import deque

from penstock.model.batch import Batch


class Pending:
    """In order of sequence; holds what is staged and no more, so it needs no bound of its own.

    The loop adds and looks; whoever made batches durable lets them go, perhaps on the writer
    thread. Every step is one operation on the deque, which needs no lock.
    """

    __slots__ = ("_batches", "add")

    def __init__(self) -> None:
        self._batches: deque[Batch] = deque()
        self.add = self._batches.append

    def __len__(self) -> int:
        return len(self._batches)

    def forget(self, through: int) -> None:
        """Let go of what is durable: everything up to `through`."""
        batches = self._batches
        while batches and batches[0].first <= through:  # a batch becomes durable as a whole
            batches.popleft()

    def clear(self) -> None:
        self._batches.clear()

    def slice(self, from_sequence: int, *, through: int, bytes_max: int) -> list[Batch]:
        """Batches from the one that covers `from_sequence`; none if that one is not here."""
        found: list[Batch] = []
        for batch in list(self._batches):  # a copy: the writer thread may let go meanwhile
            if batch.last < from_sequence:
                continue
            if not found and batch.first > from_sequence:
                break
            bytes_max -= batch.size
            if batch.last > through or (found and bytes_max < 0):
                break
            found.append(batch)
        return found
