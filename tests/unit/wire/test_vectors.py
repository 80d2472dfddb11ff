"""The bytes printed in docs/wire.md are the bytes that the code makes."""

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.inspect import (
    BoolType,
    BytesType,
    DictType,
    Field,
    IntType,
    ListType,
    NoneType,
    StrType,
    StructType,
    TupleType,
    Type,
    UnionType,
    type_info,
)

from penstock.errors import InvalidArgument, NotFound
from penstock.model.batch import SCHEMAS, Batch, Codec, Kind, decode, seal, verify_chain
from penstock.model.columns import Column, Domain, Schema
from penstock.model.delta import Delta, Op, vector_hash
from penstock.model.delta import encode as encode_delta
from penstock.model.entries import CHANGES, DELIVERY
from penstock.model.ids import LeaseToken, MessageId, partition_of, partitions_of_deltas
from penstock.replication import effects
from penstock.replication.effects import (
    Ack,
    Append,
    Fence,
    Fenced,
    Follow,
    Followed,
    Probe,
    Probed,
)
from penstock.wire import messages
from penstock.wire.frame import (
    FrameDecoder,
    FrameFlag,
    FrameType,
    compressed,
    encode,
    expanded,
    flags_of_class,
)
from penstock.wire.messages import (
    Ask,
    Call,
    Changes,
    Delivery,
    Duplicate,
    Enqueue,
    Enqueued,
    Extend,
    Forwarded,
    Grant,
    Heads,
    Hello,
    LeaseAt,
    LeasesHeld,
    Lent,
    LogSlice,
    OpenFollow,
    OpenLease,
    OpenLog,
    OpenSubscription,
    OpenSupply,
    Order,
    Outcome,
    Part,
    Placed,
    PutDelta,
    Ready,
    Return,
    Settle,
    Settled,
    SlowDown,
    SupplyHead,
    Taken,
    Tell,
    TokenPart,
    Told,
    Welcome,
    pack,
    unpack,
)

DOC = Path(__file__).parents[3] / "docs" / "wire.md"
TIME_MS = 1_700_000_000_000
TOKEN = (5).to_bytes(8, "little")
PARTS = [TokenPart(0, 1, 1, 1)]
WANTED, BATCHED = FrameFlag.ACK_WANTED, FrameFlag.BATCHED


def enq_body() -> bytes:
    """One message, without a producer key."""
    return SCHEMAS[Kind.ENQ].encode(1, {"priority": [5], "payload": [b"hello"]})


def enq_body_runs() -> bytes:
    """Two messages of one producer, the second with a key."""
    values = {
        "priority": [5, -1],
        "key": [b"", b"user-7"],
        "payload": [b"hello", b"you"],
        "run_count": [2],
        "run_epoch": [1],
        "run_sequence": [40],
        "run_producer": [b"shop"],
    }
    return SCHEMAS[Kind.ENQ].encode(2, values, runs=1)


def delivery_body() -> bytes:
    values = {"message": [2], "time_ms": [TIME_MS], "priority": [5], "payload": [b"hello"]}
    return DELIVERY.encode(1, values)


def delta_body() -> bytes:
    """Two components of a vector, after another delta of the same writer."""
    delta = Delta(
        delta_id=bytes(range(1, 17)), namespace="default", vector_id="a", op=Op.SPARSE,
        origin="docs", time=TIME_MS << 16, parent=bytes(range(17, 33)), clock={"docs": 2},
        indices=np.array([1, 3]), values=np.array([0.5, 2.0]),
    )  # fmt: skip
    return encode_delta(delta, dimensions=4)


def changes_body() -> bytes:
    """That delta, put as sequence 4 and released by the arrival of its parent, sequence 6."""
    values = {
        "position": [6],
        "ordinal": [5],
        "sequence": [4],
        "time_ms": [TIME_MS],
        "payload": [delta_body()],
    }
    return CHANGES.encode(1, values)


