"""What one origin wrote to one vector: a chain, by its number.

Most vectors have one writer, so a vector names its first chain in a column of its own (`chain`, the
number plus one). Only the further ones are looked up by their keys. A vector's chains are a list,
the first one first.
"""

from __future__ import annotations

import numpy as np

from penstock.propagation.fold.table import KeyTable, Numbers, Space, Table


class Chains:
    """Numbers of pairs of a vector and an origin, and the lists of chains that vectors have."""

    def __init__(self, vectors: Table, space: Space) -> None:
        self._vectors = vectors
        # `low` is the vector, `high` the origin; `next` is another chain of the vector plus one.
        columns = {"low": np.int32, "high": np.uint32, "seen": np.int64, "time": np.int64}
        self.table = Table(
            {**columns, "head": (np.uint64, 2), "next": np.int32}, space=space, name="chains"
        )
        self.further = KeyTable({"chain": np.int32}, space=space, name="further")

    def __len__(self) -> int:
        return self.table.count

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.further.nbytes

    def of(self, vectors: Numbers, origins: Numbers) -> Numbers:
        """Numbers of chains; new ones are entered."""
        found = self._first_of(vectors)
        rest = np.flatnonzero((found < 0) | (self.table["high"][found] != origins))
        if len(rest):
            found[rest] = self._other(vectors[rest], origins[rest], found[rest])
        return found

    def fill(self, vectors: Numbers, origins: Numbers) -> None:
        """Enter chains in this order; there are none yet, and each comes once."""
        chains = self._enter(vectors, origins)
        first = self._vectors["chain"]
        first[vectors[::-1]] = chains[::-1] + 1
        rest = np.flatnonzero(first[vectors] != chains + 1)
        if len(rest):
            vectors, origins = vectors[rest], origins[rest]
            found = self.further.add(vectors.view(np.uint64), origins.view(np.uint64))
            self.further.table["chain"][found] = rest
            self._link(vectors, rest)

    def _first_of(self, vectors: Numbers) -> Numbers:
        first: Numbers = self._vectors["chain"][vectors].astype(np.int64)
        first -= 1
        return first

    def _other(self, vectors: Numbers, origins: Numbers, first: Numbers) -> Numbers:
        none = np.flatnonzero(first < 0)
        if len(none):
            self._begin(vectors[none], origins[none])
            first = self._first_of(vectors)
        rest = np.flatnonzero(self.table["high"][first] != origins)
        if len(rest):
            first[rest] = self._further(vectors[rest], origins[rest])
        return first

    def _begin(self, vectors: Numbers, origins: Numbers) -> None:
        """Give vectors their first chains: of several rows of a vector the last is the first's."""
        column = self._vectors["chain"]
        numbers = np.arange(1, len(vectors) + 1)
        column[vectors] = numbers
        won = column[vectors] == numbers
        column[vectors[won]] = self._enter(vectors[won], origins[won]) + 1

    def _further(self, vectors: Numbers, origins: Numbers) -> Numbers:
        before = len(self.further)
        found = self.further.add(vectors.view(np.uint64), origins.view(np.uint64))
        keys = self.further.table
        if keys.count > before:
            some = slice(before, keys.count)
            vector = keys["low"][some].view(np.int64)
            made = self._enter(vector, keys["high"][some].view(np.int64))
            keys["chain"][some] = made
            self._link(vector, made)
        chains: Numbers = keys["chain"][found].astype(np.int64)
        return chains

    def _enter(self, vectors: Numbers, origins: Numbers) -> Numbers:
        first = self.table.extend(len(vectors))
        self.table["low"][first : self.table.count] = vectors
        self.table["high"][first : self.table.count] = origins
        return np.arange(first, self.table.count)

    def _link(self, vectors: Numbers, chains: Numbers) -> None:
        """Put further chains behind their vectors' first ones, several of one vector one by one."""
        following = self.table["next"]
        while len(chains):
            first = self._first_of(vectors)
            old = following[first]
            following[first] = chains + 1
            won = following[first] == chains + 1
            following[chains[won]] = old[won]
            vectors, chains = vectors[~won], chains[~won]

    def find(self, vectors: Numbers, origins: Numbers) -> Numbers:
        """Numbers of chains, -1 where there is none."""
        found = self._first_of(vectors)
        rest = np.flatnonzero((found >= 0) & (self.table["high"][found] != origins))
        if len(rest):
            entry = self.further.find(vectors[rest].view(np.uint64), origins[rest].view(np.uint64))
            found[rest] = np.where(entry < 0, -1, self.further.table["chain"][entry])
        return found

    def list_of(self, vector: int) -> list[int]:
        """A vector's chains, the first one first."""
        found, following = [], self.table["next"]
        chain = int(self._vectors["chain"][vector])
        while chain:
            found.append(chain - 1)
            chain = int(following[chain - 1])
        return found

    def validate(self) -> None:
        self.further.validate()
        linked = [chain for v in range(self._vectors.count) for chain in self.list_of(v)]
        assert sorted(linked) == list(range(len(self))), "a chain is in no list, or in two"
        vectors = self.table.rows("low").astype(np.int64)
        known = self.find(vectors, self.table.rows("high").astype(np.int64))
        assert np.array_equal(known, np.arange(len(self))), "a chain is not found"
