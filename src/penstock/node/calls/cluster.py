"""Calls about the cluster: its nodes, who coordinates what, and how far behind followers are.

The calls named `replica_*` are those that only nodes make to each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from penstock.errors import FailedPrecondition, NotFound
from penstock.model.version import __version__
from penstock.node.calls.pages import PAGE_PARTITIONS_MAX, page_of
from penstock.node.calls.table import (
    Arguments,
    Caller,
    PageArguments,
    Result,
    TopicArguments,
    method,
)
from penstock.node.cluster.cluster import Cluster
from penstock.node.engine import Engine
from penstock.node.replica.host import Host
from penstock.node.replica.ports import Key
from penstock.node.serve.partition import Partition
from penstock.node.serve.topic import Topic
from penstock.node.upkeep.gauges import rolled_back
from penstock.replication.coordinator import Coordinator, MemberStatus

UNKNOWN: Final[dict[str, Any]] = {
    "sequence_last": None, "sequence_committed": None, "followers": [],
}  # fmt: skip
UNTOLD: Final[dict[str, Any]] = {"state": "", "ahead_ms": None}  # of a clock


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
async def routes(engine: Engine, _: Caller, a: RoutesArguments) -> Result:
    """Where the nodes are and, of one topic, who serves its partitions."""
    topic = engine.topic(a.topic) if a.topic else None
    cluster = engine.nodes
    answer: dict[str, Any] = {"cluster": "", "nodes": []}
    if cluster is not None:
        answer["cluster"] = cluster.options.name
        answer["nodes"] = [
            {"id": info.id, "host": info.host, "port": info.native_port}
            for _, info in sorted(cluster.alive.items())
        ]
    if topic is not None:
        answer["topic"] = topic.config.name
        answer["coordinators"] = [
            engine.cluster.coordinator((topic.config.id, index))
            for index in range(topic.config.partitions)
        ]
    return answer


@method(PageArguments)
async def cluster_status(engine: Engine, _: Caller, a: PageArguments) -> Result:
    """The nodes, and a page of the partitions. Nodes are asked about those that it may tell of; of
    all, as nodes of an earlier version are, if that is all there are."""
    cluster = engine.nodes
    if cluster is None:
        return _alone(engine, a.after)
    known = _known(cluster)
    behind = [key for key in known if _name(key) > a.after]
    keys = behind[:PAGE_PARTITIONS_MAX]
    within = {} if len(keys) == len(known) else _bounds(keys)
    told = await cluster.ask_all("replica_status", **within)
    served = {
        (part["topic"], part["partition"]): part
        for answer in told.values()
        for part in answer["partitions"]
    }
    copies = {
        (copy["topic"], copy["partition"], node): copy["sequence"]
        for node, answer in told.items()
        for copy in answer["copies"]
    }
    still = sorted(set(_known(cluster)).intersection(keys))  # others were deleted meanwhile
    rows = ((_name(key), _partition(cluster, key, served.get(key), copies)) for key in still)
    page = page_of(rows, more=len(keys) < len(behind))
    return {
        "cluster": cluster.options.name,
        "node": cluster.node,
        "policy": cluster.options.policy,
        "metadata": {
            "kind": "etcd",
            "endpoints": list(cluster.options.etcd),
            "available": cluster.available,
        },
        "nodes": _nodes(cluster, told),
        "partitions": page.rows,
        "next": page.next,
    }


@method(RebalanceArguments)
async def cluster_rebalance(engine: Engine, _: Caller, a: RebalanceArguments) -> Result:
    return await _cluster(engine).administration.rebalance(dry_run=a.dry_run)


@method(DrainArguments, subject="node")
async def cluster_drain(engine: Engine, _: Caller, a: DrainArguments) -> Result:
    return await _cluster(engine).administration.drain(a.node, dry_run=a.dry_run)


@method(Arguments)
async def cluster_moves(engine: Engine, _: Caller, a: Arguments) -> Result:
    """What waits of the last plan."""
    return {"moves": await _cluster(engine).administration.waiting()}


@method(RemoveReplicaArguments)
async def cluster_remove_replica(engine: Engine, _: Caller, a: RemoveReplicaArguments) -> Result:
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


class ReplicaStatusArguments(Arguments, frozen=True):
    """Of which partitions: those from `first` to `last`, as (topic, partition); else all."""

    first: tuple[int, int] | None = None
    last: tuple[int, int] | None = None

    def wants(self, key: tuple[int, int]) -> bool:
        behind = self.first is None or key >= self.first
        return behind and (self.last is None or key <= self.last)


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


@method(ReplicaTopicArguments)
async def replica_topic(engine: Engine, _: Caller, a: ReplicaTopicArguments) -> Result:
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


@method(Arguments)
async def replica_room(engine: Engine, _: Caller, a: Arguments) -> Result:
    """How many more partitions fit here, and the highest topic id that a folder here has."""
    _cluster(engine)
    highest = engine.folder.topic_id_highest()
    return {**engine.room.fitting()._asdict(), "topic_id_highest": highest}


@method(ReplicaStatusArguments)
async def replica_status(engine: Engine, _: Caller, a: ReplicaStatusArguments) -> Result:
    """The partitions that this node coordinates, how their followers fare, what it copies, and how
    it is itself."""
    _cluster(engine)
    return {
        "partitions": _coordinated(engine, a.wants),
        "copies": _copies(engine, a.wants),
        **_itself(engine),
    }


@method(Arguments)
async def replica_clock(engine: Engine, _: Caller, a: Arguments) -> Result:
    """What this node's clock shows."""
    return {"time_ms": engine.clock.now_ms()}


