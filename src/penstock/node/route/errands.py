"""Requests for partitions of other nodes, and their outcomes.

A topic's port of a partition that is not served here is a `RemotePartition`: it makes an errand of
each request, which the router sends.

An *errand* is one partition's share of a request. Errands for one node gather until the end of the
loop's turn and then share frames; each gets an outcome of its own back, so that a partition that
refuses does not fail its neighbours. Three things can go wrong:

- Nobody is known to serve the partition, or the node that is known says that it does not: nothing
  has happened. The errand waits for a change, at most `WAIT_S`, and is sent again; if this node is
  cut off, it does not wait, and who asked is told to go `elsewhere`.
- The partition refuses: that is the answer.
- The connection is lost on the way: nobody knows. The answer is `Unavailable`, and whoever asked
  repeats the request with its producer key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from penstock.errors import NotFound, PenstockError, Unavailable, WrongEpoch
from penstock.model.columns import Buffer
from penstock.model.entries import BATCH_ENTRIES_MAX
from penstock.node.route.ports import Key, PartitionPort
from penstock.node.write.requests import (
    EnqueuePart,
    ExtendRequest,
    Gathered,
    Reply,
    ReturnRequest,
    TokenRequest,
    stretches,
)
from penstock.wire.frame import FrameType
from penstock.wire.messages import (
    Duplicate,
    Enqueue,
    Enqueued,
    Extend,
    Forwarded,
    Outcome,
    Part,
    Placed,
    Return,
    Settle,
    TokenPart,
)

WAIT_S: Final = 2.0  # for a coordinator to appear
FRAME_BYTES_MAX: Final = 4 << 20  # errands that share a frame are not more than this


class Freight(NamedTuple):
    """What errands must have in common to share a frame, besides their node."""

    type: FrameType
    topic: str
    how: tuple[Any, ...] = ()


@dataclass(slots=True, eq=False, kw_only=True)
class Errand:
    """One partition's share of a request, and whom to tell how it went."""

    kind: Freight
    key: Key
    count: int
    data: Buffer
    raw_length: int = 0
    served: Callable[[], PartitionPort | None]  # the partition, if this node serves it by now
    hand_over: Callable[[PartitionPort], None]
    succeed: Callable[[Outcome], None]
    fail: Callable[[PenstockError], None]
    deadline: float = field(default_factory=lambda: asyncio.get_running_loop().time() + WAIT_S)

    def give_up(self, *, elsewhere: bool) -> None:
        self.fail(
            Unavailable(
                f"nobody serves partition {self.key[1]} of {self.kind.topic} at the moment",
                partition=self.key[1],
                elsewhere=elsewhere or None,
            )
        )


def control_of(kind: Freight, errands: list[Errand]) -> Any:
    """The control message of a frame that carries these errands."""
    if kind.type is FrameType.BATCH:
        codec, expected = kind.how
        parts = [Part(e.key[1], e.count, len(e.data)) for e in errands]
        raw = [e.raw_length for e in errands] if codec else None
        return Enqueue(
            kind.topic, parts, expected_sequence=expected, codec=codec, raw_lengths=raw,
            forwarded=True, topic_id=errands[0].key[0],
        )  # fmt: skip
    tokens = [TokenPart(e.key[1], 0, e.count, e.key[0]) for e in errands]
    if kind.type is FrameType.ACK:
        return Settle(kind.topic, tokens, forwarded=True)
    if kind.type is FrameType.HEARTBEAT:
        (extend_ms,) = kind.how
        return Extend(kind.topic, tokens, extend_ms, forwarded=True)
    delay_ms, reject, counted, reason = kind.how
    return Return(kind.topic, tokens, delay_ms, reject, counted, reason, forwarded=True)


