"""Calls about dead letters: list, replay, delete."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidArgument, NotFound
from penstock.heap import DeadLetter, MessageState
from penstock.model.batch import DeadReason, Kind
from penstock.node.calls.fan_out import fan_out, shared
from penstock.node.calls.pages import (
    ListPart,
    all_committed,
    locate,
    merged_lists,
    read_messages,
)
from penstock.node.calls.table import (
    Arguments,
    Caller,
    DestructiveArguments,
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
async def dlq_list(engine: Engine, _: Caller, a: DlqListArguments) -> dict[str, Any]:
    """Dead letters by partition and sequence, a page at a time."""
    topic = engine.queue(a.topic)
    limit = bounded(a.limit, 1, LIST_MAX, "limit")
    start, after = _parse_cursor(a.after)
    results = await fan_out(
        engine, topic, dlq_list_share, indices=range(start, len(topic.partitions)),
        start=start, after=after, limit=limit,
    )  # fmt: skip
    lists = [
        ListPart([(row["partition"], row["sequence"]) for row in result["messages"]],
                result["messages"], cut=len(result["messages"]) < result.get("found", 0))
        for result in results
    ]  # fmt: skip
    rows, more = merged_lists(lists, topic, limit)
    last = rows[-1] if more or len(rows) >= limit else None
    return {
        "messages": rows,
        "next": None if last is None else f"{last['partition']}.{last['sequence']}",
    }


@shared(ListShare, of_queues=True)
async def dlq_list_share(
    _: Engine, topic: Topic, partitions: list[Partition], a: dict[str, Any]
) -> dict[str, Any]:
    """The first `limit` of these partitions."""
    limit = int(a["limit"])
    await all_committed(topic, partitions)
    found: list[tuple[Partition, DeadLetter]] = []
    for partition in partitions:
        after = a["after"] if partition.index == a["start"] else 0
        found += [(partition, row) for row in partition.heap.dead_list(after, limit - len(found))]
        if len(found) >= limit:
            break
    places = [(partition, row.sequence) for partition, row in found]
    rows = await read_messages(topic, places, besides=DETAIL_BYTES_MAX)
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
async def dlq_replay(engine: Engine, _: Caller, a: DlqReplayArguments) -> dict[str, Any]:
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
        for result in await fan_out(
            engine, topic, dlq_replay_share, indices=some, in_turn=True,
            message_ids=a.message_ids, limit=left,
        ):  # fmt: skip
            replayed += result["moved"]
    return {"replayed": replayed}


@method(DlqDeleteArguments)
async def dlq_delete(engine: Engine, caller: Caller, a: DlqDeleteArguments) -> dict[str, Any]:
    topic = engine.queue(a.topic)
    confirmed(engine, caller, "dlq_delete", a)
    indices = await _checked(engine, topic, a.message_ids)
    results = await fan_out(
        engine, topic, dlq_delete_share, indices=indices, message_ids=a.message_ids
    )
    return {"deleted": sum(result["moved"] for result in results)}


async def _checked(engine: Engine, topic: Topic, message_ids: list[str] | None) -> list[int]:
    """The partitions that are meant; raises if one of the named is not a dead letter."""
    if message_ids is None:
        return list(range(len(topic.partitions)))
    indices = sorted({locate(topic, message_id)[0] for message_id in message_ids})
    await fan_out(engine, topic, dlq_check_share, indices=indices, message_ids=message_ids)
    return indices


def _by_node(topic: Topic, indices: list[int]) -> list[list[int]]:
    groups: dict[str, list[int]] = {}
    for index in indices:
        groups.setdefault(topic.router.coordinator(topic.key(index)), []).append(index)
    return list(groups.values())


@shared(ChosenShare, of_queues=True)
async def dlq_check_share(
    _: Engine, topic: Topic, partitions: list[Partition], a: dict[str, Any]
) -> dict[str, Any]:
    for partition, sequences in _chosen(topic, partitions, a["message_ids"]):
        states = partition.heap.states(np.array(sequences, np.uint64))
        if (states != MessageState.DEAD).any() or len(set(sequences)) < len(sequences):
            raise NotFound("a named message is not a dead letter", partition=partition.index)
    return {}


@shared(ReplayShare, of_queues=True)
async def dlq_replay_share(
    _: Engine, topic: Topic, partitions: list[Partition], a: dict[str, Any]
) -> dict[str, Any]:
    replayed = 0
    for partition, sequences in _chunks(topic, partitions, a["message_ids"], a["limit"]):
        if replayed:
            await asyncio.sleep(len(sequences) / topic.config.replay_per_s)
        replayed += await _move(topic, partition, Kind.REPLAY, sequences)
    return {"moved": replayed}


@shared(ChosenShare, of_queues=True)
async def dlq_delete_share(
    _: Engine, topic: Topic, partitions: list[Partition], a: dict[str, Any]
) -> dict[str, Any]:
    deleted = 0
    for partition, sequences in _chunks(topic, partitions, a["message_ids"], None):
        deleted += await _move(topic, partition, Kind.ACK, sequences)
    return {"moved": deleted}


def _chosen(
    topic: Topic, partitions: list[Partition], message_ids: list[str] | None
) -> list[tuple[Partition, list[int]]]:
    """The chosen dead letters of these partitions; all, if none are named."""
    if message_ids is None:
        return [(p, [row.sequence for row in p.heap.dead_list(0, 1 << 62)]) for p in partitions]
    chosen: dict[int, list[int]] = {}
    for message_id in message_ids:
        index, sequence = locate(topic, message_id)
        chosen.setdefault(index, []).append(sequence)
    return [(p, chosen[p.index]) for p in partitions if p.index in chosen]


def _chunks(
    topic: Topic, partitions: list[Partition], message_ids: list[str] | None, limit: int | None
) -> Iterable[tuple[Partition, NDArray[np.uint64]]]:
    left = limit if limit is not None else 1 << 62
    size = min(CHUNK, topic.config.replay_per_s)
    for partition, sequences in _chosen(topic, partitions, message_ids):
        sequences, left = sequences[:left], left - len(sequences[:left])
        for at in range(0, len(sequences), size):
            yield partition, np.array(sequences[at : at + size], np.uint64)


async def _move(
    topic: Topic, partition: Partition, kind: Kind, sequences: NDArray[np.uint64]
) -> int:
    """Write the record for those that are still dead."""
    still = sequences[partition.heap.states(sequences) == MessageState.DEAD]
    if len(still):
        partition.journal.check_commits()
        batch = partition.journal.append_record(kind, len(still), {"message": still})
        topic.wake()
        await partition.journal.committed(batch.last)
    return len(still)
