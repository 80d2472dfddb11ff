"""Columns that grow, keys that are numbered in the order they came, and bytes by number.

The kernels work on whole columns. A `Table` holds named numpy columns of one length, with room to
grow. A `KeyTable` numbers pairs of 64-bit words 0, 1, 2 … batch by batch, by open addressing in a
numpy array: a batch of lookups costs a few gathers, not a Python call per key. `Texts` keeps many
short texts in one array of bytes, without a Python object for each.

Where the columns lie is for a `Space` to say: in the memory of this process (`MEMORY`), or wherever
whoever makes the tables wants them. A space is told the name of each column and gives an array. One
that has a column of that name already, because another process left it there, gives that: then
`Table.count` and its like have to be set to what they were.

Twice as many places for millions of keys take a second to fill, which a caller who adds a handful
should not wait for. So they are filled in the course of the additions before they are needed: from
three quarters of what they may hold on, every new key has a few old ones placed in the next set,
and that takes over when it has them all. Rows only ever come at the end, so nothing has to be done
twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from penstock.model.columns import Binary, Buffer

ROWS_MIN: Final = 1024
NAMESPACES_SMALL: Final = 1 << 16  # that two bytes tell apart
FEW_KEYS: Final = 1024  # who adds more at once may as well wait
STEP_KEYS: Final = 64  # new ones after which the next set of places is looked after
FILLED_PER_KEY: Final = 64  # empty places made, or …
PLACED_PER_KEY: Final = 8  # … rows placed for each: both are done before the places are crowded
FILL: Final = (5, 8)  # of the places, at most this part is taken
LAVISH_BYTES: Final = 256 << 20  # a table below this grows fourfold, a larger one by half
BITS_MIN: Final = 11
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


def distinct(numbers: NDArray[Any]) -> NDArray[Any]:
    """Each number once, ascending; by a sort, which numpy vectorises."""
    ranked = np.sort(numbers)
    return ranked[beginnings(ranked)]


def spread(column: NDArray[Any], counts: Numbers) -> NDArray[Any]:
    """Each row as many times as its count says."""
    if len(counts) and (counts == counts[0]).all():
        wide = np.broadcast_to(column[:, None], (len(column), int(counts[0])))
        return np.array(wide).reshape(-1)
    return np.repeat(column, counts)


def places_within(groups: NDArray[Any]) -> tuple[Numbers, Numbers]:
    """Of each row: its place among its equal neighbours, and the row where those begin."""
    numbers = np.arange(len(groups))
    start = np.maximum.accumulate(np.where(beginnings(groups), numbers, 0))
    return numbers - start, start


Kind = DTypeLike | tuple[DTypeLike, int]


class Space(Protocol):
    """Where columns lie. Arrays begin as zeros."""

    def grown(
        self,
        name: str,
        old: NDArray[Any] | None,
        shape: tuple[int, ...],
        kind: DTypeLike,
        *,
        rows: int,
    ) -> NDArray[Any]:
        """A longer array of that name, with the first rows of the old one in front. It may be
        longer than asked for. With no old one, what the space has under that name."""

    def fresh(self, name: str, shape: tuple[int, ...], kind: DTypeLike) -> NDArray[Any]:
        """An array of that name with nothing of the old one in it."""

    def holds(self, name: str) -> bool:
        """Whether another process left an array of that name."""

    def more(self, rows: int, need: int, row_bytes: int) -> int:
        """How many rows to make room for when `need` do not fit into `rows`."""


class ProcessMemory:
    """The memory of this process."""

    def grown(
        self, name: str, old: NDArray[Any] | None, shape: tuple[int, ...], kind: DTypeLike, *,
        rows: int,
    ) -> NDArray[Any]:  # fmt: skip
        made = np.zeros(shape, kind)
        if old is not None:
            made[:rows] = old[:rows]
        return made

    def fresh(self, name: str, shape: tuple[int, ...], kind: DTypeLike) -> NDArray[Any]:
        return np.zeros(shape, kind)

    def holds(self, name: str) -> bool:
        return False

    def more(self, rows: int, need: int, row_bytes: int) -> int:
        # Zeros that nobody touched take no memory: room is cheap, and moving rows is not.
        return max(need, rows * 4 if rows * row_bytes < LAVISH_BYTES else rows * 3 // 2)


MEMORY: Final = ProcessMemory()


class Table:
    """Columns by name. An array is valid until rows are added: ask again after that."""

    __slots__ = ("_columns", "_name", "_row_bytes", "_space", "capacity", "count")

    def __init__(self, columns: dict[str, Kind], *, space: Space = MEMORY, name: str = "") -> None:
        self.count = 0
        self._space, self._name, self._row_bytes = space, name, 0
        self._columns: dict[str, NDArray[Any]] = {}
        for column, kind in columns.items():
            dtype, *width = kind if isinstance(kind, tuple) else (kind,)
            shape = (ROWS_MIN, *width)
            made = space.grown(f"{name}.{column}", None, shape, dtype, rows=0)
            self._columns[column] = made
            self._row_bytes += made[:1].nbytes
        self.capacity = min(len(column) for column in self._columns.values())

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The column with room beyond its rows: for picking and setting rows by number."""
        return self._columns[name]

    def names(self) -> list[str]:
        return list(self._columns)

    @property
    def nbytes(self) -> int:
        """Of the rows; the room beyond them was never touched."""
        return self.count * self._row_bytes

    def rows(self, name: str) -> NDArray[Any]:
        return self._columns[name][: self.count]

    def widen(self, name: str, kind: DTypeLike) -> None:
        """Give a column's numbers more bytes."""
        old = self._columns[name]
        made = self._space.fresh(f"{self._name}.{name}", old.shape, kind)
        made[: self.count] = old[: self.count]
        self._row_bytes += made[:1].nbytes - old[:1].nbytes
        self._columns[name] = made

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
            rows = self._space.more(self.capacity, need, self._row_bytes)
            for name, old in self._columns.items():
                self._columns[name] = self._space.grown(
                    f"{self._name}.{name}", old, (rows, *old.shape[1:]), old.dtype, rows=self.count
                )
            self.capacity = min(len(column) for column in self._columns.values())
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


