"""Upkeep of partitions: snapshots, retention, compaction, and reading everything again.

Every replica looks after its own log and snapshots. Only the coordinator writes about it: a mark
after a snapshot, a record for dead letters that are old.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.reserve import Reserve
from penstock.errors import Corruption, DiskFull, NotFound, PenstockError
from penstock.log.crash import crash_point
from penstock.log.partition import PartitionLog
from penstock.log.segment import Segment
from penstock.model.batch import Kind
from penstock.model.columns import Buffer, Value
from penstock.node.engine import Engine
from penstock.node.observe.logs import get_logger
from penstock.node.replica.heap_applier import SnapshotFacts
from penstock.node.replica.host import Host
from penstock.node.serve.partition import Partition

UPKEEP_TICK_S: Final = 0.5
OPEN_AGAIN_S: Final = 1.0  # between attempts at topics that could not be opened
SCRUB_DELAY_S: Final = 60.0  # after the start
SCRUB_BYTES_PER_S: Final = 16 << 20  # at least
FORGET_MAX: Final = 10_000  # dead letters dropped by one record
DURABLE_POLL_S: Final = 0.01
REWRITE_BYTES_MIN: Final = 4096
REWRITE_BELOW: Final = 0.5  # a segment is rewritten when fewer of its entries than this live
log = get_logger(__name__)


async def run_upkeep(engine: Engine) -> None:
    """Snapshots and retention, until cancelled."""
    every_s, last = engine.config.upkeep.retention_s, time.monotonic()
    while True:
        await asyncio.sleep(UPKEEP_TICK_S)
        retention_due = time.monotonic() - last >= every_s
        if retention_due:
            last = time.monotonic()
        for host in list(engine.hosts.values()):
            if not (host.closed or host.halted):
                await _look_after(engine, host, retention_due=retention_due)


async def _look_after(engine: Engine, host: Host, *, retention_due: bool) -> None:
    try:
        host.persist_floor()
        if host.partition is not None and not host.partition.journal.may_commit:
            return  # all of it waits for commits, and so would the other partitions
        if _snapshot_due(engine, host):
            await snapshot(engine, host)
        if retention_due:
            if await retain(host, engine.clock.now_ms()):
                await host.on_shrunk()
            await asyncio.to_thread(engine.reserve.hold)
    except PenstockError as error:  # a full disk, mostly: the next round tries again
        log.warning("upkeep failed", topic=host.topic.config.name, error=error.message)


async def open_again(engine: Engine) -> None:
    """Try topics that could not be opened, until cancelled: there may be room by now."""
    while True:
        await asyncio.sleep(OPEN_AGAIN_S)
        for trouble in engine.unopened:
            if trouble.partition is None and not engine.stopping:
                await engine.alone.open_again(trouble)


# --- snapshots ---


def _snapshot_due(engine: Engine, host: Host) -> bool:
    options, facts = engine.config.upkeep, host.snapshot
    if host.log.sequence_last <= facts.sequence + 1:  # nothing but the snapshot's mark
        return False
    now_ms = engine.clock.now_ms()
    # One from the future was written before the wall clock was set back, or by another node.
    taken_ms = facts.time_ms if facts.time_ms <= now_ms else 0
    age_s = (now_ms - max(taken_ms, engine.started_ms)) / 1000
    grown = host.log.bytes_total - facts.log_bytes
    return age_s >= options.snapshot_s or grown >= options.snapshot_bytes


async def snapshot(engine: Engine, host: Host) -> SnapshotFacts:
    started = time.perf_counter()
    await take_snapshot(host, engine.clock.now_ms(), reserve=engine.reserve)
    engine.metrics.snapshot_seconds.observe((), time.perf_counter() - started)
    return host.snapshot


async def take_snapshot(host: Host, now_ms: int, *, reserve: Reserve) -> None:
    """Save the heap's state as of now. It is saved only once all it holds is committed, which what
    a replica that follows has applied is."""
    log, heap, partition = host.log, host.heap, host.partition
    sequence = heap.sequence_applied
    if partition is None:
        if not _is_at_rest(host) or sequence <= max(host.snapshot.sequence, log.sequence_first - 1):
            return
        parts = heap.snapshot()
        batch = await asyncio.to_thread(log.reader.read, sequence, nowait=False)
        if batch is None or batch.last != sequence:
            raise RuntimeError(f"no batch ends at {sequence}, where the heap is")
        chain, epoch = batch.chain, batch.epoch
    else:
        chain, epoch, parts = log.chain_last, log.epoch_last, heap.snapshot()
        host.topic.wake()
        await partition.journal.committed(sequence)
        await _durable(partition, sequence)
        crash_point("node.snapshot.committed")
    size = await _save(
        log, sequence=sequence, chain=chain, epoch=epoch, parts=parts, reserve=reserve
    )
    if partition is not None and partition.journal.has_room(8):
        partition.journal.append_record(Kind.SNAPSHOT_MARK, 1, {"through": [sequence]})
        host.topic.wake()
    host.snapshot = SnapshotFacts(sequence, size, now_ms, log.bytes_total)


async def _durable(partition: Partition, sequence: int) -> None:
    """Wait for the disk of this node: others may have committed without it."""
    while partition.log.sequence_durable < sequence:
        if partition.journal.failed is not None:
            raise partition.journal.failed
        await asyncio.sleep(DURABLE_POLL_S)


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


# --- retention and compaction ---


async def retain(host: Host, now_ms: int) -> int:
    """Drop what is settled and older than the topic's retention; returns bytes given back."""
    log, heap, partition, config = host.log, host.heap, host.partition, host.topic.config
    below = None
    if partition is not None:
        now_ms += partition.ahead_ms
        _forget_dead(host, partition, now_ms - config.dlq_retention_ms)
        host.topic.wake()
        below = _streamed(partition)
    elif not _is_at_rest(host):
        return 0
    old = _older(log, now_ms - config.retention_ms, below=below)
    if not old:
        return 0
    oldest, alive = heap.oldest_alive(), {s.first: heap.alive(s.first, s.last) for s in old}
    if partition is not None:
        # What is settled in memory must be settled on disk before its payload may go.
        await partition.journal.committed(heap.sequence_applied)
    done = [segment for segment in old if oldest is None or segment.last < oldest]
    freed = await asyncio.to_thread(log.drop_before, done[-1].last + 1) if done else 0
    for segment in old[len(done) :]:
        living = alive[segment.first]
        if _worth_rewriting(segment, len(living)):
            freed += await _rewrite(log, segment.first, living)
    if freed and partition is not None:
        partition.reader.forget()
    return freed


