"""Columns that grow together, and keys that number their rows.

`Table` holds columns whose rows are added at the end and never move. `Keys` gives each distinct
pair of 64-bit numbers a row number, 0, 1, 2 … batch by batch, by open addressing in a
numpy array: a batch of lookups costs a few gathers, not a Python call per key.

For a few rows the gathers cost more than they save. Those are read and set through memoryviews of
the very same columns, whose items are plain numbers, and keys are looked up one at a time.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

ROWS_MIN: Final = 1024
LAVISH_BYTES: Final = 256 << 20  # a table below this grows fourfold, a larger one by half
_A: Final = np.uint64(0x9E3779B97F4A7C15)
_B: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_HALF: Final = np.uint64(32)
_A_ONE: Final = int(_A)  # the same for one key
_B_ONE: Final = int(_B)
_WORD: Final = (1 << 64) - 1

Numbers = NDArray[np.int64]
Words = NDArray[np.uint64]


def stable_order(keys: Numbers) -> Numbers:
    """Rows by ascending key, equal ones as they come; keys are not negative.

    One sort of packed integers, which numpy vectorises; a stable argsort takes five times as long.
    """
    bits = len(keys).bit_length()
    if len(keys) and int(keys.max()).bit_length() + bits > 63:
        return np.argsort(keys, kind="stable")
    packed = keys << bits
    packed |= np.arange(len(keys))
    packed.sort()
    packed &= (1 << bits) - 1
    return packed


class Table:
    """Columns by name. An array is valid until rows are added: ask again after that."""

    __slots__ = ("_columns", "capacity", "count", "version")

    def __init__(self, columns: dict[str, DTypeLike | tuple[DTypeLike, int]]) -> None:
        self.count = 0
        self.version = 0  # grows when arrays are replaced, and views of them are out of date
        self.capacity = ROWS_MIN
        self._columns: dict[str, NDArray[Any]] = {}
        for name, kind in columns.items():
            dtype, *width = kind if isinstance(kind, tuple) else (kind,)
            self._columns[name] = np.zeros((self.capacity, *width), dtype)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The column with room beyond its rows: for picking and setting rows by number."""
        return self._columns[name]

    def __setitem__(self, name: str, column: NDArray[Any]) -> None:
        self._columns[name] = column
        self.version += 1

    def view(self, name: str) -> memoryview:
        """A column, row behind row, whose items are plain numbers; for as long as `version`."""
        return self._columns[name].reshape(-1).data

    def names(self) -> list[str]:
        return list(self._columns)

    def rows(self, name: str) -> NDArray[Any]:
        return self._columns[name][: self.count]

    def extend(self, count: int) -> int:
        """Add rows of zeros; returns the first of them."""
        first = self.count
        if first + count > self.capacity:
            self.reserve(count)
        self.count += count
        return first

    def reserve(self, count: int) -> None:
        """Make room for that many more rows."""
        need = self.count + count
        if need <= self.capacity:
            return
        self.capacity = max(need, self._larger())
        for name, old in self._columns.items():
            self._columns[name] = np.zeros((self.capacity, *old.shape[1:]), old.dtype)
            self._columns[name][: self.count] = old[: self.count]
        self.version += 1

    def _larger(self) -> int:
        """Zeros that nobody touched take no memory, so room is cheap, and moving rows is not."""
        size = sum(column.nbytes for column in self._columns.values())
        return self.capacity * 4 if size < LAVISH_BYTES else self.capacity * 3 // 2

    def keep(self, rows: Numbers) -> None:
        """Drop all rows but these, which are numbered anew in the given order."""
        for name, column in self._columns.items():
            kept = column[rows]
            column[: len(rows)] = kept
            column[len(rows) : self.count] = 0
            self._columns[name] = column
        self.count = len(rows)


