"""Upkeep of a partition: snapshots, retention and compaction, away from the hot path."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.reserve import Reserve
from penstock.errors import DiskFull
from penstock.log.crash import crash_point
from penstock.log.partition import SegmentInfo
from penstock.model.batch import Kind
from penstock.node.atomic import committed
from penstock.node.partition import Partition, SnapshotFacts
from penstock.node.topic import Topic

FORGET_MAX: Final = 10_000  # dead letters dropped by one record
REWRITE_BYTES_MIN: Final = 4096
REWRITE_BELOW: Final = 0.5  # a segment is rewritten when fewer of its entries than this live


async def take_snapshot(
    topic: Topic, partition: Partition, now_ms: int, *, reserve: Reserve
) -> SnapshotFacts:
    """Save the heap's state as of now. It is saved only once all it holds is committed.

    A log shrinks only behind a snapshot, so on a full disk the way out leads through one: it may
    take the space of the `reserve`.
    """
    heap, log = partition.heap, partition.log
    sequence, chain, epoch = heap.sequence_applied, log.chain_last, log.epoch_last
    parts = heap.snapshot()
    topic.wake()
    await committed(partition, sequence)
    crash_point("node.snapshot.committed")

    def save() -> int:
        return log.save_snapshot(sequence=sequence, chain=chain, epoch=epoch, parts=parts)

    try:
        size = await asyncio.to_thread(save)
    except DiskFull:
        if not await asyncio.to_thread(reserve.release):
            raise
        size = await asyncio.to_thread(save)
    if partition.journal.has_room(8):
        partition.journal.append_record(Kind.SNAPSHOT_MARK, 1, {"through": [sequence]})
        topic.wake()
    partition.snapshot = SnapshotFacts(sequence, size, now_ms, log.bytes_total)
    return partition.snapshot


async def retain(topic: Topic, partition: Partition, now_ms: int) -> int:
    """Drop what is settled and older than the topic's retention; returns bytes given back."""
    cutoff_ms = now_ms - topic.config.retention_ms
    _forget_dead(partition, cutoff_ms)
    topic.wake()
    old = _older(partition, cutoff_ms)
    if not old:
        return 0
    oldest = partition.heap.oldest_alive()
    alive = {s.first: partition.heap.alive(s.first, s.last) for s in old}
    # What is settled in memory must be settled on disk before its payload may go.
    await committed(partition, partition.heap.sequence_applied)
    done = [segment for segment in old if oldest is None or segment.last < oldest]
    freed = 0
    if done:
        freed += await asyncio.to_thread(partition.log.drop_before, done[-1].last + 1)
    for segment in old[len(done) :]:
        if _worth_rewriting(segment, len(alive[segment.first])):
            freed += await _rewrite(partition, segment.first, alive[segment.first])
    if freed:
        partition.reader.forget()
    return freed


def _older(partition: Partition, cutoff_ms: int) -> list[SegmentInfo]:
    """Sealed segments past retention that no snapshot needs for its replay, oldest first."""
    snapshots = partition.log.snapshot_sequences()
    if not snapshots:
        return []
    return [
        segment
        for segment in partition.log.segments()
        if segment.sealed and segment.time_ms_last < cutoff_ms and segment.last <= snapshots[0]
    ]


def _forget_dead(partition: Partition, cutoff_ms: int) -> None:
    messages = partition.heap.forget_dead_before(cutoff_ms)[:FORGET_MAX]
    if len(messages) and partition.journal.has_room(len(messages) * 8):
        partition.journal.append_record(
            Kind.ACK, len(messages), {"message": np.asarray(messages, np.uint64)}
        )


def _worth_rewriting(segment: SegmentInfo, alive: int) -> bool:
    share = alive / (segment.last - segment.first + 1)
    if segment.compacted:  # once more only when nothing in it lives any longer
        return not alive and segment.bytes > REWRITE_BYTES_MIN
    return share < REWRITE_BELOW


async def _rewrite(partition: Partition, first: int, alive: NDArray[np.uint64]) -> int:
    return await asyncio.to_thread(partition.log.rewrite, first, lambda *_: alive)


async def scrub(partition: Partition, bytes_per_s: float) -> int:
    """Verify every sealed byte of a partition, no faster than told; raises `Corruption`."""
    steps = partition.log.scrub()
    total = 0
    while (step := await asyncio.to_thread(next, steps, None)) is not None:
        total += step
        await asyncio.sleep(step / bytes_per_s)
    return total


class Pacer:
    """Says when work that is due every so often is due."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last = time.monotonic()

    def due(self) -> bool:
        if time.monotonic() - self._last < self._every_s:
            return False
        self._last = time.monotonic()
        return True
