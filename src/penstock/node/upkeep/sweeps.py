"""Upkeep of a partition: snapshots, retention and compaction, away from the hot path.

Every replica looks after its own log and snapshots. Only the coordinator writes about it: a mark
after a snapshot, a record for dead letters that are old.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.reserve import Reserve
from penstock.errors import DiskFull
from penstock.heap import Heap
from penstock.log.crash import crash_point
from penstock.log.partition import PartitionLog
from penstock.log.segment import SegmentInfo
from penstock.model.batch import Kind
from penstock.model.columns import Buffer
from penstock.node.observe.logs import get_logger
from penstock.node.replica.host import Host
from penstock.node.serve.partition import Partition, SnapshotFacts
from penstock.node.serve.topic import Topic

FORGET_MAX: Final = 10_000  # dead letters dropped by one record
DURABLE_POLL_S: Final = 0.01
REWRITE_BYTES_MIN: Final = 4096
REWRITE_BELOW: Final = 0.5  # a segment is rewritten when fewer of its entries than this live
log = get_logger(__name__)


async def take_snapshot(
    topic: Topic, partition: Partition, now_ms: int, *, reserve: Reserve
) -> SnapshotFacts:
    """Save the heap's state as of now. It is saved only once all it holds is committed."""
    heap, log = partition.heap, partition.log
    sequence, chain, epoch = heap.sequence_applied, log.chain_last, log.epoch_last
    parts = heap.snapshot()
    topic.wake()
    await partition.journal.committed(sequence)
    await _durable(partition, sequence)
    crash_point("node.snapshot.committed")
    size = await _save(
        log, sequence=sequence, chain=chain, epoch=epoch, parts=parts, reserve=reserve
    )
    if partition.journal.has_room(8):
        partition.journal.append_record(Kind.SNAPSHOT_MARK, 1, {"through": [sequence]})
        topic.wake()
    partition.snapshot.renew(sequence, bytes=size, time_ms=now_ms, log_bytes=log.bytes_total)
    return partition.snapshot


async def _durable(partition: Partition, sequence: int) -> None:
    """Wait for the disk of this node: others may have committed without it."""
    while partition.log.sequence_durable < sequence:
        if partition.journal.failed is not None:
            raise partition.journal.failed
        await asyncio.sleep(DURABLE_POLL_S)


async def snapshot_replica(host: Host, now_ms: int, *, reserve: Reserve) -> None:
    """The same of a replica that follows: what it has applied is committed."""
    heap, log = host.heap, host.log
    sequence = heap.sequence_applied
    if not _is_at_rest(host) or sequence <= max(host.snapshot.sequence, log.sequence_first - 1):
        return
    parts = heap.snapshot()
    batch = await asyncio.to_thread(log.read, sequence, nowait=False)
    if batch is None or batch.last != sequence:
        raise RuntimeError(f"no batch ends at {sequence}, where the heap is")
    size = await _save(
        log, sequence=sequence, chain=batch.chain, epoch=batch.epoch, parts=parts, reserve=reserve
    )
    host.snapshot.renew(sequence, bytes=size, time_ms=now_ms, log_bytes=log.bytes_total)


async def _save(
    log: PartitionLog, *, sequence: int, chain: int, epoch: int, parts: list[Buffer],
    reserve: Reserve,
) -> int:  # fmt: skip
    """A log shrinks only behind a snapshot, so on a full disk the way out leads through one: it
    may take the space of the `reserve`."""

    def save() -> int:
        return log.save_snapshot(sequence=sequence, chain=chain, epoch=epoch, parts=parts)

    try:
        return await asyncio.to_thread(save)
    except DiskFull:
        if not await asyncio.to_thread(reserve.release):
            raise
        return await asyncio.to_thread(save)


