"""Calls about dead letters: list, replay, delete."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidArgument, NotFound
from penstock.heap import DeadLetter, MessageState
from penstock.model.batch import DeadReason, Kind
from penstock.node.calls.fan_out import Share, fan_out, shared
from penstock.node.calls.pages import (
    locate,
    merged_lists,
    read_messages,
)
from penstock.node.calls.table import (
    Arguments,
    Caller,
    DestructiveArguments,
    Result,
    TopicArguments,
    confirmed,
    method,
)
from penstock.node.engine import Engine
from penstock.node.serve.partition import Partition
from penstock.node.serve.topic import Topic
from penstock.wire.limits import bounded

LIST_MAX: Final = 1000
DETAIL_BYTES_MAX: Final = 1024  # of what a dead letter says about its end
CHUNK: Final = 1000  # dead letters moved by one record
REPLAY_MAX: Final = 1_000_000_000


class DlqListArguments(TopicArguments, frozen=True):
    after: str | None = None
    limit: int = 100


class DlqReplayArguments(TopicArguments, frozen=True):
    message_ids: list[str] | None = None
    limit: int | None = None


class DlqDeleteArguments(DestructiveArguments, frozen=True):
    message_ids: list[str] | None = None


class ListShare(Arguments, frozen=True):
    """A page that begins in partition `start`, behind the sequence `after` there."""

    start: int
    after: Annotated[int, msgspec.Meta(ge=0)]
    limit: Annotated[int, msgspec.Meta(ge=1, le=LIST_MAX)]


class ChosenShare(Arguments, frozen=True):
    message_ids: list[str] | None


class ReplayShare(ChosenShare, frozen=True):
    limit: Annotated[int, msgspec.Meta(ge=0)] | None


@method(DlqListArguments)
async def dlq_list(engine: Engine, _: Caller, a: DlqListArguments) -> Result:
    """Dead letters by partition and sequence, a page at a time."""
    topic = engine.queue(a.topic)
    limit = bounded(a.limit, 1, LIST_MAX, "limit")
    start, after = _parse_cursor(a.after)
    wanted = ListShare(start=start, after=after, limit=limit)
    results = await fan_out(
        engine, topic, dlq_list_share, wanted, indices=range(start, len(topic.partitions))
    )
    lists = [([(row["partition"], row["sequence"]) for row in r["messages"]], r) for r in results]
    rows, more = merged_lists(lists, topic, limit)
    last = rows[-1] if more or len(rows) >= limit else None
    return {
        "messages": rows,
        "next": None if last is None else f"{last['partition']}.{last['sequence']}",
    }


@shared(ListShare, of_queues=True)
async def dlq_list_share(share: Share) -> Result:
    """The first `limit` of these partitions."""
    a: ListShare = share.arguments
    limit = a.limit
    await share.all_committed()
    found: list[tuple[Partition, DeadLetter]] = []
    for partition in share.partitions:
        after = a.after if partition.index == a.start else 0
        found += [(partition, row) for row in partition.heap.dead_list(after, limit - len(found))]
        if len(found) >= limit:
            break
    places = [(partition, row.sequence) for partition, row in found]
    rows = await read_messages(share.topic, places, besides=DETAIL_BYTES_MAX)
    for message, (_partition, row) in zip(rows, found, strict=False):
        message["reason"] = DeadReason.name_of(row.reason)
        message["detail"] = bytes(row.detail).decode(errors="replace")
        message["dead_ms"] = row.time_ms
        message["attempts"] = row.attempts
    return {"messages": rows, "found": len(found)}


def _parse_cursor(after: str | None) -> tuple[int, int]:
    if not after:
        return 0, 0
    try:
        partition, sequence = (int(part) for part in after.split("."))
    except ValueError as error:
        raise InvalidArgument("after is not a cursor of dlq_list", field="after") from error
    if partition < 0 or sequence < 0:
        raise InvalidArgument("after is not a cursor of dlq_list", field="after")
    return partition, sequence


@method(DlqReplayArguments)
async def dlq_replay(engine: Engine, _: Caller, a: DlqReplayArguments) -> Result:
    """Make dead letters ready again in their own topic, no faster than `replay_per_s`: so nodes
    do it one after the other, each up to what is left of the limit."""
    topic = engine.queue(a.topic)
    if a.limit is not None:
        bounded(a.limit, 1, REPLAY_MAX, "limit")
    indices = await _checked(engine, topic, a.message_ids)
    replayed = 0
    for some in _by_node(topic, indices):
        left = None if a.limit is None else a.limit - replayed
        if left is not None and left <= 0:
            break
        wanted = ReplayShare(message_ids=a.message_ids, limit=left)
        results = await fan_out(engine, topic, dlq_replay_share, wanted, indices=some, in_turn=True)
        replayed += sum(result["moved"] for result in results)
    return {"replayed": replayed}


@method(DlqDeleteArguments)
async def dlq_delete(engine: Engine, caller: Caller, a: DlqDeleteArguments) -> Result:
    topic = engine.queue(a.topic)
    confirmed(engine, caller, "dlq_delete", a)
    indices = await _checked(engine, topic, a.message_ids)
    chosen = ChosenShare(message_ids=a.message_ids)
    results = await fan_out(engine, topic, dlq_delete_share, chosen, indices=indices)
    return {"deleted": sum(result["moved"] for result in results)}


async def _checked(engine: Engine, topic: Topic, message_ids: list[str] | None) -> list[int]:
    """The partitions that are meant; raises if one of the named is not a dead letter."""
    if message_ids is None:
        return list(range(len(topic.partitions)))
    indices = sorted({locate(topic, message_id)[0] for message_id in message_ids})
    chosen = ChosenShare(message_ids=message_ids)
    await fan_out(engine, topic, dlq_check_share, chosen, indices=indices)
    return indices


def _by_node(topic: Topic, indices: list[int]) -> list[list[int]]:
    groups: dict[str, list[int]] = {}
    for index in indices:
        groups.setdefault(topic.router.coordinator(topic.key(index)), []).append(index)
    return list(groups.values())


@shared(ChosenShare, of_queues=True)
async def dlq_check_share(share: Share) -> Result:
    for partition, sequences in _chosen(share):
        states = partition.heap.states(np.array(sequences, np.uint64))
        if (states != MessageState.DEAD).any() or len(set(sequences)) < len(sequences):
            raise NotFound("a named message is not a dead letter", partition=partition.index)
    return {}


@shared(ReplayShare, of_queues=True)
async def dlq_replay_share(share: Share) -> Result:
    replayed = 0
    for partition, sequences in _chunks(share, share.arguments.limit):
        if replayed:
            await asyncio.sleep(len(sequences) / share.topic.config.replay_per_s)
        replayed += await _move(share, partition, Kind.REPLAY, sequences)
    return {"moved": replayed}


@shared(ChosenShare, of_queues=True)
async def dlq_delete_share(share: Share) -> Result:
    deleted = 0
    for partition, sequences in _chunks(share, None):
        deleted += await _move(share, partition, Kind.ACK, sequences)
    return {"moved": deleted}


def _chosen(share: Share) -> list[tuple[Partition, list[int]]]:
    """The chosen dead letters of these partitions; all, if none are named."""
    named = share.arguments.message_ids
    if named is None:
        found = share.partitions
        return [(p, [row.sequence for row in p.heap.dead_list(0, 1 << 62)]) for p in found]
    chosen: dict[int, list[int]] = {}
    for message_id in named:
        index, sequence = locate(share.topic, message_id)
        chosen.setdefault(index, []).append(sequence)
    return [(p, chosen[p.index]) for p in share.partitions if p.index in chosen]


def _chunks(share: Share, limit: int | None) -> Iterable[tuple[Partition, NDArray[np.uint64]]]:
    left = limit if limit is not None else 1 << 62
    size = min(CHUNK, share.topic.config.replay_per_s)
    for partition, sequences in _chosen(share):
        sequences, left = sequences[:left], left - len(sequences[:left])
        for at in range(0, len(sequences), size):
            yield partition, np.array(sequences[at : at + size], np.uint64)


async def _move(
    share: Share, partition: Partition, kind: Kind, sequences: NDArray[np.uint64]
) -> int:
    """Write the record for those that are still dead."""
    still = sequences[partition.heap.states(sequences) == MessageState.DEAD]
    if len(still):
        partition.journal.check_commits()
        record = (partition, kind, len(still), {"message": still})
        await share.engine.write_records(share.topic, [record])
    return len(still)
