"""Calls about a topic's log: how far it goes, how far it is final, where a time is in it, and what
is written there about the epochs of producers and about atomic batches.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

import msgspec

from penstock.errors import InvalidArgument, StaleProducer
from penstock.heap.transactions import SharePlace
from penstock.log.folder import FORMAT_PRODUCERS
from penstock.model.batch import Kind
from penstock.model.entries import PRODUCER_ID_BYTES_MAX
from penstock.node.atomic.participant import apply_here, decide_here, doubts_here
from penstock.node.calls.fan_out import NodeShare, fan_out, merged, shared
from penstock.node.calls.table import Arguments, Caller, Result, TopicArguments, method
from penstock.node.engine import Engine
from penstock.node.serve.partition import Partition
from penstock.node.serve.streams import gone
from penstock.node.serve.topic import ServedTopic, check_id

EPOCH_MAX: Final = (1 << 63) - 1
Epoch = Annotated[int, msgspec.Meta(ge=0, le=EPOCH_MAX)]


class LogFindArguments(TopicArguments, frozen=True):
    partition: int
    time_ms: int


class ExtentBounds(Arguments, frozen=True):
    """Part of a partition's log, and how much of it is wanted at most."""

    partition: int
    from_sequence: int
    through: int
    entries_max: int = 1 << 62
    bytes_max: int = 1 << 62


class LogExtentArguments(TopicArguments, frozen=True):
    extents: list[ExtentBounds]


class FindShare(Arguments, frozen=True):
    time_ms: int


class PlacedExtent(ExtentBounds, frozen=True, kw_only=True):
    place: int  # in the request


class ExtentShare(Arguments, frozen=True):
    extents: list[PlacedExtent]


@method(TopicArguments)
async def log_status(engine: Engine, _: Caller, a: TopicArguments) -> Result:
    """Each partition's sequences. Up to `sequence_stable` nothing waits for a decision."""
    results = await fan_out(engine, engine.topics[a.topic], log_status_share)
    return {"partitions": merged(results, "partitions")}


@shared()
async def log_status_share(share: NodeShare) -> Result:
    stable = await asyncio.gather(*(_stable(share.topic, p) for p in share.partitions))
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
            for p, sequence_stable in zip(share.partitions, stable, strict=True)
        ]
    }


async def _stable(topic: ServedTopic, partition: Partition) -> int:
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
    await partition.journal.committed(through)
    return min(through, undecided - 1)


@method(LogFindArguments)
async def log_find(engine: Engine, _: Caller, a: LogFindArguments) -> Result:
    """The first committed batch that is not from before `time_ms`; past the end if none is."""
    topic = engine.topics[a.topic]
    index = topic.partition(a.partition).index
    wanted = FindShare(time_ms=a.time_ms)
    (result,) = await fan_out(engine, topic, log_find_share, wanted, indices=[index])
    return result


@shared(FindShare)
async def log_find_share(share: NodeShare) -> Result:
    partition, time_ms = share.the_only(), share.arguments.time_ms
    through = partition.coordinator.sequence_committed
    sequence = await asyncio.to_thread(partition.log.reader.find_time, time_ms, through=through)
    return {"sequence": sequence}


@method(LogExtentArguments)
async def log_extent(engine: Engine, _: Caller, a: LogExtentArguments) -> Result:
    """How far whole committed batches reach within bounds: what a reader plans its ranges by."""
    topic = engine.topics[a.topic]
    indices = {topic.partition(extent.partition).index for extent in a.extents}
    placed = [
        PlacedExtent(place=place, **msgspec.structs.asdict(extent))
        for place, extent in enumerate(a.extents)
    ]
    wanted = ExtentShare(extents=placed)
    results = await fan_out(engine, topic, log_extent_share, wanted, indices=indices)
    found = sorted((row for r in results for row in r["extents"]), key=lambda row: row[0])
    return {"extents": [extent for _, extent in found]}


@shared(ExtentShare)
async def log_extent_share(share: NodeShare) -> Result:
    """Extents of these partitions, each with its place in the request."""
    by_index = {partition.index: partition for partition in share.partitions}
    found = []
    for wanted in share.arguments.extents:
        partition = by_index.get(wanted.partition)
        if partition is None:
            continue
        if wanted.from_sequence < partition.log.sequence_first:
            raise gone(wanted.from_sequence, sequence_first=partition.log.sequence_first)
        last, size = await asyncio.to_thread(
            partition.log.reader.extent,
            wanted.from_sequence,
            through=min(wanted.through, partition.coordinator.sequence_committed),
            entries_max=max(1, wanted.entries_max),
            bytes_max=wanted.bytes_max,
        )
        row = {"partition": partition.index, "last": last, "bytes": size}
        found.append((wanted.place, row))
    return {"extents": found}


