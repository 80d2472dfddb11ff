"""When a node looks after its partitions: snapshots, retention, and reading everything again."""

from __future__ import annotations

import asyncio
import time
from typing import Final, NamedTuple

from penstock.errors import Corruption, NotFound, PenstockError
from penstock.node.engine import Engine
from penstock.node.observe.logs import get_logger
from penstock.node.replica.host import Host
from penstock.node.serve.partition import Partition, SnapshotFacts
from penstock.node.serve.topic import Topic
from penstock.node.upkeep.sweeps import (
    Pacer,
    retain,
    retain_replica,
    scrub,
    snapshot_replica,
    take_snapshot,
)

UPKEEP_TICK_S: Final = 0.5
OPEN_AGAIN_S: Final = 1.0  # between attempts at topics that could not be opened
SCRUB_DELAY_S: Final = 60.0  # after the start
SCRUB_BYTES_PER_S: Final = 16 << 20  # at least
log = get_logger(__name__)


async def run_upkeep(engine: Engine) -> None:
    """Snapshots and retention, until cancelled."""
    retention = Pacer(engine.config.upkeep.retention_s)
    while True:
        await asyncio.sleep(UPKEEP_TICK_S)
        retention_due = retention.due()
        for host in list(engine.hosts.values()):
            if not (host.closed or host.halted):
                await _look_after(engine, host, retention_due)


async def _look_after(engine: Engine, host: Host, retention_due: bool) -> None:
    topic, partition = host.topic, host.partition
    try:
        host.persist_floor()
        if partition is not None and not partition.journal.may_commit:
            return  # all of it waits for commits, and so would the other partitions
        if _snapshot_due(engine, host):
            if partition is not None:
                await snapshot(engine, topic, partition)
            else:
                await snapshot_replica(host, engine.clock.now_ms(), reserve=engine.reserve)
        if retention_due:
            now_ms = engine.clock.now_ms()
            retaining = (
                retain_replica(host, now_ms)
                if partition is None
                else retain(topic, partition, now_ms)
            )
            if await retaining:
                await host.on_shrunk()
            await asyncio.to_thread(engine.reserve.hold)
    except PenstockError as error:  # a full disk, mostly: the next round tries again
        log.warning("upkeep failed", topic=topic.config.name, error=error.message)


async def run_scrub(engine: Engine) -> None:
    """Read and verify everything once in the configured time, until cancelled."""
    every_s = engine.config.upkeep.scrub_s
    while True:
        await asyncio.sleep(min(every_s, SCRUB_DELAY_S))
        started = time.monotonic()
        await verify(engine, every_s)
        await asyncio.sleep(max(0, every_s - (time.monotonic() - started)))


async def open_again(engine: Engine) -> None:
    """Try topics that could not be opened, until cancelled: there may be room by now."""
    while True:
        await asyncio.sleep(OPEN_AGAIN_S)
        for trouble in engine.unopened:
            if trouble.partition is None and not engine.stopping:
                await engine.alone.open_again(trouble)


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


async def snapshot(engine: Engine, topic: Topic, partition: Partition) -> SnapshotFacts:
    started = time.perf_counter()
    facts = await take_snapshot(topic, partition, engine.clock.now_ms(), reserve=engine.reserve)
    engine.metrics.snapshot_seconds.observe((), time.perf_counter() - started)
    return facts


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
