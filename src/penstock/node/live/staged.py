"""Batches on their way to disk, in the order of the log: what a feed need not read back."""

from __future__ import annotations

from collections import deque
from typing import Final

from penstock.model.batch import Batch
from penstock.model.columns import Columns

BYTES_MAX: Final = 16 << 20  # kept until they are taken; what is more has to be read from the log

Pair = tuple[Batch, Columns]


class Staged:
    __slots__ = ("_batches", "_bytes", "rows")

    def __init__(self) -> None:
        self._batches: deque[Pair] = deque()
        self._bytes = self.rows = 0

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, batch: Batch, columns: Columns) -> bool:
        """False: there is no room for it."""
        if self._bytes >= BYTES_MAX:
            return False
        self._batches.append((batch, columns))
        self.rows += batch.entries
        self._bytes += batch.size
        return True

    def take(self, following: int, *, through: int, rows_max: int) -> list[Pair] | None:
        """Those that come next, up to `through`; None: the log has to be read."""
        batches = self._batches
        while batches and batches[0][0].last < following:
            self._drop()
        if not batches or batches[0][0].first != following:
            return None
        found: list[Pair] = []
        rows = 0
        while batches and batches[0][0].last <= through and batches[0][0].first == following:
            rows += batches[0][0].entries
            if found and rows > rows_max:
                break
            following = batches[0][0].last + 1
            found.append(self._drop())
        return found

    def clear(self) -> None:
        self._batches.clear()
        self._bytes = self.rows = 0

    def _drop(self) -> Pair:
        found = self._batches.popleft()
        self.rows -= found[0].entries
        self._bytes -= found[0].size
        return found
