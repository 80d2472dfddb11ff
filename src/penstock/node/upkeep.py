"""What a node does without being asked: snapshots, retention, compaction, verification, its gauges.

Every replica looks after its own log and snapshots. Only the coordinator writes about it: a mark
after a snapshot, a record for dead letters that are old. Gauges show what the node, its partitions,
its replicas and its live path hold when somebody scrapes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter as of
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.cluster.reserve import Reserve
from penstock.errors import Corruption, DiskFull, NotFound, PenstockError
from penstock.log.crash import crash_point
from penstock.log.partition import PartitionLog
from penstock.log.segment import Segment
from penstock.model.batch import Kind
from penstock.model.columns import Buffer, Value
from penstock.model.delta import PriorityClass
from penstock.node.door.budget import Held
from penstock.node.engine import Engine
from penstock.node.live.hub import LiveReading, SinkReading
from penstock.node.observe.logs import get_logger
from penstock.node.replica.clocks import ClockVerdict
from penstock.node.replica.host import Host
from penstock.node.replica.replay import SnapshotFacts
from penstock.node.serve.partition import Partition
from penstock.replication.coordinator import MemberStatus

UPKEEP_TICK_S: Final = 0.5
SCRUB_DELAY_S: Final = 60.0  # after the start
SCRUB_BYTES_PER_S: Final = 16 << 20  # at least
FORGET_MAX: Final = 10_000  # dead letters dropped by one record
DURABLE_POLL_S: Final = 0.01
REWRITE_BYTES_MIN: Final = 4096
REWRITE_BELOW: Final = 0.5  # a segment is rewritten when fewer of its entries than this live
BREAKER: Final = {"closed": 0, "half_open": 1, "open": 2}
T = TypeVar("T")
# Name, help, and what it shows of a thing; None: there is nothing to measure.
Rows = Iterable[tuple[str, str, Callable[[T], float | None]]]
log = get_logger(__name__)


async def run_upkeep(engine: Engine) -> None:
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
        if host.partition is not None and not host.partition.may_commit:
            return  # all of it waits for commits, and so would the other partitions
        if _snapshot_due(engine, host):
            await snapshot(engine, host)
        if retention_due:
            if await retain(host, engine.clock.now_ms()):
                await host.on_shrunk()
            await asyncio.to_thread(engine.reserve.hold)
    except PenstockError as error:  # a full disk, mostly: the next round tries again
        log.warning("upkeep failed", topic=host.topic.config.name, error=error.message)


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
        await partition.committed(sequence)
        await _durable(partition, sequence)
        crash_point("node.snapshot.committed")
    size = await _save(
        log, sequence=sequence, chain=chain, epoch=epoch, parts=parts, reserve=reserve
    )
    if partition is not None and partition.has_room(8):
        partition.append_record(Kind.SNAPSHOT_MARK, 1, {"through": [sequence]})
        host.topic.wake()
    host.snapshot = SnapshotFacts(sequence, size, now_ms, log.bytes_total)


async def _durable(partition: Partition, sequence: int) -> None:
    """Wait for the disk of this node: others may have committed without it."""
    while partition.log.sequence_durable < sequence:
        if partition.failed is not None:
            raise partition.failed
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
        await partition.committed(heap.sequence_applied)
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
    if not len(messages) or not partition.has_room(len(messages) * 8):
        return
    values: dict[str, Value | None] = {"message": np.asarray(messages, np.uint64)}
    partition.append_record(Kind.ACK, len(messages), values)
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


def oldest_age_s(partition: Partition) -> float | None:
    now_ms = partition.now_ms()
    oldest_ms = partition.heap.oldest_ready_ms(now_ms)
    return None if oldest_ms is None else max(0, now_ms - oldest_ms) / 1000


def snapshot_age_s(host: Host) -> float | None:
    facts = host.snapshot
    return max(0, host.around.clock.now_ms() - facts.time_ms) / 1000 if facts.sequence else None


def _credit(name: str) -> Callable[[MemberStatus], float]:
    """A number of a follower's credit; 0 while no stream to it is open."""
    return lambda standing: getattr(standing.credit, name, 0)


