"""Valid frames of every kind that a client or a node may send: what mutations start from."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from penstock.model.batch import SCHEMAS, Codec, Kind, compress
from penstock.model.delta import Delta, Op, encode
from penstock.replication.effects import Ack, Fence, Fenced, Follow, Probe, Probed
from penstock.wire.frame import FrameFlag, FrameType, compressed, flags_of_class
from penstock.wire.messages import (
    Ask,
    Call,
    Enqueue,
    Extend,
    Grant,
    Hello,
    LeaseAt,
    OpenFollow,
    OpenLease,
    OpenLog,
    OpenSubscription,
    OpenSupply,
    Order,
    Part,
    PutDelta,
    Return,
    Settle,
    Tell,
    TokenPart,
    Told,
    pack,
)

QUEUE: Final = "fuzz-jobs"
DELTAS: Final = "fuzz-vectors"
DIMENSIONS: Final = 4
WANTED: Final = int(FrameFlag.ACK_WANTED)
CALLS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("topic_get", {"topic": QUEUE}), ("topic_list", {}), ("stats", {"topic": QUEUE}),
    ("node_status", {}), ("peek", {"topic": QUEUE, "limit": 3}), ("routes", {"topic": DELTAS}),
    ("pop", {"topic": QUEUE, "limit": 2}), ("dlq_list", {"topic": QUEUE}), ("verify", {}),
    ("log_status", {"topic": DELTAS}), ("live_status", {}),
    ("log_find", {"topic": DELTAS, "partition": 0, "time_ms": 9}),
    ("log_extent", {"topic": QUEUE}), ("confirm", {"method": "topic_delete", "subject": QUEUE}),
    ("cursor_list", {"topic": DELTAS}),
)  # fmt: skip


class Sent(NamedTuple):
    """A frame as its parts; `control` is what `data` follows in the payload."""

    type: int
    flags: int
    number: int
    control: Any  # what msgpack makes of it; None: the payload is empty
    data: bytes = b""
    codec: Codec = Codec.NONE  # by which the whole payload is compressed

    def payload(self) -> tuple[bytes, int]:
        """The payload, and the flags that go with it."""
        if self.control is None:
            return self.data, self.flags
        plain = pack(self.control) + self.data
        packed = compressed(self.codec, [plain]) if self.codec else None
        if packed is None:
            return plain, self.flags
        return b"".join(map(bytes, packed)), self.flags | FrameFlag.COMPRESSED


Make = Callable[[random.Random, int], Sent]
Valid = Callable[[random.Random, int, Codec], Sent]


def _enqueue(dice: random.Random, number: int) -> Sent:
    count = dice.choice((1, 1, 2, 40))
    values: dict[str, Any] = {
        "priority": [dice.randrange(-5, 5) for _ in range(count)],
        "payload": [dice.randbytes(dice.choice((0, 9, 900))) for _ in range(count)],
    }
    runs = dice.randrange(2)
    if runs:
        values |= {
            "run_count": [count], "run_epoch": [1], "run_sequence": [dice.randrange(50)],
            "run_producer": [b"fuzz"],
        }  # fmt: skip
    body = SCHEMAS[Kind.ENQ].encode(count, values, runs=runs)
    codec = Codec(dice.choice((0, 0, 1, 2)))
    packed = compress(codec, body)
    control = Enqueue(
        QUEUE, [Part(dice.randrange(2), count, len(packed))], codec=codec,
        raw_lengths=[len(body)] if codec else None, partitioned=bool(dice.randrange(2)),
    )  # fmt: skip
    return Sent(FrameType.BATCH, WANTED, number, control, packed)


def _atomic(dice: random.Random, number: int) -> Sent:
    body = SCHEMAS[Kind.ENQ].encode(1, {"payload": [b"x"]})
    parts = [Part(index, 1, len(body)) for index in range(2)]
    return Sent(FrameType.BATCH, WANTED, number, Enqueue(QUEUE, parts, atomic=True), body * 2)


def delta(dice: random.Random) -> bytes:
    made = Delta(
        delta_id=dice.randbytes(16), namespace="n", vector_id=f"v{dice.randrange(20)}",
        op=Op.SPARSE, origin="fuzz", time=dice.randrange(1 << 40) << 16, clock={"fuzz": 1},
        indices=np.array([1]), values=np.array([0.5]),
    )  # fmt: skip
    return encode(made, dimensions=DIMENSIONS)


def _put_delta(dice: random.Random, number: int) -> Sent:
    flags = dice.choice((0, WANTED)) | flags_of_class(dice.randrange(4))
    control = PutDelta(DELTAS, dice.choice(("", "fuzz")), 1, dice.randrange(50))
    return Sent(FrameType.DELTA, flags, number, control, delta(dice))


def _enqueue_deltas(dice: random.Random, number: int) -> Sent:
    count = dice.choice((1, 3, 80))
    payloads = [delta(dice) for _ in range(count)]
    body = SCHEMAS[Kind.ENQ].encode(count, {"payload": payloads})
    control = Enqueue(DELTAS, [Part(0, count, len(body))], partitioned=False)
    return Sent(FrameType.BATCH, WANTED, number, control, body)


def _tokens(dice: random.Random) -> tuple[list[TokenPart], bytes]:
    parts = [TokenPart(index, 1, dice.randrange(1, 4), 1) for index in range(dice.randrange(1, 3))]
    total = sum(part.count for part in parts)
    return parts, np.array([dice.randrange(99) for _ in range(total)], "<u8").tobytes()


def _settle(dice: random.Random, number: int) -> Sent:
    parts, data = _tokens(dice)
    return Sent(FrameType.ACK, WANTED, number, Settle(QUEUE, parts, bool(dice.randrange(2))), data)


def _return(dice: random.Random, number: int) -> Sent:
    parts, data = _tokens(dice)
    control = Return(QUEUE, parts, dice.choice((None, 5)), bool(dice.randrange(2)), reason="why")
    return Sent(FrameType.NACK, WANTED, number, control, data)


def _extend(dice: random.Random, number: int) -> Sent:
    parts, data = _tokens(dice)
    return Sent(FrameType.HEARTBEAT, WANTED, number, Extend(QUEUE, parts, 1000), data)


def _subscription(dice: random.Random, number: int) -> Sent:
    routes = dice.choice(([], ["*"], ["namespace=n", "op=SPARSE"], ["vector=n/v1"]))
    start, at = dice.choice((("now", 0), ("sequence", 0), ("sequence", 5), ("time", 9)))
    cursor = dice.choice(("", "", "fuzz"))
    control = OpenSubscription(
        DELTAS, 0, routes, "cursor" if cursor else start, at, cursor=cursor,
        credit_entries=dice.choice((1, 100)), coalesce_ms=dice.choice((0, 5)),
    )  # fmt: skip
    return Sent(FrameType.SUBSCRIBE, WANTED, number, control)


def _open(dice: random.Random, number: int) -> Sent:
    control = dice.choice(
        (
            OpenLease(QUEUE, dice.randrange(1, 5), "fuzz", 1000),
            OpenLog(QUEUE, dice.randrange(2), dice.randrange(3)),
            OpenLog(DELTAS, 0, 1, 10, 1000, through=dice.randrange(4)),
            OpenSupply(QUEUE, b"other/"),
            OpenFollow(1, 0, msgspec.msgpack.encode(Follow("n2", "u2", 1, 1, 1, [(1, 1)], 10, 99))),
        )
    )
    return Sent(FrameType.SUBSCRIBE, WANTED, number, control)


def _tell(dice: random.Random, number: int) -> Sent:
    kind, message = dice.choice(
        (
            ("fence", Fence("n3", 2)),
            ("fenced", Fenced("n1", "u1", 2, 1, 2, 2)),
            ("probe", Probe("n3", 1)),
            ("probed", Probed("n2", 1, True)),
            ("ack", Ack("n2", "u2", 1, 1, 1, 112, 2, 1)),
        )
    )
    told = Told(dice.randrange(3), 0, kind, msgspec.msgpack.encode(message))
    return Sent(FrameType.SUBSCRIBE, 0, number, Tell([told]))


def _call(dice: random.Random, number: int) -> Sent:
    return Sent(FrameType.SUBSCRIBE, WANTED, number, Call(*dice.choice(CALLS)))


def _on_stream(dice: random.Random, number: int) -> Sent:
    """Something for a stream that an earlier frame may have opened."""
    order = Order(b"other/1", 1000, 10, [0], [1], [99], [5])
    control = dice.choice(
        (
            Grant(dice.randrange(5), dice.randrange(999), dice.randrange(9)),
            Ask(1, 10),
            LeaseAt(1, [order], 5),
        )
    )
    return Sent(FrameType.ACK, 0, dice.randrange(1, number + 1), control)


def _plain(dice: random.Random, number: int) -> Sent:
    kind = dice.choice((FrameType.HEARTBEAT, FrameType.UNSUBSCRIBE, FrameType.BACKPRESSURE))
    return Sent(kind, dice.choice((0, WANTED)), dice.randrange(number + 1), None)


KINDS: Final[tuple[Make, ...]] = (
    _enqueue, _atomic, _put_delta, _enqueue_deltas, _settle, _return, _extend, _subscription, _open,
    _tell, _call, _on_stream, _plain,
)  # fmt: skip


def hello(dice: random.Random) -> tuple[Sent, Codec]:
    """A greeting, and the codec that will be agreed on."""
    codec = dice.choice((Codec.NONE, Codec.ZSTD, Codec.LZ4))
    codecs = [codec.name.lower()] if codec else []
    return Sent(FrameType.HEARTBEAT, 0, 0, Hello([1], None, "fuzz", codecs)), codec


def valid(dice: random.Random, number: int, codec: Codec) -> Sent:
    made = dice.choice(KINDS)(dice, number)
    return made._replace(codec=codec) if codec and dice.randrange(2) else made
