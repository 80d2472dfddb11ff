"""Calls about messages: peek, pop, purge; and about dead letters: list, replay, delete."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidArgument, NotFound, PenstockError, Unavailable
from penstock.heap import DeadLetter, MessageState
from penstock.heap.table import Ordering
from penstock.model.batch import DeadReason, Kind
from penstock.model.delivery import DELIVERY
from penstock.model.ids import LeaseToken
from penstock.node.calls.fan_out import NodeShare, fan_out, shared
from penstock.node.calls.pages import (
    Allowance,
    locate,
    merged_lists,
    messages_in,
    read_messages,
    size_of,
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
from penstock.node.serve.streams import ConsumerStream
from penstock.node.serve.topic import ServedTopic
from penstock.node.write.settler import unused
from penstock.wire.limits import bounded
from penstock.wire.messages import Delivery

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


class PeekShare(Arguments, frozen=True):
    limit: Annotated[int, msgspec.Meta(ge=1, le=LIST_MAX)]


class MoveShare(Arguments, frozen=True):
    message_id: str
    reason: str


# --- looking ---


@method(PeekArguments)
async def peek(engine: Engine, _: Caller, a: PeekArguments) -> Result:
    """The next messages in order, without leasing them: the best of each node, merged."""
    topic = engine.queue(a.topic)
    limit = bounded(a.limit, 1, LIST_MAX, "limit")
    results = await fan_out(engine, topic, peek_share, PeekShare(limit=limit))
    lists = [
        ([(key, row["sequence"]) for key, row in zip(r["keys"], r["messages"], strict=True)], r)
        for r in results
    ]
    return {"messages": merged_lists(lists, topic, limit)[0]}


@shared(PeekShare, of_queues=True)
async def peek_share(share: NodeShare) -> Result:
    now_ms, limit = share.engine.clock.now_ms(), share.arguments.limit
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


@method(PopArguments)
async def pop(engine: Engine, caller: Caller, a: PopArguments) -> Result:
    """Lease up to `limit` messages, and no more than an answer may hold, waiting for the first at
    most `wait_ms`."""
    topic = engine.queue(a.topic)
    limit = bounded(a.limit, 1, min(POP_MAX, topic.config.consumer_leases_max), "limit")
    wait_ms = bounded(a.wait_ms, 0, WAIT_MS_MAX, "wait_ms")
    if a.visibility_ms is not None:
        bounded(a.visibility_ms, 1, topic.config.visibility_ms_max, "visibility_ms")
    consumer = f"{engine.identity.node}/{engine.run_id}/pop/{next(_pops)}/{a.consumer}"
    popping = _Pop(topic, consumer.encode(), limit, a.visibility_ms, key_id=caller.key_id)
    topic.add_stream(popping.stream)
    engine.pops.add(popping.arrived)
    try:
        unreadable = -1
        if wait_ms:
            await popping.first(engine, wait_ms)
            await popping.whole()
            unreadable = popping.stream.unreadable
        # What became a dead letter has made way for others.
        while not popping.messages and unreadable < popping.stream.unreadable:
            unreadable = popping.stream.unreadable
            await topic.dispatched()
            await popping.whole()
        while popping.wants_more():
            await topic.dispatched()
            await popping.whole()
    finally:
        topic.remove_stream(popping.stream)
        engine.pops.discard(popping.arrived)
    if engine.stopping and not popping.messages and not popping.failed:
        raise Unavailable("the node is stopping, nothing was leased", elsewhere=True)
    messages = popping.answered()
    if caller.gone():  # it will settle none of them
        give_back_unused(topic, messages)
        raise Unavailable("the caller is gone")
    return {"messages": messages}


class _Pop:
    """The stream of one pop, and what has come on it.

    Its window grows as the sizes of messages become known, so that little is leased that the answer
    has no room for.
    """

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

    async def first(self, engine: Engine, wait_ms: int) -> None:
        def reached() -> bool:
            return bool(self.messages or self.failed or engine.stopping)

        await _until(self.arrived, reached, wait_ms)

    async def whole(self) -> None:
        """Wait until all that was leased so far is here."""
        await _until(self.arrived, self._complete, ARRIVE_MS_MAX)
        if not self._complete():
            self.failed.append(Unavailable("what was leased did not come: its outcome is unknown"))

    def _complete(self) -> bool:
        return bool(self.failed) or len(self.messages) >= self.stream.out + self.stream.away

    def wants_more(self) -> bool:
        """Whether there may be more to lease that the answer has room for; the stream may have it
        then."""
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


@method(DestructiveArguments)
async def purge(engine: Engine, caller: Caller, a: DestructiveArguments) -> Result:
    """Drop every message that waits, ready or delayed. Leased and dead ones stay."""
    topic = engine.queue(a.topic)
    confirmed(engine, caller, "purge", a)
    results = await fan_out(engine, topic, purge_share)
    return {"purged": sum(result["purged"] for result in results)}


@shared(of_queues=True)
async def purge_share(share: NodeShare) -> Result:
    waiting = [(p, count) for p in share.partitions if (count := p.heap.ready + p.heap.delayed)]
    for partition in share.partitions:
        partition.journal.check_commits()
    records = [(p, Kind.ACK, 1, {"through": [p.log.sequence_last]}) for p, _ in waiting]
    await share.engine.write_records(share.topic, records)
    return {"purged": sum(count for _, count in waiting)}


@method(MoveArguments)
async def move_to_dlq(engine: Engine, _: Caller, a: MoveArguments) -> Result:
    topic = engine.queue(a.topic)
    index, _sequence = locate(topic, a.message_id)
    moved = MoveShare(message_id=a.message_id, reason=a.reason)
    await fan_out(engine, topic, move_share, moved, indices=[index])
    return {}


@shared(MoveShare, of_queues=True)
async def move_share(share: NodeShare) -> Result:
    partition, message_id = share.the_only(), share.arguments.message_id
    index, sequence = locate(share.topic, message_id)
    if index != partition.index:
        raise NotFound(f"no living message {message_id}", message_id=message_id)
    sequences = np.array([sequence], np.uint64)
    state = MessageState(int(partition.heap.states(sequences)[0]))
    if state not in (MessageState.READY, MessageState.DELAYED, MessageState.LEASED):
        raise NotFound(f"no living message {message_id}", message_id=message_id)
    partition.journal.check_commits()
    values: dict[str, Any] = {
        "message": sequences,
        "reason": [DeadReason.MOVED],
        "detail": [share.arguments.reason.encode()[:DETAIL_BYTES_MAX]],
    }
    await share.engine.write_records(share.topic, [(partition, Kind.DEAD, 1, values)])
    return {}


# --- dead letters ---


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
async def dlq_list_share(share: NodeShare) -> Result:
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


async def _checked(engine: Engine, topic: ServedTopic, message_ids: list[str] | None) -> list[int]:
    """The partitions that are meant; raises if one of the named is not a dead letter."""
    if message_ids is None:
        return list(range(len(topic.partitions)))
    indices = sorted({locate(topic, message_id)[0] for message_id in message_ids})
    chosen = ChosenShare(message_ids=message_ids)
    await fan_out(engine, topic, dlq_check_share, chosen, indices=indices)
    return indices


def _by_node(topic: ServedTopic, indices: list[int]) -> list[list[int]]:
    groups: dict[str, list[int]] = {}
    for index in indices:
        groups.setdefault(topic.router.coordinator(topic.key(index)), []).append(index)
    return list(groups.values())


@shared(ChosenShare, of_queues=True)
async def dlq_check_share(share: NodeShare) -> Result:
    for partition, sequences in _chosen(share):
        states = partition.heap.states(np.array(sequences, np.uint64))
        if (states != MessageState.DEAD).any() or len(set(sequences)) < len(sequences):
            raise NotFound("a named message is not a dead letter", partition=partition.index)
    return {}


@shared(ReplayShare, of_queues=True)
async def dlq_replay_share(share: NodeShare) -> Result:
    replayed = 0
    for partition, sequences in _chunks(share, share.arguments.limit):
        if replayed:
            await asyncio.sleep(len(sequences) / share.topic.config.replay_per_s)
        replayed += await _move(share, partition, Kind.REPLAY, sequences)
    return {"moved": replayed}


@shared(ChosenShare, of_queues=True)
async def dlq_delete_share(share: NodeShare) -> Result:
    deleted = 0
    for partition, sequences in _chunks(share, None):
        deleted += await _move(share, partition, Kind.ACK, sequences)
    return {"moved": deleted}


def _chosen(share: NodeShare) -> list[tuple[Partition, list[int]]]:
    named = share.arguments.message_ids
    if named is None:
        found = share.partitions
        return [(p, [row.sequence for row in p.heap.dead_list(0, 1 << 62)]) for p in found]
    chosen: dict[int, list[int]] = {}
    for message_id in named:
        index, sequence = locate(share.topic, message_id)
        chosen.setdefault(index, []).append(sequence)
    return [(p, chosen[p.index]) for p in share.partitions if p.index in chosen]


def _chunks(share: NodeShare, limit: int | None) -> Iterable[tuple[Partition, NDArray[np.uint64]]]:
    left = limit if limit is not None else 1 << 62
    size = min(CHUNK, share.topic.config.replay_per_s)
    for partition, sequences in _chosen(share):
        sequences, left = sequences[:left], left - len(sequences[:left])
        for at in range(0, len(sequences), size):
            yield partition, np.array(sequences[at : at + size], np.uint64)


async def _move(
    share: NodeShare, partition: Partition, kind: Kind, sequences: NDArray[np.uint64]
) -> int:
    still = sequences[partition.heap.states(sequences) == MessageState.DEAD]
    if len(still):
        partition.journal.check_commits()
        record = (partition, kind, len(still), {"message": still})
        await share.engine.write_records(share.topic, [record])
    return len(still)
