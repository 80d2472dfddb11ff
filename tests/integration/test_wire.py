"""The native protocol at its edges: greetings, compressed frames, deltas alone, and limits."""

from __future__ import annotations

import asyncio
import re
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from tests.integration.harness import START_MS, Node, body
from tests.integration.raw_peer import WANTED, RawPeer, raw_peer

from penstock.client.network.connection import Connection
from penstock.client.network.exchange import memory_pair
from penstock.config import Config
from penstock.errors import Backpressure, InvalidArgument
from penstock.model.batch import Codec, compress
from penstock.model.delta import Delta, Op, PriorityClass, encode
from penstock.node.door.budget import Held
from penstock.node.door.flow import INFLIGHT_BYTES_MAX
from penstock.node.session.session import Session
from penstock.propagation.options import LiveOptions
from penstock.wire import frame
from penstock.wire.frame import FrameFlag, FrameType, compressed, flags_of_class
from penstock.wire.messages import (
    Call,
    Enqueue,
    Enqueued,
    Extend,
    Grant,
    Hello,
    OpenLease,
    OpenLog,
    OpenSubscription,
    Part,
    PutDelta,
    Return,
    SlowDown,
    TokenPart,
    pack,
    unpack,
)

ZIPPED = FrameFlag.COMPRESSED


def delta(number: int = 1, priority: PriorityClass = PriorityClass.NORMAL) -> bytes:
    made = Delta(
        delta_id=bytes([number]) * 16, namespace="default", vector_id="a", op=Op.DENSE,
        origin="x", time=START_MS << 16, clock={"x": number}, values=np.ones(4, np.float32),
        priority=priority,
    )  # fmt: skip
    return encode(made, dimensions=4)


# --- the greeting ---


async def test_the_highest_common_version_is_spoken(node: Node) -> None:
    async with raw_peer(node.engine) as peer:
        assert (await peer.greet(Hello([1, 2, 99]))).version == 1


@pytest.mark.parametrize("versions", [[2, 99], []])
async def test_a_version_that_nobody_knows_is_refused(node: Node, versions: list[int]) -> None:
    async with raw_peer(node.engine) as peer:
        refused = await peer.greet(Hello(versions))
        assert (refused["code"], refused["field"]) == ("invalid_argument", "versions")
        assert refused["versions"] == [1]
        assert await peer.frame() is None


async def test_frames_of_another_version_are_told_which_one_is_spoken(node: Node) -> None:
    async with raw_peer(node.engine) as peer:
        peer.write(struct.pack(">BBBBQI", 0xD3, 99, FrameType.HEARTBEAT, 0, 0, 0))
        refused = await peer.answer(0)
        assert "version 99 is not 1" in refused["message"]
        assert await peer.frame() is None


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [(["lz4", "zstd"], "lz4"), (["brotli", "zstd"], "zstd"), (["brotli"], ""), ([], "")],
)
async def test_the_first_known_codec_is_chosen(node: Node, offered: list[str], chosen: str) -> None:
    async with raw_peer(node.engine) as peer:
        assert (await peer.greet(Hello([1], codecs=offered))).codec == chosen


async def test_a_large_frame_waits_for_the_welcome(node: Node) -> None:
    topic = await node.topic()
    columns = body([{"payload": bytes(100_000)}])
    request = pack(Enqueue(topic, [Part(0, 1, len(columns))]))
    large = b"".join(frame.encode(FrameType.BATCH, 1, request, columns, flags=WANTED))
    hello = b"".join(frame.encode(FrameType.HEARTBEAT, 0, pack(Hello([1]))))
    async with raw_peer(node.engine) as peer:
        peer.write(hello + large)
        assert "is over 65536" in (await peer.answer(0))["message"]
        assert await peer.frame() is None
    async with raw_peer(node.engine) as peer:
        await peer.greet()
        peer.write(large)
        assert (await peer.answer(1, Enqueued)).placed[0].count == 1


# --- what is answered ---


