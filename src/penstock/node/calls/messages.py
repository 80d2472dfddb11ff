"""Calls about messages: peek, pop, purge; and about dead letters: list, replay, delete."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidArgument, NotFound, PenstockError, Unavailable
from penstock.heap.machine import DeadLetter
from penstock.heap.table import MessageState, Ordering
from penstock.model.batch import DeadReason, Kind
from penstock.model.entries import DELIVERY
from penstock.model.ids import LeaseToken
from penstock.node.calls.pages import (
    Allowance,
    locate,
    merged_lists,
    messages_in,
    read_messages,
    size_of,
)
from penstock.node.calls.table import Caller, NodeShare, Result, fan_out, method, shared
from penstock.node.engine import Engine
from penstock.node.serve.partition import Partition
from penstock.node.serve.streams import ConsumerStream
from penstock.node.serve.topic import ServedTopic
from penstock.node.write import unused
from penstock.wire.messages import Delivery, bounded

LIST_MAX: Final = 1000
POP_MAX: Final = 1000
WAIT_MS_MAX: Final = 60_000
DETAIL_BYTES_MAX: Final = 1024  # of what a dead letter says about its end
CHUNK: Final = 1000  # dead letters moved by one record
REPLAY_MAX: Final = 1_000_000_000
# For messages that are leased and have not come: longer than a coordinator without a quorum needs
# to say so (see `UNHEARD_SILENCES`), which those who wait at another node do not hear.
ARRIVE_MS_MAX: Final = 6_000
_pops: Final = itertools.count(1)
ListLimit = Annotated[int, msgspec.Meta(ge=1, le=LIST_MAX)]


# --- looking ---


@method()
async def peek(engine: Engine, *, topic: str, limit: int = 10) -> Result:
    """The next messages in order, without leasing them: the best of each node, merged."""
    queue = engine.queue(topic)
    bounded(limit, 1, LIST_MAX, "limit")
    results = await fan_out(engine, queue, partial(peek_share, limit=limit))
    lists = [
        ([(key, row["sequence"]) for key, row in zip(r["keys"], r["messages"], strict=True)], r)
        for r in results
    ]
    return {"messages": merged_lists(lists, queue, limit)[0]}


@shared(of_queues=True)
async def peek_share(share: NodeShare, *, limit: ListLimit) -> Result:
    now_ms = share.engine.clock.now_ms()
    found: list[tuple[int, int, Partition]] = []
    for partition in share.partitions:
        keys, sequences = partition.candidates(limit, now_ms)
        found += zip(keys.tolist(), sequences.tolist(), itertools.repeat(partition), strict=False)
    best = sorted(found, key=lambda row: row[:2])[:limit]
    await share.all_committed()
    places = [(partition, sequence) for _, sequence, partition in best]
    rows = await read_messages(share.topic, places)
    told = [key for key, _, _ in best[: len(rows)]]
    return {"keys": told, "messages": rows, "found": len(best)}


# --- popping ---


@method()
async def pop(
    engine: Engine,
    *,
    caller: Caller,
    topic: str,
    limit: int = 1,
    wait_ms: int = 0,
    visibility_ms: int | None = None,
    consumer: str = "",
) -> Result:
    """Lease up to `limit` messages that fit an answer, waiting for the first at most `wait_ms`."""
    queue = engine.queue(topic)
    bounded(limit, 1, min(POP_MAX, queue.config.consumer_leases_max), "limit")
    bounded(wait_ms, 0, WAIT_MS_MAX, "wait_ms")
    if visibility_ms is not None:
        bounded(visibility_ms, 1, queue.config.visibility_ms_max, "visibility_ms")
    name = f"{engine.identity.node}/{engine.run_id}/pop/{next(_pops)}/{consumer}"
    popping = _Pop(queue, name.encode(), limit, visibility_ms, key_id=caller.key_id)
    queue.add_stream(popping.stream)
    engine.pops.add(popping.arrived)
    try:
        await popping.run(engine, wait_ms)
    finally:
        queue.remove_stream(popping.stream)
        engine.pops.discard(popping.arrived)
    if engine.stopping and not popping.messages and not popping.failed:
        raise Unavailable("the node is stopping, nothing was leased", elsewhere=True)
    messages = popping.answered()
    if caller.gone():  # it will settle none of them
        give_back_unused(queue, messages)
        raise Unavailable("the caller is gone")
    return {"messages": messages}


class _Pop:
    """Its window grows as the sizes of messages become known, so that little is leased that the
    answer has no room for."""

    def __init__(
        self,
        topic: ServedTopic,
        consumer: bytes,
        limit: int,
        visibility_ms: int | None,
        *,
        key_id: str | None,
    ) -> None:
        self._topic, self._limit = topic, limit
        self._allowance = Allowance(topic, limit)
        self.messages: list[dict[str, Any]] = []
        self.failed: list[PenstockError] = []
        self.arrived = asyncio.Event()
        self.stream = ConsumerStream(
            consumer, window=self._allowance.step(), batch_max=limit, visibility_ms=visibility_ms,
            send=self._receive, key_id=key_id, fail=self._fail,
        )  # fmt: skip
        self.stream.changed = self.arrived.set

    def _receive(self, delivery: Delivery, body: Any) -> None:
        columns = DELIVERY.decode(body, delivery.count)
        for i, message in enumerate(messages_in(self._topic, delivery.partition, columns)):
            message["lease_token"] = str(delivery.token(i))
            message["deadline_ms"] = delivery.deadline_ms
            message["visibility_ms"] = delivery.visibility_ms
            self.messages.append(message)
            self._allowance.take(size_of(message))
        self.arrived.set()

    def _fail(self, error: PenstockError) -> None:
        self.failed.append(error)
        self.arrived.set()

    async def run(self, engine: Engine, wait_ms: int) -> None:
        def reached() -> bool:
            return bool(self.messages or self.failed or engine.stopping)

        unreadable = -1
        if wait_ms:
            await _until(self.arrived, reached, wait_ms)
            await self._whole()
            unreadable = self.stream.unreadable
        # What became a dead letter has made way for others.
        while not self.messages and unreadable < self.stream.unreadable:
            unreadable = self.stream.unreadable
            await self._lease_more()
        while self._wants_more():
            await self._lease_more()

    async def _lease_more(self) -> None:
        await self._topic.dispatched()
        await self._whole()

    async def _whole(self) -> None:
        """Wait until all that was leased so far is here."""
        await _until(self.arrived, self._complete, ARRIVE_MS_MAX)
        if not self._complete():
            self.failed.append(Unavailable("what was leased did not come: its outcome is unknown"))

    def _complete(self) -> bool:
        return bool(self.failed) or len(self.messages) >= self.stream.out + self.stream.away

    def _wants_more(self) -> bool:
        """Whether there may be more to lease that fits the answer; the stream may have it then."""
        if self.failed or len(self.messages) < self.stream.window:
            return False
        step = self._allowance.step()
        self.stream.window += max(0, step)
        return step > 0

    def answered(self) -> list[dict[str, Any]]:
        """The best messages, as many as the answer may hold; the others are given back."""
        if self.failed and not self.messages:
            raise self.failed[0]
        rows = self.messages
        if len(self._topic.partitions) > 1:
            rows.sort(key=_order(self._topic))
        allowance = Allowance(self._topic, self._limit)
        kept = list(itertools.takewhile(lambda row: allowance.take(size_of(row)), rows))
        give_back_unused(self._topic, rows[len(kept) :])
        return kept


def give_back_unused(topic: ServedTopic, messages: Iterable[dict[str, Any]]) -> None:
    tokens: dict[int, list[int]] = {}
    for message in messages:
        token = LeaseToken.parse(message["lease_token"])
        tokens.setdefault(token.partition, []).append(token.sequence)
    for index, sequences in tokens.items():
        topic.partitions[index].settle(unused(np.array(sequences, np.uint64)))


def _order(topic: ServedTopic) -> Callable[[dict[str, Any]], tuple[int, int, int]]:
    """By what messages of several partitions are put in order: as the heap would."""
    ordering = Ordering(topic.config)

    def key(message: dict[str, Any]) -> tuple[int, int, int]:
        time_ms = message["time_ms"]
        _, aged = ordering.key_one(message["priority"], time_ms)
        return aged, time_ms, message["sequence"]

    return key


async def _until(changed: asyncio.Event, reached: Callable[[], bool], wait_ms: int) -> None:
    """Wait for `reached`, which may become true with each change; give up after `wait_ms`."""
    try:
        async with asyncio.timeout(wait_ms / 1000):
            while not reached():
                changed.clear()
                await changed.wait()
    except TimeoutError:
        return


# --- removing ---


@method(of_queues=True)
async def purge(engine: Engine, *, topic: str) -> Result:
    """Drop every message that waits, ready or delayed. Leased and dead ones stay."""
    results = await fan_out(engine, engine.queue(topic), purge_share)
    return {"purged": sum(result["purged"] for result in results)}


@shared(of_queues=True)
async def purge_share(share: NodeShare) -> Result:
    waiting = [(p, count) for p in share.partitions if (count := p.heap.ready + p.heap.delayed)]
    for partition in share.partitions:
        partition.check_commits()
    records = [(p, Kind.ACK, 1, {"through": [p.log.sequence_last]}) for p, _ in waiting]
    await share.engine.write_records(share.topic, records)
    return {"purged": sum(count for _, count in waiting)}


@method()
async def move_to_dlq(engine: Engine, *, topic: str, message_id: str, reason: str = "") -> Result:
    queue = engine.queue(topic)
    index, _sequence = locate(queue, message_id)
    move = partial(move_share, message_id=message_id, reason=reason)
    await fan_out(engine, queue, move, indices=[index])
    return {}


@shared(of_queues=True)
async def move_share(share: NodeShare, *, message_id: str, reason: str) -> Result:
    partition = share.the_only()
    index, sequence = locate(share.topic, message_id)
    if index != partition.index:
        raise NotFound(f"no living message {message_id}", message_id=message_id)
    sequences = np.array([sequence], np.uint64)
    state = MessageState(int(partition.heap.states(sequences)[0]))
    if state not in (MessageState.READY, MessageState.DELAYED, MessageState.LEASED):
        raise NotFound(f"no living message {message_id}", message_id=message_id)
    partition.check_commits()
    values: dict[str, Any] = {
        "message": sequences,
        "reason": [DeadReason.MOVED],
        "detail": [reason.encode()[:DETAIL_BYTES_MAX]],
    }
    await share.engine.write_records(share.topic, [(partition, Kind.DEAD, 1, values)])
    return {}


# --- dead letters ---


@method()
async def dlq_list(
    engine: Engine, *, topic: str, after: str | None = None, limit: int = 100
) -> Result:
    queue = engine.queue(topic)
    bounded(limit, 1, LIST_MAX, "limit")
    start, behind = _parse_cursor(after)
    page = partial(dlq_list_share, start=start, after=behind, limit=limit)
    results = await fan_out(engine, queue, page, indices=range(start, len(queue.partitions)))
    lists = [([(row["partition"], row["sequence"]) for row in r["messages"]], r) for r in results]
    rows, more = merged_lists(lists, queue, limit)
    last = rows[-1] if more or len(rows) >= limit else None
    return {
        "messages": rows,
        "next": None if last is None else f"{last['partition']}.{last['sequence']}",
    }


@shared(of_queues=True)
async def dlq_list_share(
    share: NodeShare, *, start: int, after: Annotated[int, msgspec.Meta(ge=0)], limit: ListLimit
) -> Result:
    """A page that begins in partition `start`, behind the sequence `after` there."""
    await share.all_committed()
    found: list[tuple[Partition, DeadLetter]] = []
    for partition in share.partitions:
        behind = after if partition.index == start else 0
        found += [(partition, row) for row in partition.heap.dead_list(behind, limit - len(found))]
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


@method()
async def dlq_replay(
    engine: Engine, *, topic: str, message_ids: list[str] | None = None, limit: int | None = None
) -> Result:
    """Make dead letters ready again in their own topic, no faster than `replay_per_s`: so one
    partition comes after the other, each up to what is left of the limit."""
    queue = engine.queue(topic)
    left = REPLAY_MAX if limit is None else bounded(limit, 1, REPLAY_MAX, "limit")
    replayed = moved = 0
    for index, named in (await _checked(engine, queue, message_ids)).items():
        if replayed == left:
            break
        await asyncio.sleep(min(moved, _chunk_size(queue)) / queue.config.replay_per_s)
        replay = partial(dlq_replay_share, message_ids=named, limit=left - replayed)
        (result,) = await fan_out(engine, queue, replay, indices=[index])
        moved = result["moved"]
        replayed += moved
    return {"replayed": replayed}


@method(of_queues=True)
async def dlq_delete(engine: Engine, *, topic: str, message_ids: list[str] | None = None) -> Result:
    queue = engine.queue(topic)
    indices = await _checked(engine, queue, message_ids)
    delete = partial(dlq_delete_share, message_ids=message_ids)
    results = await fan_out(engine, queue, delete, indices=indices)
    return {"deleted": sum(result["moved"] for result in results)}


async def _checked(
    engine: Engine, topic: ServedTopic, message_ids: list[str] | None
) -> dict[int, list[str] | None]:
    """The partitions that are meant, each with those of the named messages that are there; raises
    if one of them is not a dead letter."""
    if message_ids is None:
        return dict.fromkeys(range(len(topic.partitions)))
    named: dict[int, list[str]] = {}
    for message_id in message_ids:
        named.setdefault(locate(topic, message_id)[0], []).append(message_id)
    check = partial(dlq_check_share, message_ids=message_ids)
    await fan_out(engine, topic, check, indices=named)
    return {**named}


@shared(of_queues=True)
async def dlq_check_share(share: NodeShare, *, message_ids: list[str] | None) -> Result:
    for partition, sequences in _chosen(share, message_ids):
        states = partition.heap.states(np.array(sequences, np.uint64))
        if (states != MessageState.DEAD).any() or len(set(sequences)) < len(sequences):
            raise NotFound("a named message is not a dead letter", partition=partition.index)
    return {}


@shared(of_queues=True)
async def dlq_replay_share(
    share: NodeShare,
    *,
    message_ids: list[str] | None,
    limit: Annotated[int, msgspec.Meta(ge=0)] | None,
) -> Result:
    replayed = 0
    for partition, sequences in _chunks(share, message_ids, limit):
        if replayed:
            await asyncio.sleep(len(sequences) / share.topic.config.replay_per_s)
        replayed += await _move(share, partition, Kind.REPLAY, sequences)
    return {"moved": replayed}


@shared(of_queues=True)
async def dlq_delete_share(share: NodeShare, *, message_ids: list[str] | None) -> Result:
    deleted = 0
    for partition, sequences in _chunks(share, message_ids, None):
        deleted += await _move(share, partition, Kind.ACK, sequences)
    return {"moved": deleted}


def _chosen(share: NodeShare, named: list[str] | None) -> list[tuple[Partition, list[int]]]:
    if named is None:
        found = share.partitions
        return [(p, [row.sequence for row in p.heap.dead_list(0, 1 << 62)]) for p in found]
    chosen: dict[int, list[int]] = {}
    for message_id in named:
        index, sequence = locate(share.topic, message_id)
        chosen.setdefault(index, []).append(sequence)
    return [(p, chosen[p.index]) for p in share.partitions if p.index in chosen]


def _chunks(
    share: NodeShare, named: list[str] | None, limit: int | None
) -> Iterable[tuple[Partition, NDArray[np.uint64]]]:
    left = limit if limit is not None else 1 << 62
    size = _chunk_size(share.topic)
    for partition, sequences in _chosen(share, named):
        sequences, left = sequences[:left], left - len(sequences[:left])
        for at in range(0, len(sequences), size):
            yield partition, np.array(sequences[at : at + size], np.uint64)


def _chunk_size(topic: ServedTopic) -> int:
    return min(CHUNK, topic.config.replay_per_s)


async def _move(
    share: NodeShare, partition: Partition, kind: Kind, sequences: NDArray[np.uint64]
) -> int:
    still = sequences[partition.heap.states(sequences) == MessageState.DEAD]
    if len(still):
        partition.check_commits()
        record = (partition, kind, len(still), {"message": still})
        await share.engine.write_records(share.topic, [record])
    return len(still)
