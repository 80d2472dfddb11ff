"""Released deltas with their places in the order of release."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.model.deltas import DeltaBatch
from penstock.propagation.partition import Outcome

Sequences = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Rows:
    """What a subscriber is sent: deltas, and for each its position and its ordinal."""

    batch: DeltaBatch
    positions: Sequences  # the log sequence whose arrival released each
    ordinals: Sequences  # 1, 2, 3 … over all releases of the partition
    folded: int = 0  # deltas that were merged into others of these

    @staticmethod
    def of(outcome: Outcome) -> Rows:
        return Rows(outcome.released, outcome.positions, outcome.ordinals)

    @staticmethod
    def empty() -> Rows:
        none = np.empty(0, np.uint64)
        return Rows(DeltaBatch.empty(), none, none)

    def __len__(self) -> int:
        return len(self.positions)

    def take(self, rows: NDArray[Any]) -> Rows:
        """These rows (numbers or a mask) in that order; payloads are not copied."""
        return Rows(self.batch.take(rows), self.positions[rows], self.ordinals[rows])

    def cut(self, first: int, end: int) -> Rows:
        """Rows first … end - 1."""
        if first <= 0 and end >= len(self):
            return self
        return self.take(np.arange(max(first, 0), min(end, len(self))))

    @staticmethod
    def concat(parts: Sequence[Rows]) -> Rows:
        full = [part for part in parts if len(part)]
        if len(full) <= 1:
            return full[0] if full else Rows.empty()
        return Rows(
            DeltaBatch.concat([part.batch for part in full]),
            np.concatenate([part.positions for part in full]),
            np.concatenate([part.ordinals for part in full]),
            sum(part.folded for part in full),
        )
