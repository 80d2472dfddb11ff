"""Calls about how things are: the nodes, who coordinates what, how far behind followers are,
statistics, snapshots, verification.

The calls named `replica_*` are those that only nodes make to each other.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from penstock.cluster.membership import NodeInfo
from penstock.errors import FailedPrecondition, NotFound, Unavailable
from penstock.heap.state import Totals
from penstock.model.version import __version__
from penstock.node import upkeep
from penstock.node.calls.pages import PAGE_PARTITIONS_MAX, Page, page_of, topics_behind
from penstock.node.calls.table import (
    NodeShare,
    Result,
    ask_share,
    by_node,
    fan_out,
    merged,
    method,
    shared,
)
from penstock.node.engine import Engine
from penstock.node.replica.host import Host
from penstock.node.replica.ports import Key
from penstock.node.serve.partition import Partition
from penstock.node.serve.topic import ServedTopic
from penstock.node.upkeep import oldest_age_s, snapshot_age_s
from penstock.replication.assignment import PartitionRecord
from penstock.replication.coordinator import Coordinator, MemberStatus
from penstock.wire.messages import Text

Records = dict[Key, tuple[str, PartitionRecord]]  # with the names of their topics
UNKNOWN: Final[dict[str, Any]] = {
    "sequence_last": None, "sequence_committed": None, "followers": [],
}  # fmt: skip
UNTOLD: Final[dict[str, Any]] = {"state": "", "ahead_ms": None}  # of a clock
UNREGISTERED: Final = NodeInfo(id="", uuid="", host="", native_port=0)
_TOTALS: Final = Totals.__struct_fields__
_SUMMED: Final = ("ready", "delayed", "leased", "dead", "backlog", "bytes")
_UNSERVED: Final[dict[str, Any]] = {
    "coordinator": "", "oldest_age_ms": None, "snapshot_age_ms": None,
    **dict.fromkeys(_SUMMED, 0),
    **dict.fromkeys(("epoch", "sequence_first", "sequence_last", "sequence_committed"), 0),
    **dict.fromkeys(("segments", "snapshot_sequence", "snapshot_bytes"), 0),
}  # fmt: skip


# --- for everybody ---


@method()
async def routes(engine: Engine, *, topic: str | None = None) -> Result:
    config = engine.topics[topic].config if topic else None
    alive = [] if engine.cluster.alone else sorted(engine.cluster.alive.items())
    answer: Result = {
        "cluster": engine.config.cluster_name,
        "nodes": [
            {"id": info.id, "host": info.host, "port": info.native_port} for _, info in alive
        ],
    }
    if config is not None:
        answer["topic"] = config.name
        answer["coordinators"] = [
            engine.cluster.coordinator((config.id, index)) for index in range(config.partitions)
        ]
    return answer


@method()
async def cluster_status(engine: Engine, *, after: Text = "") -> Result:
    """The nodes, and a page of the partitions. Nodes are asked about those that it may tell of; of
    all, as nodes of an earlier version are, if that is all there are."""
    records = _records(engine)
    behind = [key for key in records if _name(key) > after]
    keys, more = behind[:PAGE_PARTITIONS_MAX], len(behind) > PAGE_PARTITIONS_MAX
    told = await _told(engine, {} if len(keys) == len(records) else _bounds(keys))
    records = _records(engine)
    keys = [key for key in keys if key in records]  # others were deleted meanwhile
    page = page_of(_partitions(engine, keys, records, told), more=more)
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
        **page.told("partitions"),
    }


@method()
async def cluster_rebalance(engine: Engine, *, dry_run: bool = False) -> Result:
    return await engine.administration.replica_sets.rebalance(dry_run=dry_run)


@method(subject="node")
async def cluster_drain(engine: Engine, *, node: str, dry_run: bool = False) -> Result:
    return await engine.administration.replica_sets.drain(node, dry_run=dry_run)


@method()
async def cluster_moves(engine: Engine) -> Result:
    return {"moves": await engine.administration.replica_sets.waiting()}


@method()
async def cluster_remove_replica(
    engine: Engine, *, topic: str, partition: int, node: str
) -> Result:
    served = engine.topics[topic]
    served.partition(partition)
    key = (served.config.id, partition)
    return {"voters": await engine.administration.replica_sets.remove_replica(key, node)}


# --- between nodes ---


@method()
async def replica_topic(engine: Engine, *, topic: int, name: str) -> Result:
    served = engine.topics.get(name)
    if served is None or served.config.id != topic:
        return {"known": False, "config": None, "serving": []}
    return {
        "known": True,
        "config": msgspec.to_builtins(served.config),
        "serving": [partition.index for partition in served.local],
    }


@method()
async def replica_room(engine: Engine) -> Result:
    """How many more partitions fit here, and the highest topic id that a folder here has."""
    highest = engine.folder.topic_id_highest()
    return {**engine.room.fitting()._asdict(), "topic_id_highest": highest}


@method()
async def replica_status(
    engine: Engine, *, first: Key | None = None, last: Key | None = None
) -> Result:
    """What this node coordinates, from `first` to `last` or all of it, its copies, and itself."""
    hosts = [
        (key, host)
        for key, host in engine.hosts.items()
        if (first is None or key >= first) and (last is None or key <= last)
    ]
    return {
        "partitions": [
            _coordinated(key, host, coordinator)
            for key, host in hosts
            if host.partition is not None and (coordinator := host.replica.coordinator) is not None
        ],
        # Replicas that take a copy, as their logs are too far behind; how far they have come.
        "copies": [
            {"topic": key[0], "partition": key[1], "sequence": host.log.sequence_last}
            for key, host in hosts
            if host.following.copying
        ],
        **_itself(engine),
    }


@method()
async def replica_clock(engine: Engine) -> Result:
    return {"time_ms": engine.clock.now_ms()}


@method()
async def replica_drain(engine: Engine, *, draining: bool) -> Result:
    await engine.nodes.set_draining(draining)
    return {}


@method()
async def replica_resign(engine: Engine, *, topic: int, partition: int, node: str) -> Result:
    """Give a partition up for the node that asks, if that one has all of it."""
    host = engine.hosts.get((topic, partition))
    if host is None or host.partition is None:
        raise NotFound("this node does not serve the partition", partition=partition)
    if not _caught_up(host, node):
        raise FailedPrecondition(f"{node} has not caught up", node=node)
    await engine.nodes.resign((topic, partition))
    return {}


@method()
async def replica_seed(engine: Engine, *, topic: int, partition: int) -> Result:
    return await engine.nodes.seeds.head((topic, partition))


@method()
async def replica_seed_slice(
    engine: Engine, *, topic: int, partition: int, from_sequence: int, through: int
) -> Result:
    seeds = engine.nodes.seeds
    return await seeds.slice((topic, partition), from_sequence=from_sequence, through=through)


@method()
async def replica_seed_chunk(engine: Engine, *, piece: int, offset: int) -> Result:
    return engine.nodes.seeds.chunk(piece, offset)


def _partitions(
    engine: Engine, keys: Sequence[Key], records: Records, told: Mapping[str, Result]
) -> Iterator[tuple[str, Result]]:
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
    for key in keys:
        yield _name(key), _partition(engine, key, *records[key], served.get(key), copies)


def _records(engine: Engine) -> Records:
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
    return {engine.identity.node: await replica_status(engine)}


def _bounds(keys: Sequence[Key]) -> dict[str, Any]:
    """Arguments of `replica_status` for these partitions alone; (0, 0) is before all of them."""
    if not keys:
        return {"last": (0, 0)}
    return {"first": keys[0], "last": keys[-1]}


def _name(key: Key) -> str:
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
    alive, ages = engine.cluster.alive, engine.cluster.ages
    nodes = []
    for node in sorted({*alive, *replicas}):
        info, itself = alive.get(node, UNREGISTERED), told.get(node, {})
        nodes.append(
            {
                "id": node,
                "address": f"{info.host}:{info.native_port}" if node in alive else "",
                "zone": info.zone,
                "version": info.version,
                "alive": node in alive,
                "reachable": node in alive and node in seen,
                "rolled_back": itself.get("rolled_back", False),
                "clock": itself.get("clock", UNTOLD),
                "draining": info.draining,
                "age": ages.get(node, 0),
                "started_ms": info.started_ms,
                "coordinators": coordinated[node],
                "replicas": replicas[node],
            }
        )
    return nodes


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
        lost = reachable or record.coordinator not in engine.cluster.alive
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


def _coordinated(key: Key, host: Host, coordinator: Coordinator) -> Result:
    return {
        "topic": key[0],
        "partition": key[1],
        "sequence_last": host.log.sequence_last,
        "sequence_committed": host.committed,
        "followers": [
            _follower(found, counts=_counts(coordinator, found.node))
            for found in coordinator.standings()
        ],
    }


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
        "rolled_back": cluster.rolled_back,
    }


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


@method()
async def stats(engine: Engine, *, topic: str | None = None, after: Text = "") -> Result:
    chosen = {topic: engine.topics[topic]} if topic else engine.topics
    topics, more = topics_behind(chosen, after)
    rows = await asyncio.gather(*(_topic_stats(engine, topic) for topic in topics))
    return page_of(((row["name"], row) for row in rows), more=more).told("topics")


async def _topic_stats(engine: Engine, topic: ServedTopic) -> dict[str, Any]:
    """Counts and totals are summed over the nodes, ages and errors are the greatest. A partition
    that nobody serves is listed without a coordinator."""
    served = by_node(topic, range(len(topic.partitions))).values()
    known = [index for some in served for index in some]
    try:
        results = await fan_out(engine, topic, stats_share, indices=known)
    except Unavailable:  # somebody left at this very moment: what this node has is better than none
        results = [await stats_share(NodeShare(engine, topic, list(topic.local)))]
    if not any(result["node"] == engine.identity.node for result in results):
        results.append(await stats_share(NodeShare(engine, topic, [])))
    partitions = merged(results, "partitions")
    found = {p["partition"] for p in partitions}
    unserved = [i for i in range(len(topic.partitions)) if i not in found]
    partitions += [{"partition": i, **_UNSERVED} for i in unserved]
    partitions.sort(key=lambda p: p["partition"])
    ages = [p["oldest_age_ms"] for p in partitions if p["oldest_age_ms"] is not None]
    return {
        "name": topic.config.name,
        "mode": topic.config.mode.value,
        "paused": topic.config.paused,
        **{name: sum(p[name] for p in partitions) for name in _SUMMED},
        **{f"{name}_total": sum(r["totals"][name] for r in results) for name in _TOTALS},
        "oldest_age_ms": max(ages, default=None),
        "rank_error_max": max(result["rank_error_max"] for result in results),
        "consumers": sum(result["consumers"] for result in results),
        "partitions": partitions,
    }


@shared()
async def stats_share(share: NodeShare) -> Result:
    engine, topic, partitions = share
    return {
        "node": engine.identity.node,
        "partitions": [_partition_stats(engine, topic, partition) for partition in partitions],
        "totals": {name: sum(getattr(p.heap.totals, name) for p in partitions) for name in _TOTALS},
        "rank_error_max": topic.dispatch.rank_error_max,
        "consumers": len(topic.dispatch.streams),
    }


def _partition_stats(engine: Engine, topic: ServedTopic, partition: Partition) -> dict[str, Any]:
    host, heap = engine.hosts[topic.key(partition.index)], partition.heap
    age_s, snapshot_age = oldest_age_s(partition), snapshot_age_s(host)
    return {
        "partition": partition.index,
        "coordinator": engine.identity.node,
        "epoch": partition.coordinator.epoch,
        "sequence_first": partition.log.sequence_first,
        "sequence_last": partition.log.sequence_last,
        "sequence_committed": partition.coordinator.sequence_committed,
        "ready": heap.ready,
        "delayed": heap.delayed,
        "leased": heap.leased,
        "dead": heap.dead,
        "backlog": heap.ready + heap.delayed,
        "oldest_age_ms": None if age_s is None else round(age_s * 1000),
        "bytes": partition.log.bytes_total,
        "segments": len(partition.log.segments()),
        "snapshot_sequence": host.snapshot.sequence,
        "snapshot_bytes": host.snapshot.bytes,
        "snapshot_age_ms": None if snapshot_age is None else round(snapshot_age * 1000),
    }


@method()
async def snapshot(engine: Engine, *, topic: str | None = None) -> Result:
    """All are taken at their coordinators, also those that the answer has no room for."""
    chosen = [engine.topics[topic]] if topic else list(engine.topics.values())
    page, left = Page(), 0
    for each in chosen:
        for taken in merged(await fan_out(engine, each, snapshot_share), "snapshots"):
            left += page.more or not page.take(each.config.name, taken)
    return {"snapshots": page.rows, "left": left}


@shared()
async def snapshot_share(share: NodeShare) -> Result:
    taken = []
    for partition in share.partitions:
        host = share.engine.hosts[share.topic.key(partition.index)]
        facts = await upkeep.snapshot(share.engine, host)
        taken.append(
            {
                "topic": share.topic.config.name,
                "partition": partition.index,
                "sequence": facts.sequence,
                "bytes": facts.bytes,
            }
        )
    return {"snapshots": taken}


@method()
async def verify(engine: Engine) -> Result:
    others = {  # each with a topic that it knows for sure
        node: topic
        for topic in engine.topics.values()
        for index in range(len(topic.partitions))
        if (node := topic.router.coordinator(topic.key(index)))
    }
    here, *results = await asyncio.gather(
        _verified(engine), *(ask_share(topic, node, verify_share) for node, topic in others.items())
    )
    damage = [f"{r['node']}: {r['damage']}" for r in results if r["damage"] is not None]
    first = here["damage"] or next(iter(damage), None)
    size = here["bytes"] + sum(r["bytes"] for r in results)
    return {"bytes": size, "ok": first is None, "damage": first}


@shared()
async def verify_share(share: NodeShare) -> Result:
    return await _verified(share.engine)


async def _verified(engine: Engine) -> dict[str, Any]:
    found = await upkeep.verify(engine)
    damage = found.damage or engine.damage
    return {"node": engine.identity.node, "bytes": found.bytes, "damage": damage}


@method()
async def node_status(engine: Engine, *, after: Text = "") -> Result:
    return {
        "node": engine.identity.node,
        "version": __version__,
        "format": engine.folder.format,
        "data": str(engine.config.data),
        "uptime_ms": engine.clock.now_ms() - engine.started_ms,
        "topics": len(engine.topics),
        "connections": len(engine.connections),
        "keys_required": engine.config.keys_required,
        "healthy": engine.fatal_error is None and not engine.stopping,
        "damage": engine.damage,
        **page_of(engine.unopened.rows(after)).told("unopened"),
    }