async def _rewrite(log: PartitionLog, first: int, alive: NDArray[np.uint64]) -> int:
    return await asyncio.to_thread(log.rewrite, first, lambda *_: alive)


def _is_at_rest(host: Host) -> bool:
    """Whether the heap holds nothing that may be cut off, here or by a power cut."""
    reached = min(host.committed, host.log.sequence_durable)
    return host.applying.settled and host.heap.sequence_applied <= reached


def _streamed(partition: Partition) -> int | None:
    """The first entry that some follower is still to be sent. One that lags is not waited for."""
    senders = partition.coordinator.senders.values()
    return min((s.next for s in senders if not s.lagging), default=None)


def _older(log: PartitionLog, cutoff_ms: int, *, below: int | None) -> list[Segment]:
    """Sealed segments past retention that no snapshot needs for its replay, oldest first."""
    snapshots = log.snapshot_sequences()
    if not snapshots:
        return []
    through = snapshots[0] if below is None else min(snapshots[0], below - 1)
    return [
        segment
        for segment in log.segments()
        if segment.sealed and segment.time_ms < cutoff_ms and segment.last <= through
    ]


def _forget_dead(host: Host, partition: Partition, cutoff_ms: int) -> None:
    """Delete some of the dead letters that died before `cutoff_ms`. They have a retention of their
    own: a short one of the topic is meant to save space, and must not take messages away that
    nobody has looked at."""
    messages = partition.heap.forget_dead_before(cutoff_ms)[:FORGET_MAX]
    if not len(messages) or not partition.journal.has_room(len(messages) * 8):
        return
    values: dict[str, Value | None] = {"message": np.asarray(messages, np.uint64)}
    partition.journal.append_record(Kind.ACK, len(messages), values)
    log.warning(
        "dead letters are deleted for their age",
        topic=host.topic.config.name,
        partition=partition.index,
        count=len(messages),
    )


def _worth_rewriting(segment: Segment, alive: int) -> bool:
    share = alive / (segment.last - segment.first + 1)
    if segment.compacted:  # once more only when nothing in it lives any longer
        return not alive and segment.bytes > REWRITE_BYTES_MIN
    return share < REWRITE_BELOW


# --- reading everything again ---


async def run_scrub(engine: Engine) -> None:
    """Read and verify everything once in the configured time, until cancelled."""
    every_s = engine.config.upkeep.scrub_s
    while True:
        await asyncio.sleep(min(every_s, SCRUB_DELAY_S))
        started = time.monotonic()
        await verify(engine, every_s)
        await asyncio.sleep(max(0, every_s - (time.monotonic() - started)))


class Verified(NamedTuple):
    bytes: int  # that were read
    damage: str | None  # the first that was found


async def verify(engine: Engine, within_s: float = 0.0) -> Verified:
    """Verify all sealed segments; damage is reported, not raised."""
    total = sum(host.log.bytes_total for host in engine.hosts.values())
    bytes_per_s = max(SCRUB_BYTES_PER_S, total / within_s) if within_s else float("inf")
    done, damage = 0, None
    for host in list(engine.hosts.values()):
        try:
            done += await scrub(host.log, bytes_per_s)
        except Corruption as error:
            damage = damage or error.message  # the host has heard of it, and does what it can
        except NotFound:
            log.debug("closed while it was verified", topic=host.topic.config.name)
    return Verified(done, damage)


async def scrub(log: PartitionLog, bytes_per_s: float) -> int:
    """Verify every sealed byte of a partition, no faster than told; raises `Corruption`."""
    steps = log.reader.scrub()
    total = 0
    while (step := await asyncio.to_thread(next, steps, None)) is not None:
        total += step
        await asyncio.sleep(step / bytes_per_s)
    return total
