"""All-or-none batches over several partitions: PREPARE in each, one DECIDE in the home partition.

The decision is the DECIDE record of the home partition: once that is committed, the batch is in,
and nothing can take it back. A prepared participant never decides alone. Whoever coordinates a
partition in which a batch has been prepared for too long asks its home: a decision found there
holds; if there is none, the home decides against, which whoever drove the batch then finds. The
driver may be any node, and so may the partitions' coordinators; each of them may fail at any time.

- A PREPARE is sent once. If nobody knows whether it was written, the batch is decided against, and
  a PREPARE that comes later than that is resolved by its coordinator.
- A decision may be sent again and again: the first one in the home's log holds, and is the answer.
- The other participants get a copy. Should it be lost, they ask, as after a restart. The home keeps
  what it decided for until all of them have it (`batches`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec
from ulid import ULID

from penstock.errors import BatchAborted, PenstockError, Unavailable, from_wire
from penstock.heap.transactions import Doubts, SharePlace
from penstock.log.crash import crash_point
from penstock.node.atomic.participant import (
    apply_here,
    decide_here,
    doubts_here,
    prepare_here,
    stage_here,
)
from penstock.node.observe.logs import get_logger
from penstock.node.route.ports import PartitionPort, PeerPort
from penstock.node.route.router import WAIT_S, in_request, not_there
from penstock.node.serve.partition import Partition
from penstock.node.serve.topic import ServedTopic
from penstock.node.write.enqueuer import EnqueuePart
from penstock.wire.frame import FrameType
from penstock.wire.messages import Call, Enqueue, Forwarded, Part, Placed, pack

# That a batch may be prepared for before it is decided for. A home keeps its aborts for longer
# (`heap.transactions.ABORTED_MS`), so a driver that is late finds them.
COMMIT_S: Final = 60.0
DECIDE_S: Final = 10.0  # that a decision is tried; the home's coordinator may change meanwhile
ASK_S: Final = 2.0  # that it is asked for: who is in doubt asks again
HOMES_MAX: Final = 16  # asked at the same time
R = TypeVar("R")
log = get_logger(__name__)


async def enqueue_atomically(
    topic: ServedTopic, parts: Sequence[tuple[PartitionPort, EnqueuePart]]
) -> None:
    """Write all parts or none; each part's request is answered."""
    transaction = ULID().bytes
    home = choose_home([port.index for port, _ in parts], transaction)
    late = asyncio.get_running_loop().time() + COMMIT_S
    try:
        prepared = await _prepare_all(topic, parts, transaction, home)
        crash_point("node.atomic.prepared")
        places = [
            SharePlace(port.index, placed.sequence)
            for (port, _), mine in zip(parts, prepared, strict=True)
            for placed in mine
        ]
        if places:  # else all of it was written before
            await _commit(topic, home, transaction, places, late=late)
    except PenstockError as error:
        for _, part in parts:
            part.request.part_failed(error)
        return
    for (_, part), placed in zip(parts, prepared, strict=True):
        part.request.part_placed(placed, part.known)


def choose_home(partitions: Sequence[int], transaction: bytes) -> int:
    """One of the participants, each as often as the others: what homes keep is spread over them."""
    return partitions[transaction[-1] % len(partitions)]


async def _commit(
    topic: ServedTopic, home: int, transaction: bytes, places: list[SharePlace], *, late: float
) -> None:
    """Have the home decide for the batch, and tell the others; raises if it is decided against."""
    others = sorted({place.partition for place in places} - {home})
    if asyncio.get_running_loop().time() > late:
        await _abort(topic, home, others, transaction)
        raise BatchAborted("it took too long to prepare")
    if not await decide_at(topic, home, transaction, commit=True, places=places):
        raise BatchAborted("another decision came first")
    crash_point("node.atomic.decided")
    await _tell(topic, others, transaction, commit=True)


