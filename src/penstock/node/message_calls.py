"""Calls that look at or move single messages: peek, pop, purge, and into the dead letters."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from penstock.errors import NotFound, PenstockError, Unavailable
from penstock.heap import State
from penstock.heap.ordering import Ordering
from penstock.model.batch import DeadReason, Kind
from penstock.model.delivery import DELIVERY
from penstock.model.ids import LeaseToken
from penstock.node.atomic import committed
from penstock.node.calls import Arguments, Caller, DestructiveArguments, TopicArguments, method
from penstock.node.engine import Engine
from penstock.node.partition import Partition
from penstock.node.shares import fan_out, shared, the_only
from penstock.node.showing import all_committed, bounded, locate, messages_in, read_messages
from penstock.node.streams import LeaseStream
from penstock.node.topic import Topic
from penstock.wire.messages import Delivery

LIST_MAX: Final = 1000
POP_MAX: Final = 1000
WAIT_MS_MAX: Final = 60_000
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
async def peek(engine: Engine, _: Caller, a: PeekArguments) -> dict[str, Any]:
    """The next messages in order, without leasing them: the best of each node, merged."""
    topic = engine.queue(a.topic)
    limit = bounded(a.limit, 1, LIST_MAX, "limit")
    results = await fan_out(engine, topic, peek_share, limit=limit)
    found = [row for result in results for row in _keyed(result)]
    best = sorted(found, key=lambda row: (row[0], row[1]["sequence"]))[:limit]
    return {"messages": [message for _, message in best]}


def _keyed(result: dict[str, Any]) -> Iterable[tuple[int, dict[str, Any]]]:
    return zip(result["keys"], result["messages"], strict=True)


@shared(PeekShare, of_queues=True)
async def peek_share(
    engine: Engine, topic: Topic, partitions: list[Partition], a: dict[str, Any]
) -> dict[str, Any]:
    now_ms, limit = engine.clock.now_ms(), int(a["limit"])
    found: list[tuple[int, int, Partition]] = []
    for partition in partitions:
        keys, sequences = partition.candidates(limit, now_ms)
        found += zip(keys.tolist(), sequences.tolist(), itertools.repeat(partition), strict=False)
    best = sorted(found, key=lambda row: row[:2])[:limit]
    await all_committed(topic, partitions)
    rows = await read_messages(topic, [(partition, sequence) for _, sequence, partition in best])
    return {"keys": [key for key, _, _ in best], "messages": rows}


# --- popping ---


@method(PopArguments)
async def pop(engine: Engine, caller: Caller, a: PopArguments) -> dict[str, Any]:
    """Lease up to `limit` messages, waiting for the first at most `wait_ms`."""
    topic = engine.queue(a.topic)
    limit = bounded(a.limit, 1, min(POP_MAX, topic.config.consumer_leases_max), "limit")
    wait_ms = bounded(a.wait_ms, 0, WAIT_MS_MAX, "wait_ms")
    if a.visibility_ms is not None:
        bounded(a.visibility_ms, 1, topic.config.visibility_ms_max, "visibility_ms")
    arrived = asyncio.Event()
    messages: list[dict[str, Any]] = []

    def receive(delivery: Delivery, body: Any) -> None:
        columns = DELIVERY.decode(body, delivery.count)
        for i, message in enumerate(messages_in(topic, delivery.partition, columns)):
            token = LeaseToken(delivery.partition, delivery.epoch, delivery.token_first + i)
            message["lease_token"] = str(token)
            message["deadline_ms"] = delivery.deadline_ms
            message["visibility_ms"] = delivery.visibility_ms
            messages.append(message)
        arrived.set()

    failed: list[PenstockError] = []

    def fail(error: PenstockError) -> None:
        failed.append(error)
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
        return bool(failed) or len(messages) >= stream.out + stream.away

    topic.add_stream(stream)
    engine.pops.add(arrived)
    try:
        if wait_ms:
            await _until(arrived, lambda: bool(messages or failed or engine.stopping), wait_ms)
        else:
            await topic.dispatched()
        await _until(arrived, complete, ARRIVE_MS_MAX)
        if not complete():
            failed.append(Unavailable("what was leased did not come: its outcome is unknown"))
    finally:
        topic.remove_stream(stream)
        engine.pops.discard(arrived)
    if failed and not messages:
        raise failed[0]
    if engine.stopping and not messages:
        raise Unavailable("the node is stopping, nothing was leased", elsewhere=True)
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


@method(DestructiveArguments, audited=True)
async def purge(engine: Engine, _: Caller, a: DestructiveArguments) -> dict[str, Any]:
    """Drop every message that waits, ready or delayed. Leased and dead ones stay."""
    topic = engine.queue(a.topic)
    engine.confirmations.use(a.confirm, "purge", a.topic, force=a.force)
    results = await fan_out(engine, topic, purge_share)
    return {"purged": sum(result["purged"] for result in results)}


@shared(of_queues=True)
async def purge_share(
    _: Engine, topic: Topic, partitions: list[Partition], __: dict[str, Any]
) -> dict[str, Any]:
    purged = 0
    written = []
    for partition in partitions:
        partition.journal.check_commits()
    for partition in partitions:
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
    index, _sequence = locate(topic, a.message_id)
    await fan_out(
        engine, topic, move_share, indices=[index], message_id=a.message_id, reason=a.reason
    )
    return {}


@shared(MoveShare, of_queues=True)
async def move_share(
    _: Engine, topic: Topic, partitions: list[Partition], a: dict[str, Any]
) -> dict[str, Any]:
    partition, message_id = the_only(partitions), str(a["message_id"])
    index, sequence = locate(topic, message_id)
    if index != partition.index:
        raise NotFound(f"no living message {message_id}", message_id=message_id)
    sequences = np.array([sequence], np.uint64)
    state = State(int(partition.heap.states(sequences)[0]))
    if state not in (State.READY, State.DELAYED, State.LEASED):
        raise NotFound(f"no living message {message_id}", message_id=message_id)
    partition.journal.check_commits()
    values: dict[str, Any] = {
        "message": sequences,
        "reason": [DeadReason.MOVED],
        "detail": [str(a["reason"]).encode()[:1024]],
    }
    batch = partition.journal.append_record(Kind.DEAD, 1, values)
    topic.wake()
    await committed(partition, batch.last)
    return {}