def batch() -> Batch:
    return seal(
        Kind.ENQ, enq_body(), topic=1, partition=0, epoch=1, epoch_previous=1, first=2, count=1,
        time_ms=TIME_MS, chain_previous=0x0123456789ABCDEF,
    )  # fmt: skip


def frame(type: FrameType, number: int, *payload: bytes, flags: int = 0) -> bytes:
    return b"".join(encode(type, number, *payload, flags=flags))


def frame_enqueue() -> bytes:
    request = Enqueue("jobs", [Part(0, 1, len(enq_body()))])
    return frame(FrameType.BATCH, 1, pack(request), enq_body(), flags=WANTED)


def frame_enqueued() -> bytes:
    return frame(FrameType.ACK, 1, pack(Enqueued(1, [Placed(0, 1, 0, 2, TIME_MS)])))


def frame_put_delta() -> bytes:
    control = pack(PutDelta("vectors", "docs", 1, 7))
    return frame(FrameType.DELTA, 11, control, delta_body(), flags=WANTED | flags_of_class(2))


def frame_known() -> bytes:
    answer = Enqueued(1, [], [Duplicate(0, 0, 4, TIME_MS)])
    return frame(FrameType.ACK, 11, pack(answer))


def frame_compressed() -> bytes:
    packed = compressed(Codec.LZ4, [pack(Call("stats", {"topic": "x" * 2000}))])
    assert packed is not None
    return frame(FrameType.SUBSCRIBE, 12, *map(bytes, packed), flags=WANTED | FrameFlag.COMPRESSED)


def frame_refused_version() -> bytes:
    refused = InvalidArgument("versions 1 are spoken here, not 2", field="versions", versions=[1])
    return frame(FrameType.NACK, 0, pack(refused.to_wire()))


def frame_forwarded() -> bytes:
    lost = NotFound("no topic jobs", topic="jobs").to_wire()
    placed = Outcome([Placed(0, 1, 0, 2, TIME_MS)])
    return frame(FrameType.ACK, 13, pack(Forwarded([placed, Outcome(error=lost)])))


def frame_told(kind: str, message: object) -> bytes:
    told = Told(1, 0, kind, msgspec.msgpack.encode(message))
    return frame(FrameType.SUBSCRIBE, 9, pack(Tell([told])))


CONSUMERS = b"n2/run/"
ORDER = Order(CONSUMERS + b"4/2/worker", 30_000, 100, [0], [1], [5], [2])


def frame_lease_at() -> bytes:
    return frame(FrameType.ACK, 14, pack(LeaseAt(1, [ORDER])))


def frame_heads() -> bytes:
    control, keys = pack(Heads(1, 0, [SupplyHead(0, 1, False, 2)])), (5).to_bytes(8, "little")
    return frame(FrameType.BATCH, 14, control, keys, flags=BATCHED)


def frame_lent() -> bytes:
    control = Lent(ORDER.consumer, Delivery(0, 1, 5, 1, TIME_MS + 30_000, 30_000, 1))
    return frame(FrameType.BATCH, 14, pack(control), delivery_body(), flags=BATCHED)


def frame_delivery() -> bytes:
    control = Delivery(0, 1, 5, 1, TIME_MS + 30_000, 30_000, 1)
    return frame(FrameType.BATCH, 2, pack(control), delivery_body(), flags=BATCHED)


def frame_slice() -> bytes:
    control, stored = pack(LogSlice(0, 2, 2, 2)), batch().encode()
    return frame(FrameType.BATCH, 7, control, stored, bytes(-len(stored) & 7), flags=BATCHED)


def frame_open_subscription() -> bytes:
    control = OpenSubscription("vectors", 0, ["namespace=default"], "cursor", cursor="docs")
    return frame(FrameType.SUBSCRIBE, 10, pack(control), flags=WANTED)


