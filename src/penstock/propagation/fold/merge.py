"""Merge released deltas into the states of their vectors.

A vector's state is the fold of its deltas in the order of their stamps (`registers`). Registers are
maxima and operations are kept apart in order, so the state is a function of the *set* of deltas
that were merged: not of their arrival, nor of how they were cut into batches.

There is one exception, and it is a bound: a delta that is stamped before a vector's last fold of
operations is *late*. It counts as seen, but is refused, and a new delta has to say it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.model.columns import Binary
from penstock.model.delta import HAS_INDICES, Op, PriorityClass
from penstock.model.delta_batch import DeltaBatch
from penstock.propagation.fold.ledger import Ledger
from penstock.propagation.fold.order import ReleasedDeltas
from penstock.propagation.fold.registers import (
    DEAD,
    Operations,
    Registers,
    VectorOperation,
    ascending,
)
from penstock.propagation.fold.table import Numbers, Table
from penstock.propagation.options import PropagationOptions


@dataclass(frozen=True, slots=True)
class VectorStates:
    """One row per vector, ascending by `sequence`; a deleted vector has zeros and no metadata."""

    namespace: Binary
    vector_id: Binary
    values: NDArray[np.float32]  # (rows, dimensions)
    metadata: Binary  # msgpack, empty where there is none
    deleted: NDArray[np.bool_]
    revision: NDArray[np.uint64]  # deltas merged into the vector so far
    time: NDArray[np.int64]  # the newest hybrid time merged
    sequence: NDArray[np.uint64]  # the newest log sequence merged
    log_time_ms: NDArray[np.int64]  # of that
    lane: NDArray[np.uint8]  # the most urgent class among the deltas merged in this feed

    def __len__(self) -> int:
        return len(self.revision)


NO_LANE: Final = 255
Mask = NDArray[np.bool_]


class Merge:
    def __init__(self, ledger: Ledger, dimensions: int, options: PropagationOptions) -> None:
        self.ledger = ledger
        self.registers = Registers(dimensions)
        self.operations = Operations(self.registers, operations_max=options.operations_max)
        self.table = Table(
            {
                "revision": np.int64,
                "time": np.int64,
                "sequence": np.uint64,
                "log_time_ms": np.int64,
                "lane": np.uint8,
                "row": np.int64,  # scratch
            }
        )
        self.noting = True  # whether somebody will ask for the vectors that are touched
        self.touched: list[Numbers] = []  # vectors changed in this feed

    def merge(self, released: ReleasedDeltas) -> Mask:
        """Merge deltas in the order of release; says which were merged, and not late."""
        batch, vectors = released.batch, released.vectors
        self.reserve()
        chains = self.ledger.chains.table
        times = ascending(batch.time, released.chains, chains["time"])
        writers = chains["high"][released.chains].view(np.int64)
        merged = np.ones(len(batch), np.bool_)
        careful = self._careful(batch, vectors)
        if careful.any():
            for row in np.flatnonzero(careful).tolist():
                merged[row] = self._merge_one(batch, row, vectors, times, writers)
            plain = np.flatnonzero(~careful)
            self._apply(batch.take(plain), vectors[plain], times[plain], writers[plain])
        else:
            newest = bool((times > self.table["time"][vectors]).all())
            self._apply(batch, vectors, times, writers, newest=newest)
        if merged.all():
            self._count(batch, vectors, times)
        else:
            self._count(batch.take(merged), vectors[merged], times[merged])
        return merged

    def reserve(self) -> None:
        """Make room for all vectors that are known."""
        count = len(self.ledger.vectors)
        self.registers.reserve(count)
        if count > self.table.count:
            first = self.table.extend(count - self.table.count)
            self.table["lane"][first:count] = NO_LANE

    def _careful(self, batch: DeltaBatch, vectors: Numbers) -> Mask:
        """Rows of vectors that have been folded, or may be by this batch: they go one by one."""
        operations, op = self.operations, batch.op
        affine = (op == Op.SCALE) | (op == Op.OFFSET)
        special = set(operations.folds)
        if affine.any():
            changed, counts = np.unique(vectors[affine], return_counts=True)
            most = operations.operations_max
            special |= {
                vector
                for vector, more in zip(changed.tolist(), counts.tolist(), strict=True)
                if operations.count(vector) + more > most
            }
        if not special:
            return np.zeros(len(batch), np.bool_)
        return np.isin(vectors, np.array(sorted(special), np.int64))

    def _merge_one(
        self, batch: DeltaBatch, row: int, vectors: Numbers, times: Numbers, writers: Numbers
    ) -> bool:
        vector = int(vectors[row])
        horizon = self.operations.folds.get(vector)
        if horizon is not None:
            origin = self.ledger.origin_name(int(writers[row]))
            if (int(times[row]), origin) <= horizon:
                return False
        one = np.array([row])
        self._apply(batch.take(one), vectors[one], times[one], writers[one])
        self.operations.fold(vector, self.ledger.ranks)
        return True

    def _apply(
        self, batch: DeltaBatch, vectors: Numbers, times: Numbers, writers: Numbers, *,
        newest: bool = False,
    ) -> None:  # fmt: skip
        """Offer deltas to registers and operations."""
        ranks, op = self.ledger.ranks, batch.op
        affine = np.flatnonzero((op == Op.SCALE) | (op == Op.OFFSET))
        for row in affine.tolist():
            self._operate(batch, row, int(vectors[row]), int(times[row]), int(writers[row]))
        if len(batch) > 1 and not (times[1:] > times[:-1]).all():
            order = np.lexsort((ranks[writers], times))
            batch, vectors = batch.take(order), vectors[order]
            times, writers = times[order], writers[order]
        self.registers.set(batch, vectors, times, writers=writers, ranks=ranks, newest=newest)
        if self.operations.lists:
            for vector in self.operations.lists.keys() & set(vectors.tolist()):
                self.operations.prune(vector, ranks)

    def _operate(self, batch: DeltaBatch, row: int, vector: int, time: int, writer: int) -> None:
        offsets, indices, values = batch.components()
        some = slice(offsets[row], offsets[row + 1])
        indexed = batch.fixed["flags"][row] & HAS_INDICES
        operation = VectorOperation(
            time,
            self.ledger.origin_name(writer),
            writer,
            bool(batch.op[row] == Op.SCALE),
            indices[some].copy() if indexed else None,
            values[some].copy(),
        )
        self.operations.add(vector, operation)

    def _count(self, batch: DeltaBatch, vectors: Numbers, times: Numbers) -> None:
        if not len(batch):
            return
        table = self.table
        np.add.at(table["revision"], vectors, 1)
        np.maximum.at(table["time"], vectors, times)
        np.maximum.at(table["sequence"], vectors, batch.sequences)
        np.maximum.at(table["log_time_ms"], vectors, batch.log_times_ms)
        if not self.noting:
            return
        np.minimum.at(table["lane"], vectors, batch.priority)
        numbers = np.arange(len(vectors))
        table["row"][vectors] = numbers
        self.touched.append(vectors[table["row"][vectors] == numbers])

    # --- results ---

    def take_touched(self) -> VectorStates:
        """The vectors changed since the last call."""
        touched, self.touched = self.touched, []
        if len(touched) > 1:
            vectors = np.unique(np.concatenate(touched))
        else:
            vectors = touched[0] if touched else np.empty(0, np.int64)
        found = self.states(vectors)
        self.table["lane"][vectors] = NO_LANE
        return found

    def states(self, vectors: Numbers | None = None) -> VectorStates:
        """States by vector number, all of them by default."""
        self.reserve()
        table = self.table
        if vectors is None:
            vectors = np.flatnonzero(table.rows("revision"))
        vectors = vectors[np.argsort(table["sequence"][vectors])]
        deleted = self.registers.table["existence"][vectors] == DEAD
        lane = table["lane"][vectors]
        return VectorStates(
            namespace=self.ledger.namespaces.take(vectors),
            vector_id=self.ledger.vector_ids.take(vectors),
            values=self._values(vectors, deleted),
            metadata=self._metadata(vectors, deleted),
            deleted=deleted,
            revision=table["revision"][vectors].view(np.uint64),
            time=table["time"][vectors],
            sequence=table["sequence"][vectors],
            log_time_ms=table["log_time_ms"][vectors],
            lane=np.where(lane == NO_LANE, np.uint8(PriorityClass.NORMAL), lane),
        )

    def _metadata(self, vectors: Numbers, deleted: Mask) -> Binary:
        known = self.registers.metadata
        if not known:
            return Binary(np.zeros(len(vectors) + 1, np.int32), b"")
        pairs = zip(vectors.tolist(), deleted.tolist(), strict=True)
        return Binary.of([b"" if gone else known.get(vector, b"") for vector, gone in pairs])

    def _values(self, vectors: Numbers, deleted: Mask) -> NDArray[np.float32]:
        values: NDArray[np.float32] = self.registers.table["values"][vectors]
        values[deleted] = 0
        if self.operations.lists:
            for i, vector in enumerate(vectors.tolist()):
                if vector in self.operations.lists and not deleted[i]:
                    values[i] = self.operations.value(vector, self.ledger.ranks)
        return values

    def validate(self) -> None:
        assert self.table.count == self.registers.table.count
        self.operations.validate(self.ledger.ranks)