class BeginShare(Arguments, frozen=True):
    producer: str
    epoch: Epoch
    suffixed: bool

    def id_in(self, partition: int) -> bytes:
        return (f"{self.producer}.{partition}" if self.suffixed else self.producer).encode()


class BeginArguments(BeginShare, frozen=True, kw_only=True):
    topic: str
    suffixed: bool = True  # in partition 3 its id has `.3` at the end; False: it is the same in all


@method(BeginArguments)
async def producer_begin(engine: Engine, _: Caller, a: BeginArguments) -> Result:
    """A producer begins: every partition of the topic refuses its earlier epochs from now on. It
    may be called again.

    A partition learns of a producer's epoch by what is enqueued there, so a client that was
    replaced could go on in partitions which its successor has not written to yet. A client with a
    name that outlives it therefore has its epoch written into the log of every partition first. A
    record in the log is replicated and recovered as any other; whoever coordinates the partition
    knows it.
    """
    topic = engine.topics[a.topic]
    longest = a.id_in(len(topic.partitions) - 1)
    if not a.producer or len(longest) > PRODUCER_ID_BYTES_MAX:
        raise InvalidArgument(
            f"the id of a producer has 1 to {PRODUCER_ID_BYTES_MAX} bytes",
            field="producer",
            limit=PRODUCER_ID_BYTES_MAX,
        )
    begun = BeginShare(producer=a.producer, epoch=a.epoch, suffixed=a.suffixed)
    await fan_out(engine, topic, producer_begin_share, begun)
    return {"topic": topic.config.id, "partitions": len(topic.partitions)}


@shared(BeginShare)
async def producer_begin_share(share: NodeShare) -> Result:
    a: BeginShare = share.arguments
    for partition in share.partitions:
        current = partition.heap.dedup.epoch_of(a.id_in(partition.index))
        if current is not None and current > a.epoch:
            raise StaleProducer(
                f"producer epoch {a.epoch} is over, {current} is current", epoch=current
            )
        refusal = partition.journal.flusher.disk_full()
        if refusal is not None:
            raise refusal
        partition.journal.check_commits()
    await asyncio.to_thread(share.engine.folder.raise_format, FORMAT_PRODUCERS)
    records = [
        (p, Kind.PRODUCER, 1, {"producer": [a.id_in(p.index)], "producer_epoch": [a.epoch]})
        for p in share.partitions
    ]
    await share.engine.write_records(share.topic, records)
    return {}


# --- atomic batches: what nodes ask the coordinator of a partition ---


class OfTopicArguments(TopicArguments, frozen=True, kw_only=True):
    """What names a topic that has the same id at the node that asks."""

    topic_id: int = 0

    def queue(self, engine: Engine) -> ServedTopic:
        topic = engine.queue(self.topic)
        check_id(topic, self.topic_id)
        return topic


class TransactionArguments(OfTopicArguments, frozen=True):
    partition: int
    transaction: bytes


class DecisionArguments(TransactionArguments, frozen=True):
    commit: bool


class HomeArguments(DecisionArguments, frozen=True):
    places: tuple[tuple[int, int], ...] = ()  # where the shares are; none: they are not told


class DoubtsArguments(OfTopicArguments, frozen=True):
    partition: int
    home: int


@method(HomeArguments)
async def transaction_decide(engine: Engine, _: Caller, a: HomeArguments) -> Result:
    """Decide in the home partition; the first decision holds and is the answer."""
    topic = a.queue(engine)
    home = topic.here(a.partition)
    places = [_place(topic, *place) for place in a.places]
    return {"commit": await decide_here(topic, home, a.transaction, commit=a.commit, places=places)}


def _place(topic: ServedTopic, partition: int, sequence: int) -> SharePlace:
    if not 0 < sequence < 1 << 63:
        raise InvalidArgument("a share has a sequence from 1 to 2^63 - 1", field="places")
    return SharePlace(topic.partition(partition).index, sequence)


@method(TransactionArguments)
async def transaction_outcome(engine: Engine, _: Caller, a: TransactionArguments) -> Result:
    """The home's decision; if there is none, it decides against."""
    topic = a.queue(engine)
    home = topic.here(a.partition)
    return {"commit": await decide_here(topic, home, a.transaction, commit=False)}


@method(DecisionArguments)
async def transaction_apply(engine: Engine, _: Caller, a: DecisionArguments) -> Result:
    """Follow the home's decision in another partition."""
    topic = a.queue(engine)
    apply_here(topic, topic.here(a.partition), a.transaction, commit=a.commit)
    return {}


@method(DoubtsArguments)
async def transaction_doubts(engine: Engine, _: Caller, a: DoubtsArguments) -> Result:
    """Which batches of a home wait for its decision in another partition."""
    topic = a.queue(engine)
    doubts = await doubts_here(topic, topic.here(a.partition), a.home)
    return {"sequence": doubts.sequence, "transactions": sorted(doubts.transactions)}
