"""Valid frames of every kind that a node sends to a client: what mutations of its words start from.

A client that is fuzzed has asked for everything once, so each frame answers one of its numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final

import msgspec
import numpy as np

from penstock.errors import InvalidArgument, Unavailable
from penstock.model.batch import SCHEMAS, Kind, seal
from penstock.model.entries import CHANGES, DELIVERY
from penstock.wire.frame import FrameFlag, FrameType
from penstock.wire.messages import (
    Changes,
    Delivery,
    Enqueued,
    LogSlice,
    Placed,
    Settled,
    SlowDown,
    Welcome,
)
from verification.fuzz.corpus import Sent, delta

BATCHED: Final = int(FrameFlag.BATCHED)


class Asked(IntEnum):
    """What a client has asked for, by the number of its request."""

    CALL = 1
    ENQUEUE = 2
    SETTLE = 3
    LEASES = 4
    LOG = 5
    CHANGES = 6


def welcome(codec: str) -> Sent:
    control = Welcome(1, "penstock", "n1", 20_000, 64 << 20, codec=codec)
    return Sent(FrameType.HEARTBEAT, 0, 0, control)


def answers(dice: random.Random) -> list[Sent]:
    """One for each request, in the order of their numbers."""
    controls: dict[Asked, Any] = {
        Asked.CALL: {"topics": [{"name": "t", "ready": 3}]},
        Asked.ENQUEUE: Enqueued(1, [Placed(0, 1, 0, 7, 9)]),
        Asked.SETTLE: Settled([0] if dice.randrange(2) else []),
        Asked.LEASES: {"consumer": "n1/1/c"},
        Asked.LOG: {"from_sequence": 1},
        Asked.CHANGES: {"position": 0, "ordinal": 0, "epoch": 1, "sequence_committed": 9},
    }
    return [Sent(FrameType.ACK, 0, number, control) for number, control in controls.items()]


def _delivery(dice: random.Random) -> Sent:
    count = dice.choice((1, 3))
    body = DELIVERY.encode(
        count,
        {
            "message": range(count), "time_ms": [5] * count, "priority": [0] * count,
            "attempts": [0] * count, "payload": [dice.randbytes(9) for _ in range(count)],
        },
    )  # fmt: skip
    return Sent(FrameType.BATCH, BATCHED, Asked.LEASES, Delivery(0, 1, 1, count, 9, 9, 1), body)


def _slice(dice: random.Random) -> Sent:
    body = SCHEMAS[Kind.ENQ].encode(2, {"payload": [b"a", dice.randbytes(20)]})
    batch = seal(
        Kind.ENQ, body, topic=1, partition=0, epoch=1, epoch_previous=0, first=1, count=2,
        time_ms=5, chain_previous=0,
    )  # fmt: skip
    data = batch.header + bytes(batch.body)
    data += bytes(-len(data) & 7)
    return Sent(FrameType.BATCH, BATCHED, Asked.LOG, LogSlice(0, 1, 2, 9), data)


def _changes(dice: random.Random) -> Sent:
    count = dice.choice((0, 1, 40))
    if not count:
        return Sent(FrameType.BATCH, BATCHED, Asked.CHANGES, Changes(0, 0, 5, 9))
    numbers = np.arange(1, count + 1, dtype=np.uint64)
    body = CHANGES.encode(
        count,
        {
            "position": numbers, "ordinal": numbers, "sequence": numbers, "time_ms": [5] * count,
            "payload": [delta(dice) for _ in range(count)],
            "headers": [msgspec.msgpack.encode({"who": "me"})] * count,
        },
    )  # fmt: skip
    return Sent(FrameType.BATCH, BATCHED, Asked.CHANGES, Changes(0, count, count, 9), body)


def _refusal(dice: random.Random) -> Sent:
    kind = dice.choice((FrameType.NACK, FrameType.UNSUBSCRIBE))
    error = dice.choice((Unavailable("moved", partition=1), InvalidArgument("no", field="topic")))
    return Sent(kind, 0, dice.choice(list(Asked)), error.to_wire())


def _ended(dice: random.Random) -> Sent:
    return Sent(FrameType.UNSUBSCRIBE, 0, dice.choice((Asked.LEASES, Asked.LOG)), None)


def _slow_down(dice: random.Random) -> Sent:
    return Sent(FrameType.BACKPRESSURE, 0, 0, SlowDown(50, "many wait", "t"))


def _alive(dice: random.Random) -> Sent:
    return Sent(FrameType.HEARTBEAT, 0, 0, None)


KINDS: Final[tuple[Callable[[random.Random], Sent], ...]] = (
    _delivery, _slice, _changes, _changes, _refusal, _ended, _slow_down, _alive,
)  # fmt: skip


def said(dice: random.Random) -> Sent:
    """Something that a node says when all is open."""
    return dice.choice(KINDS)(dice)
