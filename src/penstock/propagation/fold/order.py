"""Admit and order a batch: which deltas are released, in which order, and which are not.

Most vectors of a batch get their deltas in order; for those every question is answered with whole
columns. A vector is *affected* if something waits for it already, or if any of its rows is not
plainly in order; all rows of an affected vector go one by one through the waitlist, and what
became of them is put back into columns here. As a delta's causes are all of its own vector, the two
never meet but in the order of release, which is that of the rows whose arrival released them.

A step may stop before the batch's end (see `ledger`): then nothing behind the stop has happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.model.columns import Binary
from penstock.model.delta import HAS_PARENT, NO_ID
from penstock.model.delta_batch import DeltaBatch, halves, sixteens
from penstock.propagation.fold.ledger import (
    MARKED,
    PENDING,
    WAITS,
    Ledger,
    Verdicts,
    WaitingDelta,
    Waitlist,
)
from penstock.propagation.fold.table import Numbers, Words, beginnings, places_within, stable_order

Sequences = NDArray[np.uint64]


@dataclass(slots=True)
class ReleasedDeltas:
    """Released deltas in order, with the numbers of their vectors and chains."""

    batch: DeltaBatch
    positions: Sequences  # the sequence whose arrival released each
    vectors: Numbers
    chains: Numbers

    def take(self, rows: NDArray[np.bool_]) -> ReleasedDeltas:
        return ReleasedDeltas(
            self.batch.take(rows), self.positions[rows], self.vectors[rows], self.chains[rows]
        )


@dataclass(slots=True)
class RefusedDeltas:
    """Deltas that can not be released, ascending by position."""

    batch: DeltaBatch
    positions: Sequences
    reasons: list[str]
    missing: list[bytes]

    @staticmethod
    def join(parts: Sequence[RefusedDeltas]) -> RefusedDeltas:
        """All of them in the order of their positions."""
        full = [part for part in parts if part.reasons]
        if len(full) <= 1:
            return full[0] if full else NOTHING
        positions = np.concatenate([np.empty(0, np.uint64), *(part.positions for part in full)])
        order = np.argsort(positions, kind="stable")
        reasons = [reason for part in full for reason in part.reasons]
        missing = [id_ for part in full for id_ in part.missing]
        return RefusedDeltas(
            DeltaBatch.concat([part.batch for part in full]).take(order),
            positions[order],
            [reasons[i] for i in order],
            [missing[i] for i in order],
        )


NOTHING: Final = RefusedDeltas(DeltaBatch.empty(), np.empty(0, np.uint64), [], [])


def released_of(verdicts: Verdicts, position: int) -> ReleasedDeltas:
    """Deltas that had waited, released at one position."""
    base, rows = with_kept(DeltaBatch.empty(), verdicts.released)
    positions = np.full(len(rows), position, np.uint64)
    return ReleasedDeltas(base.take(rows), positions, *_numbers(verdicts.released))


def refused_of(batch: DeltaBatch, verdicts: Verdicts, position: int | None = None) -> RefusedDeltas:
    """Positions are those of the rows that had them refused, or the one given."""
    refused = verdicts.refused
    if not refused:
        return NOTHING
    base, rows = with_kept(batch, [refusal.waiting for refusal in refused])
    if position is None:
        positions = batch.sequences[[refusal.at for refusal in refused]]
    else:
        positions = np.full(len(rows), position, np.uint64)
    reasons = [refusal.reason for refusal in refused]
    return RefusedDeltas(
        base.take(rows), positions, reasons, [refusal.missing for refusal in refused]
    )


def _numbers(some: list[WaitingDelta]) -> tuple[Numbers, Numbers]:
    return np.array([w.vector for w in some], np.int64), np.array([w.chain for w in some], np.int64)


def with_kept(batch: DeltaBatch, some: list[WaitingDelta]) -> tuple[DeltaBatch, Numbers]:
    """The batch, followed by what was kept from earlier ones, and where each delta is in that."""
    rows = np.array([w.row for w in some], np.int64)
    before = rows < 0
    if not before.any():
        return batch, rows
    kept = [w for w in some if w.row < 0]
    rows[before] = len(batch) + np.arange(len(kept))
    headers = Binary.of([w.headers for w in kept]) if any(w.headers for w in kept) else None
    earlier = DeltaBatch.of(
        [w.payload for w in kept],
        sequences=np.array([w.sequence for w in kept], np.uint64),
        log_times_ms=np.array([w.log_time_ms for w in kept], np.int64),
        headers=headers,
    )
    return DeltaBatch.concat([batch, earlier]), rows


Mask = NDArray[np.bool_]
Causes = tuple[Numbers, Numbers, Numbers]  # (row, chain, counter)


@dataclass(slots=True)
class FeedTally:
    """What a feed has come to so far."""

    read: int = 0
    duplicates: int = 0
    released: list[tuple[DeltaBatch, Sequences]] = field(default_factory=list)  # with positions
    refused: list[RefusedDeltas] = field(default_factory=list)

    def refuse(self, batch: DeltaBatch, positions: Sequences, reason: str) -> None:
        reasons, missing = [reason] * len(batch), [NO_ID] * len(batch)
        self.refused.append(RefusedDeltas(batch, positions, reasons, missing))


class IdSights:
    """The first row of a batch in which each id is seen. `before`: so many ids were entered before
    the batch. Most of its ids are new, and for those a column of their own is enough."""

    def __init__(self, entries: Numbers, before: int) -> None:
        self._before = before
        rows = np.arange(len(entries))
        new = entries - before
        old = np.flatnonzero(new < 0)
        fresh = rows if not len(old) else np.flatnonzero(new >= 0)
        self._rows = np.empty(int(new.max()) + 1 if len(fresh) else 0, np.int64)
        self._rows[new[fresh[::-1]]] = fresh[::-1]
        self.first = np.empty(len(entries), np.int64)
        self.first[fresh] = self._rows[new[fresh]]
        self._old, at = np.unique(entries[old], return_index=True)
        self._old_rows = old[at]
        if len(old):
            self.first[old] = self._old_rows[np.searchsorted(self._old, entries[old])]

    def rows_of(self, entries: Numbers) -> Numbers:
        """-1 where an id is not in the batch, or not entered at all."""
        found = np.full(len(entries), -1, np.int64)
        new = entries - self._before
        fresh = np.flatnonzero((new >= 0) & (new < len(self._rows)))
        found[fresh] = self._rows[new[fresh]]
        if len(self._old):
            at = np.minimum(np.searchsorted(self._old, entries), len(self._old) - 1)
            same = self._old[at] == entries
            found[same] = self._old_rows[at[same]]
        return found


@dataclass(slots=True)
class _Rows:
    """A batch's rows in terms of the ledger."""

    batch: DeltaBatch
    times_ms: Numbers  # log times, ascending
    vectors: Numbers
    chains: Numbers
    counters: Numbers
    low: Words  # the ids' halves
    high: Words
    entries: Numbers  # of the ids in the ledger
    known: Mask  # ids released before this batch
    sights: IdSights

    @property
    def first(self) -> Numbers:
        """The first row with the same id."""
        return self.sights.first


