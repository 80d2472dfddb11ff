"""Whole log batches as rows: the cheapest way to bring a log through Spark.

`body` is a batch as it is stored, header and all: `penstock.model.batch.decode` opens it. `first`
and `last` say which of its sequences belong to the row, in case a range began or ended inside it;
`count` is the number of messages there. Nothing is decompressed on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from penstock.model.batch import Batch

ENVELOPES: Final[dict[str, str]] = {
    "topic": "string",
    "partition": "int",
    "first": "bigint",
    "last": "bigint",
    "count": "int",
    "body": "binary",
}


def envelope_batch(
    batches: Sequence[Batch], schema: pa.Schema, *, topic: str, first: int, last: int
) -> pa.RecordBatch | None:
    """One row per batch that has messages in `[first, last]`."""
    rows = [(b, _count(b, first, last)) for b in batches if b.first <= last and b.last >= first]
    rows = [(batch, count) for batch, count in rows if count]
    if not rows:
        return None
    values: dict[str, list[Any]] = {
        "topic": [topic] * len(rows),
        "partition": [batch.partition for batch, _ in rows],
        "first": [max(batch.first, first) for batch, _ in rows],
        "last": [min(batch.last, last) for batch, _ in rows],
        "count": [count for _, count in rows],
    }
    if "body" in schema.names:
        values["body"] = [batch.encode() for batch, _ in rows]
    arrays = [pa.array(values[field.name], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _count(batch: Batch, first: int, last: int) -> int:
    """The messages of a batch in `[first, last]`."""
    if first <= batch.first and batch.last <= last:
        return batch.entries
    if not batch.compacted:
        return min(batch.last, last) - max(batch.first, first) + 1
    held = batch.columns().fixed("sequence")
    return int(np.searchsorted(held, last, "right") - np.searchsorted(held, first, "left"))
