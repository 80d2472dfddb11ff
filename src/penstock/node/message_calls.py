"""Calls that look at or move single messages: peek, pop, purge, and the dead letters."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidArgument, NotFound, PenstockError
from penstock.heap import DeadLetter, State
from penstock.heap.ordering import Ordering
from penstock.model.batch import DeadReason, Kind
from penstock.model.columns import Columns
from penstock.model.delivery import DELIVERY
from penstock.model.ids import LeaseToken, MessageId
from penstock.node.atomic import committed
from penstock.node.calls import Caller, DestructiveArguments, TopicArguments, method
from penstock.node.engine import Engine
from penstock.node.partition import Partition
from penstock.node.streams import LeaseStream
from penstock.node.topic import Topic
from penstock.wire.messages import Delivery

LIST_MAX: Final = 1000
POP_MAX: Final = 1000
WAIT_MS_MAX: Final = 60_000
CHUNK: Final = 1000  # dead letters moved by one record
REPLAY_MAX: Final = 1_000_000_000
_pops: Final = itertools.count(1)


class PeekArguments(TopicArguments, frozen=True):
    limit: int = 10


class PopArguments(TopicArguments, frozen=True):
    limit: int = 1
    wait_ms: int = 0
    visibility_ms: int | None = None
    consumer: str = ""


class MoveArguments(TopicArguments, frozen=True):
    message_id: str
    reason: str = ""


class DlqListArguments(TopicArguments, frozen=True):
    after: str | None = None
    limit: int = 100


class DlqReplayArguments(TopicArguments, frozen=True):
    message_ids: list[str] | None = None
    limit: int | None = None


class DlqDeleteArguments(DestructiveArguments, frozen=True):
    message_ids: list[str] | None = None


def _bounded(value: int, low: int, high: int, field: str) -> int:
    if not low <= value <= high:
        raise InvalidArgument(f"{field} must be from {low} to {high}", field=field, limit=high)
    return value


# --- looking ---


@method(PeekArguments)
async def peek(engine: Engine, _: Caller, a: PeekArguments) -> dict[str, Any]:
    """The next messages in order, without leasing them."""
    topic = engine.queue(a.topic)
    limit = _bounded(a.limit, 1, LIST_MAX, "limit")
    now_ms = engine.clock.now_ms()
    found: list[tuple[int, int, Partition]] = []
    for partition in topic.local:
        keys, sequences = partition.heap.candidates(limit, now_ms)
        found += zip(keys.tolist(), sequences.tolist(), itertools.repeat(partition), strict=False)
    best = sorted(found, key=lambda row: row[:2])[:limit]
    await _all_committed(topic)
    rows = await _read(topic, [(partition, sequence) for _, sequence, partition in best])
    return {"messages": rows}


async def _all_committed(topic: Topic) -> None:
    """Wait until all that was seen is committed: nothing is shown that could still be lost."""
    topic.wake()
    await asyncio.gather(*(committed(p, p.log.sequence_last) for p in topic.local))


async def _read(topic: Topic, places: list[tuple[Partition, int]]) -> list[dict[str, Any]]:
    """Messages in the order asked for."""
    by_partition: dict[Partition, list[int]] = {}
    for partition, sequence in places:
        by_partition.setdefault(partition, []).append(sequence)
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for partition, sequences in by_partition.items():
        rows = await asyncio.to_thread(partition.reader.load, sequences)
        attempts = partition.heap.attempts(np.array(sequences, np.uint64))
        columns = DELIVERY.decode(rows.encode(attempts), len(sequences))
        for row in _messages(topic, partition.index, columns):
            found[partition.index, row["sequence"]] = row
    return [found[partition.index, sequence] for partition, sequence in places]


def _messages(topic: Topic, partition: int, columns: Columns) -> Iterable[dict[str, Any]]:
    payloads = columns.binary("payload")
    keys, headers = columns.binary("key"), columns.binary("headers")
    for i, sequence in enumerate(columns.fixed("message").tolist()):
        time_ms = int(columns.fixed("time_ms")[i])
        packed = b"" if headers is None else headers[i]
        yield {
            "message_id": str(MessageId(time_ms, topic.config.id, partition, sequence)),
            "partition": partition,
            "sequence": sequence,
            "priority": int(columns.fixed("priority")[i]),
            "attempts": int(columns.fixed("attempts")[i]),
            "time_ms": time_ms,
            "key": b"" if keys is None else keys[i],
            "headers": msgspec.msgpack.decode(packed) if packed else {},
            "payload": b"" if payloads is None else payloads[i],
        }


# --- popping ---


@method(PopArguments)
async def pop(engine: Engine, caller: Caller, a: PopArguments) -> dict[str, Any]:
    """Lease up to `limit` messages, waiting for the first at most `wait_ms`."""
    topic = engine.queue(a.topic)
    limit = _bounded(a.limit, 1, min(POP_MAX, topic.config.consumer_leases_max), "limit")
    wait_ms = _bounded(a.wait_ms, 0, WAIT_MS_MAX, "wait_ms")
    if a.visibility_ms is not None:
        _bounded(a.visibility_ms, 1, topic.config.visibility_ms_max, "visibility_ms")
    arrived = asyncio.Event()
    messages: list[dict[str, Any]] = []

    def receive(delivery: Delivery, body: Any) -> None:
        columns = DELIVERY.decode(body, delivery.count)
        for i, message in enumerate(_messages(topic, delivery.partition, columns)):
            token = LeaseToken(delivery.partition, delivery.epoch, delivery.token_first + i)
            message["lease_token"] = str(token)
            message["deadline_ms"] = delivery.deadline_ms
            message["visibility_ms"] = delivery.visibility_ms
            messages.append(message)
        arrived.set()

    unreadable: list[PenstockError] = []

    def fail(error: PenstockError) -> None:
        unreadable.append(error)
        arrived.set()

    stream = LeaseStream(
        f"{engine.identity.node}/{engine.run_id}/pop/{next(_pops)}/{a.consumer}".encode(),
        window=limit,
        batch_max=limit,
        visibility_ms=a.visibility_ms,
        send=receive,
        key_id=caller.key_id,
        fail=fail,
    )
    stream.changed = arrived.set

    def complete() -> bool:
        """All that was leased so far is here."""
        return bool(unreadable) or len(messages) >= stream.out + stream.away

    topic.add_stream(stream)
    try:
        if wait_ms:
            await _until(arrived, lambda: bool(messages or unreadable), wait_ms)
        else:
            await topic.dispatched()
        await _until(arrived, complete)
    finally:
        topic.remove_stream(stream)
    if unreadable and not messages:
        raise unreadable[0]
    if len(topic.partitions) > 1:
        messages.sort(key=_order(topic))
    return {"messages": messages}


def _order(topic: Topic) -> Callable[[dict[str, Any]], tuple[int, int, int]]:
    """By what messages of several partitions are put in order: as the heap would."""
    ordering = Ordering(topic.config)

    def key(message: dict[str, Any]) -> tuple[int, int, int]:
        time_ms = message["time_ms"]
        aged = ordering.aged_one(ordering.key(message["priority"]), time_ms)
        return aged, time_ms, message["sequence"]

    return key


async def _until(
    changed: asyncio.Event, reached: Callable[[], bool], wait_ms: int | None = None
) -> None:
    """Wait for `reached`, which may become true with each change; give up after `wait_ms`."""
    try:
        async with asyncio.timeout(None if wait_ms is None else wait_ms / 1000):
            while not reached():
                changed.clear()
                await changed.wait()
    except TimeoutError:
        return


# --- removing ---


@method(DestructiveArguments, audited=True)
async def purge(engine: Engine, _: Caller, a: DestructiveArguments) -> dict[str, Any]:
    """Drop every message that waits, ready or delayed. Leased and dead ones stay."""
    topic = engine.queue(a.topic)
    engine.confirmations.use(a.confirm, "purge", a.topic, force=a.force)
    purged = 0
    written = []
    for partition in topic.local:
        count = partition.heap.ready + partition.heap.delayed
        if count:
            purged += count
            values: dict[str, Any] = {"through": [partition.log.sequence_last]}
            written.append((partition, partition.journal.append_record(Kind.ACK, 1, values).last))
    topic.wake()
    await asyncio.gather(*(committed(p, sequence) for p, sequence in written))
    return {"purged": purged}


@method(MoveArguments, audited=True)
async def move_to_dlq(engine: Engine, _: Caller, a: MoveArguments) -> dict[str, Any]:
    topic = engine.queue(a.topic)
    partition, sequence = _locate(topic, a.message_id)
    sequences = np.array([sequence], np.uint64)
    state = State(int(partition.heap.states(sequences)[0]))
    if state not in (State.READY, State.DELAYED, State.LEASED):
        raise NotFound(f"no living message {a.message_id}", message_id=a.message_id)
    values: dict[str, Any] = {
        "message": sequences,
        "reason": [DeadReason.MOVED],
        "detail": [a.reason.encode()[:1024]],
    }
    batch = partition.journal.append_record(Kind.DEAD, 1, values)
    topic.wake()
    await committed(partition, batch.last)
    return {}


def _locate(topic: Topic, message_id: str) -> tuple[Partition, int]:
    place = MessageId.parse(message_id)
    if place.topic != topic.config.id or place.partition >= len(topic.partitions):
        raise NotFound(f"no message {message_id} in this topic", message_id=message_id)
    return topic.here(place.partition), place.sequence


# --- dead letters ---


@method(DlqListArguments)
async def dlq_list(engine: Engine, _: Caller, a: DlqListArguments) -> dict[str, Any]:
    """Dead letters by partition and sequence, a page at a time."""
    topic = engine.queue(a.topic)
    limit = _bounded(a.limit, 1, LIST_MAX, "limit")
    start, after = _parse_cursor(a.after)
    await _all_committed(topic)
    found: list[tuple[Partition, DeadLetter]] = []
    for partition in (p for p in topic.local if p.index >= start):
        found += [(partition, row) for row in partition.heap.dead_list(after, limit - len(found))]
        after = 0
        if len(found) >= limit:
            break
    rows = await _read(topic, [(partition, row.sequence) for partition, row in found])
    for message, (_partition, row) in zip(rows, found, strict=True):
        message["reason"] = DeadReason(row.reason).name.lower()
        message["detail"] = bytes(row.detail).decode(errors="replace")
        message["dead_ms"] = row.time_ms
        message["attempts"] = row.attempts
    last = found[-1] if len(found) >= limit else None
    return {
        "messages": rows,
        "next": None if last is None else f"{last[0].index}.{last[1].sequence}",
    }


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


@method(DlqReplayArguments, audited=True)
async def dlq_replay(engine: Engine, _: Caller, a: DlqReplayArguments) -> dict[str, Any]:
    """Make dead letters ready again in their own topic, no faster than `replay_per_s`."""
    topic = engine.queue(a.topic)
    if a.limit is not None:
        _bounded(a.limit, 1, REPLAY_MAX, "limit")
    replayed = 0
    for partition, sequences in _dead_letters(topic, a.message_ids, a.limit):
        if replayed:
            await asyncio.sleep(len(sequences) / topic.config.replay_per_s)
        replayed += await _move(topic, partition, Kind.REPLAY, sequences)
    return {"replayed": replayed}


@method(DlqDeleteArguments, audited=True)
async def dlq_delete(engine: Engine, _: Caller, a: DlqDeleteArguments) -> dict[str, Any]:
    topic = engine.queue(a.topic)
    engine.confirmations.use(a.confirm, "dlq_delete", a.topic, force=a.force)
    deleted = 0
    for partition, sequences in _dead_letters(topic, a.message_ids, None):
        deleted += await _move(topic, partition, Kind.ACK, sequences)
    return {"deleted": deleted}


def _dead_letters(
    topic: Topic, message_ids: list[str] | None, limit: int | None
) -> Iterable[tuple[Partition, NDArray[np.uint64]]]:
    """The chosen dead letters (all, if none are named), in chunks."""
    chosen: dict[Partition, list[int]] = {}
    if message_ids is None:
        for partition in topic.local:
            chosen[partition] = [row.sequence for row in partition.heap.dead_list(0, 1 << 62)]
    else:
        for message_id in message_ids:
            partition, sequence = _locate(topic, message_id)
            chosen.setdefault(partition, []).append(sequence)
        for partition, sequences in chosen.items():
            _check_dead(partition, sequences)
    left = limit if limit is not None else 1 << 62
    size = min(CHUNK, topic.config.replay_per_s)
    for partition, sequences in chosen.items():
        sequences, left = sequences[:left], left - len(sequences[:left])
        for at in range(0, len(sequences), size):
            yield partition, np.array(sequences[at : at + size], np.uint64)


def _check_dead(partition: Partition, sequences: list[int]) -> None:
    states = partition.heap.states(np.array(sequences, np.uint64))
    if (states != State.DEAD).any() or len(set(sequences)) < len(sequences):
        raise NotFound("a named message is not a dead letter", partition=partition.index)


async def _move(
    topic: Topic, partition: Partition, kind: Kind, sequences: NDArray[np.uint64]
) -> int:
    """Write the record for those that are still dead."""
    still = sequences[partition.heap.states(sequences) == State.DEAD]
    if len(still):
        batch = partition.journal.append_record(kind, len(still), {"message": still})
        topic.wake()
        await committed(partition, batch.last)
    return len(still)
