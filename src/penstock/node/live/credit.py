"""What a subscriber may be sent before it has handled the rest, and what was sent out of turn."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidArgument
from penstock.model.ragged import sixteens
from penstock.propagation.rows import Rows

AHEAD_MAX: Final = 100_000  # rows sent out of turn that are remembered


class Credit:
    """A window of entries and bytes; a single row may exceed the bytes."""

    __slots__ = ("bytes_max", "bytes_out", "entries_max", "entries_out")

    def __init__(self, entries_max: int, bytes_max: int) -> None:
        self.entries_max, self.bytes_max = entries_max, bytes_max
        self.entries_out = self.bytes_out = 0  # sent, and not handled yet

    @property
    def entries(self) -> int:
        return self.entries_max - self.entries_out

    @property
    def bytes(self) -> int:
        left = self.bytes_max - self.bytes_out
        return left if self.entries_out else max(left, 1)

    @property
    def utilisation(self) -> float:
        """How much of it is used; 1: all."""
        return max(self.entries_out / self.entries_max, self.bytes_out / self.bytes_max)

    def use(self, entries: int, bytes_: int) -> None:
        self.entries_out += entries
        self.bytes_out += bytes_

    def give_back(self, entries: int, bytes_: int) -> None:
        if not (0 <= entries <= self.entries_out and 0 <= bytes_ <= self.bytes_out):
            raise InvalidArgument("more credit returned than is out", field="entries")
        self.entries_out -= entries
        self.bytes_out -= bytes_


class Ahead:
    """Rows that were sent while others, released before them, still wait.

    Deltas of a vector are sent in order, so of each vector the last one sent says all: who reads
    the log again leaves out what is not behind it.
    """

    __slots__ = ("_parts", "rows")

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]] = []
        self.rows = 0

    def add(self, rows: Rows) -> None:
        self._parts.append((rows.positions, rows.ordinals, rows.batch.vector))
        self.rows += len(rows)

    def settle(self, position: int) -> None:
        """Nothing waits any more that was released up to here."""
        self._parts = [part for part in self._parts if int(part[0].max()) > position]
        self.rows = sum(len(part[0]) for part in self._parts)

    def clear(self) -> None:
        if self._parts:
            self._parts = []
            self.rows = 0

    def sent(self) -> dict[bytes, int]:
        """By vector, the ordinal of the last one that was sent."""
        found: dict[bytes, int] = {}
        for _, ordinals, vectors in self._parts:
            for vector, ordinal in zip(sixteens(vectors), ordinals.tolist(), strict=True):
                found[vector] = max(ordinal, found.get(vector, 0))
        return found
