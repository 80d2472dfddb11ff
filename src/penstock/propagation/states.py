"""The merged state of vectors, as columns for those who store or compare it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.model.columns import Binary


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