@method(DrainingArguments)
async def replica_drain(engine: Engine, _: Caller, a: DrainingArguments) -> Result:
    await _cluster(engine).set_draining(a.draining)
    return {}


@method(ResignArguments)
async def replica_resign(engine: Engine, _: Caller, a: ResignArguments) -> Result:
    """Give a partition up for the node that asks, if that one has all of it."""
    cluster = _cluster(engine)
    key = (a.topic, a.partition)
    host = engine.hosts.get(key)
    if host is None or host.partition is None:
        raise NotFound("this node does not serve the partition", partition=a.partition)
    if not _caught_up(host, a.node):
        raise FailedPrecondition(f"{a.node} has not caught up", node=a.node)
    await cluster.resign(key)
    return {}


@method(ReplicaArguments)
async def replica_seed(engine: Engine, _: Caller, a: ReplicaArguments) -> Result:
    """Where a copy of a replica begins, and the beginning of its snapshot."""
    return await _cluster(engine).seeds.head((a.topic, a.partition))


@method(SliceArguments)
async def replica_seed_slice(engine: Engine, _: Caller, a: SliceArguments) -> Result:
    seeds = _cluster(engine).seeds
    return await seeds.slice(
        (a.topic, a.partition), from_sequence=a.from_sequence, through=a.through
    )


@method(ChunkArguments)
async def replica_seed_chunk(engine: Engine, _: Caller, a: ChunkArguments) -> Result:
    return _cluster(engine).seeds.chunk(a.piece, a.offset)


def _known(cluster: Cluster) -> list[Key]:
    control = cluster.control
    return sorted(key for key in control.records if key[0] in control.topics)


def _bounds(keys: Sequence[Key]) -> dict[str, Any]:
    """Arguments of `replica_status` for these partitions alone; (0, 0) is before all of them."""
    if not keys:
        return {"last": (0, 0)}
    return {"first": keys[0], "last": keys[-1]}


def _name(key: Key) -> str:
    """By which a partition is in the list of all."""
    return f"{key[0]:010} {key[1]:04}"


def _alone(engine: Engine, after: str) -> dict[str, Any]:
    """A node in no cluster answers with itself."""
    node = engine.identity.node
    topics = sorted(engine.topics.values(), key=lambda topic: topic.config.id)
    named = (
        (_name((topic.config.id, partition.index)), topic, partition)
        for topic in topics
        for partition in topic.local
    )
    page = page_of((n, _serving(node, topic, part)) for n, topic, part in named if n > after)
    partitions = sum(len(topic.local) for topic in topics)
    itself = {
        "id": node,
        "address": f"{engine.config.host}:{engine.config.native_port}",
        "zone": "",
        "version": __version__,
        "alive": True,
        "reachable": True,
        "rolled_back": False,
        "clock": UNTOLD,
        "draining": engine.stopping,
        "age": 0,
        "started_ms": engine.started_ms,
        "coordinators": partitions,
        "replicas": partitions,
    }
    metadata = {"kind": "embedded", "endpoints": [], "available": True}
    return {
        "cluster": "", "node": node, "policy": "balanced", "metadata": metadata,
        "nodes": [itself], "partitions": page.rows, "next": page.next,
    }  # fmt: skip


def _serving(node: str, topic: Topic, partition: Partition) -> dict[str, Any]:
    """A partition whose only replica is that of its node."""
    return {
        "topic": topic.config.name,
        "partition": partition.index,
        "state": "serving",
        "epoch": partition.coordinator.epoch,
        "coordinator": node,
        "voters": [node],
        "joint": [],
        "learners": [],
        "target": [],
        "sequence_last": partition.log.sequence_last,
        "sequence_committed": partition.coordinator.sequence_committed,
        "followers": [],
    }