async def _prepare_all(
    topic: ServedTopic,
    parts: Sequence[tuple[PartitionPort, EnqueuePart]],
    transaction: bytes,
    home: int,
) -> list[list[Placed]]:
    """Have every part prepared and committed; returns where. If one fails, the batch is decided
    against."""
    staging = await asyncio.gather(
        *(_stage(topic, port.index, part, transaction, home) for port, part in parts),
        return_exceptions=True,
    )
    staged = [
        (port.index, s)
        for (port, _), s in zip(parts, staging, strict=True)
        if not isinstance(s, BaseException)
    ]
    crash_point("node.atomic.staged")
    topic.wake()
    ended = await asyncio.gather(*(s for _, s in staged), return_exceptions=True)
    failed = [e for e in (*staging, *ended) if isinstance(e, BaseException)]
    if failed:
        if staged:
            await _abort(topic, home, [index for index, _ in staged], transaction)
        raise failed[0]
    return [e for e in ended if not isinstance(e, BaseException)]


async def _stage(
    topic: ServedTopic, index: int, part: EnqueuePart, transaction: bytes, home: int
) -> asyncio.Future[list[Placed]]:
    served = topic.served(index)
    if served is not None:
        return await stage_here(topic, served, part, transaction=transaction, home=home)
    work = prepare_at(topic, index, part, transaction=transaction, home=home)
    return asyncio.ensure_future(work)


async def _tell(
    topic: ServedTopic, partitions: list[int], transaction: bytes, *, commit: bool
) -> None:
    """Give participants a copy of the decision. One that does not get it will ask."""
    results = await asyncio.gather(
        *(apply_at(topic, index, transaction, commit=commit) for index in partitions),
        return_exceptions=True,
    )
    for index, result in zip(partitions, results, strict=True):
        if isinstance(result, PenstockError):
            log.info("a decision was not told", partition=index, error=result.message)
        elif isinstance(result, BaseException):
            raise result


async def _abort(
    topic: ServedTopic, home: int, participants: list[int], transaction: bytes
) -> None:
    """Decide against. If even that is not possible now, participants ask for it later."""
    try:
        outcome = await decide_at(topic, home, transaction, commit=False)
    except PenstockError as error:
        log.warning("an atomic batch is in doubt", home=home, error=error.message)
        return
    await _tell(topic, [i for i in participants if i != home], transaction, commit=outcome)


# --- after a crash ---


async def resolve_in_doubt(topic: ServedTopic, *, older_ms: int | None = None) -> int:
    """Give what is prepared here, for that long at least, the decision of its home partition.

    Homes are asked side by side, and each fails by itself: what one of them cannot answer now must
    not keep the batches of others invisible. Returns how many were resolved.
    """
    by_home: dict[int, list[tuple[Partition, bytes]]] = {}
    for partition in topic.local:
        for transaction, prepared in partition.heap.transactions.prepared.items():
            if older_ms is None or prepared.time_ms <= partition.journal.now_ms() - older_ms:
                by_home.setdefault(prepared.home, []).append((partition, transaction))
    slots = asyncio.Semaphore(HOMES_MAX)
    async with asyncio.TaskGroup() as group:
        asking = [
            group.create_task(_resolve_of(topic, home, doubts, slots))
            for home, doubts in by_home.items()
        ]
    return sum(task.result() for task in asking)


async def _resolve_of(
    topic: ServedTopic, home: int, doubts: list[tuple[Partition, bytes]], slots: asyncio.Semaphore
) -> int:
    """Ask one home, as long as it answers; returns how many batches it told of."""
    async with slots:
        for resolved, (partition, transaction) in enumerate(doubts):
            try:
                decision = await decide_at(topic, home, transaction, commit=False, in_doubt=True)
                if partition.journal.failed is None:
                    apply_here(topic, partition, transaction, commit=decision)
            except PenstockError as error:
                log.warning(
                    "still in doubt", topic=topic.config.name, home=home,
                    count=len(doubts) - resolved, error=error.message,
                )  # fmt: skip
                return resolved
    return len(doubts)


# --- what is asked of a partition's coordinator; if that is this node, it acts here ---


async def prepare_at(
    topic: ServedTopic, index: int, part: EnqueuePart, *, transaction: bytes, home: int
) -> list[Placed]:
    """Have a part prepared and committed. Only what may be done twice is asked for twice when
    nobody knows how the first time ended: a decision may, a PREPARE may not."""

    async def away(peer: PeerPort) -> list[Placed]:
        request = Enqueue(
            topic.config.name, [Part(index, part.count, len(part.body))], codec=part.codec,
            raw_lengths=[len(part.columns.body)], forwarded=True, transaction=transaction,
            home=home, topic_id=topic.config.id,
        )  # fmt: skip
        answer: Forwarded = await peer.ask(FrameType.BATCH, Forwarded, pack(request), part.body)
        if len(answer.outcomes) != 1:
            raise Unavailable("an answer does not fit its request")
        outcome = answer.outcomes[0]
        if outcome.error is not None:
            raise from_wire(outcome.error)
        placed, part.known = in_request(part, outcome)
        return placed

    return await _at(
        topic,
        index,
        here=lambda partition: prepare_here(
            topic, partition, part, transaction=transaction, home=home
        ),
        away=away,
    )


