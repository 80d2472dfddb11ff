"""Calls about the cluster, and those that only its nodes make to each other (`replica_*`)."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.errors import FailedPrecondition, NotFound
from penstock.node.calls import Arguments, Caller, TopicArguments, method
from penstock.node.engine import Engine
from penstock.node.replicas import status
from penstock.node.replicas.cluster import Cluster


def _cluster(engine: Engine) -> Cluster:
    if engine.nodes is None:
        raise FailedPrecondition("this node is alone: it is in no cluster")
    return engine.nodes


# --- for everybody ---


class RoutesArguments(Arguments, frozen=True):
    topic: str | None = None


class RebalanceArguments(Arguments, frozen=True):
    dry_run: bool = False


class DrainArguments(Arguments, frozen=True):
    node: str
    dry_run: bool = False


class RemoveReplicaArguments(TopicArguments, frozen=True):
    partition: int
    node: str


@method(RoutesArguments)
async def routes(engine: Engine, _: Caller, a: RoutesArguments) -> dict[str, Any]:
    """Where partitions are served."""
    return status.routes(engine, engine.topic(a.topic) if a.topic else None)


@method(Arguments)
async def cluster_status(engine: Engine, _: Caller, a: Arguments) -> dict[str, Any]:
    return await status.cluster_status(engine)


@method(RebalanceArguments, audited=True)
async def cluster_rebalance(engine: Engine, _: Caller, a: RebalanceArguments) -> dict[str, Any]:
    return await _cluster(engine).administration.rebalance(dry_run=a.dry_run)


@method(DrainArguments, audited=True, subject="node")
async def cluster_drain(engine: Engine, _: Caller, a: DrainArguments) -> dict[str, Any]:
    return await _cluster(engine).administration.drain(a.node, dry_run=a.dry_run)


@method(Arguments)
async def cluster_moves(engine: Engine, _: Caller, a: Arguments) -> dict[str, Any]:
    """What waits of the last plan."""
    return {"moves": await _cluster(engine).administration.waiting()}


@method(RemoveReplicaArguments, audited=True)
async def cluster_remove_replica(
    engine: Engine, _: Caller, a: RemoveReplicaArguments
) -> dict[str, Any]:
    topic = engine.topic(a.topic)
    topic.partition(a.partition)
    key = (topic.config.id, a.partition)
    return {"voters": await _cluster(engine).administration.remove_replica(key, a.node)}


# --- between nodes ---


class ReplicaArguments(Arguments, frozen=True):
    topic: int
    partition: int


class ReplicaTopicArguments(Arguments, frozen=True):
    topic: int
    name: str


class SliceArguments(ReplicaArguments, frozen=True):
    from_sequence: int
    through: int


class ChunkArguments(Arguments, frozen=True):
    piece: int
    offset: int


class DrainingArguments(Arguments, frozen=True):
    draining: bool


class ResignArguments(ReplicaArguments, frozen=True):
    node: str  # who asks for it


@method(ReplicaTopicArguments, between_nodes=True)
async def replica_topic(engine: Engine, _: Caller, a: ReplicaTopicArguments) -> dict[str, Any]:
    """What this node knows of a topic, and which of its partitions it serves."""
    _cluster(engine)
    topic = engine.topics.get(a.name)
    if topic is None or topic.config.id != a.topic:
        return {"known": False, "config": None, "serving": []}
    return {
        "known": True,
        "config": msgspec.to_builtins(topic.config),
        "serving": [partition.index for partition in topic.local],
    }


@method(Arguments, between_nodes=True)
async def replica_status(engine: Engine, _: Caller, a: Arguments) -> dict[str, Any]:
    """The partitions that this node coordinates, how their followers fare, and what it copies."""
    _cluster(engine)
    return {"partitions": status.coordinated(engine), "copies": status.copies(engine)}


@method(DrainingArguments, between_nodes=True)
async def replica_drain(engine: Engine, _: Caller, a: DrainingArguments) -> dict[str, Any]:
    await _cluster(engine).set_draining(a.draining)
    return {}


@method(ResignArguments, between_nodes=True)
async def replica_resign(engine: Engine, _: Caller, a: ResignArguments) -> dict[str, Any]:
    """Give a partition up for the node that asks, if that one has all of it."""
    cluster = _cluster(engine)
    key = (a.topic, a.partition)
    host = engine.hosts.get(key)
    if host is None or host.partition is None:
        raise NotFound("this node does not serve the partition", partition=a.partition)
    if not status.caught_up(host, a.node):
        raise FailedPrecondition(f"{a.node} has not caught up", node=a.node)
    await cluster.resign(key)
    return {}


@method(ReplicaArguments, between_nodes=True)
async def replica_seed(engine: Engine, _: Caller, a: ReplicaArguments) -> dict[str, Any]:
    """Where a copy of a replica begins, and the beginning of its snapshot."""
    return await _cluster(engine).seeds.head((a.topic, a.partition))


@method(SliceArguments, between_nodes=True)
async def replica_seed_slice(engine: Engine, _: Caller, a: SliceArguments) -> dict[str, Any]:
    seeds = _cluster(engine).seeds
    return await seeds.slice(
        (a.topic, a.partition), from_sequence=a.from_sequence, through=a.through
    )


@method(ChunkArguments, between_nodes=True)
async def replica_seed_chunk(engine: Engine, _: Caller, a: ChunkArguments) -> dict[str, Any]:
    return _cluster(engine).seeds.chunk(a.piece, a.offset)