def frames(errands: list[Errand]) -> Iterator[tuple[Freight, list[Errand]]]:
    """Errands that go together, in the order in which the first of each came."""
    kinds: dict[Freight, list[Errand]] = {}
    for errand in errands:
        kinds.setdefault(errand.kind, []).append(errand)
    for kind, mine in kinds.items():
        some: list[Errand] = []
        count = size = 0
        for errand in mine:
            count, size = count + errand.count, size + len(errand.data)
            alone = kind.type is FrameType.BATCH and kind.how[1] is not None
            if some and (alone or count > BATCH_ENTRIES_MAX or size > FRAME_BYTES_MAX):
                yield kind, some
                some, count, size = [], errand.count, len(errand.data)
            some.append(errand)
        yield kind, some


def not_there(error: BaseException) -> bool:
    """The node did nothing: it does not serve that partition, does not even know the topic yet, or
    serves nothing right now."""
    if isinstance(error, Unavailable):
        return bool(error.details.get("elsewhere"))
    unknown = isinstance(error, NotFound) and "topic" in error.details
    return unknown or isinstance(error, WrongEpoch)


class RemotePartition:
    """The port of a partition that is not served here."""

    def __init__(
        self,
        topic: str,
        key: Key,
        *,
        served: Callable[[], PartitionPort | None],
        send: Callable[[Errand], None],
    ) -> None:
        self.topic, self.key, self.index = topic, key, key[1]
        self._served, self._send = served, send

    def enqueue(self, part: EnqueuePart) -> None:
        self._send(
            Errand(
                kind=Freight(FrameType.BATCH, self.topic, (part.codec, part.expected_sequence)),
                key=self.key,
                count=part.count,
                data=part.body,
                raw_length=len(part.columns.body),
                served=self._served,
                hand_over=lambda port: port.enqueue(part),
                succeed=lambda outcome: part.request.part_placed(*in_request(part, outcome)),
                fail=part.request.part_failed,
            )
        )

    def settle(self, request: TokenRequest) -> None:
        type = FrameType.ACK
        how: tuple[Any, ...] = ()
        if isinstance(request, ReturnRequest):
            reason = request.reason.decode(errors="replace")
            type = FrameType.NACK
            how = (request.delay_ms, request.reject, request.counted, reason)
        elif isinstance(request, ExtendRequest):
            type, how = FrameType.HEARTBEAT, (request.extend_ms,)
        self._send(
            Errand(
                kind=Freight(type, self.topic, how),
                key=self.key,
                count=len(request.tokens),
                data=np.ascontiguousarray(request.tokens, "<u8").tobytes(),
                served=self._served,
                hand_over=lambda port: port.settle(request),
                succeed=lambda outcome: request.reply(outcome.lost),
                fail=request.reply,
            )
        )


def in_request(part: EnqueuePart, outcome: Outcome) -> tuple[list[Placed], list[Duplicate]]:
    """An outcome counts entries of its part; the request counts those of all parts."""
    indices = part.indices
    placed: list[Placed] = []
    for p in outcome.placed:
        if isinstance(indices, range):
            start = indices.start + p.index
            placed.append(Placed(start, p.count, p.partition, p.sequence, p.time_ms))
        else:
            mine = indices[p.index : p.index + p.count]
            sequences = np.arange(p.sequence, p.sequence + p.count)
            placed += stretches(mine, sequences, p.partition, p.time_ms)
    duplicates = [
        Duplicate(int(indices[d.index]), d.partition, d.sequence, d.time_ms)
        for d in outcome.duplicates
    ]
    return placed, duplicates


# --- at the node that serves the partitions ---


def forwarded(parts: int, reply: Reply) -> Gathered:
    """Gathers the outcome of each part of a request that another node has sent on."""
    return Gathered(parts, lambda results: Forwarded([_outcome(each) for each in results]), reply)


def _outcome(result: object) -> Outcome:
    if isinstance(result, PenstockError):
        return Outcome(error=result.to_wire())
    if isinstance(result, Enqueued):
        return Outcome(result.placed, result.duplicates)
    if isinstance(result, list):
        return Outcome(lost=result)
    raise TypeError(f"a part of a request cannot end in {result!r}")
