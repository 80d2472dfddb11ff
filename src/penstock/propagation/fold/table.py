"""Columns that grow together, keys that number their rows, and texts picked by number.

`Table` holds columns whose rows are added at the end and never move. `KeyTable` gives each distinct
pair of 64-bit numbers a row number, 0, 1, 2 … batch by batch, by open addressing in a
numpy array: a batch of lookups costs a few gathers, not a Python call per key. `Texts` keeps many
short texts in one array of bytes, without a Python object for each.

Twice as many places for millions of keys take a second to fill, which a caller who adds a handful
should not wait for. So they are filled in the course of the additions before they are needed: from
three eighths of the places on, every new key has a few old ones placed in the next set, and that
takes over when it has them all. Rows only ever come at the end, so nothing has to be done twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from penstock.model.columns import Binary

ROWS_MIN: Final = 1024
FEW_KEYS: Final = 1024  # who adds more at once may as well wait
STEP_KEYS: Final = 64  # new ones after which the next set of places is looked after
FILLED_PER_KEY: Final = 64  # empty places made, or …
PLACED_PER_KEY: Final = 8  # … rows placed for each: both are done before half the places are taken
LAVISH_BYTES: Final = 256 << 20  # a table below this grows fourfold, a larger one by half
HASH_A: Final = 0x9E3779B97F4A7C15
HASH_B: Final = 0xC2B2AE3D27D4EB4F
_WORD: Final = (1 << 64) - 1
_A: Final = np.uint64(HASH_A)
_B: Final = np.uint64(HASH_B)
_HALF: Final = np.uint64(32)

Numbers = NDArray[np.int64]
Words = NDArray[np.uint64]


def stable_order(keys: Numbers) -> Numbers:
    """Rows by ascending key, equal ones as they come; keys are not negative. One sort of packed
    integers, which numpy vectorises; a stable argsort takes five times as long."""
    bits = len(keys).bit_length()
    if len(keys) and int(keys.max()).bit_length() + bits > 63:
        return np.argsort(keys, kind="stable")
    packed = keys << bits
    packed |= np.arange(len(keys))
    packed.sort()
    packed &= (1 << bits) - 1
    return packed


def beginnings(groups: NDArray[Any]) -> NDArray[np.bool_]:
    """Where in a column a stretch of equal neighbours begins."""
    begins = np.ones(len(groups), np.bool_)
    begins[1:] = groups[1:] != groups[:-1]
    return begins


def places_within(groups: NDArray[Any]) -> tuple[Numbers, Numbers]:
    """Of each row: its place among its equal neighbours, and the row where those begin."""
    numbers = np.arange(len(groups))
    start = np.maximum.accumulate(np.where(beginnings(groups), numbers, 0))
    return numbers - start, start


class Table:
    """Columns by name. An array is valid until rows are added: ask again after that."""

    __slots__ = ("_columns", "capacity", "count")

    def __init__(self, columns: dict[str, DTypeLike | tuple[DTypeLike, int]]) -> None:
        self.count = 0
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

    def names(self) -> list[str]:
        return list(self._columns)

    def rows(self, name: str) -> NDArray[Any]:
        return self._columns[name][: self.count]

    def extend(self, count: int) -> int:
        """Add rows of zeros; returns the first of them."""
        self.reserve(count)
        first = self.count
        self.count += count
        return first

    def reserve(self, count: int) -> int:
        """Make room for that many more rows; says how many fit before arrays are replaced."""
        need = self.count + count
        if need > self.capacity:
            # Zeros that nobody touched take no memory: room is cheap, and moving rows is not.
            lavish = sum(column.nbytes for column in self._columns.values()) < LAVISH_BYTES
            self.capacity = max(need, self.capacity * 4 if lavish else self.capacity * 3 // 2)
            for name, old in self._columns.items():
                self._columns[name] = np.zeros((self.capacity, *old.shape[1:]), old.dtype)
                self._columns[name][: self.count] = old[: self.count]
        return self.capacity - self.count

    def keep(self, rows: Numbers) -> None:
        """Drop all rows but these, which are numbered anew in the given order."""
        for column in self._columns.values():
            column[: len(rows)] = column[rows]
            column[len(rows) : self.count] = 0
        self.count = len(rows)


def _hashed(low: Words, high: Words, bits: int) -> Numbers:
    mixed = low * _A ^ high * _B
    mixed ^= mixed >> _HALF
    mixed *= _A
    mixed >>= np.uint64(64 - bits)
    return mixed.view(np.int64)


def _place(table: Table, places: NDArray[np.int32], *, bits: int, first: int, end: int) -> None:
    """Put rows whose keys are not there yet into places; all keys differ."""
    last = len(places) - 1
    place = _hashed(table["low"][first:end], table["high"][first:end], bits)
    waiting = np.arange(end - first)
    while len(waiting):
        at, rows = place[waiting], waiting + first
        free = places[at] < 0
        places[at[free]] = rows[free]
        settled = free & (places[at] == rows)
        waiting = waiting[~settled]
        place[waiting] = (place[waiting] + 1) & last


class NextPlaces:
    """The set of places that comes next, on its way."""

    __slots__ = ("_filled", "bits", "placed", "places")

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.places = np.empty(1 << bits, np.int32)
        self._filled = 0  # so many places are known to be empty, or taken by a row
        self.placed = 0  # rows

    def advance(self, table: Table, keys: int) -> bool:
        """Do the work that so many new keys call for; True: it has every row."""
        if self._filled < len(self.places):
            end = self._filled + FILLED_PER_KEY * keys
            self.places[self._filled : end] = -1
            self._filled = end
            return False
        end = min(table.count, self.placed + PLACED_PER_KEY * keys)
        _place(table, self.places, bits=self.bits, first=self.placed, end=end)
        self.placed = end
        return end == table.count


class KeyTable:
    """Row numbers of pairs of numbers. At most half of the places are taken."""

    __slots__ = ("_next", "bits", "places", "table")

    def __init__(self, columns: dict[str, DTypeLike | tuple[DTypeLike, int]]) -> None:
        self.table = Table({"low": np.uint64, "high": np.uint64, **columns})
        self._clear(11)

    def _clear(self, bits: int) -> None:
        self._use(np.full(1 << bits, -1, np.int32), bits)

    def _use(self, places: NDArray[np.int32], bits: int) -> None:
        self.places, self.bits = places, bits
        self._next: NextPlaces | None = None

    @property
    def _crowded_at(self) -> int:
        """From so many keys on the next set of places is prepared."""
        return len(self.places) // 8 * 3

    def __len__(self) -> int:
        return self.table.count

    def find(self, low: Words, high: Words) -> Numbers:
        """Rows of keys, -1 where a key is unknown."""
        return self._probe(low, high)[0]

    def _probe(self, low: Words, high: Words) -> tuple[Numbers, Numbers]:
        """Rows, and the places where the search of each key ended."""
        lows, highs = self.table["low"], self.table["high"]
        places, last = self.places, len(self.places) - 1
        place = _hashed(low, high, self.bits)
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
        self._reserve(len(low))
        found, place = self._probe(low, high)
        waiting = np.flatnonzero(found < 0)
        while len(waiting):
            # Everyone writes itself into the free place it found: the last one to do so wins it.
            at = place[waiting]
            self.places[at] = waiting
            won = self.places[at] == waiting
            winners, losers = waiting, waiting[~won]
            if len(losers):
                winners, at = waiting[won], at[won]
            first = self.table.extend(len(winners))
            rows = np.arange(first, first + len(winners))
            self.table["low"][first : self.table.count] = low[winners]
            self.table["high"][first : self.table.count] = high[winners]
            self.places[at] = rows
            found[winners] = rows
            waiting = losers
            if len(waiting):
                rest = self._probe(low[waiting], high[waiting])
                found[waiting], place[waiting] = rest
                waiting = waiting[rest[0] < 0]
        return found

    def reserve(self, count: int) -> int:
        """Make room for that many more keys; says how many may come before this is asked again.
        Until then rows and places stay where they are."""
        self._reserve(count)
        self.table.reserve(count)
        calm = self._crowded_at if self._next is None else self.table.count + STEP_KEYS
        return min(self.table.capacity, len(self.places) // 2, calm) - self.table.count

    def _reserve(self, count: int) -> None:
        after = self.table.count + count
        if 2 * after > len(self.places):  # many at once
            self._clear((2 * after).bit_length())
            _place(self.table, self.places, bits=self.bits, first=0, end=self.table.count)
        elif after > self._crowded_at and (count <= FEW_KEYS or self._next is not None):
            if self._next is None:
                self._next = NextPlaces(self.bits + 1)
            if self._next.advance(self.table, max(count, STEP_KEYS)):
                self._use(self._next.places, self._next.bits)

    def keep(self, rows: Numbers) -> None:
        self.table.keep(rows)
        self._clear(max(11, (2 * len(rows)).bit_length()))
        _place(self.table, self.places, bits=self.bits, first=0, end=self.table.count)

    def validate(self) -> None:
        known = self.find(self.table.rows("low"), self.table.rows("high"))
        assert np.array_equal(known, np.arange(self.table.count)), "a key is not found"
        assert (self.places >= 0).sum() == self.table.count
        assert 2 * self.table.count <= len(self.places)
        assert self._next is None or self._next.placed <= self.table.count


class KeyView:
    """Looks up one key at a time in a `KeyTable`, until that changes otherwise."""

    __slots__ = ("_bits", "_ended", "_highs", "_last", "_lows", "_places", "_table")

    def __init__(self, keys: KeyTable) -> None:
        self._table, self._bits = keys.table, keys.bits
        self._places, self._last = keys.places.data, len(keys.places) - 1
        self._lows, self._highs = keys.table["low"].data, keys.table["high"].data
        self._ended = 0  # the place where the latest search ended

    def find(self, low: int, high: int) -> int:
        """The row of a key, -1 if it is unknown."""
        mixed = (low * HASH_A ^ high * HASH_B) & _WORD
        place = ((mixed ^ mixed >> 32) * HASH_A & _WORD) >> (64 - self._bits)
        places, lows, highs = self._places, self._lows, self._highs
        row: int = places[place]
        while row >= 0 and (lows[row] != low or highs[row] != high):
            place = (place + 1) & self._last
            row = places[place]
        self._ended = place
        return row

    def put(self, low: int, high: int) -> int:
        """Give a key a row that `find` has just not found; there must be room."""
        row = self._table.count
        self._table.count = row + 1
        self._lows[row], self._highs[row] = low, high
        self._places[self._ended] = row
        return row


def views(table: Table, *names: str) -> list[Any]:
    """Columns, row behind row, whose items are plain numbers; valid as the columns are."""
    return [table[name].reshape(-1).data for name in names]


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

    def extend(self, texts: Sequence[bytes]) -> None:
        self.append(b"".join(texts), np.fromiter(map(len, texts), np.int64, len(texts)))

    def add(self, text: bytes) -> None:
        """One more, without the columns that several take."""
        self._make_room(len(text))
        row = self.table.extend(1)
        self.table["start"][row], self.table["size"][row] = self._end, len(text)
        self._arena[self._end : self._end + len(text)] = np.frombuffer(text, np.uint8)
        self._end += len(text)

    def append(self, data: bytes, sizes: Numbers) -> None:
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
        starts, sizes = self.table["start"][numbers], self.table["size"][numbers]
        offsets = np.zeros(len(numbers) + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        at = np.repeat(starts - offsets[:-1], sizes)
        at += np.arange(len(at))
        return Binary(offsets.astype(np.int32), self._arena[at].data)

    def joined(self) -> NDArray[np.uint8]:
        return self._arena[: self._end]
