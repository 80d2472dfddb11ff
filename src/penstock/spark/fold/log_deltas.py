"""The deltas of a range of the log, as the columns that the kernels take.

The payloads of many log batches are joined once, so that what follows has one blob and one array
per column however small the batches were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Final

import numpy as np

from penstock.model.columns import Binary
from penstock.model.deltas import DeltaBatch
from penstock.propagation.partition import Propagator
from penstock.spark.source.access import NodeAccess
from penstock.spark.source.rows import Piece, pieces

FEED_BYTES_MAX: Final = 512 << 20  # of log batches that are joined


def read_deltas(
    access: NodeAccess, topic: str, partition: int, *, first: int, last: int
) -> Iterator[tuple[DeltaBatch, int]]:
    """The deltas of `[first, last]`, each time with the sequence up to which they reach.

    A range within `FEED_BYTES_MAX` comes in one piece. The last piece reaches to `last`, with no
    deltas in it if the log ends in other records.
    """
    held: list[Piece] = []
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


def deltas_of(found: Sequence[Piece]) -> DeltaBatch:
    """The messages of some pieces of the log, in their order."""
    if not found:
        return DeltaBatch.empty()
    headers = [piece.columns.binary("headers") for piece in found]
    return DeltaBatch.of(
        _joined([piece.columns.binary("payload") for piece in found], found),
        sequences=np.concatenate([piece.sequences() for piece in found]).astype(np.uint64),
        log_times_ms=np.repeat(
            np.array([piece.batch.time_ms for piece in found], np.int64),
            [piece.count for piece in found],
        ),
        headers=_joined(headers, found) if any(headers) else None,
    )


def _joined(columns: Sequence[Binary | None], found: Sequence[Piece]) -> Binary:
    """The values of all pieces in one column; where a piece has no such column they are empty."""
    if len(found) == 1 and columns[0] is not None:
        return Binary(columns[0].offsets[found[0].low : found[0].high + 1], columns[0].blob)
    sizes: list[np.ndarray[tuple[int, ...], np.dtype[np.int32]]] = []
    blobs: list[memoryview] = []
    for column, piece in zip(columns, found, strict=True):
        if column is None:
            sizes.append(np.zeros(piece.count, np.int32))
            continue
        offsets = column.offsets[piece.low : piece.high + 1]
        sizes.append(np.diff(offsets))
        blobs.append(memoryview(column.blob)[int(offsets[0]) : int(offsets[-1])])
    ends = np.zeros(sum(map(len, sizes)) + 1, np.int32)
    np.cumsum(np.concatenate(sizes), out=ends[1:])
    return Binary(ends, b"".join(blobs))
