"""Calls about the cluster: its nodes, who coordinates what, and how far behind followers are.

The calls named `replica_*` are those that only nodes make to each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from penstock.cluster.membership import NodeInfo
from penstock.errors import FailedPrecondition, NotFound
from penstock.node.calls.pages import PAGE_PARTITIONS_MAX, page_of
from penstock.node.calls.table import (
    Arguments,
    Caller,
    PageArguments,
    Result,
    TopicArguments,
    method,
)
from penstock.node.engine import Engine
from penstock.node.replica.host import Host
from penstock.node.replica.ports import Key
from penstock.node.upkeep.gauges import rolled_back
from penstock.replication.assignment import PartitionRecord
from penstock.replication.coordinator import Coordinator, MemberStatus

UNKNOWN: Final[dict[str, Any]] = {
    "sequence_last": None, "sequence_committed": None, "followers": [],
}  # fmt: skip
UNTOLD: Final[dict[str, Any]] = {"state": "", "ahead_ms": None}  # of a clock


# --- for everybody ---


class RoutesArguments(Arguments, frozen=True):
    topic: str | None = None


class RebalanceArguments(Arguments, frozen=True):
    dry_run: bool = False


class DrainArguments(RebalanceArguments, frozen=True, kw_only=True):
    node: str


class RemoveReplicaArguments(TopicArguments, frozen=True):
    partition: int
    node: str


@method(RoutesArguments)
async def routes(engine: Engine, _: Caller, a: RoutesArguments) -> Result:
    """Where the nodes are and, of one topic, who serves its partitions."""
    topic = engine.topics[a.topic] if a.topic else None
    alive = sorted(engine.nodes.alive.items()) if engine.config.cluster.enabled else []
    answer: Result = {
        "cluster": engine.config.cluster_name,
        "nodes": [
            {"id": info.id, "host": info.host, "port": info.native_port} for _, info in alive
        ],
    }
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
    records = _records(engine)
    behind = [key for key in records if _name(key) > a.after]
    keys = behind[:PAGE_PARTITIONS_MAX]
    told = await _told(engine, {} if len(keys) == len(records) else _bounds(keys))
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
    records = _records(engine)
    rows = (
        (_name(key), _partition(engine, key, *records[key], served.get(key), copies))
        for key in keys
        if key in records  # others were deleted meanwhile
    )
    page = page_of(rows, more=len(keys) < len(behind))
    options = engine.config.cluster
    return {
        "cluster": engine.config.cluster_name,
        "node": engine.identity.node,
        "policy": options.policy,
        "metadata": {
            "kind": "etcd" if options.enabled else "embedded",
            "endpoints": list(options.etcd),
            "available": engine.cluster.available,
        },
        "nodes": _nodes(engine, told, [record for _, record in records.values()]),
        "partitions": page.rows,
        "next": page.next,
    }


@method(RebalanceArguments)
async def cluster_rebalance(engine: Engine, _: Caller, a: RebalanceArguments) -> Result:
    return await engine.replica_sets.rebalance(dry_run=a.dry_run)


@method(DrainArguments, subject="node")
async def cluster_drain(engine: Engine, _: Caller, a: DrainArguments) -> Result:
    return await engine.replica_sets.drain(a.node, dry_run=a.dry_run)


@method(Arguments)
async def cluster_moves(engine: Engine, _: Caller, a: Arguments) -> Result:
    return {"moves": await engine.replica_sets.waiting()}


@method(RemoveReplicaArguments)
async def cluster_remove_replica(engine: Engine, _: Caller, a: RemoveReplicaArguments) -> Result:
    topic = engine.topics[a.topic]
    topic.partition(a.partition)
    key = (topic.config.id, a.partition)
    return {"voters": await engine.replica_sets.remove_replica(key, a.node)}


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
    highest = engine.folder.topic_id_highest()
    return {**engine.room.fitting()._asdict(), "topic_id_highest": highest}


@method(ReplicaStatusArguments)
async def replica_status(engine: Engine, _: Caller, a: ReplicaStatusArguments) -> Result:
    """The partitions that this node coordinates, how their followers fare, what it copies, and how
    it is itself."""
    return _status(engine, a.wants)


@method(Arguments)
async def replica_clock(engine: Engine, _: Caller, a: Arguments) -> Result:
    return {"time_ms": engine.clock.now_ms()}


@method(DrainingArguments)
async def replica_drain(engine: Engine, _: Caller, a: DrainingArguments) -> Result:
    await engine.nodes.set_draining(a.draining)
    return {}


@method(ResignArguments)
async def replica_resign(engine: Engine, _: Caller, a: ResignArguments) -> Result:
    """Give a partition up for the node that asks, if that one has all of it."""
    key = (a.topic, a.partition)
    host = engine.hosts.get(key)
    if host is None or host.partition is None:
        raise NotFound("this node does not serve the partition", partition=a.partition)
    if not _caught_up(host, a.node):
        raise FailedPrecondition(f"{a.node} has not caught up", node=a.node)
    await engine.nodes.resign(key)
    return {}


@method(ReplicaArguments)
async def replica_seed(engine: Engine, _: Caller, a: ReplicaArguments) -> Result:
    """Where a copy of a replica begins, and the beginning of its snapshot."""
    return await engine.nodes.seeds.head((a.topic, a.partition))


@method(SliceArguments)
async def replica_seed_slice(engine: Engine, _: Caller, a: SliceArguments) -> Result:
    key = (a.topic, a.partition)
    return await engine.nodes.seeds.slice(key, from_sequence=a.from_sequence, through=a.through)


@method(ChunkArguments)
async def replica_seed_chunk(engine: Engine, _: Caller, a: ChunkArguments) -> Result:
    return engine.nodes.seeds.chunk(a.piece, a.offset)


def _records(engine: Engine) -> dict[Key, tuple[str, PartitionRecord]]:
    """The name of the topic, and the record, of each partition that there is, in order."""
    if engine.config.cluster.enabled:
        control = engine.nodes.control
        topics = control.topics
        found = {
            key: (topics[key[0]].name, held.record)
            for key, held in control.records.items()
            if key[0] in topics
        }
    else:
        found = {
            (topic.config.id, p.index): (topic.config.name, p.coordinator.record)
            for topic in engine.topics.values()
            for p in topic.local
        }
    return dict(sorted(found.items()))


async def _told(engine: Engine, within: dict[str, Any]) -> dict[str, Result]:
    if engine.config.cluster.enabled:
        return await engine.nodes.ask_all("replica_status", **within)
    return {engine.identity.node: _status(engine, lambda key: True)}


def _bounds(keys: Sequence[Key]) -> dict[str, Any]:
    """Arguments of `replica_status` for these partitions alone; (0, 0) is before all of them."""
    if not keys:
        return {"last": (0, 0)}
    return {"first": keys[0], "last": keys[-1]}


def _name(key: Key) -> str:
    """By which a partition is in the list of all."""
    return f"{key[0]:010} {key[1]:04}"


def _nodes(
    engine: Engine, told: Mapping[str, Result], records: Sequence[PartitionRecord]
) -> list[Result]:
    """All that are registered or named by a partition. A lease outlives its node for some seconds,
    so what the others see is told too: `reachable` is who answered, or is connected to one that
    did."""
    seen = {*told, *(peer for answer in told.values() for peer in answer.get("peers", ()))}
    replicas = Counter(node for record in records for node in record.members)
    coordinated = Counter(record.coordinator for record in records if record.coordinator)
    alive, ages = _alive(engine)
    nodes = []
    for node in sorted({*alive, *replicas}):
        info = alive.get(node)
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
                "age": ages.get(node, 0),
                "started_ms": info.started_ms if info else 0,
                "coordinators": coordinated[node],
                "replicas": replicas[node],
            }
        )
    return nodes


def _alive(engine: Engine) -> tuple[Mapping[str, NodeInfo], Mapping[str, int]]:
    """The members, and their ages. Who is alone is the only one."""
    if engine.config.cluster.enabled:
        return engine.nodes.alive, engine.nodes.members.ages
    info = engine.info(port=engine.config.native_port or 0)
    return {info.id: info}, {}


def _partition(
    engine: Engine,
    key: Key,
    topic: str,
    record: PartitionRecord,
    served: Result | None,
    copies: Mapping[tuple[int, int, str], int],
) -> Result:
    state = "serving"
    if served is None:
        reachable = engine.cluster.coordinator(key)
        lost = reachable or record.coordinator not in engine.nodes.alive
        state = "electing" if lost else "unknown"
    known = UNKNOWN if served is None else {name: served[name] for name in UNKNOWN}
    return {
        "topic": topic,
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


def _status(engine: Engine, wanted: Callable[[Key], bool]) -> Result:
    return {
        "partitions": _coordinated(engine, wanted),
        "copies": _copies(engine, wanted),
        **_itself(engine),
    }


def _coordinated(engine: Engine, wanted: Callable[[Key], bool]) -> list[dict[str, Any]]:
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
    if not engine.config.cluster.enabled:
        return {"peers": [], "clock": UNTOLD, "rolled_back": False}
    cluster = engine.nodes
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
