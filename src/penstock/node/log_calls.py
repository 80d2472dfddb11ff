"""Calls about a topic's log: how far it goes, how far it is final, where a time is in it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from penstock.node.atomic import committed
from penstock.node.calls import Arguments, Caller, TopicArguments, method
from penstock.node.engine import Engine
from penstock.node.partition import Partition
from penstock.node.shares import fan_out, merged, shared, the_only
from penstock.node.streams import gone
from penstock.node.topic import Topic


class LogFindArguments(TopicArguments, frozen=True):
    partition: int
    time_ms: int


class Extent(Arguments, frozen=True):
    """Part of a partition's log, and how much of it is wanted at most."""

    partition: int
    from_sequence: int
    through: int
    entries_max: int = 1 << 62
    bytes_max: int = 1 << 62


class LogExtentArguments(TopicArguments, frozen=True):
    extents: list[Extent]


class FindShare(Arguments, frozen=True):
    time_ms: int


class PlacedExtent(Extent, frozen=True, kw_only=True):
    place: int  # in the request


class ExtentShare(Arguments, frozen=True):
    extents: list[PlacedExtent]


@method(TopicArguments)
async def log_status(engine: Engine, _: Caller, a: TopicArguments) -> dict[str, Any]:
    """Each partition's sequences. Up to `sequence_stable` nothing waits for a decision."""
    results = await fan_out(engine, engine.topic(a.topic), log_status_share)
    return {"partitions": merged(results, "partitions")}


@shared()
async def log_status_share(
    _: Engine, topic: Topic, partitions: list[Partition], __: dict[str, Any]
) -> dict[str, Any]:
    stable = await asyncio.gather(*(_stable(topic, p) for p in partitions))
    return {
        "partitions": [
            {
                "partition": p.index,
                "epoch": p.coordinator.epoch,
                "sequence_first": p.log.sequence_first,
                "sequence_last": p.log.sequence_last,
                "sequence_committed": p.coordinator.sequence_committed,
                "sequence_stable": sequence_stable,
                "chain": p.log.chain_last,
            }
            for p, sequence_stable in zip(partitions, stable, strict=True)
        ]
    }


async def _stable(topic: Topic, partition: Partition) -> int:
    """The last committed sequence before the first PREPARE without a committed decision.

    The heap is ahead of what is committed: a decision that it knows may still be lost. So it is
    asked now, and answers for what is committed once all that it has seen is.
    """
    transactions = partition.heap.transactions
    if transactions.untouched:
        return partition.coordinator.sequence_committed
    through = partition.heap.sequence_applied
    undecided = min((t.first for t in transactions.prepared.values()), default=through + 1)
    topic.wake()
    await committed(partition, through)
    return min(through, undecided - 1)


@method(LogFindArguments)
async def log_find(engine: Engine, _: Caller, a: LogFindArguments) -> dict[str, Any]:
    """The first committed batch that is not from before `time_ms`; past the end if none is."""
    topic = engine.topic(a.topic)
    index = topic.partition(a.partition).index
    (result,) = await fan_out(engine, topic, log_find_share, indices=[index], time_ms=a.time_ms)
    return result


@shared(FindShare)
async def log_find_share(
    _: Engine, __: Topic, partitions: list[Partition], a: dict[str, Any]
) -> dict[str, Any]:
    partition = the_only(partitions)
    through = partition.coordinator.sequence_committed
    sequence = await asyncio.to_thread(partition.log.find_time, a["time_ms"], through=through)
    return {"sequence": sequence}


@method(LogExtentArguments)
async def log_extent(engine: Engine, _: Caller, a: LogExtentArguments) -> dict[str, Any]:
    """How far whole committed batches reach within bounds: what a reader plans its ranges by."""
    topic = engine.topic(a.topic)
    indices = {topic.partition(extent.partition).index for extent in a.extents}
    wanted = [msgspec.to_builtins(extent) | {"place": i} for i, extent in enumerate(a.extents)]
    results = await fan_out(engine, topic, log_extent_share, indices=indices, extents=wanted)
    found = sorted((row for r in results for row in r["extents"]), key=lambda row: row[0])
    return {"extents": [extent for _, extent in found]}


@shared(ExtentShare)
async def log_extent_share(
    _: Engine, __: Topic, partitions: list[Partition], a: dict[str, Any]
) -> dict[str, Any]:
    """Extents of these partitions, each with its place in the request."""
    by_index = {partition.index: partition for partition in partitions}
    found = []
    for wanted in a["extents"]:
        partition = by_index.get(wanted["partition"])
        if partition is None:
            continue
        if wanted["from_sequence"] < partition.log.sequence_first:
            raise gone(wanted["from_sequence"], sequence_first=partition.log.sequence_first)
        last, size = await asyncio.to_thread(
            partition.log.extent,
            wanted["from_sequence"],
            through=min(wanted["through"], partition.coordinator.sequence_committed),
            entries_max=max(1, wanted["entries_max"]),
            bytes_max=wanted["bytes_max"],
        )
        row = {"partition": partition.index, "last": last, "bytes": size}
        found.append((wanted["place"], row))
    return {"extents": found}
