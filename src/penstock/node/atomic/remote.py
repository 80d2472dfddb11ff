"""Atomic batches with partitions of other nodes: what is asked of their coordinators.

Each function finds the coordinator of a partition and asks it; if that is this node, it acts here.
Only what may be done twice is asked twice when nobody knows how the first time ended: a decision
may, a PREPARE may not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from penstock.errors import PenstockError, Unavailable, from_wire
from penstock.heap.transactions import Doubts, SharePlace
from penstock.node.atomic.participant import (
    Prepared,
    apply_here,
    decide_here,
    doubts_here,
    outcome_here,
    stage_here,
)
from penstock.node.route.errands import WAIT_S, in_request, not_there
from penstock.node.route.ports import PeerPort
from penstock.node.serve.partition import Partition
from penstock.node.serve.topic import Topic
from penstock.node.write.requests import EnqueuePart
from penstock.wire.frame import FrameType
from penstock.wire.messages import Call, Enqueue, Forwarded, Part, pack

DECIDE_S: Final = 10.0  # that a decision is tried; the home's coordinator may change meanwhile
ASK_S: Final = 2.0  # that it is asked for: who is in doubt asks again

R = TypeVar("R")
Here = Callable[[Partition], Awaitable[bool]]


async def prepare_at(
    topic: Topic, index: int, part: EnqueuePart, *, transaction: bytes, home: int
) -> Prepared:
    """Have a part prepared and committed by whoever coordinates its partition."""

    async def here(partition: Partition) -> Prepared:
        staged = await stage_here(topic, partition, part, transaction=transaction, home=home)
        topic.wake()
        return await staged.prepared

    async def away(peer: PeerPort) -> Prepared:
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
        return Prepared(index, *in_request(part, outcome))

    return await _at(topic, index, here=here, away=away)


async def decide_at(
    topic: Topic, home: int, transaction: bytes, *, commit: bool, places: Sequence[SharePlace] = ()
) -> bool:
    """Have the home decide; returns the decision that holds, committed in the home partition."""

    async def here(partition: Partition) -> bool:
        return await decide_here(topic, partition, transaction, commit=commit, places=places)

    return await _ask_home(
        topic, home, "transaction_decide", here, transaction, within_s=DECIDE_S, commit=commit,
        places=[list(place) for place in places],
    )  # fmt: skip


async def outcome_at(topic: Topic, home: int, transaction: bytes) -> bool:
    """The decision, made now if there was none."""

    async def here(partition: Partition) -> bool:
        return await outcome_here(topic, partition, transaction)

    return await _ask_home(topic, home, "transaction_outcome", here, transaction, within_s=ASK_S)


async def apply_at(topic: Topic, index: int, transaction: bytes, *, commit: bool) -> None:
    """Give a participant the decision."""

    async def here(partition: Partition) -> None:
        apply_here(topic, partition, transaction, commit=commit)

    async def away(peer: PeerPort) -> None:
        await _call(peer, "transaction_apply", topic, index, transaction, commit=commit)

    await _at(topic, index, here=here, away=away)


async def doubts_at(topic: Topic, index: int, *, home: int) -> Doubts:
    """Which batches of a home wait for its decision in a partition."""

    async def here(partition: Partition) -> Doubts:
        return await doubts_here(topic, partition, home)

    async def away(peer: PeerPort) -> Doubts:
        arguments = {
            "topic": topic.config.name, "topic_id": topic.config.id, "partition": index,
            "home": home,
        }  # fmt: skip
        call = pack(Call("transaction_doubts", arguments))
        answer: dict[str, Any] = await peer.ask(FrameType.SUBSCRIBE, dict, call)
        try:
            return msgspec.convert((answer["sequence"], answer["transactions"]), Doubts)
        except (KeyError, msgspec.ValidationError) as error:
            raise Unavailable("an answer does not say what is in doubt") from error

    return await _at(topic, index, here=here, away=away, repeat=True)


async def _ask_home(
    topic: Topic, home: int, method: str, here: Here, transaction: bytes, *, within_s: float,
    **arguments: Any,
) -> bool:  # fmt: skip
    async def away(peer: PeerPort) -> bool:
        answer = await _call(peer, method, topic, home, transaction, **arguments)
        if not isinstance(answer.get("commit"), bool):
            raise Unavailable("an answer does not say how it was decided")
        return bool(answer["commit"])

    return await _at(topic, home, here=here, away=away, repeat=True, within_s=within_s)


async def _call(
    peer: PeerPort,
    method: str,
    topic: Topic,
    index: int,
    transaction: bytes,
    **arguments: Any,
) -> dict[str, Any]:
    call = Call(
        method,
        {"topic": topic.config.name, "topic_id": topic.config.id, "partition": index,
         "transaction": transaction, **arguments},
    )  # fmt: skip
    answer: dict[str, Any] = await peer.ask(FrameType.SUBSCRIBE, dict, pack(call))
    return answer


async def _at(
    topic: Topic,
    index: int,
    *,
    here: Callable[[Partition], Awaitable[R]],
    away: Callable[[PeerPort], Awaitable[R]],
    repeat: bool = False,
    within_s: float | None = None,
) -> R:
    """Do something at the coordinator of a partition, `here` if that is this node.

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
