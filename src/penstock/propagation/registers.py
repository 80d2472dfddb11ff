"""Last writer wins: components, existence and metadata of vectors, as columns.

Every delta has a *stamp*: its time and its origin, compared by time and then by the origin's bytes.
Times are made strictly ascending within a chain first (`ascending`), so no two deltas of a vector
have the same stamp. A register keeps the value with the greatest stamp that it was given: a
maximum, and so it does not matter in which order, how often or in which batches values come.

    component   set by CREATE and DENSE (all of them) and SPARSE (the named ones)
    existence   alive by CREATE and DENSE, dead by DELETE; alive on zeros if nobody said
    metadata    set by METADATA, and by CREATE and DENSE that carry some; cleared by DELETE, and by
                CREATE that carries none

A stamp of time 0 is that of nobody.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.model.delta import Op
from penstock.model.deltas import DeltaBatch
from penstock.propagation.table import Numbers, Table, stable_order

UNSAID: Final = 0
ALIVE: Final = 1
DEAD: Final = 2
CODES_SMALL: Final = 1 << 16  # origins that two bytes tell apart

Mask = NDArray[np.bool_]
Ranks = Numbers | None  # of origins; None: nothing is to be compared


class Registers:
    """One row per vector. `values`, `times` and `writers` have a column per component."""

    def __init__(self, dimensions: int) -> None:
        self.dimensions = dimensions
        self.table = Table(
            {
                "values": (np.float32, dimensions),
                "times": (np.int64, dimensions),
                "writers": (np.uint16, dimensions),
                "existence": np.uint8,
                "existence_time": np.int64,
                "existence_writer": np.uint32,
                "metadata_time": np.int64,
                "metadata_writer": np.uint32,
            }
        )
        self.metadata: dict[int, bytes] = {}  # by vector; none: no metadata

    def reserve(self, vectors: int) -> None:
        if vectors > self.table.count:
            self.table.extend(vectors - self.table.count)

    def widen(self, origins: int) -> None:
        """Make room for the codes of so many origins."""
        if origins > CODES_SMALL and self.table["writers"].dtype == np.uint16:
            self.table["writers"] = self.table["writers"].astype(np.uint32)

    def set(
        self, batch: DeltaBatch, vectors: Numbers, times: Numbers, *, writers: Numbers,
        ranks: Numbers, newest: bool = False,
    ) -> None:  # fmt: skip
        """Offer deltas, ascending by stamp, to the registers.

        `newest`: each has a greater time than anything that its vector was given before, so that
        no component has to be compared.
        """
        self.widen(len(ranks))
        op = batch.op
        for mask, offer in (
            (op <= Op.DENSE, self._set_rows),
            (op == Op.SPARSE, self._set_components),
        ):
            rivals = None if newest else ranks
            if mask.all():
                offer(batch, vectors, times, writers, rivals)
            elif mask.any():
                offer(batch.take(mask), vectors[mask], times[mask], writers[mask], rivals)
                newest = False  # than what has just been set
        existing = (op <= Op.DENSE) | (op == Op.DELETE)
        if existing.any():
            newer = existing & self._newer("existence", vectors, times, writers, ranks)
            state = np.where(op[newer] == Op.DELETE, DEAD, ALIVE)
            self._write("existence", vectors[newer], times[newer], writers[newer])
            self.table["existence"][vectors[newer]] = state
        self._set_metadata(batch, vectors, times, writers, ranks)

    def _set_rows(
        self, batch: DeltaBatch, vectors: Numbers, times: Numbers, writers: Numbers, ranks: Ranks
    ) -> None:
        """All components at once."""
        table = self.table
        values = batch.components()[2].reshape(-1, self.dimensions)
        time, writer = times[:, None], writers[:, None]
        if ranks is not None:
            before = table["times"][vectors]
            newer = time > before
            if not newer.all():
                old = table["writers"][vectors]
                newer |= (time == before) & (ranks[writer] > ranks[old])
                values = np.where(newer, values, table["values"][vectors])
                time, writer = np.where(newer, time, before), np.where(newer, writer, old)
        # Of two rows of a vector the last stays; where it is not the newer one, the old value is.
        table["times"][vectors] = time
        table["writers"][vectors] = writer
        table["values"][vectors] = values

    def _set_components(
        self, batch: DeltaBatch, vectors: Numbers, times: Numbers, writers: Numbers, ranks: Ranks
    ) -> None:
        _, indices, values = batch.components()
        n = batch.n.astype(np.int64)
        place = np.repeat(vectors * self.dimensions, n)
        place += indices
        time, writer = np.repeat(times, n), np.repeat(writers, n)
        old_times = self.table["times"].reshape(-1)
        old_writers = self.table["writers"].reshape(-1)
        if ranks is not None:
            before = old_times[place]
            newer = time > before
            if not newer.all():
                tied = np.flatnonzero(time == before)
                newer[tied] = ranks[writer[tied]] > ranks[old_writers[place[tied]]]
                place, time, writer = place[newer], time[newer], writer[newer]
                values = values[newer]
        # Where a component is named twice the last assignment stays: that of the greater stamp.
        old_times[place] = time
        old_writers[place] = writer
        self.table["values"].reshape(-1)[place] = values

    def _set_metadata(
        self, batch: DeltaBatch, vectors: Numbers, times: Numbers, writers: Numbers, ranks: Numbers
    ) -> None:
        op, size = batch.op, batch.fixed["metadata_bytes"]
        saying = (op == Op.CREATE) | (op == Op.DELETE) | (size > 0)
        if not saying.any():
            return
        newer = saying & self._newer("metadata", vectors, times, writers, ranks)
        self._write("metadata", vectors[newer], times[newer], writers[newer])
        rows = np.flatnonzero(newer)
        for vector, data in zip(vectors[rows].tolist(), batch.metadata_of(rows), strict=True):
            if data:
                self.metadata[vector] = data
            else:
                self.metadata.pop(vector, None)

    def _newer(
        self, name: str, vectors: Numbers, times: Numbers, writers: Numbers, ranks: Numbers
    ) -> Mask:
        before = self.table[f"{name}_time"][vectors]
        newer = times > before
        tied = np.flatnonzero(times == before)
        if len(tied):
            old = self.table[f"{name}_writer"][vectors[tied]]
            newer[tied] = ranks[writers[tied]] > ranks[old]
        return newer

    def _write(self, name: str, vectors: Numbers, times: Numbers, writers: Numbers) -> None:
        self.table[f"{name}_time"][vectors] = times
        self.table[f"{name}_writer"][vectors] = writers


def ascending(times: Numbers, chains: Numbers, last: Numbers) -> Numbers:
    """Times made strictly ascending within each chain, and after what `last` has of it.

    Rows are in the order of release, so those of a chain are in the order of its counters. A time
    that does not exceed the one before it (a clock stepped back, or two deltas in one tick) becomes
    that one plus one: what an origin did later stays later. `last` is brought up to date.
    """
    if (times[1:] > times[:-1]).all() and (times > last[chains]).all():
        last[chains] = times
        return times
    order = stable_order(chains)
    chain, time = chains[order], times[order]
    begins = np.ones(len(order), np.bool_)
    begins[1:] = chain[1:] != chain[:-1]
    before = np.empty_like(time)
    before[1:] = time[:-1]
    before[begins] = last[chain[begins]]
    if (time <= before).any():
        time = _lifted(time, before, begins)
    ends = np.ones(len(order), np.bool_)
    ends[:-1] = begins[1:]
    last[chain[ends]] = time[ends]
    found = np.empty_like(times)
    found[order] = time
    return found


def _lifted(time: Numbers, before: Numbers, begins: Mask) -> Numbers:
    """One by one: rare, and each depends on the one before it."""
    lifted, least = time.tolist(), 0
    starts, firsts = begins.tolist(), before.tolist()
    for i, own in enumerate(lifted):
        least = firsts[i] + 1 if starts[i] else least + 1
        least = lifted[i] = max(own, least)
    return np.array(lifted, np.int64)
