"""What an enqueue to a delta topic must be: valid deltas, each in the partition of its vector."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidArgument
from penstock.model.columns import Columns
from penstock.model.deltas import DeltaBatch, validate
from penstock.model.partitioning import partitions_of_digests
from penstock.model.topic import TopicConfig

_MEANINGLESS = ("delay_ms", "max_retries")  # where nothing is ever leased


def check_deltas(columns: Columns, config: TopicConfig, *, now_ms: int) -> DeltaBatch:
    """The deltas of a checked ENQ body; raises `InvalidArgument` for the first that is none."""
    payloads = columns.binary("payload")
    if payloads is None:
        raise InvalidArgument("a delta has no payload", field="payload")
    for name in _MEANINGLESS:
        if name in columns and (columns.fixed(name) > 0).any():
            raise InvalidArgument(f"{name} has no meaning in a delta topic", field=name, limit=0)
    deltas = DeltaBatch.of(payloads)
    validate(deltas, dimensions=config.dimensions, now_ms=now_ms)
    return deltas


def spread_deltas(deltas: DeltaBatch, partitions: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Which deltas go where."""
    where = _homes(deltas, partitions)
    for partition in np.unique(where).tolist():
        yield partition, np.flatnonzero(where == partition)


def check_partition(deltas: DeltaBatch, partition: int, partitions: int) -> None:
    """Refuse a part whose producer has another idea of where its vectors belong."""
    if partitions == 1:
        return
    wrong = _homes(deltas, partitions) != partition
    if wrong.any():
        row = int(np.argmax(wrong))
        raise InvalidArgument(
            f"delta {row}: its vector does not belong in partition {partition}",
            field="partition",
            limit=partitions - 1,
        )


def _homes(deltas: DeltaBatch, partitions: int) -> NDArray[np.int64]:
    """Where each delta belongs: all deltas of a vector lie in one log."""
    return partitions_of_digests(np.ascontiguousarray(deltas.vector[:, 0]), partitions)