def frame_subscribed() -> bytes:
    answer = {"position": 5, "ordinal": 4, "epoch": 1, "sequence_committed": 5, "topic": 1}
    return frame(FrameType.ACK, 10, pack(answer))


def frame_changes() -> bytes:
    control, normal = pack(Changes(0, 1, 6, 6)), 2 << 4
    return frame(FrameType.BATCH, 10, control, changes_body(), flags=BATCHED | normal)


def frame_open_follow() -> bytes:
    follow = Follow("n2", "u2", 1, 1, 1, [(1, 1)], 1000, 8 << 20)
    control = OpenFollow(1, 0, msgspec.msgpack.encode(follow))
    return frame(FrameType.SUBSCRIBE, 8, pack(control), flags=WANTED)


def frame_append() -> bytes:
    control, stored = pack(Append("n1", 1, 1, 1)), batch().encode()
    return frame(FrameType.BATCH, 8, control, stored, bytes(-len(stored) & 7), flags=BATCHED)


VECTORS: dict[str, Callable[[], bytes]] = {
    "heartbeat": lambda: frame(FrameType.HEARTBEAT, 0),
    "hello": lambda: frame(FrameType.HEARTBEAT, 0, pack(Hello([1], None, "docs"))),
    "welcome": lambda: frame(
        FrameType.HEARTBEAT, 0, pack(Welcome(1, "0.1.0", "node-1", 20_000, 64 << 20))
    ),
    "hello-codecs": lambda: frame(
        FrameType.HEARTBEAT, 0, pack(Hello([1, 2], "psk_1.s3cret", "docs", ["zstd", "lz4"]))
    ),
    "welcome-codec": lambda: frame(
        FrameType.HEARTBEAT, 0, pack(Welcome(1, "0.1.0", "n1", 20_000, 64 << 20, "prod", "zstd"))
    ),
    "refused-version": frame_refused_version,
    "compressed": frame_compressed,
    "body-enq": enq_body,
    "body-enq-runs": enq_body_runs,
    "enqueue": frame_enqueue,
    "enqueued": frame_enqueued,
    "put-delta": frame_put_delta,
    "enqueued-before": frame_known,
    "slow-down": lambda: frame(
        FrameType.BACKPRESSURE, 0, pack(SlowDown(250, "the ingest is full", "vectors"))
    ),
    "forwarded": frame_forwarded,
    "open-lease": lambda: frame(
        FrameType.SUBSCRIBE, 2, pack(OpenLease("jobs", 2, "worker")), flags=WANTED
    ),
    "opened-lease": lambda: frame(
        FrameType.ACK, 2, pack({"consumer": "node-1/5f0c7a91/4/2/worker"})
    ),
    "body-delivery": delivery_body,
    "body-delta": delta_body,
    "delivery": frame_delivery,
    "settle": lambda: frame(FrameType.ACK, 3, pack(Settle("jobs", PARTS)), TOKEN, flags=WANTED),
    "settled": lambda: frame(FrameType.ACK, 3, pack(Settled([0]))),
    "return": lambda: frame(
        FrameType.NACK, 4, pack(Return("jobs", PARTS, 1500)), TOKEN, flags=WANTED
    ),
    "extend": lambda: frame(
        FrameType.HEARTBEAT, 5, pack(Extend("jobs", PARTS, 30_000)), TOKEN, flags=WANTED
    ),
    "grant": lambda: frame(FrameType.ACK, 2, pack(Grant(10))),
    "call": lambda: frame(
        FrameType.SUBSCRIBE, 6, pack(Call("topic_get", {"topic": "jobs"})), flags=WANTED
    ),
    "error": lambda: frame(
        FrameType.NACK, 6, pack(NotFound("no topic jobs", topic="jobs").to_wire())
    ),
    "open-log": lambda: frame(FrameType.SUBSCRIBE, 7, pack(OpenLog("jobs", 0)), flags=WANTED),
    "opened-log": lambda: frame(FrameType.ACK, 7, pack({"from_sequence": 1, "topic": 1})),
    "batch": lambda: batch().encode(),
    "log-slice": frame_slice,
    "open-subscription": frame_open_subscription,
    "subscribed": frame_subscribed,
    "changes": frame_changes,
    "grant-position": lambda: frame(FrameType.ACK, 10, pack(Grant(1, 184, 6))),
    "open-follow": frame_open_follow,
    "followed": lambda: frame(FrameType.ACK, 8, pack(Followed("n1", 1, 1, 1, 1))),
    "append": frame_append,
    "tell": lambda: frame_told("fence", Fence("n3", 2)),
    "tell-fenced": lambda: frame_told("fenced", Fenced("n1", "u1", 2, 1, 2, 2, 1_790_000_000_000)),
    "tell-probe": lambda: frame_told("probe", Probe("n3", 1)),
    "tell-probed": lambda: frame_told("probed", Probed("n2", 1, True)),
    "tell-ack": lambda: frame_told("ack", Ack("n2", "u2", 1, 1, 1, 112, 2, 1)),
    "open-supply": lambda: frame(
        FrameType.SUBSCRIBE, 14, pack(OpenSupply("jobs", CONSUMERS, 1)), flags=WANTED
    ),
    "ask": lambda: frame(FrameType.ACK, 14, pack(Ask(1, 100))),
    "heads": frame_heads,
    "lease-at": frame_lease_at,
    "taken": lambda: frame(FrameType.BATCH, 14, pack(Taken(1, 1, [1], False)), flags=BATCHED),
    "lent": frame_lent,
    "ready": lambda: frame(FrameType.BATCH, 14, pack(Ready()), flags=BATCHED),
    "held": lambda: frame(
        FrameType.BATCH, 14, pack(LeasesHeld([ORDER.consumer], [1])), flags=BATCHED
    ),
    "unsubscribe": lambda: frame(FrameType.UNSUBSCRIBE, 7, flags=WANTED),
    "unsubscribed": lambda: frame(FrameType.ACK, 7, pack({})),
    "stream-failed": lambda: frame(
        FrameType.UNSUBSCRIBE, 2, pack(NotFound("topic jobs was deleted").to_wire())
    ),
    "stream-complete": lambda: frame(FrameType.UNSUBSCRIBE, 7),
}