class Keys:
    """Row numbers of pairs of numbers. At most half of the places are taken."""

    __slots__ = (
        "_bits", "_ended", "_highs", "_last", "_lows", "_places", "_spots", "_version", "room",
        "table",
    )  # fmt: skip

    def __init__(self, columns: dict[str, DTypeLike | tuple[DTypeLike, int]]) -> None:
        self.table = Table({"low": np.uint64, "high": np.uint64, **columns})
        self._clear(11)

    def _clear(self, bits: int) -> None:
        self._bits = bits
        self._places = np.full(1 << bits, -1, np.int32)
        self.table.version += 1
        self._look()

    def _look(self) -> None:
        """Take views of what single keys are looked up in."""
        self._spots, self._last = self._places.data, len(self._places) - 1
        self._lows, self._highs = self.table.view("low"), self.table.view("high")
        self._version = self.table.version
        self.room = min(self.table.capacity, len(self._places) // 2)  # keys before anything moves
        self._ended = 0  # the place where the latest search of a single key ended

    def __len__(self) -> int:
        return self.table.count

    def find(self, low: Words, high: Words) -> Numbers:
        """Rows of keys, -1 where a key is unknown."""
        return self._probe(low, high)[0]

    def _hash(self, low: Words, high: Words) -> Numbers:
        mixed = low * _A ^ high * _B
        mixed ^= mixed >> _HALF
        mixed *= _A
        mixed >>= np.uint64(64 - self._bits)
        return mixed.view(np.int64)

    def _probe(self, low: Words, high: Words) -> tuple[Numbers, Numbers]:
        """Rows, and the places where the search of each key ended."""
        lows, highs = self.table["low"], self.table["high"]
        places, last = self._places, len(self._places) - 1
        place = self._hash(low, high)
        found = places[place].astype(np.int64)
        # A row of -1 reads the last row of the columns: harmless, as it is masked.
        other = (found >= 0) & ((lows[found] != low) | (highs[found] != high))
        active = np.flatnonzero(other)
        while len(active):
            at = (place[active] + 1) & last
            row = places[at].astype(np.int64)
            place[active], found[active] = at, row
            differs = (lows[row] != low[active]) | (highs[row] != high[active])
            active = active[(row >= 0) & differs]
        return found, place

    def add(self, low: Words, high: Words) -> Numbers:
        """Rows of keys; unknown ones are given new rows."""
        self._reserve(len(low))
        found, place = self._probe(low, high)
        waiting = np.flatnonzero(found < 0)
        while len(waiting):
            # Everyone writes itself into the free place it found: the last one to do so wins it.
            at = place[waiting]
            self._places[at] = waiting
            won = self._places[at] == waiting
            winners, losers = waiting, waiting[~won]
            if len(losers):
                winners, at = waiting[won], at[won]
            first = self.table.extend(len(winners))
            rows = np.arange(first, first + len(winners))
            self.table["low"][first : self.table.count] = low[winners]
            self.table["high"][first : self.table.count] = high[winners]
            self._places[at] = rows
            found[winners] = rows
            waiting = losers
            if len(waiting):
                rest = self._probe(low[waiting], high[waiting])
                found[waiting], place[waiting] = rest
                waiting = waiting[rest[0] < 0]
        return found

    def find_one(self, low: int, high: int) -> int:
        """The row of one key, -1 if it is unknown."""
        if self._version != self.table.version:
            self._look()
        mixed = (low * _A_ONE ^ high * _B_ONE) & _WORD
        place = ((mixed ^ mixed >> 32) * _A_ONE & _WORD) >> (64 - self._bits)
        spots, lows, highs = self._spots, self._lows, self._highs
        row: int = spots[place]
        while row >= 0 and (lows[row] != low or highs[row] != high):
            place = (place + 1) & self._last
            row = spots[place]
        self._ended = place
        return row

    def put_one(self, low: int, high: int) -> int:
        """Give a key a row that `find_one` has just not found; there must be room."""
        row = self.table.extend(1)
        self._lows[row], self._highs[row] = low, high
        self._spots[self._ended] = row
        return row

    def add_one(self, low: int, high: int) -> int:
        """The row of one key, a new one if it is unknown; there must be room."""
        row = self.find_one(low, high)
        return row if row >= 0 else self.put_one(low, high)

    def reserve(self, count: int) -> None:
        """Make room for that many more keys, so that rows and places stay where they are."""
        self._reserve(count)
        self.table.reserve(count)
        if self._version != self.table.version:
            self._look()

    def _reserve(self, count: int) -> None:
        need = 2 * (self.table.count + count)
        if need > len(self._places):
            self._clear(need.bit_length())
            self._place_all()

    def _place_all(self) -> None:
        """Put every row into an empty set of places; all keys differ."""
        count, last = self.table.count, len(self._places) - 1
        place = self._hash(self.table.rows("low"), self.table.rows("high"))
        waiting = np.arange(count)
        while len(waiting):
            at = place[waiting]
            free = self._places[at] < 0
            self._places[at[free]] = waiting[free]
            settled = free & (self._places[at] == waiting)
            waiting = waiting[~settled]
            place[waiting] = (place[waiting] + 1) & last

    def keep(self, rows: Numbers) -> None:
        self.table.keep(rows)
        self._clear(max(11, (2 * len(rows)).bit_length()))
        self._place_all()

    def validate(self) -> None:
        known = self.find(self.table.rows("low"), self.table.rows("high"))
        assert np.array_equal(known, np.arange(self.table.count)), "a key is not found"
        assert (self._places >= 0).sum() == self.table.count
        assert 2 * self.table.count <= len(self._places)