class DeltaOrder:
    def __init__(self, ledger: Ledger, waitlist: Waitlist) -> None:
        self.ledger, self.waitlist = ledger, waitlist

    def step(self, batch: DeltaBatch, tally: FeedTally) -> tuple[int, ReleasedDeltas]:
        """Order as many rows as there are until something has waited too long; how many these are,
        and what they released."""
        rows = self._look_up(batch)
        others = self._other_causes(rows)
        sorted_rows = stable_order(rows.chains)
        affected = self._affected(rows, others, sorted_rows)
        verdicts, stop = self._one_by_one(rows, others, affected)
        numbers = np.arange(len(batch))
        plain = ~affected & (numbers < stop)
        fresh = plain & ~rows.known & (rows.first == numbers)
        self._commit(rows, fresh, sorted_rows)
        tally.duplicates += int(plain.sum() - fresh.sum()) + verdicts.duplicates
        tally.refused.append(refused_of(batch, verdicts))
        released = self._released(rows, fresh, verdicts)
        self.waitlist.keep(batch)
        if stop:
            self.ledger.time_ms = int(batch.log_times_ms[stop - 1])
        return stop, released

    # --- looking up ---

    def _look_up(self, batch: DeltaBatch) -> _Rows:
        ledger, times_ms = self.ledger, batch.log_times_ms
        vectors = ledger.vectors_of(batch)
        chains = ledger.chains.of(vectors, ledger.origins_of(batch.origin))
        low, high = halves(batch.delta_id)
        before = len(ledger.ids)
        entries = ledger.ids.add(low, high)
        known = ledger.known(entries, times_ms)
        counters = batch.counter.astype(np.int64)
        sights = IdSights(entries, before)
        return _Rows(batch, times_ms, vectors, chains, counters, low, high, entries, known, sights)

    def _other_causes(self, rows: _Rows) -> Causes:
        """(row, chain, counter) of each clock entry that is not the delta's own."""
        batch = rows.batch
        if not len(batch) or batch.fixed["clocks"].max() <= 1:
            none = np.empty(0, np.int64)
            return none, none, none
        offsets, origins, counters = batch.clocks()
        other = np.ones(len(counters), np.bool_)
        other[offsets[:-1]] = False
        row = np.repeat(np.arange(len(batch)), np.diff(offsets))[other]
        origin = self.ledger.origins_of(origins[other])
        chain = self.ledger.chains.of(rows.vectors[row], origin)
        return row, chain, counters[other].astype(np.int64)

    # --- which vectors are affected ---

    def _affected(self, rows: _Rows, others: Causes, sorted_rows: Numbers) -> Mask:
        """Rows of vectors that cannot be ordered by columns."""
        ledger = self.ledger
        vectors = ledger.vectors.table
        numbers = np.arange(len(rows.batch))
        again = rows.first != numbers
        bad: Mask = (vectors["flags"][rows.vectors] & WAITS) > 0
        bad |= ledger.ids.table["vector"][rows.entries] == PENDING
        if again.any():
            bad |= self._odd_duplicates(rows, again)
        fresh = ~(again | rows.known)
        queue = sorted_rows if fresh.all() else sorted_rows[fresh[sorted_rows]]
        bad[queue] |= self._out_of_count(rows, queue)
        bad |= fresh & ~self._parents_fine(rows, queue)
        if len(others[0]):
            bad[others[0][~self._others_fine(rows, others, queue)]] = True  # a row has several
        if not bad.any():
            return bad
        flags = vectors["flags"]
        flags[rows.vectors[bad]] |= MARKED
        found = flags[rows.vectors]
        flags[rows.vectors] = found & ~np.uint8(MARKED)
        affected: Mask = (found & MARKED) > 0
        return affected

    def _odd_duplicates(self, rows: _Rows, again: Mask) -> Mask:
        """Repeated ids of different vectors, or so far apart that what came first is forgotten."""
        first = rows.first
        odd: Mask = again & (
            (rows.vectors[first] != rows.vectors)
            | (rows.times_ms[first] < rows.times_ms - self.ledger.dedup_ms)
            | (rows.known[first] & ~rows.known)
        )
        odd[first[odd]] = True
        return odd

    def _out_of_count(self, rows: _Rows, queue: Numbers) -> Mask:
        """In the order of `queue` (by chain, then arrival): rows that are not the next ones."""
        chain = rows.chains[queue]
        rank, _ = places_within(chain)
        seen = self.ledger.chains.table["seen"][chain]
        out: Mask = rows.counters[queue] != seen + 1 + rank
        return out

    def _parents_fine(self, rows: _Rows, queue: Numbers) -> Mask:
        """Rows whose parent was released when they arrive, if the rows before them were."""
        batch = rows.batch
        if not (batch.fixed["flags"] & HAS_PARENT).any():
            return np.ones(len(batch), np.bool_)
        chain = rows.chains[queue]
        begins = beginnings(chain)
        heads = self.ledger.chains.table["head"][chain[begins]]
        good = (batch.fixed["flags"][queue] & HAS_PARENT) == 0
        same = np.ones(len(queue), np.bool_)
        wanted = batch.parent[queue]
        for half, ids in enumerate((rows.low, rows.high)):
            previous = np.empty(len(queue), np.uint64)
            previous[1:] = ids[queue[:-1]]
            previous[begins] = heads[:, half]
            same &= wanted[:, half] == previous
        good |= same
        fine = np.zeros(len(batch), np.bool_)
        fine[queue] = good
        if not good.all():
            doubtful = queue[~good]
            fine[doubtful] = self._parents_known(rows, doubtful)
        return fine

    def _parents_known(self, rows: _Rows, some: Numbers) -> Mask:
        """Rows whose parent was released before, or stands earlier in the batch."""
        entry, known = self._parents_released(rows, some)
        row = rows.sights.rows_of(entry)
        here = (row >= 0) & (row < some)
        here &= rows.vectors[row] == rows.vectors[some]
        here &= rows.times_ms[row] >= rows.times_ms[some] - self.ledger.dedup_ms
        fine: Mask = known | here
        return fine

    def _parents_released(self, rows: _Rows, some: Numbers) -> tuple[Numbers, Mask]:
        """Where the ids of parents are entered, and which were released before this batch."""
        entry = self.ledger.ids.find(*halves(rows.batch.parent[some]))
        same = self.ledger.ids.table["vector"][entry] == rows.vectors[some] + 1
        return entry, same & self.ledger.known(entry, rows.times_ms[some])

    def _others_fine(self, rows: _Rows, others: Causes, queue: Numbers) -> Mask:
        """Causes of other chains that were seen, or stand earlier in the batch, in order."""
        row, chain, counter = others
        table = self.ledger.chains.table
        ahead = counter - table["seen"][chain] - 1
        fine: Mask = ahead < 0
        if fine.all() or not len(queue):
            return fine
        begin = np.searchsorted(rows.chains[queue], chain)
        at = np.minimum(begin + ahead, len(queue) - 1)
        cause = queue[np.maximum(at, 0)]
        fine |= (rows.chains[cause] == chain) & (rows.counters[cause] == counter) & (cause < row)
        return fine

    # --- the affected ones ---

    def _one_by_one(self, rows: _Rows, others: Causes, affected: Mask) -> tuple[Verdicts, int]:
        some = np.flatnonzero(affected)
        if not len(some) and not self.waitlist.arrivals:
            return Verdicts(), len(rows.batch)
        arrivals = self._waiting(rows, others, some)
        return self.waitlist.take(arrivals, rows.times_ms)

    def _waiting(self, rows: _Rows, others: Causes, some: Numbers) -> list[WaitingDelta]:
        batch, causes = rows.batch, dict[int, list[tuple[int, int]]]()
        if len(others[0]):
            mine = np.isin(others[0], some)
            for row, chain, counter in zip(*(o[mine].tolist() for o in others), strict=True):
                causes.setdefault(row, []).append((chain, counter))
        parents: list[bytes | None] = list(sixteens(batch.parent[some]))
        settled = self._parents_released(rows, some)[1]
        settled |= (batch.fixed["flags"][some] & HAS_PARENT) == 0
        for number in np.flatnonzero(settled).tolist():
            parents[number] = None
        numbers = some.tolist()
        columns = (
            numbers, rows.entries[some].tolist(), batch.sequences[some].tolist(),
            rows.times_ms[some].tolist(), sixteens(batch.delta_id[some]), parents,
            rows.vectors[some].tolist(), rows.chains[some].tolist(), rows.counters[some].tolist(),
            [causes.get(number, ()) for number in numbers],
        )  # fmt: skip
        return [WaitingDelta(*fields) for fields in zip(*columns, strict=True)]

    # --- writing down what happened ---

    def _commit(self, rows: _Rows, fresh: Mask, sorted_rows: Numbers) -> None:
        queue = sorted_rows if fresh.all() else sorted_rows[fresh[sorted_rows]]
        if not len(queue):
            return
        chain, chains, ids = rows.chains[queue], self.ledger.chains.table, self.ledger.ids.table
        last = np.ones(len(queue), np.bool_)
        last[:-1] = chain[1:] != chain[:-1]
        ends, chain = queue[last], chain[last]
        chains["seen"][chain] = rows.counters[ends]
        chains["head"][chain] = rows.batch.delta_id[ends]
        entries = rows.entries[queue]
        self.ledger.note_ids(entries)
        ids["vector"][entries] = rows.vectors[queue] + 1
        ids["log_time_ms"][entries] = rows.times_ms[queue]

    def _released(self, rows: _Rows, fresh: Mask, verdicts: Verdicts) -> ReleasedDeltas:
        batch = rows.batch
        if not verdicts.released:
            if fresh.all():
                return ReleasedDeltas(batch, batch.sequences, rows.vectors, rows.chains)
            plain = batch.take(fresh)
            return ReleasedDeltas(plain, plain.sequences, rows.vectors[fresh], rows.chains[fresh])
        own, single = np.flatnonzero(fresh), verdicts.released
        at = np.concatenate([own, np.array(verdicts.at, np.int64)])
        order = stable_order(at)
        base, others = with_kept(batch, single)
        vectors, chains = _numbers(single)
        return ReleasedDeltas(
            base.take(np.concatenate([own, others])[order]),
            batch.sequences[at[order]],
            np.concatenate([rows.vectors[own], vectors])[order],
            np.concatenate([rows.chains[own], chains])[order],
        )