@pytest.mark.parametrize("flags", [0, WANTED])
async def test_requests_are_answered_wanted_or_not(node: Node, flags: int) -> None:
    await node.topic()
    columns, tokens = body([{"payload": b"x"}]), [TokenPart(0, 1, 1, 1)]
    enqueue = [pack(Enqueue("jobs", [Part(0, 1, len(columns))])), columns]
    token = (99).to_bytes(8, "little")
    async with raw_peer(node.engine) as peer:
        await peer.greet()
        for number, (type, payload) in enumerate(
            [
                (FrameType.BATCH, enqueue),
                (FrameType.NACK, [pack(Return("jobs", tokens)), token]),
                (FrameType.HEARTBEAT, [pack(Extend("jobs", tokens, 1000)), token]),
                (FrameType.SUBSCRIBE, [pack(Call("topic_list", {}))]),
                (FrameType.UNSUBSCRIBE, []),
            ],
            1,
        ):
            peer.send(type, number, *payload, flags=flags)
            found = await peer.frame()
            assert found is not None and (found.type, found.sequence) == (FrameType.ACK, number)
        peer.send(FrameType.HEARTBEAT, 6, flags=flags)
        found = await peer.frame()
        assert found is not None and (found.type, found.sequence) == (FrameType.HEARTBEAT, 6)


@pytest.mark.parametrize("flags", [0, WANTED])
async def test_streams_say_where_they_begin_and_why_they_end(node: Node, flags: int) -> None:
    await node.topic()
    async with raw_peer(node.engine) as peer:
        await peer.greet()
        peer.send(FrameType.SUBSCRIBE, 2, pack(OpenLease("jobs", 2, "worker")), flags=flags)
        name = (await peer.answer(2))["consumer"]
        assert re.fullmatch(rf"{node.engine.identity.node}/[0-9a-f]{{8}}/\d+/2/worker", name)
        peer.send(FrameType.SUBSCRIBE, 7, pack(OpenLog("jobs", 0, through=1)), flags=flags)
        assert await peer.answer(7) == {"from_sequence": 1, "topic": 1}
        kinds = [(await peer.frame() or pytest.fail("it hung up")) for _ in range(2)]
        assert [(f.type, len(f.payload) > 0) for f in kinds] == [
            (FrameType.BATCH, True),
            (FrameType.UNSUBSCRIBE, False),
        ]
        peer.send(FrameType.ACK, 2, pack(Grant(1)))  # is not answered
        await node.forced("topic_delete", "jobs")
        found = await peer.frame()
        assert found is not None and (found.type, found.sequence) == (FrameType.UNSUBSCRIBE, 2)
        assert unpack(found.payload, dict)[0]["message"] == "topic jobs was deleted"


# --- compressed frames ---


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
async def test_both_sides_compress_what_is_large(node: Node, codec: str) -> None:
    topic = await node.topic()
    async with raw_peer(node.engine) as peer:
        await peer.greet(Hello([1], codecs=[codec]))
        columns = body([{"payload": b"x" * 100_000}])
        request = pack(Enqueue(topic, [Part(0, 1, len(columns))]))
        packed = compressed(Codec[codec.upper()], [request, columns])
        assert packed is not None
        peer.send(FrameType.BATCH, 1, *packed, flags=WANTED | ZIPPED)
        assert (await peer.answer(1, Enqueued)).placed[0].count == 1
        before = peer.wire_bytes
        peer.send(FrameType.SUBSCRIBE, 2, pack(Call("peek", {"topic": topic})), flags=WANTED)
        assert len((await peer.answer(2))["messages"][0]["payload"]) == 100_000
        assert peer.wire_bytes - before < 10_000


async def test_the_sdk_can_compress(node: Node) -> None:
    connection = Connection(codecs=["zstd"])
    memory_pair(connection, Session(node.engine))
    assert (await connection.greeted()).codec == "zstd"
    topic = await node.topic()
    rows = body([{"payload": b"y" * 50_000}])
    await connection.enqueue(topic, [(0, 1, rows)])
    found = await connection.call("peek", topic=topic)
    assert found["messages"][0]["payload"] == b"y" * 50_000
    await connection.close()


def bomb(claimed: int, size: int = 200 << 20, codec: int = Codec.ZSTD) -> bytes:
    return struct.pack(">B3xI", codec, claimed) + zstandard.ZstdCompressor().compress(bytes(size))


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (bomb(200 << 20), "is over"),
        (bomb(1000), "not of the 1000 bytes"),
        (bomb(1 << 20, size=100), "not of the"),
        (bomb(100, size=100, codec=Codec.LZ4), "by codec 2, not 1"),
        (b"\x01\x00", "shorter than its own header"),
        (b"\x01\0\0\0\0\0\4\0garbage", "cannot be read"),
    ],
)
async def test_a_bomb_is_refused_before_it_grows(node: Node, payload: bytes, why: str) -> None:
    async with raw_peer(node.engine) as peer:
        await peer.greet(Hello([1], codecs=["zstd"]))
        peer.send(FrameType.BATCH, 7, payload, flags=WANTED | ZIPPED)
        refused = await peer.answer(7)
        assert refused["code"] == "invalid_argument" and why in refused["message"]
        peer.send(FrameType.HEARTBEAT, 8)
        assert (await peer.frame()) is not None  # it serves on


