"""Calls about a topic's log: how far it goes, how far it is final, where a time is in it, and what
is written there about the epochs of producers and about atomic batches.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Final

import msgspec

from penstock.errors import InvalidArgument, StaleProducer
from penstock.heap.transactions import SharePlace
from penstock.log.folder import FORMAT_PRODUCERS
from penstock.model.batch import Kind
from penstock.model.entries import PRODUCER_ID_BYTES_MAX
from penstock.node.atomic import ParticipantHere
from penstock.node.calls.table import NodeShare, Result, fan_out, merged, method, shared
from penstock.node.engine import Engine
from penstock.node.serve.partition import Partition
from penstock.node.serve.streams import gone
from penstock.node.serve.topic import ServedTopic, check_id

EPOCH_MAX: Final = (1 << 63) - 1
Epoch = Annotated[int, msgspec.Meta(ge=0, le=EPOCH_MAX)]


class LogExtent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    partition: int
    from_sequence: int
    through: int
    entries_max: int = 1 << 62
    bytes_max: int = 1 << 62


class PlacedExtent(LogExtent, frozen=True, kw_only=True):
    place: int  # in the request


@method()
async def log_status(engine: Engine, *, topic: str) -> Result:
    """Each partition's sequences. Up to `sequence_stable` nothing waits for a decision."""
    served = engine.topics[topic]
    results = await fan_out(engine, served, log_status_share)
    return {"topic_id": served.config.id, "partitions": merged(results, "partitions")}


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
    await partition.committed(through)
    return min(through, undecided - 1)


@method()
async def log_find(engine: Engine, *, topic: str, partition: int, time_ms: int) -> Result:
    """The first committed batch that is not from before `time_ms`; past the end if none is."""
    served = engine.topics[topic]
    index = served.partition(partition).index
    find = partial(log_find_share, time_ms=time_ms)
    (result,) = await fan_out(engine, served, find, indices=[index])
    return result


@shared()
async def log_find_share(share: NodeShare, *, time_ms: int) -> Result:
    partition = share.the_only()
    through = partition.coordinator.sequence_committed
    sequence = await asyncio.to_thread(partition.log.reader.find_time, time_ms, through=through)
    return {"sequence": sequence}


@method()
async def log_extent(engine: Engine, *, topic: str, extents: list[LogExtent]) -> Result:
    """How far whole committed batches reach within bounds: what a reader plans its ranges by."""
    served = engine.topics[topic]
    indices = {served.partition(extent.partition).index for extent in extents}
    placed = [
        PlacedExtent(place=place, **msgspec.structs.asdict(extent))
        for place, extent in enumerate(extents)
    ]
    measure = partial(log_extent_share, extents=placed)
    results = await fan_out(engine, served, measure, indices=indices)
    found = sorted((row for r in results for row in r["extents"]), key=lambda row: row[0])
    return {"extents": [extent for _, extent in found]}


@shared()
async def log_extent_share(share: NodeShare, *, extents: list[PlacedExtent]) -> Result:
    by_index = {partition.index: partition for partition in share.partitions}
    found = []
    for wanted in extents:
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


@method()
async def producer_begin(
    engine: Engine, *, topic: str, producer: str, epoch: Epoch, suffixed: bool = True
) -> Result:
    """A producer begins: every partition of the topic refuses its earlier epochs from now on. It
    may be called again.

    A partition learns of a producer's epoch by what is enqueued there, so a client that was
    replaced could go on in partitions which its successor has not written to yet. A client with a
    name that outlives it therefore has its epoch written into the log of every partition first. A
    record in the log is replicated and recovered as any other; whoever coordinates the partition
    knows it.

    `suffixed`: in partition 3 the producer's id has `.3` at the end; else it is the same in all.
    """
    served = engine.topics[topic]
    longest = _id_in(len(served.partitions) - 1, producer, suffixed=suffixed)
    if not producer or len(longest) > PRODUCER_ID_BYTES_MAX:
        raise InvalidArgument(
            f"the id of a producer has 1 to {PRODUCER_ID_BYTES_MAX} bytes",
            field="producer",
            limit=PRODUCER_ID_BYTES_MAX,
        )
    begin = partial(producer_begin_share, producer=producer, epoch=epoch, suffixed=suffixed)
    await fan_out(engine, served, begin)
    return {"topic": served.config.id, "partitions": len(served.partitions)}


@shared()
async def producer_begin_share(
    share: NodeShare, *, producer: str, epoch: Epoch, suffixed: bool
) -> Result:
    records = []
    for partition in share.partitions:
        id_ = _id_in(partition.index, producer, suffixed=suffixed)
        current = partition.heap.dedup.epoch_of(id_)
        if current is not None and current > epoch:
            raise StaleProducer(
                f"producer epoch {epoch} is over, {current} is current", epoch=current
            )
        refusal = partition.flusher.disk_full()
        if refusal is not None:
            raise refusal
        partition.check_commits()
        begun = {"producer": [id_], "producer_epoch": [epoch]}
        records.append((partition, Kind.PRODUCER, 1, begun))
    await asyncio.to_thread(share.engine.folder.raise_format, FORMAT_PRODUCERS)
    await share.engine.write_records(share.topic, records)
    return {}


def _id_in(partition: int, producer: str, *, suffixed: bool) -> bytes:
    return (f"{producer}.{partition}" if suffixed else producer).encode()


# --- atomic batches: what nodes ask the coordinator of a partition ---


def _asked_of(engine: Engine, topic: str, topic_id: int, partition: int) -> ParticipantHere:
    """A partition that this node serves, of the topic that has the same id where it is asked."""
    queue = engine.queue(topic)
    check_id(queue, topic_id)
    return ParticipantHere(queue, queue.here(partition))


@method()
async def transaction_decide(
    engine: Engine,
    *,
    topic: str,
    topic_id: int = 0,
    partition: int,
    transaction: bytes,
    commit: bool,
    places: tuple[tuple[int, int], ...] = (),
) -> Result:
    """The first decision in the home partition holds and is the answer. No `places`: not told."""
    home = _asked_of(engine, topic, topic_id, partition)
    known = [_place(engine.queue(topic), *place) for place in places]
    return {"commit": await home.decide(transaction, commit=commit, places=known)}


def _place(topic: ServedTopic, partition: int, sequence: int) -> SharePlace:
    if not 0 < sequence < 1 << 63:
        raise InvalidArgument("a share has a sequence from 1 to 2^63 - 1", field="places")
    return SharePlace(topic.partition(partition).index, sequence)


@method()
async def transaction_outcome(
    engine: Engine, *, topic: str, topic_id: int = 0, partition: int, transaction: bytes
) -> Result:
    """The home's decision; if there is none, it decides against."""
    home = _asked_of(engine, topic, topic_id, partition)
    return {"commit": await home.outcome(transaction)}


@method()
async def transaction_apply(
    engine: Engine,
    *,
    topic: str,
    topic_id: int = 0,
    partition: int,
    transaction: bytes,
    commit: bool,
) -> Result:
    await _asked_of(engine, topic, topic_id, partition).apply(transaction, commit=commit)
    return {}


@method()
async def transaction_doubts(
    engine: Engine, *, topic: str, topic_id: int = 0, partition: int, home: int
) -> Result:
    doubts = await _asked_of(engine, topic, topic_id, partition).doubts(home)
    return {"sequence": doubts.sequence, "transactions": sorted(doubts.transactions)}
