"""Calls about a topic's log: how far it goes, how far it is final, where a time is in it."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.node.atomic import committed
from penstock.node.calls import Arguments, Caller, TopicArguments, method
from penstock.node.engine import Engine
from penstock.node.partition import Partition
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


@method(TopicArguments)
async def log_status(engine: Engine, _: Caller, a: TopicArguments) -> dict[str, Any]:
    """Each partition's sequences. Up to `sequence_stable` nothing waits for a decision."""
    topic = engine.topic(a.topic)
    stable = await asyncio.gather(*(_stable(topic, p) for p in topic.local))
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
            for p, sequence_stable in zip(topic.local, stable, strict=True)
        ]
    }


async def _stable(topic: Topic, partition: Partition) -> int:
    """The last committed sequence before the first PREPARE without a committed decision.

    The heap is ahead of what is committed: a decision that it knows may still be lost. So it is
    asked now, and answers for what is committed once all that it has seen is.
    """
    transactions = partition.heap.transactions
    if not (transactions.prepared or transactions.decided):
        return partition.coordinator.sequence_committed
    through = partition.heap.sequence_applied
    undecided = min((t.first for t in transactions.prepared.values()), default=through + 1)
    topic.wake()
    await committed(partition, through)
    return min(through, undecided - 1)


@method(LogFindArguments)
async def log_find(engine: Engine, _: Caller, a: LogFindArguments) -> dict[str, Any]:
    """The first committed batch that is not from before `time_ms`; past the end if none is."""
    partition = engine.topic(a.topic).here(a.partition)
    through = partition.coordinator.sequence_committed
    return {
        "sequence": await asyncio.to_thread(partition.log.find_time, a.time_ms, through=through)
    }


@method(LogExtentArguments)
async def log_extent(engine: Engine, _: Caller, a: LogExtentArguments) -> dict[str, Any]:
    """How far whole committed batches reach within bounds: what a reader plans its ranges by."""
    topic = engine.topic(a.topic)
    found = []
    for extent in a.extents:
        partition = topic.here(extent.partition)
        if extent.from_sequence < partition.log.sequence_first:
            raise gone(extent.from_sequence, sequence_first=partition.log.sequence_first)
        last, size = await asyncio.to_thread(
            partition.log.extent,
            extent.from_sequence,
            through=min(extent.through, partition.coordinator.sequence_committed),
            entries_max=max(1, extent.entries_max),
            bytes_max=extent.bytes_max,
        )
        found.append({"partition": extent.partition, "last": last, "bytes": size})
    return {"extents": found}