async def test_parts_that_are_bombs_together_are_refused(node: Node) -> None:
    topic = await node.topic()
    raw = body([{"payload": bytes(1 << 20)}] * 30)
    packed = compress(Codec.ZSTD, raw)
    parts, lengths = [(0, 30, packed)] * 3, [len(raw)] * 3
    with pytest.raises(InvalidArgument) as refused:
        await node.connection.enqueue(topic, parts, codec=Codec.ZSTD, raw_lengths=lengths)
    assert (refused.value.field, refused.value.limit) == ("raw_lengths", 64 << 20)
    answer = await node.connection.enqueue(
        topic, parts[:2], codec=Codec.ZSTD, raw_lengths=lengths[:2]
    )
    assert sum(placed.count for placed in answer.placed) == 60


async def test_what_is_kept_decompressed_counts_as_that(node: Node) -> None:
    topic = await node.topic()
    raw = body([{"payload": bytes(1 << 20)}] * 8)
    part, lengths = (0, 8, compress(Codec.ZSTD, raw)), [len(raw)]
    budget = node.engine.budget
    others = budget.account()  # as if that much were under way for others
    others.take(budget.bytes_large_max - 14 * (1 << 20), Held.REQUESTS)

    async def put() -> Any:
        return await node.connection.enqueue(topic, [part], codec=Codec.ZSTD, raw_lengths=lengths)

    answers = await asyncio.gather(put(), put(), return_exceptions=True)
    assert [isinstance(answer, Backpressure) for answer in answers] == [False, True]
    assert budget.held == others.held


async def test_what_was_not_agreed_on_is_not_decompressed(node: Node) -> None:
    async with raw_peer(node.engine) as peer:
        await peer.greet()
        peer.send(FrameType.BATCH, 7, bomb(100, size=100), flags=WANTED | ZIPPED)
        assert "by codec 1, not 0" in (await peer.answer(7))["message"]


# --- a delta by itself ---


async def put(peer: RawPeer, control: PutDelta, payload: bytes, number: int) -> Any:
    flags = WANTED | flags_of_class(2)
    peer.send(FrameType.DELTA, number, pack(control), payload, flags=flags)
    return await peer.answer(number, Enqueued)


async def test_a_delta_alone_is_an_enqueue(node: Node) -> None:
    await node.topic("vectors", kind="delta", dimensions=4, partitions=3)
    async with raw_peer(node.engine) as peer:
        await peer.greet()
        named = PutDelta("vectors", "docs", 1, 1, msgspec.msgpack.encode({"h": 1}))
        first = await put(peer, named, delta(), 1)
        again = await put(peer, named, delta(), 2)
        assert again.placed == [] and again.duplicates[0].sequence == first.placed[0].sequence
        refused = await put(peer, PutDelta("vectors"), delta()[:-1], 3)
        assert refused["code"] == "invalid_argument"
        assert (await put(peer, PutDelta("vectors", "p", -1), delta(2), 4))["field"] == "epoch"
        await node.topic("jobs")
        assert (await put(peer, PutDelta("jobs"), delta(3), 5))["field"] == "topic"


async def test_a_delta_that_wants_no_answer_gets_none(node: Node) -> None:
    await node.topic("vectors", kind="delta", dimensions=4)
    async with raw_peer(node.engine) as peer:
        await peer.greet()
        peer.send(FrameType.DELTA, 1, pack(PutDelta("vectors")), delta())
        peer.send(FrameType.DELTA, 2, pack(PutDelta("vectors")), b"none")
        found = await peer.frame()
        assert found is not None and (found.type, found.sequence) == (FrameType.NACK, 2)
        while (await node.call("log_status", topic="vectors"))["partitions"][0][
            "sequence_committed"
        ] < 2:  # the barrier and the delta
            await node.settled()
        peer.send(FrameType.HEARTBEAT, 3)
        found = await peer.frame()
        assert found is not None and found.type is FrameType.HEARTBEAT


# --- a subscription ---


