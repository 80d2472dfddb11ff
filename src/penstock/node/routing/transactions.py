"""Atomic batches with partitions of other nodes: what is asked of their coordinators.

Each function finds the coordinator of a partition and asks it; `here` is what to do should that be
this node by then. Only what may be done twice is asked twice when nobody knows how the first time
ended: a decision may, a PREPARE may not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.errors import Unavailable, from_wire
from penstock.heap.transactions import Doubts, Place
from penstock.node.partition import Partition
from penstock.node.preparing import Prepared, apply_here, doubts_here, stage_here
from penstock.node.requests import EnqueuePart
from penstock.node.routing.ports import PeerConnection
from penstock.node.routing.remote import in_request
from penstock.wire.frame import FrameType
from penstock.wire.messages import Call, Enqueue, Forwarded, Part, pack

if TYPE_CHECKING:
    from penstock.node.topic import Topic

DECIDE_S: Final = 10.0  # that a decision is tried; the home's coordinator may change meanwhile
ASK_S: Final = 2.0  # that it is asked for: who is in doubt asks again

Here = Callable[[Partition], Awaitable[bool]]


async def prepare_at(
    topic: Topic, index: int, part: EnqueuePart, *, transaction: bytes, home: int
) -> Prepared:
    """Have a part prepared and committed by whoever coordinates its partition."""

    async def here(partition: Partition) -> Prepared:
        staged = await stage_here(topic, partition, part, transaction=transaction, home=home)
        topic.wake()
        return await staged.prepared

    async def away(peer: PeerConnection) -> Prepared:
        request = Enqueue(
            topic.config.name, [Part(index, part.count, len(part.body))], codec=part.codec,
            raw_lengths=[len(part.columns.body)], forwarded=True, transaction=transaction,
            home=home,
        )  # fmt: skip
        answer: Forwarded = await peer.ask(FrameType.BATCH, Forwarded, pack(request), part.body)
        if len(answer.outcomes) != 1:
            raise Unavailable("an answer does not fit its request")
        outcome = answer.outcomes[0]
        if outcome.error is not None:
            raise from_wire(outcome.error)
        return Prepared(index, *in_request(part, outcome))

    return await topic.router.at(topic.key(index), here=here, away=away)


async def decide_at(
    topic: Topic, home: int, transaction: bytes, *, commit: bool, places: Sequence[Place],
    here: Here,
) -> bool:  # fmt: skip
    """The decision that holds, committed in the home partition."""
    return await _ask_home(
        topic, home, "transaction_decide", here, transaction, within_s=DECIDE_S, commit=commit,
        places=[list(place) for place in places],
    )  # fmt: skip


async def outcome_at(topic: Topic, home: int, transaction: bytes, *, here: Here) -> bool:
    """The decision, made now if there was none."""
    return await _ask_home(topic, home, "transaction_outcome", here, transaction, within_s=ASK_S)


async def apply_at(topic: Topic, index: int, transaction: bytes, *, commit: bool) -> None:
    """Give a participant the decision."""

    async def here(partition: Partition) -> None:
        apply_here(topic, partition, transaction, commit=commit)

    async def away(peer: PeerConnection) -> None:
        await _call(peer, "transaction_apply", topic, index, transaction, commit=commit)

    await topic.router.at(topic.key(index), here=here, away=away)


async def doubts_at(topic: Topic, index: int, *, home: int) -> Doubts:
    """Which batches of a home wait for its decision in a partition."""

    async def here(partition: Partition) -> Doubts:
        return await doubts_here(topic, partition, home)

    async def away(peer: PeerConnection) -> Doubts:
        arguments = {"topic": topic.config.name, "partition": index, "home": home}
        call = pack(Call("transaction_doubts", arguments))
        answer: dict[str, Any] = await peer.ask(FrameType.SUBSCRIBE, dict, call)
        try:
            return msgspec.convert((answer["sequence"], answer["transactions"]), Doubts)
        except (KeyError, msgspec.ValidationError) as error:
            raise Unavailable("an answer does not say what is in doubt") from error

    return await topic.router.at(topic.key(index), here=here, away=away, repeat=True)


async def _ask_home(
    topic: Topic, home: int, method: str, here: Here, transaction: bytes, *, within_s: float,
    **arguments: Any,
) -> bool:  # fmt: skip
    async def away(peer: PeerConnection) -> bool:
        answer = await _call(peer, method, topic, home, transaction, **arguments)
        if not isinstance(answer.get("commit"), bool):
            raise Unavailable("an answer does not say how it was decided")
        return bool(answer["commit"])

    return await topic.router.at(
        topic.key(home), here=here, away=away, repeat=True, within_s=within_s
    )


async def _call(
    peer: PeerConnection,
    method: str,
    topic: Topic,
    index: int,
    transaction: bytes,
    **arguments: Any,
) -> dict[str, Any]:
    call = Call(
        method,
        {"topic": topic.config.name, "partition": index, "transaction": transaction, **arguments},
    )
    answer: dict[str, Any] = await peer.ask(FrameType.SUBSCRIBE, dict, pack(call))
    return answer