def _bits_for(keys: int) -> int:
    return max(BITS_MIN, (keys * FILL[1] // FILL[0]).bit_length())


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
    """Row numbers of pairs of numbers."""

    __slots__ = ("_name", "_next", "_space", "bits", "places", "table")

    def __init__(self, columns: dict[str, Kind], *, space: Space = MEMORY, name: str = "") -> None:
        self._space, self._name = space, name
        self.table = Table({"low": np.uint64, "high": np.uint64, **columns}, space=space, name=name)
        if not space.holds(f"{name}.places"):
            self._clear(BITS_MIN)

    def _clear(self, bits: int) -> None:
        self.places = self._space.fresh(f"{self._name}.places", (1 << bits,), np.int32)
        self.places[:] = -1
        self.bits = bits
        self._next: NextPlaces | None = None

    def _use(self, found: NextPlaces) -> None:
        self.places, self.bits, self._next = found.places, found.bits, None
        if not isinstance(self._space, ProcessMemory):
            self.places = self._space.fresh(f"{self._name}.places", found.places.shape, np.int32)
            self.places[:] = found.places

    def attach(self, count: int, bits: int) -> None:
        """Take rows and places as another process left them in the space."""
        self.table.count, self.bits, self._next = count, bits, None
        self.places = self._space.grown(
            f"{self._name}.places", None, (1 << bits,), np.int32, rows=0
        )[: 1 << bits]

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.places.nbytes

    @property
    def _room(self) -> int:
        """Keys that the places may hold."""
        return len(self.places) // FILL[1] * FILL[0]

    @property
    def _crowded_at(self) -> int:
        """From so many keys on the next set of places is prepared."""
        return self._room // 4 * 3

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
        return min(self.table.capacity, self._room, calm) - self.table.count

    def _reserve(self, count: int) -> None:
        after = self.table.count + count
        if after > self._room:  # many at once
            self._clear(_bits_for(after))
            _place(self.table, self.places, bits=self.bits, first=0, end=self.table.count)
        elif after > self._crowded_at and (count <= FEW_KEYS or self._next is not None):
            if self._next is None:
                self._next = NextPlaces(self.bits + 1)
            if self._next.advance(self.table, max(count, STEP_KEYS)):
                self._use(self._next)

    def keep(self, rows: Numbers) -> None:
        self.table.keep(rows)
        self._clear(_bits_for(len(rows)))
        _place(self.table, self.places, bits=self.bits, first=0, end=self.table.count)

    def validate(self) -> None:
        known = self.find(self.table.rows("low"), self.table.rows("high"))
        assert np.array_equal(known, np.arange(self.table.count)), "a key is not found"
        assert (self.places >= 0).sum() == self.table.count
        assert self.table.count <= self._room
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


class Arena:
    """Bytes, one behind the other, with room to grow. What is given up stays until somebody who
    knows what is still wanted packs the rest."""

    __slots__ = ("_data", "_name", "_space", "_view", "end")

    def __init__(self, *, space: Space = MEMORY, name: str = "") -> None:
        self._space, self._name = space, f"{name}.bytes"
        self._look(space.grown(self._name, None, (BYTES_MIN,), np.uint8, rows=0))
        self.end = 0

    def _look(self, data: NDArray[np.uint8]) -> None:
        self._data, self._view = data, data.data

    def append(self, data: Buffer) -> int:
        """Where the bytes begin."""
        start, end = self.end, self.end + len(data)
        if end > len(self._data):
            room = self._space.more(len(self._data), end, 1)
            grown = self._space.grown(self._name, self._data, (room,), np.uint8, rows=start)
            self._look(grown)
        self._view[start:end] = data
        self.end = end
        return start

    def get(self, start: int, size: int) -> bytes:
        return self._data[start : start + size].tobytes()

    def take(self, starts: Numbers, sizes: NDArray[Any]) -> Binary:
        offsets = np.zeros(len(starts) + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        at = np.repeat(starts - offsets[:-1], sizes)
        at += np.arange(len(at))
        return Binary(offsets.astype(np.int32), self._data[at].data)

    def joined(self) -> NDArray[np.uint8]:
        return self._data[: self.end]

    def replace(self, data: Buffer) -> None:
        self._look(self._space.fresh(self._name, (max(BYTES_MIN, len(data)),), np.uint8))
        self.end = 0
        self.append(data)


class Texts:
    """Append-only: text *i* is `size[i]` bytes of the arena, from `start[i]` on."""

    __slots__ = ("arena", "table")

    def __init__(self, *, space: Space = MEMORY, name: str = "") -> None:
        self.arena = Arena(space=space, name=name)
        self.table = Table({"start": np.int64, "size": np.uint16}, space=space, name=name)

    def __len__(self) -> int:
        return self.table.count

    def __getitem__(self, number: int) -> bytes:
        return self.arena.get(int(self.table["start"][number]), int(self.table["size"][number]))

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.arena.end

    def extend(self, texts: Sequence[bytes]) -> None:
        self.append(b"".join(texts), np.fromiter(map(len, texts), np.int64, len(texts)))

    def add(self, text: bytes) -> None:
        """One more, without the columns that several take."""
        row = self.table.extend(1)
        self.table["start"][row], self.table["size"][row] = self.arena.append(text), len(text)

    def append(self, data: Buffer, sizes: Numbers) -> None:
        start = self.arena.append(data)
        first = self.table.extend(len(sizes))
        self.table["size"][first : self.table.count] = sizes
        self.table["start"][first : self.table.count] = start + np.cumsum(sizes) - sizes

    def attach(self, count: int, end: int) -> None:
        self.table.count, self.arena.end = count, end

    def take(self, numbers: Numbers) -> Binary:
        return self.arena.take(self.table["start"][numbers], self.table["size"][numbers])


class VectorNames:
    """A namespace and an id for each vector. Namespaces are few, and each is kept once."""

    __slots__ = ("_codes", "namespaces", "table", "vector_ids")

    def __init__(self, *, space: Space = MEMORY) -> None:
        self.namespaces = Texts(space=space, name="namespaces")
        self.vector_ids = Texts(space=space, name="vector_ids")
        self.table = Table({"namespace": np.uint16}, space=space, name="names")
        self._codes: dict[bytes, int] = {}

    def __len__(self) -> int:
        return self.table.count

    @property
    def nbytes(self) -> int:
        return self.namespaces.nbytes + self.vector_ids.nbytes + self.table.nbytes

    def extend(self, namespaces: Sequence[bytes], vector_ids: Sequence[bytes]) -> None:
        for namespace in dict.fromkeys(namespaces):
            self._code(namespace)
        codes = map(self._codes.__getitem__, namespaces)
        first = self.table.extend(len(namespaces))
        self.table["namespace"][first : self.table.count] = np.fromiter(
            codes, np.int64, len(namespaces)
        )
        self.vector_ids.extend(vector_ids)

    def add(self, namespace: bytes, vector_id: bytes) -> None:
        code = self._code(namespace)
        row = self.table.extend(1)
        self.table["namespace"][row] = code
        self.vector_ids.add(vector_id)

    def _code(self, namespace: bytes) -> int:
        code = self._codes.get(namespace)
        if code is None:
            code = self._codes[namespace] = len(self._codes)
            self.namespaces.add(namespace)
            if code == NAMESPACES_SMALL:
                self.table.widen("namespace", np.uint32)
        return code

    def namespaces_of(self, vectors: Numbers) -> Binary:
        if len(self._codes) == 1:  # as is most often so
            (only,) = self._codes
            count, size = len(vectors), len(only)
            return Binary(np.arange(count + 1, dtype=np.int32) * np.int32(size), only * count)
        return self.namespaces.take(self.table["namespace"][vectors])

    def ids_of(self, vectors: Numbers) -> Binary:
        return self.vector_ids.take(vectors)

    def attach(self, facts: dict[str, Any]) -> None:
        self.table.count = facts["vectors"]
        self.vector_ids.attach(facts["vectors"], facts["vector_ids_end"])
        self.namespaces.attach(facts["namespaces"], facts["namespaces_end"])
        self._codes = {self.namespaces[code]: code for code in range(len(self.namespaces))}

    def facts(self) -> dict[str, Any]:
        return {
            "vectors": self.table.count,
            "vector_ids_end": self.vector_ids.arena.end,
            "namespaces": len(self.namespaces),
            "namespaces_end": self.namespaces.arena.end,
        }