def documented() -> dict[str, bytes]:
    """Blocks of hex in the page: what follows a `#` is a remark."""
    blocks = re.findall(r"^```vector (\S+)\n(.*?)^```$", DOC.read_text(), re.MULTILINE | re.DOTALL)
    lines = {name: re.sub(r"#.*", "", text) for name, text in blocks}
    return {name: bytes.fromhex(text) for name, text in lines.items()}


def test_every_vector_is_documented() -> None:
    assert documented().keys() == VECTORS.keys()


@pytest.mark.parametrize("name", VECTORS)
def test_the_page_shows_what_the_code_makes(name: str) -> None:
    assert documented()[name].hex(" ") == VECTORS[name]().hex(" ")


@pytest.mark.parametrize("name", sorted(VECTORS.keys() - {"batch"}))
def test_documented_frames_are_read_back(name: str) -> None:
    data = documented()[name]
    if not name.startswith("body-"):
        (found,) = FrameDecoder().feed(data)
        assert frame(found.type, found.sequence, bytes(found.payload), flags=found.flags) == data


def test_the_documented_compression_is_read() -> None:
    (found,) = FrameDecoder().feed(documented()["compressed"])
    whole = expanded(found, Codec.LZ4, bytes_max=4096)
    assert unpack(whole.payload, Call)[0].arguments == {"topic": "x" * 2000}
    assert not whole.flags & FrameFlag.COMPRESSED


def test_the_documented_limits() -> None:
    """Every limit of the wire stands in the page's table with its value."""
    text = DOC.read_text()
    for name, value in vars(messages).items():
        if name.endswith("_MAX"):
            assert f"| `{name}` | {value} |" in text, name