async def decide_at(
    topic: ServedTopic,
    home: int,
    transaction: bytes,
    *,
    commit: bool,
    places: Sequence[SharePlace] = (),
    in_doubt: bool = False,
) -> bool:
    """Have the home decide; returns the decision that holds, committed in the home partition. A
    participant that is `in_doubt` asks for it, and decides against if there is none."""

    async def away(peer: PeerPort) -> bool:
        method, told = "transaction_outcome", dict[str, Any]()
        if not in_doubt:
            method = "transaction_decide"
            told = {"commit": commit, "places": [list(place) for place in places]}
        answer = await _call(peer, method, topic, partition=home, transaction=transaction, **told)
        if not isinstance(answer.get("commit"), bool):
            raise Unavailable("an answer does not say how it was decided")
        return bool(answer["commit"])

    return await _at(
        topic,
        home,
        here=lambda partition: decide_here(
            topic, partition, transaction, commit=commit, places=places
        ),
        away=away,
        repeat=True,
        within_s=ASK_S if in_doubt else DECIDE_S,
    )


async def apply_at(topic: ServedTopic, index: int, transaction: bytes, *, commit: bool) -> None:

    async def here(partition: Partition) -> None:
        apply_here(topic, partition, transaction, commit=commit)

    async def away(peer: PeerPort) -> None:
        await _call(
            peer, "transaction_apply", topic, partition=index, transaction=transaction,
            commit=commit,
        )  # fmt: skip

    await _at(topic, index, here=here, away=away)


async def doubts_at(topic: ServedTopic, index: int, *, home: int) -> Doubts:
    """Which batches of a home wait for its decision in a partition."""

    async def away(peer: PeerPort) -> Doubts:
        answer = await _call(peer, "transaction_doubts", topic, partition=index, home=home)
        try:
            return msgspec.convert((answer["sequence"], answer["transactions"]), Doubts)
        except (KeyError, msgspec.ValidationError) as error:
            raise Unavailable("an answer does not say what is in doubt") from error

    return await _at(
        topic, index, here=lambda partition: doubts_here(topic, partition, home), away=away,
        repeat=True,
    )  # fmt: skip


async def _call(
    peer: PeerPort, method: str, topic: ServedTopic, **arguments: Any
) -> dict[str, Any]:
    named = {"topic": topic.config.name, "topic_id": topic.config.id, **arguments}
    answer: dict[str, Any] = await peer.ask(FrameType.SUBSCRIBE, dict, pack(Call(method, named)))
    return answer


async def _at(
    topic: ServedTopic,
    index: int,
    *,
    here: Callable[[Partition], Awaitable[R]],
    away: Callable[[PeerPort], Awaitable[R]],
    repeat: bool = False,
    within_s: float | None = None,
) -> R:
    """Do something at a partition's coordinator, wherever that is.

    While nobody coordinates it, or who was asked does not, it is tried again; when nobody knows
    whether it was done, only if it may be done twice (`repeat`).
    """
    loop, router, key = asyncio.get_running_loop(), topic.router, topic.key(index)
    deadline = loop.time() + (WAIT_S if within_s is None else within_s)
    while True:
        unreached = Unavailable(f"nobody serves partition {index} now", partition=index)
        try:
            served = topic.served(index)
            if served is not None:
                return await here(served)
            node = router.coordinator(key)
            peer = router.cluster.live(node) if node else None
            if peer is None:
                raise unreached
            return await away(peer)
        except PenstockError as error:
            undone = error is unreached or not_there(error)
            unknown = isinstance(error, Unavailable) and not undone
            if (unknown and not repeat) or not (isinstance(error, Unavailable) or undone):
                raise
            if router.cluster.cut_off or loop.time() >= deadline:
                raise (error if unknown else unreached) from error
        await router.changed(key)
