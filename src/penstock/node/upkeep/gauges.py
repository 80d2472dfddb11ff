"""What a node, its partitions and its replicas hold at a moment, as the metrics tell it."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.node.door.budget import Held
from penstock.node.engine import Engine
from penstock.node.observe.readings import (
    FollowerReading,
    NodeReading,
    PartitionReading,
    ReplicaReading,
)
from penstock.node.replica.clocks import ClockVerdict
from penstock.node.replica.host import Host
from penstock.node.serve.partition import Partition
from penstock.replication.coordinator import Coordinator


def node_reading(engine: Engine) -> NodeReading:
    now_ms, clocks = engine.clock.now_ms(), engine.around.clocks
    return NodeReading(
        partitions=[
            partition_reading(host, host.partition, now_ms)
            for host in engine.hosts.values()
            if host.partition is not None
        ],
        replicas=[replica_reading(host) for host in engine.hosts.values()],
        live=[hub.reading() for hub in engine.hubs.values()],
        connections=len(engine.connections),
        streams={
            "lease": sum(len(t.dispatch.streams) for t in engine.topics.values()),
            "log": sum(len(t.log_streams) for t in engine.topics.values()),
        },
        credits={"lease": sum(t.dispatch.unused_credit for t in engine.topics.values())},
        rank_error_max={t.config.name: t.dispatch.rank_error_max for t in engine.topics.values()},
        ingest={
            name: list(topic.ingest.queue.depth_by_class)
            for name, topic in engine.topics.items()
            if topic.ingest is not None
        },
        requests_pending=sum(c.pending for c in engine.connections),
        strangers=engine.doorway.strangers,
        held_bytes={kind.name.lower(): engine.budget.by_kind[kind] for kind in Held},
        metadata_available=engine.cluster.available,
        rolled_back=rolled_back(engine),
        clock_off=clocks.verdict is ClockVerdict.OFF,
        clock_ahead_s=(clocks.ahead_ms or 0.0) / 1000,
        unopened=engine.unopened.partitions,
    )


def partition_reading(host: Host, partition: Partition, now_ms: int) -> PartitionReading:
    heap, facts = partition.heap, host.snapshot
    log_ms = now_ms + partition.ahead_ms
    oldest_ms = heap.oldest_ready_ms(log_ms)
    return PartitionReading(
        topic=host.topic.config.name,
        partition=partition.index,
        ready=heap.ready,
        delayed=heap.delayed,
        inflight=heap.leased,
        dead=heap.dead,
        oldest_age_s=None if oldest_ms is None else max(0, log_ms - oldest_ms) / 1000,
        log_bytes=partition.log.bytes_total,
        log_segments=len(partition.log.segments()),
        sequence_committed=partition.coordinator.sequence_committed,
        epoch=partition.coordinator.epoch,
        snapshot_bytes=facts.bytes if facts.sequence else None,
        snapshot_age_s=max(0, now_ms - facts.time_ms) / 1000 if facts.sequence else None,
    )


def replica_reading(host: Host) -> ReplicaReading:
    replica = host.replica
    return ReplicaReading(
        topic=host.topic.config.name,
        partition=host.index,
        role=host.role.value,
        epoch=replica.epoch,
        sequence_committed=host.committed,
        sequence_last=host.log.sequence_last,
        sequence_applied=host.heap.sequence_applied,
        damaged=bool(host.mending.damage),
        followers=tuple(_followers(replica.coordinator)) if replica.coordinator else (),
    )


def _followers(coordinator: Coordinator) -> Iterator[FollowerReading]:
    """Every other member: one that is away is what an alert is for."""
    for standing in coordinator.standings():
        credit = standing.credit
        yield FollowerReading(
            node=standing.node,
            lag=standing.lag,
            credit=standing.credit_share,
            credit_entries=credit.entries if credit else 0,
            credit_entries_max=credit.entries_window if credit else 0,
            credit_bytes=credit.bytes if credit else 0,
            credit_bytes_max=credit.bytes_window if credit else 0,
            lagging=standing.lagging,
            learner=not coordinator.record.is_voter(standing.node),
        )


def rolled_back(engine: Engine) -> bool:
    """Whether the data folder was found to be an older copy of itself, and still is in part: some
    replica in it does not count."""
    if not engine.config.cluster.enabled or not engine.nodes.disk.rolled_back:
        return False
    cluster = engine.nodes
    ours = [key for key, h in cluster.control.records.items() if h.record.is_voter(cluster.node)]
    return not all(key in engine.hosts and engine.hosts[key].replica.counts for key in ours)