KINDS: dict[str, type[msgspec.Struct]] = {
    name: kind
    for module, base in ((messages, messages.ControlMessage), (effects, effects.PeerMessage))
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, base) and kind is not base
}


@pytest.mark.parametrize("name", KINDS)
def test_every_message_kind_has_a_vector(name: str) -> None:
    tested = inspect.getsource(inspect.getmodule(documented) or msgspec)
    assert re.search(rf"\b{name}\(", tested)


NAMES = {IntType: "int", BoolType: "bool", StrType: "text", BytesType: "bytes", DictType: "map"}


def type_shown(found: Type) -> str:
    if isinstance(found, UnionType):
        (other,) = [one for one in found.types if not isinstance(one, NoneType)]
        return f"{type_shown(other)}?"
    if isinstance(found, ListType):
        return f"[{type_shown(found.item_type)}]"
    if isinstance(found, TupleType):
        return f"({', '.join(map(type_shown, found.item_types))})"
    return found.cls.__name__ if isinstance(found, StructType) else NAMES[type(found)]


def field_shown(field: Field) -> str:
    shown = f"{field.name} {type_shown(field.type)}"
    default = [] if field.default_factory is list else field.default
    if default is msgspec.NODEFAULT:
        return shown
    quoted = default.decode() if isinstance(default, bytes) else default
    return f"{shown} = {'nil' if quoted is None else json.dumps(quoted)}"


@pytest.mark.parametrize("name", KINDS)
def test_the_documented_fields(name: str) -> None:
    kind = type_info(KINDS[name])
    assert isinstance(kind, StructType)
    tag = [] if kind.tag is None else [f'"{kind.tag}"']
    (row,) = re.findall(rf"^\| {name} \| [^|]* \| (.*) \|$", DOC.read_text(), re.MULTILINE)
    assert row == ", ".join(tag + [field_shown(field) for field in kind.fields])


def test_the_documented_batch_is_valid() -> None:
    found = decode(documented()["batch"])
    verify_chain(found, 0x0123456789ABCDEF)
    assert found.columns().binary("payload").tolist() == [b"hello"]


def test_the_documented_texts() -> None:
    text = DOC.read_text()
    assert f"`{MessageId(TIME_MS, 1, 0, 2)}`" in text
    assert f"`{LeaseToken(7, 0, 1, 26)}`" in text
    for key, partitions in ((b"user-7", 4), (b"user-8", 4), (b"user-7", 16)):
        assert f"| `{key.decode()}` | {partitions} | {partition_of(key, partitions)} |" in text


def test_the_documented_partition_of_a_delta() -> None:
    [home] = partitions_of_deltas([documented()["body-delta"]], 4).tolist()
    assert f"| `a` in `default` | 4 | {home} |" in DOC.read_text()
    assert documented()["body-delta"][64:80] == vector_hash("default", "a")


SHORT = {"uint8": "u8", "int32": "i32", "uint32": "u32", "int64": "i64", "uint64": "u64"}
DOMAINS = {Domain.ENTRY: "", Domain.RUN: "r ", Domain.SCALAR: "s "}


def listed(columns: tuple[Column, ...]) -> str:
    return ", ".join(f"{DOMAINS[c.domain]}{c.name} {SHORT.get(c.kind, c.kind)}" for c in columns)


@pytest.mark.parametrize(
    ("name", "schema"),
    [*((k.name, SCHEMAS[k]) for k in Kind), ("delivery", DELIVERY), ("changes", CHANGES)],
)
def test_the_documented_columns(name: str, schema: Schema) -> None:
    (row,) = re.findall(rf"^\| {name} \| (.*) \|$", DOC.read_text(), re.MULTILINE)
    enq = listed(SCHEMAS[Kind.ENQ].columns)
    assert re.sub(r" \(.*?\)", "", row).replace("as ENQ, then", f"{enq},") == listed(schema.columns)
