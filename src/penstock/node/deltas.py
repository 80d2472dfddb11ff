"""What an enqueue to a delta topic must be: valid deltas, each in the partition of its vector."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidArgument
from penstock.model.columns import Binary, Columns
from penstock.model.delta_batch import explain
from penstock.model.deltas import DeltaBatch, validate
from penstock.model.partitioning import partitions_of_deltas, partitions_of_digests
from penstock.model.plain_delta import plain_deltas
from penstock.model.topic import TopicConfig

FEW: Final = 64  # deltas that are looked at one by one
_MEANINGLESS: Final = ("delay_ms", "max_retries")  # where nothing is ever leased


def homes_of_deltas(columns: Columns, config: TopicConfig, *, now_ms: int) -> NDArray[np.int64]:
    """Where each delta of a checked ENQ body belongs: all deltas of a vector lie in one log.

    Raises `InvalidArgument` for the first entry that is no valid delta.
    """
    payloads = columns.binary("payload")
    if payloads is None:
        raise InvalidArgument("a delta has no payload", field="payload")
    for name in _MEANINGLESS:
        if name in columns and (columns.fixed(name) > 0).any():
            raise InvalidArgument(f"{name} has no meaning in a delta topic", field=name, limit=0)
    if len(payloads) <= FEW:
        return _homes_of_few(payloads, config, now_ms)
    deltas = DeltaBatch.of(payloads)
    validate(deltas, dimensions=config.dimensions, now_ms=now_ms)
    return partitions_of_digests(np.ascontiguousarray(deltas.vector[:, 0]), config.partitions)


def _homes_of_few(payloads: Binary, config: TopicConfig, now_ms: int) -> NDArray[np.int64]:
    """The same without columns, which take longer to set up than a few deltas to check."""
    rows, plain = payloads.tolist(), plain_deltas(config.dimensions)
    for row, payload in enumerate(rows):
        if not plain.sure(payload, now_ms=now_ms):
            explain(payload, row, dimensions=config.dimensions, now_ms=now_ms)
    if config.partitions == 1:
        return np.zeros(len(rows), np.int64)
    return partitions_of_deltas(rows, config.partitions)


def spread_deltas(homes: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Which deltas go where."""
    for partition in np.unique(homes).tolist():
        yield partition, np.flatnonzero(homes == partition)


def check_partition(homes: NDArray[np.int64], partition: int, partitions: int) -> None:
    """Refuse a part whose producer has another idea of where its vectors belong."""
    if partitions == 1:
        return
    wrong = homes != partition
    if wrong.any():
        raise InvalidArgument(
            f"delta {int(np.argmax(wrong))}: its vector does not belong in partition {partition}",
            field="partition",
            limit=partitions - 1,
        )
