"""Calls about how things are: statistics, snapshots, verification, the node itself."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from penstock.errors import Unavailable
from penstock.heap import Totals
from penstock.model.version import __version__
from penstock.node.calls.fan_out import NodeShare, ask_share, by_node, fan_out, merged, shared
from penstock.node.calls.pages import Page, page_of, topics_behind
from penstock.node.calls.table import Arguments, Caller, PageArguments, Result, method
from penstock.node.engine import Engine
from penstock.node.serve.partition import Partition
from penstock.node.serve.topic import ServedTopic
from penstock.node.upkeep import sweeps
from penstock.node.upkeep.gauges import partition_reading


class StatsArguments(PageArguments, frozen=True):
    topic: str | None = None


class SnapshotArguments(Arguments, frozen=True):
    topic: str | None = None


@method(StatsArguments)
async def stats(engine: Engine, _: Caller, a: StatsArguments) -> Result:
    chosen = {a.topic: engine.topics[a.topic]} if a.topic else engine.topics
    topics, more = topics_behind(chosen, a.after)
    rows = await asyncio.gather(*(_topic_stats(engine, topic) for topic in topics))
    page = page_of(((row["name"], row) for row in rows), more=more)
    return {"topics": page.rows, "next": page.next}


_TOTALS: Final = Totals.__struct_fields__
_SUMMED: Final = ("ready", "delayed", "leased", "dead", "backlog", "bytes")


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
    partitions += [_unserved(i) for i in range(len(topic.partitions)) if i not in found]
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
    engine, topic, partitions, _ = share
    now_ms = engine.clock.now_ms()
    return {
        "node": engine.identity.node,
        "partitions": [_partition_stats(engine, topic, p, now_ms) for p in partitions],
        "totals": {name: sum(getattr(p.heap.totals, name) for p in partitions) for name in _TOTALS},
        "rank_error_max": topic.dispatch.rank_error_max,
        "consumers": len(topic.dispatch.streams),
    }


def _partition_stats(
    engine: Engine, topic: ServedTopic, partition: Partition, now_ms: int
) -> dict[str, Any]:
    host = engine.hosts[topic.key(partition.index)]
    reading = partition_reading(host, partition, now_ms)
    age_s, snapshot_age_s = reading.oldest_age_s, reading.snapshot_age_s
    return {
        "partition": partition.index,
        "coordinator": engine.identity.node,
        "epoch": reading.epoch,
        "sequence_first": partition.log.sequence_first,
        "sequence_last": partition.log.sequence_last,
        "sequence_committed": reading.sequence_committed,
        "ready": reading.ready,
        "delayed": reading.delayed,
        "leased": reading.inflight,
        "dead": reading.dead,
        "backlog": reading.backlog,
        "oldest_age_ms": None if age_s is None else round(age_s * 1000),
        "bytes": reading.log_bytes,
        "segments": reading.log_segments,
        "snapshot_sequence": host.snapshot.sequence,
        "snapshot_bytes": host.snapshot.bytes,
        "snapshot_age_ms": None if snapshot_age_s is None else round(snapshot_age_s * 1000),
    }


def _unserved(index: int) -> dict[str, Any]:
    names = ("epoch", "sequence_first", "sequence_last", "sequence_committed", "ready", "delayed",
             "leased", "dead", "backlog", "bytes", "segments", "snapshot_sequence",
             "snapshot_bytes")  # fmt: skip
    missing: dict[str, Any] = {"oldest_age_ms": None, "snapshot_age_ms": None}
    return {"partition": index, "coordinator": "", **dict.fromkeys(names, 0), **missing}


@method(SnapshotArguments)
async def snapshot(engine: Engine, _: Caller, a: SnapshotArguments) -> Result:
    """Take snapshots now, of every partition at its coordinator. All are taken, also those that
    the answer has no room for."""
    chosen = [engine.topics[a.topic]] if a.topic else list(engine.topics.values())
    page, left = Page(), 0
    for topic in chosen:
        for taken in merged(await fan_out(engine, topic, snapshot_share), "snapshots"):
            left += page.more or not page.take(topic.config.name, taken)
    return {"snapshots": page.rows, "left": left}


@shared()
async def snapshot_share(share: NodeShare) -> Result:
    taken = []
    for partition in share.partitions:
        host = share.engine.hosts[share.topic.key(partition.index)]
        facts = await sweeps.snapshot(share.engine, host)
        taken.append(
            {
                "topic": share.topic.config.name,
                "partition": partition.index,
                "sequence": facts.sequence,
                "bytes": facts.bytes,
            }
        )
    return {"snapshots": taken}


@method(Arguments)
async def verify(engine: Engine, _: Caller, a: Arguments) -> Result:
    """Verify all sealed segments now, of every node that serves partitions."""
    results = await asyncio.gather(
        _verified(engine),
        *(ask_share(topic, node, verify_share) for node, topic in _other_nodes(engine).items()),
    )
    damage = [f"{r['node']}: {r['damage']}" for r in results[1:] if r["damage"] is not None]
    first = results[0]["damage"] or next(iter(damage), None)
    return {"bytes": sum(r["bytes"] for r in results), "ok": first is None, "damage": first}


def _other_nodes(engine: Engine) -> dict[str, ServedTopic]:
    """Nodes that coordinate something, each with a topic that it knows for sure."""
    return {
        node: topic
        for topic in engine.topics.values()
        for index in range(len(topic.partitions))
        if (node := topic.router.coordinator(topic.key(index)))
    }


@shared()
async def verify_share(share: NodeShare) -> Result:
    return await _verified(share.engine)


async def _verified(engine: Engine) -> dict[str, Any]:
    found = await sweeps.verify(engine)
    damage = found.damage or engine.damage
    return {"node": engine.identity.node, "bytes": found.bytes, "damage": damage}


@method(PageArguments)
async def node_status(engine: Engine, _: Caller, a: PageArguments) -> Result:
    unopened = page_of(engine.unopened.rows(a.after))
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
        "unopened": unopened.rows,
        "next": unopened.next,
    }