_NODE: Final[Rows[Engine]] = (
    ("penstock_connections", "Open connections.", lambda e: len(e.connections)),
    (
        "penstock_requests_pending",
        "Requests not answered yet.",
        lambda e: sum(c.pending for c in e.connections),
    ),
    ("penstock_strangers", "Connections whose callers are not known yet.", of("doorway.strangers")),
    (
        "penstock_metadata_available",
        "0: the metadata store did not answer when it was asked last.",
        of("cluster.available"),
    ),
    (
        "penstock_disk_rolled_back",
        "1: the data folder is an older copy of itself, and does not count for all it holds yet.",
        of("cluster.rolled_back"),
    ),
    (
        "penstock_clock_off",
        "1: the clock differs from those of a majority, and the node coordinates nothing.",
        lambda e: e.around.clocks.verdict is ClockVerdict.OFF,
    ),
    (
        "penstock_clock_ahead_seconds",
        "What the clock is ahead of the middle one of the cluster.",
        lambda e: (e.around.clocks.ahead_ms or 0.0) / 1000,
    ),
    (
        "penstock_unopened_partitions",
        "Partitions that the node should have open and cannot for now.",
        of("unopened.partitions"),
    ),
)
_PARTITION: Final[Rows[Partition]] = (
    (
        "penstock_backlog_messages",
        "Messages that wait, ready or delayed.",
        lambda p: p.heap.ready + p.heap.delayed,
    ),
    ("penstock_ready_messages", "Messages that can be popped now.", of("heap.ready")),
    ("penstock_delayed_messages", "Messages that become ready later.", of("heap.delayed")),
    ("penstock_inflight_messages", "Messages out on a lease.", of("heap.leased")),
    ("penstock_dlq_messages", "Dead letters.", of("heap.dead")),
    ("penstock_oldest_age_seconds", "Age of the oldest ready message.", oldest_age_s),
    ("penstock_log_bytes", "Size of the write-ahead log (WAL) on disk.", of("log.bytes_total")),
    ("penstock_log_segments", "Segment files of the log.", lambda p: len(p.log.segments())),
    (
        "penstock_sequence_committed",
        "Last committed sequence.",
        of("coordinator.sequence_committed"),
    ),
    ("penstock_epoch", "Epoch of the partition's coordinator.", of("coordinator.epoch")),
)
_SNAPSHOT: Final[Rows[Host]] = (
    (
        "penstock_snapshot_bytes",
        "Size of the last snapshot.",
        lambda h: h.snapshot.bytes if h.snapshot.sequence else None,
    ),
    ("penstock_snapshot_age_seconds", "Time since the last snapshot.", snapshot_age_s),
)
_REPLICA: Final[Rows[Host]] = (
    ("penstock_replica_epoch", "Epoch that a replica knows of.", of("replica.epoch")),
    ("penstock_replica_committed", "Last sequence known to be committed.", of("committed")),
    ("penstock_replica_last", "Last sequence of a replica's log.", of("log.sequence_last")),
    ("penstock_replica_applied", "Last sequence in a replica's heap.", of("heap.sequence_applied")),
    (
        "penstock_replica_damaged",
        "1: some of its log cannot be read.",
        lambda h: bool(h.mending.damage),
    ),
)
_FOLLOWER: Final[Rows[MemberStatus]] = (
    ("penstock_follower_lag_entries", "Entries that a follower does not hold yet.", of("lag")),
    (
        "penstock_follower_credit_ratio",
        "Credit left to a follower, of its window.",
        of("credit_share"),
    ),
    (
        "penstock_follower_credit_entries",
        "Entries that a follower may be sent.",
        _credit("entries"),
    ),
    ("penstock_follower_credit_entries_max", "Its window in entries.", _credit("entries_window")),
    ("penstock_follower_credit_bytes", "Bytes that a follower may be sent.", _credit("bytes")),
    ("penstock_follower_credit_bytes_max", "Its window in bytes.", _credit("bytes_window")),
    ("penstock_follower_lagging", "1: without credit for longer than allowed.", of("lagging")),
)
_LIVE: Final[Rows[LiveReading]] = (
    ("penstock_live_lag_entries", "Sequences that the last of the subscribers lacks.", of("lag")),
    ("penstock_live_outbox_deltas", "Released deltas that wait to be sent.", of("outbox")),
    (
        "penstock_live_rate",
        "Deltas per second that the slowest subscriber gets at most.",
        of("rate"),
    ),
)
_SINK: Final[Rows[SinkReading]] = (
    ("penstock_live_sink_up", "1 while the sink takes what it is given.", of("up")),
    ("penstock_live_sink_lag_entries", "Sequences that the sink lacks.", of("lag")),
    ("penstock_live_sink_outbox_deltas", "Released deltas that wait for the sink.", of("outbox")),
    ("penstock_live_sink_rate", "Deltas per second that it gets at most.", of("rate")),
    ("penstock_live_sink_busy_seconds", "Duration of the call under way.", of("busy_s")),
)
_SINK_COUNTERS: Final[Rows[SinkReading]] = (
    ("penstock_live_sink_rows", "Deltas written.", of("rows")),
    ("penstock_live_sink_retries", "Tries that failed.", of("retries")),
    ("penstock_live_sink_rejected_rows", "Rows that the sink can never take.", of("rejected")),
    ("penstock_live_sink_dead_letters", "Messages in its DLQ topic for them.", of("dead_letters")),
)


