"""A slow fold of deltas in plain Python: what the kernels' answer is held against in tests.

It shares nothing with `penstock.propagation`. It knows all deltas at once, so it needs neither
order of arrival nor pending deltas: distinct deltas of a vector, sorted by (time, origin, counter),
applied one after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.model.delta import Delta, Op

Key = tuple[str, str]  # namespace, vector id


@dataclass
class Folded:
    """A vector after all of its deltas."""

    values: NDArray[np.float32]
    deleted: bool = False
    metadata: dict[str, Any] | None = None
    revision: int = 0
    ids: set[bytes] = field(default_factory=set)

    def apply(self, delta: Delta) -> None:
        values, indices = delta.values, delta.indices
        if delta.op in (Op.CREATE, Op.DENSE):
            assert values is not None
            self.values[:] = values
            self.deleted = False
        elif delta.op is Op.SPARSE:
            assert indices is not None
            assert values is not None
            self.values[indices] = values
        elif delta.op is Op.SCALE:
            assert values is not None
            self.values *= values[0]
        elif delta.op is Op.OFFSET:
            assert values is not None
            self.values[slice(None) if indices is None else indices] += values
        elif delta.op is Op.DELETE:
            self.deleted = True
        if delta.metadata is not None or delta.op in (Op.CREATE, Op.DELETE):
            self.metadata = delta.metadata
        self.revision += 1


def fold(deltas: Iterable[Delta], *, dimensions: int) -> dict[Key, Folded]:
    """Every vector that any delta names, deleted ones included."""
    grouped: dict[Key, dict[bytes, Delta]] = defaultdict(dict)
    for delta in deltas:
        grouped[delta.namespace, delta.vector_id].setdefault(delta.delta_id, delta)
    folded = {}
    for key, distinct in grouped.items():
        vector = Folded(np.zeros(dimensions, np.float32), ids=set(distinct))
        for delta in sorted(distinct.values(), key=_stamp):
            vector.apply(delta)
        folded[key] = vector
    return folded


def _stamp(delta: Delta) -> tuple[int, bytes, int]:
    return delta.time, delta.origin.encode(), delta.clock[delta.origin]