async def test_changes_say_how_urgent_they_are(node: Node) -> None:
    await node.topic("vectors", kind="delta", dimensions=4)
    async with raw_peer(node.engine) as peer:
        await peer.greet()
        peer.send(FrameType.SUBSCRIBE, 1, pack(OpenSubscription("vectors", 0)), flags=WANTED)
        assert (await peer.answer(1))["ordinal"] == 0
        for number, priority in enumerate((PriorityClass.CRITICAL, PriorityClass.LOW), 1):
            payload = delta(number, priority)
            peer.send(FrameType.DELTA, 9, pack(PutDelta("vectors")), payload)
            found = await peer.frame()
            assert found is not None and found.type is FrameType.BATCH and found.sequence == 1
            assert found.flags == flags_of_class(priority) | FrameFlag.BATCHED
            assert bool(found.flags & FrameFlag.HIGH) == (priority is PriorityClass.CRITICAL)
            assert bytes(found.payload).rstrip(b"\0").endswith(payload.rstrip(b"\0"))


@pytest.mark.parametrize("grant", [Grant(1), Grant(0, 1), Grant(0, 0, 99), Grant(-1)])
async def test_credit_that_was_never_out_ends_a_subscription(node: Node, grant: Grant) -> None:
    await node.topic("vectors", kind="delta", dimensions=4)
    async with raw_peer(node.engine) as peer:
        await peer.greet()
        peer.send(FrameType.SUBSCRIBE, 1, pack(OpenSubscription("vectors", 0)), flags=WANTED)
        await peer.answer(1)
        peer.send(FrameType.ACK, 1, pack(grant))
        found = await peer.frame()
        assert found is not None and (found.type, found.sequence) == (FrameType.UNSUBSCRIBE, 1)
        assert unpack(found.payload, dict)[0]["code"] == "invalid_argument"
        assert node.engine.topics["vectors"].live.subscribers == 0  # type: ignore[union-attr]


# --- slowing down ---


async def test_producers_of_a_topic_whose_queue_is_high_are_told(tmp_path: Path) -> None:
    live = LiveOptions(ingest_max=100, ingest_high_water=0.02)
    node = Node(tmp_path / "data", Config(data=tmp_path / "data", live=live, drain_s=5.0))
    await node.start()
    await node.topic("vectors", kind="delta", dimensions=4)
    node.engine.topics["vectors"].live_room = lambda: 0  # the live path is far behind
    async with raw_peer(node.engine) as peer:
        await peer.greet()
        for number in range(1, 5):
            peer.send(FrameType.DELTA, number, pack(PutDelta("vectors")), delta(number))
        found = await peer.frame()
        assert found is not None and (found.type, found.sequence) == (FrameType.BACKPRESSURE, 0)
        slow, _ = unpack(found.payload, SlowDown)
        assert slow.topic == "vectors" and 0 < slow.retry_after_ms <= 250
        peer.send(FrameType.HEARTBEAT, 9)
        found = await peer.frame()  # not another one at once
        assert found is not None and found.type is FrameType.HEARTBEAT
    node.engine.topics["vectors"].live_room = None
    await node.stop()


# --- limits ---


@pytest.mark.parametrize(
    ("field", "limit", "change"),
    [
        ("routes", 64, {"routes": ["*"] * 65}),
        ("routes", 1024, {"routes": ["x" * 1025]}),
        ("cursor", 128, {"cursor": "c" * 129}),
        ("cursor", None, {"cursor": "sink-memory"}),
        ("credit_entries", 1_000_000, {"credit_entries": 0}),
        ("credit_bytes", 256 << 20, {"credit_bytes": 1 << 40}),
        ("batch_max", 10_000, {"batch_max": 10_001}),
        ("coalesce_ms", 60_000, {"coalesce_ms": -1}),
        ("partition", 0, {"partition": 1}),
        ("start", None, {"start": "then"}),
        ("route", None, {"routes": ["what=ever"]}),
    ],
)
async def test_a_subscription_over_a_limit_is_refused(
    node: Node, field: str, limit: int | None, change: dict[str, Any]
) -> None:
    await node.topic("vectors", kind="delta", dimensions=4)
    request = msgspec.structs.replace(OpenSubscription("vectors", 0), **change)
    with pytest.raises(InvalidArgument) as refused:
        await node.connection.subscribe(request, lambda *_: None)
    assert (refused.value.field, refused.value.limit) == (field, limit)


async def test_a_call_has_so_many_bytes(node: Node) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await node.call("stats", topic="x" * (4 << 20))
    assert refused.value.field == "control"


async def test_what_is_refused_is_no_longer_under_way(node: Node) -> None:
    topic = await node.topic()
    wrong = bytes(8 << 20)
    for _ in range(INFLIGHT_BYTES_MAX // len(wrong) + 2):
        with pytest.raises(InvalidArgument):
            await node.connection.enqueue(topic, [(0, 1, wrong)])
    assert node.engine.budget.held == 0
    assert len(await node.put(topic, b"still read")) == 1
