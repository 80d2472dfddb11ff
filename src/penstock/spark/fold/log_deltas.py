"""The deltas of a range of the log, read from a node as the columns that the kernels take."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Final

from penstock.model.delta_batch import DeltaBatch
from penstock.propagation.fold.propagator import Propagator
from penstock.spark.source.access import NodeAccess
from penstock.spark.source.rows import BatchPiece, deltas_of, pieces

FEED_BYTES_MAX: Final = 512 << 20  # of log batches that are joined


def read_deltas(
    access: NodeAccess, topic: str, partition: int, *, first: int, last: int
) -> Iterator[tuple[DeltaBatch, int]]:
    """The deltas of `[first, last]`, each time with the sequence up to which they reach.

    A range within `FEED_BYTES_MAX` comes in one piece. The last piece reaches to `last`, with no
    deltas in it if the log ends in other records.
    """
    held: list[BatchPiece] = []
    size = 0
    for batches in access.read_range(topic, partition, first, last):
        held += pieces(batches, first=first, last=last)
        size += sum(batch.size for batch in batches)
        if size >= FEED_BYTES_MAX:
            yield deltas_of(held), min(batches[-1].last, last)
            held, size = [], 0
    yield deltas_of(held), last


def find_forgotten(access: NodeAccess, topic: str, partition: int, state: Propagator) -> set[bytes]:
    """Those of the parents that a paused fold asks for which the log holds from before the fold's
    memory of ids. What came later the fold would know, had it been released."""
    forgotten_ms = state.ledger.time_ms - state.options.dedup_ms
    horizon = access.find_time(topic, partition, forgotten_ms)
    return find_ids(access, topic, partition, set(state.missing()), below=horizon)


def find_ids(
    access: NodeAccess, topic: str, partition: int, wanted: Set[bytes], *, below: int
) -> set[bytes]:
    """Which of these delta ids the log holds before the sequence `below`."""
    first = access.log_status(topic)[partition].sequence_first
    found: set[bytes] = set()
    if first >= below:
        return found
    for deltas, _ in read_deltas(access, topic, partition, first=first, last=below - 1):
        found |= wanted & set(deltas.delta_ids())
        if found == wanted:
            break
    return found