def _nodes(cluster: Cluster, told: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """All that are registered or named by a partition. A lease outlives its node for some seconds,
    so what the others see is told too: `reachable` is who answered, or is connected to one that
    did."""
    seen = {*told, *(peer for answer in told.values() for peer in answer.get("peers", ()))}
    records = [held.record for held in cluster.control.records.values()]
    replicas = Counter(node for record in records for node in record.members)
    coordinated = Counter(record.coordinator for record in records if record.coordinator)
    nodes = []
    for node in sorted({*cluster.alive, *replicas}):
        info = cluster.alive.get(node)
        nodes.append(
            {
                "id": node,
                "address": f"{info.host}:{info.native_port}" if info else "",
                "zone": info.zone if info else "",
                "version": info.version if info else "",
                "alive": info is not None,
                "reachable": info is not None and node in seen,
                "rolled_back": told.get(node, {}).get("rolled_back", False),
                "clock": told.get(node, {}).get("clock", UNTOLD),
                "draining": info is not None and info.draining,
                "age": cluster.members.ages.get(node, 0),
                "started_ms": info.started_ms if info else 0,
                "coordinators": coordinated[node],
                "replicas": replicas[node],
            }
        )
    return nodes


def _partition(
    cluster: Cluster,
    key: Key,
    served: dict[str, Any] | None,
    copies: Mapping[tuple[int, int, str], int],
) -> dict[str, Any]:
    record = cluster.control.records[key].record
    state = "serving"
    if served is None:
        reachable = cluster.coordinator(key)
        state = "electing" if reachable or record.coordinator not in cluster.alive else "unknown"
    known = UNKNOWN if served is None else {name: served[name] for name in UNKNOWN}
    return {
        "topic": cluster.control.topics[key[0]].name,
        "partition": key[1],
        "state": state,
        "epoch": record.epoch,
        "coordinator": record.coordinator if served is not None or state == "unknown" else "",
        "voters": list(record.voters),
        "joint": list(record.joint),
        "learners": list(record.learners),
        "target": list(record.target),
        **known,
        "followers": [
            {**follower, "copying": copies.get((*key, follower["node"]))}
            for follower in known["followers"]
        ],
    }


def _coordinated(engine: Engine, wanted: Callable[[Key], bool]) -> list[dict[str, Any]]:
    """What this node serves, by topic id."""
    return [
        {
            "topic": key[0],
            "partition": key[1],
            "sequence_last": host.log.sequence_last,
            "sequence_committed": host.committed,
            "followers": [
                _follower(found, counts=_counts(coordinator, found.node))
                for found in coordinator.standings()
            ],
        }
        for key, host in engine.hosts.items()
        if wanted(key)
        and host.partition is not None
        and (coordinator := host.replica.coordinator) is not None
    ]


def _itself(engine: Engine) -> dict[str, Any]:
    """What this node alone knows of itself and of the others."""
    cluster = engine.nodes
    assert cluster is not None
    return {
        "peers": [node for node in cluster.alive if cluster.live(node) is not None],
        "clock": {
            "state": cluster.clocks.verdict.value,
            "ahead_ms": None if (ahead := cluster.clocks.ahead_ms) is None else round(ahead),
        },
        "rolled_back": rolled_back(engine),
    }


def _copies(engine: Engine, wanted: Callable[[Key], bool]) -> list[dict[str, Any]]:
    """Replicas here that take a copy, as their logs are too far behind; how far they have come."""
    return [
        {"topic": key[0], "partition": key[1], "sequence": host.log.sequence_last}
        for key, host in engine.hosts.items()
        if wanted(key) and host.following.copying
    ]


def _counts(coordinator: Coordinator, node: str) -> bool:
    """Whether what a node acknowledges makes a majority: it votes, with the disk that is meant."""
    sender, record = coordinator.senders.get(node), coordinator.record
    return sender is not None and record.is_voter(node) and record.uuids.get(node) == sender.uuid


def _follower(standing: MemberStatus, *, counts: bool) -> dict[str, Any]:
    credit = standing.credit
    return {
        "node": standing.node,
        "connected": credit is not None,
        "counts": counts,
        "sequence": standing.durable,
        "lag": standing.lag,
        "lagging": standing.lagging,
        "credits": credit.entries if credit else 0,
        "credits_max": credit.entries_window if credit else 0,
        "credit_bytes": credit.bytes if credit else 0,
        "credit_bytes_max": credit.bytes_window if credit else 0,
    }


def _caught_up(host: Host, node: str) -> bool:
    """Whether a follower could take over without making anybody wait."""
    coordinator = host.replica.coordinator
    sender = coordinator.senders.get(node) if coordinator else None
    if coordinator is None or sender is None or sender.lagging:
        return False
    near = sender.lag(host.replica.log) <= host.replica.options.caught_up_entries
    return near and _counts(coordinator, node)
