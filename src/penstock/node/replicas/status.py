"""How the cluster is: its nodes, who coordinates what, and how far behind followers are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from penstock.model.version import __version__
from penstock.node.engine import Engine
from penstock.node.replicas.cluster import Cluster
from penstock.node.replicas.host import Host
from penstock.node.replicas.ports import Key
from penstock.node.topic import Topic
from penstock.replication.coordinator import Coordinator
from penstock.replication.standing import Standing

UNKNOWN: Final[dict[str, Any]] = {
    "sequence_last": None, "sequence_committed": None, "followers": [],
}  # fmt: skip


def routes(engine: Engine, topic: Topic | None) -> dict[str, Any]:
    """Where the nodes are and, of one topic, who serves its partitions."""
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


async def cluster_status(engine: Engine) -> dict[str, Any]:
    cluster = engine.nodes
    if cluster is None:
        return _alone(engine)
    told = await cluster.ask_all("replica_status")
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
    return {
        "cluster": cluster.options.name,
        "node": cluster.node,
        "policy": cluster.options.policy,
        "metadata": {
            "kind": "etcd",
            "endpoints": list(cluster.options.etcd),
            "available": cluster.available,
        },
        "nodes": _nodes(cluster),
        "partitions": [
            _partition(cluster, key, served.get(key), copies)
            for key in sorted(cluster.control.records)
            if key[0] in cluster.control.topics
        ],
    }


def _alone(engine: Engine) -> dict[str, Any]:
    """A node in no cluster answers with itself."""
    node = engine.identity.node
    partitions = [
        {
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
        for topic in engine.topics.values()
        for partition in topic.local
    ]
    itself = {
        "id": node,
        "address": f"{engine.config.host}:{engine.config.native_port}",
        "zone": "",
        "version": __version__,
        "alive": True,
        "draining": engine.stopping,
        "age": 0,
        "started_ms": engine.started_ms,
        "coordinators": len(partitions),
        "replicas": len(partitions),
    }
    metadata = {"kind": "embedded", "endpoints": [], "available": True}
    return {
        "cluster": "", "node": node, "policy": "balanced", "metadata": metadata,
        "nodes": [itself], "partitions": partitions,
    }  # fmt: skip


def _nodes(cluster: Cluster) -> list[dict[str, Any]]:
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


def coordinated(engine: Engine) -> list[dict[str, Any]]:
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
        if host.partition is not None and (coordinator := host.replica.coordinator) is not None
    ]


def copies(engine: Engine) -> list[dict[str, Any]]:
    """Replicas here that take a copy, as their logs are too far behind; how far they have come."""
    return [
        {"topic": key[0], "partition": key[1], "sequence": host.log.sequence_last}
        for key, host in engine.hosts.items()
        if host.following.copying
    ]


def _counts(coordinator: Coordinator, node: str) -> bool:
    """Whether what a node acknowledges makes a majority: it votes, with the disk that is meant."""
    sender, record = coordinator.senders.get(node), coordinator.record
    return sender is not None and record.is_voter(node) and record.uuids.get(node) == sender.uuid


def _follower(standing: Standing, *, counts: bool) -> dict[str, Any]:
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


def caught_up(host: Host, node: str) -> bool:
    """Whether a follower could take over without making anybody wait."""
    coordinator = host.replica.coordinator
    sender = coordinator.senders.get(node) if coordinator else None
    if coordinator is None or sender is None or sender.lagging:
        return False
    near = sender.lag(host.replica.log) <= host.replica.options.caught_up_entries
    return near and _counts(coordinator, node)
