"""Released deltas with their places in the order of release."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.model.columns import Binary
from penstock.model.deltas import FIXED, DeltaBatch, gather
from penstock.propagation.partition import Outcome

Sequences = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Merged:
    """Of rows that may each stand for several deltas, what they stand for."""

    firsts: Sequences  # the position of the first of them
    folded: NDArray[np.int64]  # how many there are besides the row itself

    def take(self, rows: NDArray[Any]) -> Merged:
        return Merged(self.firsts[rows], self.folded[rows])

    @staticmethod
    def concat(parts: Sequence[Merged]) -> Merged:
        return Merged(
            np.concatenate([part.firsts for part in parts]),
            np.concatenate([part.folded for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """What a subscriber is sent: deltas, and for each its position and its ordinal."""

    batch: DeltaBatch
    positions: Sequences  # the log sequence whose arrival released each
    ordinals: Sequences  # 1, 2, 3 … over all releases of the partition
    merged: Merged | None = None  # None: each stands for itself alone

    @staticmethod
    def of(outcome: Outcome) -> Rows:
        return Rows(outcome.released, outcome.positions, outcome.ordinals)

    @staticmethod
    def empty() -> Rows:
        none = np.empty(0, np.uint64)
        return Rows(DeltaBatch.empty(), none, none)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def folded(self) -> int:
        """Deltas that were merged into these."""
        return 0 if self.merged is None else int(self.merged.folded.sum())

    @property
    def first_position(self) -> int:
        """Of the first delta that they stand for; there must be one."""
        return int(self.positions[0] if self.merged is None else self.merged.firsts.min())

    def spans(self) -> Merged:
        """What each row stands for, if only for itself."""
        return self.merged or Merged(self.positions, np.zeros(len(self), np.int64))

    def take(self, rows: NDArray[Any]) -> Rows:
        """These rows (numbers or a mask) in that order; payloads are not copied."""
        merged = None if self.merged is None else self.merged.take(rows)
        return Rows(self.batch.take(rows), self.positions[rows], self.ordinals[rows], merged)

    def cut(self, first: int, end: int) -> Rows:
        """Rows first … end - 1."""
        if first <= 0 and end >= len(self):
            return self
        return self.take(np.arange(max(first, 0), min(end, len(self))))

    def packed(self) -> Rows:
        """The same, holding on to no buffer that is much larger than it needs."""
        batch = self.batch
        if len(batch.blob) <= 2 * int(batch.sizes.sum()):
            return self
        payloads, headers = batch.payloads, batch.headers
        if headers is not None:
            headers = Binary.of(headers.tolist())
        alone = DeltaBatch(
            bytes(payloads.blob), payloads.offsets[:-1].astype(np.int64), batch.fixed.copy(),
            batch.sequences.copy(), batch.log_times_ms.copy(), headers,
        )  # fmt: skip
        return Rows(alone, self.positions.copy(), self.ordinals.copy(), self.merged)

    @staticmethod
    def gathered(parts: Sequence[tuple[Rows, NDArray[np.int64]]]) -> Rows:
        """Rows by their numbers out of several; many small parts are as cheap as a large one."""
        if len(parts) == 1:
            rows, numbers = parts[0]
            return rows if len(numbers) == len(rows) else rows.take(numbers)
        pieces: list[memoryview] = []
        for rows, numbers in parts:
            view, batch = memoryview(rows.batch.blob), rows.batch
            places, sizes = batch.starts[numbers].tolist(), batch.sizes[numbers].tolist()
            pieces += [view[a : a + n] for a, n in zip(places, sizes, strict=True)]
        headers = None
        if any(rows.batch.headers is not None for rows, _ in parts):
            headers = Binary.of([data for part in parts for data in _headers_of(*part)])
        blob = b"".join(pieces)
        starts = np.fromiter(accumulate(map(len, pieces), initial=0), np.int64, len(pieces) + 1)
        batch = DeltaBatch(
            blob, starts[:-1],
            gather(blob, starts[:-1], FIXED),  # joining records is slow: their types are compared
            np.concatenate([rows.batch.sequences[numbers] for rows, numbers in parts]),
            np.concatenate([rows.batch.log_times_ms[numbers] for rows, numbers in parts]),
            headers,
        )  # fmt: skip
        merged = None
        if any(rows.merged is not None for rows, _ in parts):
            merged = Merged.concat([rows.spans().take(numbers) for rows, numbers in parts])
        return Rows(
            batch,
            np.concatenate([rows.positions[numbers] for rows, numbers in parts]),
            np.concatenate([rows.ordinals[numbers] for rows, numbers in parts]),
            merged,
        )

    @staticmethod
    def concat(parts: Sequence[Rows]) -> Rows:
        full = [part for part in parts if len(part)]
        if len(full) <= 1:
            return full[0] if full else Rows.empty()
        merged = None
        if any(part.merged is not None for part in full):
            merged = Merged.concat([part.spans() for part in full])
        return Rows(
            DeltaBatch.concat([part.batch for part in full]),
            np.concatenate([part.positions for part in full]),
            np.concatenate([part.ordinals for part in full]),
            merged,
        )


def _headers_of(rows: Rows, numbers: NDArray[np.int64]) -> list[bytes]:
    headers = rows.batch.headers
    return [b""] * len(numbers) if headers is None else headers.take(numbers)
