"""A delta topic's log, read as columns of deltas."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Final

import numpy as np

from penstock.client.logreader import LogReader, Source
from penstock.model.delta_batch import DeltaBatch
from penstock.model.delta_log import deltas_of

CREDIT_ENTRIES: Final = 200_000  # read ahead of whoever folds them
CREDIT_BYTES: Final = 8 << 20


async def read_deltas(
    topic: Source,
    *,
    partition: int,
    from_sequence: int,
    through: int,
    vector: bytes | None = None,
) -> AsyncGenerator[tuple[DeltaBatch, int], None]:
    """Deltas from a sequence on, and how far the log is read with them.

    `vector`: only the deltas of that vector hash. The last batch may reach past `through`.
    """
    if from_sequence > through:
        return
    reader: LogReader[Any] = LogReader(
        topic,
        partition=partition,
        from_sequence=from_sequence,
        credit_entries=CREDIT_ENTRIES,
        credit_bytes=CREDIT_BYTES,
        through=through,
    )
    wanted = None if vector is None else np.frombuffer(vector, "<u8")
    slices = reader.slices()
    try:
        async for batches in slices:
            deltas = deltas_of(batches)
            if wanted is not None:
                deltas = deltas.take((deltas.vector == wanted).all(axis=1))
            if len(deltas) and int(deltas.sequences[0]) < from_sequence:
                # A slice begins with the whole batch that holds the first sequence asked for.
                deltas = deltas.take(deltas.sequences >= from_sequence)
            yield deltas, batches[-1].last
    finally:
        await slices.aclose()
