"""What was released so far: vectors, origins, chains and ids, each a numbered table.

A *chain* is what one origin wrote to one vector; its deltas are counted 1, 2, 3 … and released in
that order, so `seen` alone says which of them were. The last one's id is the chain's *head*.

An id is in one of three states: released (its vector's number), PENDING, or VOID, which is as good
as unknown: its delta was quarantined, or lies ahead in the batch at hand. A released id counts as
known for `dedup_ms` of log time; ids past that are swept out now and then, which nobody notices.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.model.delta_batch import DeltaBatch, sixteens
from penstock.propagation.fold.table import KeyTable, Numbers, Texts

VOID: Final = 0
PENDING: Final = -1
ORIGINS_FEW: Final = 6
SWEEP_MIN: Final = 1 << 14  # ids below which sweeping is not worth it
SWEEP_SHARE: Final = 8  # of the ids, or of their time: looked at again after so much


class Ledger:
    """Everything that ordering knows of the past."""

    def __init__(self, dedup_ms: int, pending_ms: int) -> None:
        self.dedup_ms, self.pending_ms = dedup_ms, pending_ms
        # `waiting` counts a vector's pending deltas; `chain` is its latest chain plus one.
        self.vectors = KeyTable({"waiting": np.int32, "mark": np.bool_, "chain": np.int32})
        self.namespaces, self.vector_ids = Texts(), Texts()  # by vector
        self.origins = KeyTable({})
        self.codes: dict[bytes, int] = {}  # of origins, by name
        self._names: list[bytes] = []  # of origins
        self.ranks: Numbers = np.zeros(0, np.int64)  # of origins, by bytes
        # The key of a chain is (vector, origin); `next` is the vector's previous chain plus one.
        times = {"seen": np.int64, "time": np.int64, "first": np.int64}
        self.chains = KeyTable({**times, "head": (np.uint64, 2), "next": np.int32})
        # `vector`: the vector's number plus one when released, else VOID or PENDING.
        self.ids = KeyTable({"vector": np.int32, "log_time_ms": np.int64, "row": np.int64})
        self.time_ms = 0  # the latest log time looked at
        self._sweep_count = self._sweep_ms = 0  # ids are looked through at that count, or time

    def vectors_of(self, batch: DeltaBatch) -> Numbers:
        """Numbers of the rows' vectors; new ones are entered with their names."""
        before = len(self.vectors)
        found = self.vectors.add(batch.vector[:, 0], batch.vector[:, 1])
        fresh = len(self.vectors) - before
        if fresh:
            row = np.empty(fresh, np.int64)
            new = np.flatnonzero(found >= before)
            row[found[new] - before] = new
            namespaces, vector_ids = batch.take(row).name_bytes()
            self.namespaces.extend(namespaces)
            self.vector_ids.extend(vector_ids)
        return found

    def origins_of(self, origins: NDArray[np.uint64]) -> Numbers:
        low, high = np.ascontiguousarray(origins[:, 0]), np.ascontiguousarray(origins[:, 1])
        before = len(self.origins)
        found = np.empty(len(low), np.int64)
        rest = np.arange(len(low))
        # A batch has few origins: comparing with each is quicker than looking every row up.
        for _ in range(ORIGINS_FEW):
            if not len(rest):
                break
            one = rest[:1]
            same = (low[rest] == low[one]) & (high[rest] == high[one])
            found[rest[same]] = self.origins.add(low[one], high[one])[0]
            rest = rest[~same]
        found[rest] = self.origins.add(low[rest], high[rest])
        if len(self.origins) > before:
            self.rank_origins()
        return found

    def rank_origins(self) -> None:
        """Codes are given in order of sight; ties of time are settled by the origins' bytes."""
        names = self._names = self.origin_names()
        self.codes = {name: code for code, name in enumerate(names)}
        self.ranks = np.empty(len(names), np.int64)
        self.ranks[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))

    def origin_names(self) -> list[bytes]:
        table = self.origins.table
        return sixteens(np.stack([table.rows("low"), table.rows("high")], axis=1))

    def origin_name(self, code: int) -> bytes:
        return self._names[code]

    def chains_of(self, vectors: Numbers, origins: Numbers) -> Numbers:
        before = len(self.chains)
        # Most vectors have one writer: then their latest chain is the one, and no key is looked up.
        found = self.vectors.table["chain"][vectors].astype(np.int64) - 1
        other = (found < 0) | (self.chains.table["high"][found] != origins.view(np.uint64))
        if other.any():
            rest = np.flatnonzero(other)
            found[rest] = self.chains.add(
                vectors[rest].view(np.uint64), origins[rest].view(np.uint64)
            )
            self._link(before)
        return found

    def _link(self, before: int) -> None:
        """Put new chains in front of their vectors' lists, several of one vector one by one."""
        table, first = self.chains.table, self.vectors.table["chain"]
        waiting = np.arange(before, len(self.chains))
        while len(waiting):
            vector = table["low"][waiting].view(np.int64)
            old = first[vector]
            first[vector] = waiting + 1
            won = first[vector] == waiting + 1
            table["next"][waiting[won]] = old[won]
            waiting = waiting[~won]

    def heads_of(self, vector: int) -> list[int]:
        """A vector's chains, latest first."""
        found, table = [], self.chains.table
        chain = int(self.vectors.table["chain"][vector])
        while chain:
            found.append(chain - 1)
            chain = int(table["next"][chain - 1])
        return found

    def known(self, entries: Numbers, log_times_ms: Numbers) -> NDArray[np.bool_]:
        """Which entries (of `ids`; -1: none) were released and count as known at these times."""
        table = self.ids.table
        recent = table["log_time_ms"][entries] >= log_times_ms - self.dedup_ms
        known: NDArray[np.bool_] = (entries >= 0) & (table["vector"][entries] > 0) & recent
        return known

    def sweep(self) -> bool:
        """Forget ids that are past their time, once they are half of all; says whether it did.

        Looking takes time for every id there is, so it waits until a good part of them is new, or
        may have come of age.
        """
        if len(self.ids) < self._sweep_count and self.time_ms < self._sweep_ms:
            return False
        kept = np.flatnonzero(self.remembered())
        due = 2 * len(kept) <= len(self.ids)
        if due:
            self.ids.keep(kept)
        self._sweep_count = len(self.ids) + len(self.ids) // SWEEP_SHARE
        self._sweep_ms = self.time_ms + (self.dedup_ms + self.pending_ms) // SWEEP_SHARE
        return due

    def remembered(self) -> NDArray[np.bool_]:
        """Ids that may matter again: known to what comes, or to what waits since earlier."""
        table = self.ids.table
        states = table.rows("vector")
        recent = table.rows("log_time_ms") >= self.time_ms - self.dedup_ms - self.pending_ms
        remembered: NDArray[np.bool_] = ((states > 0) & recent) | (states == PENDING)
        return remembered

    def validate(self) -> None:
        for keys in (self.vectors, self.origins, self.chains, self.ids):
            keys.validate()
        assert len(self.namespaces) == len(self.vector_ids) == len(self.vectors)
        assert not self.vectors.table.rows("mark").any(), "a mark was left behind"
        linked = [chain for vector in range(len(self.vectors)) for chain in self.heads_of(vector)]
        assert sorted(linked) == list(range(len(self.chains))), "a chain is in no list, or in two"
