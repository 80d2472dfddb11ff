"""Many short texts, kept once and picked by number without a Python object for each."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.model.columns import Binary
from penstock.propagation.table import Numbers, Table, stable_order

BYTES_MIN: Final = 1 << 16


class Texts:
    """Append-only: text *i* is `sizes[i]` bytes of the arena, from `starts[i]` on."""

    __slots__ = ("_arena", "_end", "table")

    def __init__(self) -> None:
        self._arena = np.zeros(BYTES_MIN, np.uint8)
        self._end = 0
        self.table = Table({"start": np.int64, "size": np.int64})

    def __len__(self) -> int:
        return self.table.count

    def __getitem__(self, number: int) -> bytes:
        start = int(self.table["start"][number])
        return self._arena[start : start + int(self.table["size"][number])].tobytes()

    def extend(self, texts: list[bytes]) -> None:
        self.append(b"".join(texts), np.fromiter(map(len, texts), np.int64, len(texts)))

    def add(self, text: bytes) -> None:
        """One more text."""
        start, end = self._end, self._end + len(text)
        self._make_room(len(text))
        row = self.table.extend(1)
        self.table["start"][row], self.table["size"][row] = start, len(text)
        self._arena[start:end] = np.frombuffer(text, np.uint8)
        self._end = end

    def append(self, data: bytes, sizes: Numbers) -> None:
        """Texts that lie one behind the other."""
        self._make_room(len(data))
        first = self.table.extend(len(sizes))
        self.table["size"][first : self.table.count] = sizes
        self.table["start"][first : self.table.count] = self._end + np.cumsum(sizes) - sizes
        self._arena[self._end : self._end + len(data)] = np.frombuffer(data, np.uint8)
        self._end += len(data)

    def _make_room(self, size: int) -> None:
        while self._end + size > len(self._arena):
            grown = np.zeros(2 * len(self._arena), np.uint8)
            grown[: self._end] = self._arena[: self._end]
            self._arena = grown

    def take(self, numbers: Numbers) -> Binary:
        """Texts by number, as a column: those of one size are moved together."""
        starts, sizes = self.table["start"][numbers], self.table["size"][numbers]
        offsets = np.zeros(len(numbers) + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        found = np.empty(offsets[-1], np.uint8)
        order = stable_order(sizes)
        ranked = sizes[order]
        cuts = np.flatnonzero(ranked[1:] != ranked[:-1]) + 1
        for a, b in pairwise([0, *cuts.tolist(), len(order)]):
            size = int(ranked[a]) if b > a else 0
            if size:
                rows = order[a:b]
                _everywhere(found, size)[offsets[rows]] = _everywhere(self._arena, size)[
                    starts[rows]
                ]
        return Binary(offsets.astype(np.int32), found.data)

    def joined(self) -> NDArray[np.uint8]:
        """All texts, one behind the other."""
        return self._arena[: self._end]


def _everywhere(data: NDArray[np.uint8], size: int) -> NDArray[Any]:
    """The texts of one size that begin at each byte."""
    places = len(data) - size + 1
    return np.ndarray((places,), f"V{size}", data, strides=(1,))
