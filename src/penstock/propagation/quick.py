"""Admit, order and merge a few deltas, one at a time.

The columns of `order` and `merge` cost about the same for one row as for a thousand. A node folds
what was just committed, which is a row or ten: here each is read from its payload with plain
numbers, and entered into the very same tables.

Only what is plainly in order is taken: a sound delta that is a duplicate, or whose causes were all
released, of a vector that nothing waits for. At the first row that is anything else this stops,
and the columns take the rest. As a fold does not depend on how a log is cut, nobody can tell which
of the two a delta went through.
"""

from __future__ import annotations

from typing import Final

from penstock.model.delta_batch import DeltaBatch
from penstock.model.delta_format import HAS_PARENT
from penstock.propagation.chains import PENDING, Ledger
from penstock.propagation.merge import Merge
from penstock.propagation.pending import Pending
from penstock.propagation.quick_merge import QuickMerge
from penstock.propagation.quick_row import Row

ROWS_MAX: Final = 64  # of a feed: with more the columns are quicker
CHAINS_FEW: Final = 8
NEVER: Final = 1 << 63


class Quick:
    def __init__(self, ledger: Ledger, pending: Pending, merge: Merge) -> None:
        self.ledger, self.pending = ledger, pending
        self._merge = QuickMerge(merge)
        self._row = Row(merge.registers.dimensions)
        self._version = self._origins = -1  # what the views were made of

    def take(
        self, batch: DeltaBatch, sequences: list[int], times_ms: list[int]
    ) -> tuple[int, list[int]]:
        """Take rows up to the first that is not plain; which that is, and which were released.

        The others are duplicates. Log times do not step back.
        """
        self._prepare(len(sequences))
        stop, released, overdue = 0, [], self._overdue()
        row, blob, dedup_ms = self._row, batch.blob, self.ledger.dedup_ms
        for number, start in enumerate(batch.starts.tolist()):
            row.time_ms = times_ms[number]
            if row.time_ms >= overdue or not row.read(blob, start):
                break
            entry = self.ledger.ids.add_one(row.low, row.high)
            state = self._id_states[entry]
            if state <= 0 or self._id_times[entry] < row.time_ms - dedup_ms:
                row.sequence = sequences[number]
                if state == PENDING or not (self._ready(row) and self._merge.merge(row)):
                    break
                self._release(row, entry)
                released.append(number)
            stop = number + 1
        if stop:
            self.ledger.time_ms = times_ms[stop - 1]
        self._merge.finish()
        return stop, released

    def _overdue(self) -> int:
        """The log time at which something that waits is to be turned out."""
        pending = self.pending
        if len(pending) > pending.pending_max:
            return 0
        eldest = pending.eldest()
        return NEVER if eldest is None else eldest.log_time_ms + pending.pending_ms

    def _prepare(self, count: int) -> None:
        """See that views are of today's arrays, and that there is room for all that may come."""
        ledger = self.ledger
        ids, vectors, chains = ledger.ids.table, ledger.vectors.table, ledger.chains.table
        vectors_after = vectors.count + count
        if (
            ids.version + vectors.version + chains.version + self._merge.version == self._version
            and ids.count + count <= ledger.ids.room
            and vectors_after <= ledger.vectors.room
            and vectors_after <= self._merge.room
            and chains.count + count <= ledger.chains.room
            and len(ledger.codes) == self._origins
        ):
            return
        for keys in (ledger.ids, ledger.vectors, ledger.chains):
            keys.reserve(count)
        self._merge.prepare(count)
        self._origins = len(ledger.codes)
        # Each only ever grows, so their sum tells.
        self._version = ids.version + vectors.version + chains.version + self._merge.version
        self._id_states, self._id_times = ids.view("vector"), ids.view("log_time_ms")
        self._waiting, self._latest = vectors.view("waiting"), vectors.view("chain")
        self._writers, self._next = chains.view("high"), chains.view("next")
        self._seen, self._times = chains.view("seen"), chains.view("time")
        self._heads = chains.view("head")

    def _ready(self, row: Row) -> bool:
        """Whether all causes were released, and nothing of the vector waits.

        Vectors and chains are entered on sight: they count from their first release on.
        """
        ledger = self.ledger
        vector = ledger.vectors.find_one(row.vector_low, row.vector_high)
        if vector < 0:
            vector = self._new_vector(row)
        code = ledger.codes.get(row.origin)
        if code is None or self._waiting[vector]:
            return False
        chain = self._latest[vector] - 1
        if chain < 0 or self._writers[chain] != code:
            chain = self._find_chain(vector, code)
            if chain < 0:
                chain = self._new_chain(vector, code)
        row.vector, row.chain, row.code = vector, chain, code
        if row.counter != self._seen[chain] + 1:
            return False
        if row.clocks > 1 and not self._causes_seen(row):
            return False
        last = self._times[chain]
        if row.time <= last:
            row.time = last + 1  # an origin's later delta stays the later one
        return not row.flags & HAS_PARENT or self._parent_released(row)

    def _new_vector(self, row: Row) -> int:
        ledger = self.ledger
        vector = ledger.vectors.put_one(row.vector_low, row.vector_high)
        namespace, vector_id = row.names()
        ledger.namespaces.add(namespace)
        ledger.vector_ids.add(vector_id)
        self._merge.reserve()
        return vector

    def _find_chain(self, vector: int, code: int) -> int:
        """A vector's chain, or -1. It has few of them: going through those is the quickest."""
        writers, following, chain = self._writers, self._next, self._latest[vector] - 1
        for _ in range(CHAINS_FEW):
            if chain < 0 or writers[chain] == code:
                return chain
            chain = following[chain] - 1
        return self.ledger.chains.find_one(vector, code)

    def _new_chain(self, vector: int, code: int) -> int:
        chain = self.ledger.chains.add_one(vector, code)
        self._next[chain], self._latest[vector] = self._latest[vector], chain + 1
        return chain

    def _causes_seen(self, row: Row) -> bool:
        codes, vector = self.ledger.codes, row.vector
        for origin, counter in row.causes():
            code = codes.get(origin)
            chain = -1 if code is None else self._find_chain(vector, code)
            if chain < 0 or self._seen[chain] < counter:
                return False
        return True

    def _parent_released(self, row: Row) -> bool:
        low, high, heads, at = row.parent_low, row.parent_high, self._heads, 2 * row.chain
        if heads[at] == low and heads[at + 1] == high:
            return True
        entry = self.ledger.ids.find_one(low, high)
        if entry < 0 or self._id_states[entry] != row.vector + 1:
            return False
        recent: bool = self._id_times[entry] >= row.time_ms - self.ledger.dedup_ms
        return recent

    def _release(self, row: Row, entry: int) -> None:
        chain, at = row.chain, 2 * row.chain
        self._seen[chain], self._times[chain] = row.counter, row.time
        self._heads[at], self._heads[at + 1] = row.low, row.high
        self._id_states[entry], self._id_times[entry] = row.vector + 1, row.time_ms
