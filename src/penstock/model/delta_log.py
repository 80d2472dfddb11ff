"""The deltas in the batches of a log, as columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.model.batch import Batch, Kind
from penstock.model.columns import Columns
from penstock.model.delta_batch import DeltaBatch


def deltas_of(batches: Sequence[Batch]) -> DeltaBatch:
    """The deltas in these batches of a log, in its order."""
    return DeltaBatch.concat(
        [deltas_in(batch, batch.columns()) for batch in batches if batch.kind is Kind.ENQ]
    )


def deltas_in(batch: Batch, columns: Columns) -> DeltaBatch:
    """Those of one ENQ batch, whose columns are at hand."""
    payloads = columns.binary("payload")
    if payloads is None:
        return DeltaBatch.empty()
    sequences = np.arange(batch.first, batch.first + batch.entries, dtype=np.uint64)
    if batch.compacted:
        sequences = columns.fixed("sequence")
    return DeltaBatch.of(
        payloads,
        sequences=sequences,
        log_times_ms=np.full(len(payloads), batch.time_ms, np.int64),
        headers=columns.binary("headers"),
    )