async def retain(topic: Topic, partition: Partition, now_ms: int) -> int:
    """Drop what is settled and older than the topic's retention; returns bytes given back.

    Dead letters have a retention of their own. A short one of the topic is meant to save space,
    and must not take messages away that nobody has looked at.
    """
    now_ms += partition.ahead_ms
    forgotten = _forget_dead(partition, now_ms - topic.config.dlq_retention_ms)
    if forgotten:
        log.warning(
            "dead letters are deleted for their age",
            topic=topic.config.name,
            partition=partition.index,
            count=forgotten,
        )
    topic.wake()
    cutoff_ms = now_ms - topic.config.retention_ms
    old = _older(partition.log, cutoff_ms, below=_streamed(partition))
    if not old:
        return 0
    oldest, alive = _living(partition.heap, old)
    # What is settled in memory must be settled on disk before its payload may go.
    await partition.journal.committed(partition.heap.sequence_applied)
    freed = await _shrink(partition.log, old, oldest, alive)
    if freed:
        partition.reader.forget()
    return freed


async def retain_replica(host: Host, now_ms: int) -> int:
    """The same of a replica that follows."""
    if not _is_at_rest(host):
        return 0
    old = _older(host.log, now_ms - host.topic.config.retention_ms, below=None)
    if not old:
        return 0
    oldest, alive = _living(host.heap, old)
    return await _shrink(host.log, old, oldest, alive)


def _is_at_rest(host: Host) -> bool:
    """Whether the heap holds nothing that may be cut off, here or by a power cut."""
    reached = min(host.committed, host.log.sequence_durable)
    return host.applying.settled and host.heap.sequence_applied <= reached


def _streamed(partition: Partition) -> int | None:
    """The first entry that some follower is still to be sent. One that lags is not waited for."""
    senders = partition.coordinator.senders.values()
    return min((s.next for s in senders if not s.lagging), default=None)


def _older(log: PartitionLog, cutoff_ms: int, *, below: int | None) -> list[SegmentInfo]:
    """Sealed segments past retention that no snapshot needs for its replay, oldest first."""
    snapshots = log.snapshot_sequences()
    if not snapshots:
        return []
    through = snapshots[0] if below is None else min(snapshots[0], below - 1)
    return [
        segment
        for segment in log.segments()
        if segment.sealed and segment.time_ms_last < cutoff_ms and segment.last <= through
    ]


def _living(heap: Heap, old: list[SegmentInfo]) -> tuple[int | None, dict[int, NDArray[np.uint64]]]:
    return heap.oldest_alive(), {s.first: heap.alive(s.first, s.last) for s in old}


async def _shrink(
    log: PartitionLog,
    old: list[SegmentInfo],
    oldest: int | None,
    alive: dict[int, NDArray[np.uint64]],
) -> int:
    done = [segment for segment in old if oldest is None or segment.last < oldest]
    freed = 0
    if done:
        freed += await asyncio.to_thread(log.drop_before, done[-1].last + 1)
    for segment in old[len(done) :]:
        if _worth_rewriting(segment, len(alive[segment.first])):
            freed += await _rewrite(log, segment.first, alive[segment.first])
    return freed


def _forget_dead(partition: Partition, cutoff_ms: int) -> int:
    """Delete some of the dead letters that died before `cutoff_ms`; returns how many."""
    messages = partition.heap.forget_dead_before(cutoff_ms)[:FORGET_MAX]
    if not len(messages) or not partition.journal.has_room(len(messages) * 8):
        return 0
    partition.journal.append_record(
        Kind.ACK, len(messages), {"message": np.asarray(messages, np.uint64)}
    )
    return len(messages)


def _worth_rewriting(segment: SegmentInfo, alive: int) -> bool:
    share = alive / (segment.last - segment.first + 1)
    if segment.compacted:  # once more only when nothing in it lives any longer
        return not alive and segment.bytes > REWRITE_BYTES_MIN
    return share < REWRITE_BELOW


async def _rewrite(log: PartitionLog, first: int, alive: NDArray[np.uint64]) -> int:
    return await asyncio.to_thread(log.rewrite, first, lambda *_: alive)


async def scrub(log: PartitionLog, bytes_per_s: float) -> int:
    """Verify every sealed byte of a partition, no faster than told; raises `Corruption`."""
    steps = log.scrub()
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
