"""Stamps of a few components: the SPARSE deltas of a vector since it was set whole.

A SPARSE has one stamp for all components that it names. So what a handful of them changed takes
little room: a row has their stamps, oldest first, and the names of each behind those of the one
before. A component that is named twice has the stamp of the later one, and one that is not named
has that of its vector.

Only what is newer than all that its vector was given may be added. A vector that is given anything
else, or more than a row takes, has a stamp for each component instead (`registers`).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.propagation.fold.table import (
    MEMORY,
    Numbers,
    Space,
    Table,
    places_within,
    spread,
    stable_order,
)

# Of a vector. A row then takes 316 bytes; a stamp for each of 128 components takes 1284.
WRITES_MAX: Final = 10
NAMES_MAX: Final = 100  # and of few components no more than four in five
COLUMNS: Final = ("count", "size", "times", "writers", "ends", "names")


class SparseStamps:
    def __init__(self, dimensions: int, space: Space = MEMORY) -> None:
        self.names_max = max(1, min(NAMES_MAX, dimensions * 4 // 5))
        self.writes_max = min(WRITES_MAX, self.names_max)
        each = self.writes_max
        self.table = Table(
            {
                "vector": np.int32,  # its owner plus one, 0 for a row that is free
                "count": np.uint8,  # writes
                "size": np.uint8,  # names
                "times": (np.int64, each),
                "writers": (np.uint16, each),
                "ends": (np.uint8, each),  # of the names of each
                "names": (np.uint16, self.names_max),
            },
            space=space,
            name="sparse",
        )
        self.free: list[int] = []

    def add(self, vectors: Numbers) -> Numbers:
        """Rows for vectors, each once, with nothing in them."""
        used = min(len(self.free), len(vectors))
        rows = np.empty(len(vectors), np.int64)
        if used:
            rows[:used] = self.free[-used:]
            del self.free[-used:]
        first = self.table.extend(len(vectors) - used)
        rows[used:] = np.arange(first, self.table.count)
        self.table["vector"][rows] = vectors + 1
        return rows

    def release(self, rows: Numbers) -> None:
        for name in ("vector", "count", "size"):
            self.table[name][rows] = 0
        self.free += rows.tolist()

    def places(
        self, vectors: Numbers, rows: Numbers, n: Numbers
    ) -> tuple[Numbers, Numbers, NDArray[np.bool_]]:
        """Of writes in the order of their stamps, to vectors that have rows (-1: none): which write
        of its vector each would be, how many names come before its own, and whether all writes of
        its vector fit."""
        order = stable_order(vectors)
        sizes, row = n[order], rows[order]
        nth, start = places_within(vectors[order])
        before = np.cumsum(sizes) - sizes
        before -= before[start]
        if self.table.count:
            known = row >= 0
            nth += np.where(known, self.table["count"][row], 0)
            before += np.where(known, self.table["size"][row], 0)
        fits = (nth < self.writes_max) & (before + sizes <= self.names_max)
        if not fits.all():  # then neither does what comes before it
            last = np.append(np.flatnonzero(np.diff(start)), len(start) - 1)
            fits = np.repeat(fits[last], np.diff(last, prepend=-1))
        found = np.empty_like(nth), np.empty_like(before), np.empty_like(fits)
        for column, ordered in zip(found, (nth, before, fits), strict=True):
            column[order] = ordered
        return found

    def append(
        self, rows: Numbers, nth: Numbers, before: Numbers, *, times: Numbers, writers: Numbers,
        indices: NDArray[np.uint16], n: Numbers,
    ) -> None:  # fmt: skip
        """Add writes at the places that were found for them."""
        table, slot, ends = self.table, rows * self.writes_max + nth, before + n
        table["times"].reshape(-1)[slot] = times
        table["writers"].reshape(-1)[slot] = writers
        table["ends"].reshape(-1)[slot] = ends
        # Of several writes of a vector the last stays.
        table["count"][rows], table["size"][rows] = nth + 1, ends
        place = spread(rows * self.names_max + before - (np.cumsum(n) - n), n)
        place += np.arange(len(indices))
        table["names"].reshape(-1)[place] = indices

    def replay(self, rows: Numbers, starts: Numbers, times: Numbers, writers: NDArray[Any]) -> None:
        """Put the stamps of rows into columns with one for each component, where those of each
        vector start."""
        told, size = self.columns(rows), self.table["size"][rows].astype(np.int64)
        some = np.arange(self.writes_max) < told["count"][:, None]
        n = told["ends"].astype(np.int64)
        n[:, 1:] -= told["ends"][:, :-1]
        n = n[some]
        named = np.arange(self.names_max) < size[:, None]
        place = np.repeat(starts, size)
        place += told["names"][named]
        # Where a component is named twice the last assignment stays.
        times[place] = np.repeat(told["times"][some], n)
        writers[place] = np.repeat(told["writers"][some], n)

    def replay_one(self, row: int, times: Numbers, writers: NDArray[Any]) -> None:
        """The same for one vector."""
        table, first = self.table, 0
        names, count = table["names"][row], int(table["count"][row])
        told = (table[name][row, :count].tolist() for name in ("times", "writers", "ends"))
        for time, writer, end in zip(*told, strict=True):
            some = names[first:end]
            times[some], writers[some] = time, writer
            first = end

    def columns(self, rows: Numbers) -> dict[str, NDArray[Any]]:
        """What rows say, and zeros where they say nothing."""
        found = {name: self.table[name][rows] for name in COLUMNS}
        idle = np.arange(self.writes_max) >= found["count"][:, None]
        for name in ("times", "writers", "ends"):
            found[name][idle] = 0
        found["names"][np.arange(self.names_max) >= found["size"][:, None]] = 0
        return found

    def validate(self) -> None:
        table = self.table
        free = table.rows("vector") == 0
        assert sorted(self.free) == np.flatnonzero(free).tolist(), "a row is lost"
        told = self.columns(np.flatnonzero(~free))
        assert (told["count"] > 0).all(), "a row says nothing"
        assert (told["ends"].max(axis=1, initial=0) == told["size"]).all(), "names are lost"