def gauges(engine: Engine) -> Iterator[Metric]:
    topics = engine.topics.values()
    yield from _families(_NODE, (), [((), engine)])
    yield _family(
        "penstock_held_bytes", "Bytes held for callers, by what they are.", ["what"],
        ((kind.name.lower(), engine.budget.by_kind[kind]) for kind in Held),
    )  # fmt: skip
    yield _family(
        "penstock_streams", "Open streams, by kind.", ["kind"],
        [("lease", sum(len(t.dispatch.streams) for t in topics)),
         ("log", sum(len(t.log_streams) for t in topics))],
    )  # fmt: skip
    yield _family(
        "penstock_credits", "Credit that open streams have not used.", ["kind"],
        [("lease", sum(t.dispatch.unused_credit for t in topics))],
    )  # fmt: skip
    yield _family(
        "penstock_rank_error_max", "Greatest rank error seen since the node started.", ["topic"],
        ((t.config.name, t.dispatch.rank_error_max) for t in topics),
    )  # fmt: skip
    yield _family(
        "penstock_ingest_deltas", "Deltas that wait to be written.", ["topic", "class"],
        (((t.config.name, each.name.lower()), depth)
         for t in topics if t.ingest is not None
         for each, depth in zip(PriorityClass, t.ingest.queue.depth_by_class, strict=True)),
    )  # fmt: skip
    yield from replica_gauges(engine.hosts.values())
    yield from _live_gauges([hub.reading() for hub in engine.hubs.values()])


def replica_gauges(hosts: Iterable[Host]) -> Iterator[Metric]:
    labels = ("topic", "partition")
    replicas = [((host.topic.config.name, str(host.index)), host) for host in hosts]
    served = [(p, h.partition) for p, h in replicas if h.partition is not None]
    yield from _families(_PARTITION, labels, served)
    serving = [(p, h) for p, h in replicas if h.partition is not None]
    yield from _families(_SNAPSHOT, labels, serving)
    yield _family(
        "penstock_replica_role", "1 for the role of a replica.", (*labels, "role"),
        (((*place, host.role.value), 1) for place, host in replicas),
    )  # fmt: skip
    yield from _families(_REPLICA, labels, replicas)
    leading = [(p, h.replica.coordinator) for p, h in replicas if h.replica.coordinator]
    # Of every other member: one that is away is what an alert is for.
    followers = [((*p, each.node), each) for p, c in leading for each in c.standings()]
    yield from _families(_FOLLOWER, (*labels, "follower"), followers)
    yield _family(
        "penstock_follower_learner", "1: it copies, and does not count.", (*labels, "follower"),
        (((*p, each.node), not c.record.is_voter(each.node))
         for p, c in leading for each in c.standings()),
    )  # fmt: skip


def _live_gauges(readings: list[LiveReading]) -> Iterator[Metric]:
    yield _family(
        "penstock_live_fold_lag_entries",
        "Committed sequences that a partition's fold has not taken in yet.",
        ("topic", "partition"),
        (((r.topic, str(partition)), lag) for r in readings for partition, lag in r.folds.items()),
    )
    yield _family(
        "penstock_live_subscriptions", "Open subscriptions, by state.", ("topic", "state"),
        (((r.topic, state), count) for r in readings for state, count in r.states.items()),
    )  # fmt: skip
    yield from _families(_LIVE, ("topic",), [((r.topic,), r) for r in readings])
    sinks = [((r.topic, sink.sink), sink) for r in readings for sink in r.sinks]
    yield _family(
        "penstock_live_sink_breaker", "0 closed, 1 half open, 2 open.", ("topic", "sink"),
        ((place, BREAKER[sink.breaker]) for place, sink in sinks),
    )  # fmt: skip
    yield from _families(_SINK, ("topic", "sink"), sinks)
    yield from _families(_SINK_COUNTERS, ("topic", "sink"), sinks, kind=CounterMetricFamily)


def _families(
    rows: Rows[T],
    labels: Sequence[str],
    things: Sequence[tuple[Sequence[str], T]],
    *,
    kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
) -> Iterator[Metric]:
    """One metric for each row of a table, over all things with their label values."""
    for name, help, measure in rows:
        values = ((place, measure(thing)) for place, thing in things)
        yield _family(name, help, labels, values, kind=kind)


def _family(
    name: str,
    help: str,
    labels: Sequence[str],
    values: Iterable[tuple[str | Sequence[str], float | None]],
    *,
    kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
) -> Metric:
    """A metric with a value for each place, which is the values of its labels, or the only one."""
    family = kind(name, help, labels=labels)
    for place, value in values:
        if value is not None:
            family.add_metric([place] if isinstance(place, str) else place, value)
    return family
