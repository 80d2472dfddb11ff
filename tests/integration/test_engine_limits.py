"""Every bound is held, and names itself when it is met."""

from __future__ import annotations

from typing import Any

import pytest
from tests.integration.harness import Node, body, delivered_tokens

from penstock.errors import InvalidArgument, LimitExceeded, NotFound
from penstock.model.batch import SCHEMAS, Codec, Kind, compress
from penstock.model.entries import (
    BATCH_ENTRIES_MAX,
    DELAY_MS_MAX,
    HEADERS_BYTES_MAX,
    KEY_BYTES_MAX,
    PRODUCER_ID_BYTES_MAX,
    RETRIES_MAX,
)


@pytest.mark.parametrize(
    ("row", "field", "limit"),
    [
        ({"payload": b"x" * 101}, "payload", 100),
        ({"key": b"k" * (KEY_BYTES_MAX + 1)}, "key", KEY_BYTES_MAX),
        ({"headers": {"h": b"x" * HEADERS_BYTES_MAX}}, "headers", HEADERS_BYTES_MAX),
        ({"delay_ms": DELAY_MS_MAX + 1}, "delay_ms", DELAY_MS_MAX),
        ({"delay_ms": -1}, "delay_ms", DELAY_MS_MAX),
        ({"max_retries": RETRIES_MAX + 1}, "max_retries", RETRIES_MAX),
        ({"max_retries": -2}, "max_retries", RETRIES_MAX),
    ],
)
async def test_an_entry_over_a_limit_is_refused(
    node: Node, row: dict[str, Any], field: str, limit: int
) -> None:
    topic = await node.topic(payload_bytes_max=100)
    with pytest.raises(InvalidArgument) as refused:
        await node.enqueue(topic, [{"payload": b"fine"}, {"payload": b"", **row}])
    assert (refused.value.field, refused.value.limit) == (field, limit)
    assert await node.counts() == (0, 0, 0, 0)


async def test_entries_at_their_limits_are_taken(node: Node) -> None:
    topic = await node.topic(payload_bytes_max=100)
    row = {
        "payload": b"x" * 100, "key": b"k" * KEY_BYTES_MAX, "max_retries": RETRIES_MAX,
        "headers": {"h": b"x" * (HEADERS_BYTES_MAX - 16)},
    }  # fmt: skip
    await node.enqueue(topic, [row], producer=("p" * PRODUCER_ID_BYTES_MAX, 2**63 - 1, 2**63 - 2))
    (message,) = await node.pop(topic)
    assert (message["payload"], message["key"]) == (row["payload"], row["key"])
    with pytest.raises(InvalidArgument, match="run_producer"):
        await node.enqueue(topic, [row], producer=("p" * (PRODUCER_ID_BYTES_MAX + 1), 1, 1))


@pytest.mark.parametrize("count", [0, BATCH_ENTRIES_MAX + 1])
async def test_a_request_has_so_many_entries(node: Node, count: int) -> None:
    topic = await node.topic()
    with pytest.raises(InvalidArgument) as refused:
        await node.enqueue(topic, [{"payload": b"x"}] * count)
    assert (refused.value.field, refused.value.limit) == ("entries", BATCH_ENTRIES_MAX)
    await node.enqueue(topic, [{"payload": b"x"}] * BATCH_ENTRIES_MAX)
    assert await node.counts() == (BATCH_ENTRIES_MAX, 0, 0, 0)


async def test_malformed_requests_are_refused_one_by_one(node: Node) -> None:
    topic = await node.topic()
    good = body([{"payload": b"x"}])
    enqueue = node.connection.enqueue
    with pytest.raises(NotFound):
        await enqueue("nowhere", [(0, 1, good)])
    for parts, field in (
        ([], "parts"), ([(1, 1, good)], "partition"), ([(-1, 1, good)], "partition"),
        ([(0, 1, good[:-8])], "body"), ([(0, 2, good)], "body"), ([(0, 1, b"")], "body"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument) as refused:
            await enqueue(topic, parts)
        assert refused.value.field == field
    named = SCHEMAS[Kind.ENQ].encode(1, {"payload": [b"x"], "sequence": [1]})
    with pytest.raises(InvalidArgument, match="sequences"):
        await enqueue(topic, [(0, 1, named)])
    assert (await enqueue(topic, [(0, 1, good)])).placed


async def test_compressed_requests_are_taken_as_they_are(node: Node) -> None:
    topic = await node.topic()
    raw = body([{"payload": b"x" * 9000}])
    for codec in (Codec.ZSTD, Codec.LZ4):
        packed = compress(codec, raw)
        part = [(0, 1, packed)]
        await node.connection.enqueue(topic, part, codec=codec, raw_lengths=[len(raw)])
        for wrong in (None, [len(raw) - 1], [len(raw) + 1], [2**40], [0]):
            with pytest.raises(InvalidArgument):
                await node.connection.enqueue(topic, part, codec=codec, raw_lengths=wrong)
        with pytest.raises(InvalidArgument):
            await node.connection.enqueue(
                topic, [(0, 1, packed[:-9])], codec=codec, raw_lengths=[len(raw)]
            )
    assert await node.popped(topic) == [b"x" * 9000] * 2


async def test_a_topic_has_so_many_messages_in_flight(node: Node) -> None:
    topic = await node.topic(inflight_max=5)
    await node.put(topic, *[b"x"] * 20)
    stream = await node.stream(topic, credits=20)
    other = await (await node.connect()).connection.lease_stream(topic, credits=20)
    mine, theirs = await node.delivered(stream), await node.delivered(other)
    assert sum(b.delivery.count for b in mine + theirs) == 5
    tokens = delivered_tokens(mine + theirs)
    assert await node.connection.settle(topic, tokens[:2]) == []
    await node.delivered(stream)
    assert (await node.counts())[:3] == (13, 0, 5)


async def test_a_consumer_has_so_many_leases(node: Node) -> None:
    topic = await node.topic(consumer_leases_max=4)
    await node.put(topic, *[b"x"] * 20)
    stream = await node.stream(topic, credits=4)
    stream.grant(10)
    assert sum(b.delivery.count for b in await node.delivered(stream)) == 4
    for wrong in (
        {"credits": 5}, {"credits": 0}, {"credits": 1, "batch_max": 0},
        {"credits": 1, "visibility_ms": 0}, {"credits": 1, "consumer": "c" * 256},
    ):  # fmt: skip
        with pytest.raises(InvalidArgument):
            await node.stream(topic, **wrong)
    with pytest.raises(InvalidArgument, match="limit"):
        await node.pop(topic, 5)


async def test_a_key_has_so_many_streams(node: Node) -> None:
    topic = await node.topic(key_streams_max=2)
    made = await node.call("key_create", name="one")
    keyed = (await node.connect(made["key"])).connection
    for _ in range(2):
        await keyed.lease_stream(topic, credits=1)
    with pytest.raises(LimitExceeded):
        await keyed.lease_stream(topic, credits=1)
    assert await node.stream(topic, credits=1)  # another key's, that is, none


@pytest.mark.parametrize(
    ("method", "arguments", "field"),
    [
        ("pop", {"limit": 0}, "limit"), ("pop", {"limit": 1001}, "limit"),
        ("pop", {"wait_ms": 60_001}, "wait_ms"), ("pop", {"visibility_ms": 0}, "visibility_ms"),
        ("peek", {"limit": 0}, "limit"), ("dlq_list", {"limit": 1001}, "limit"),
        ("move_to_dlq", {"message_id": "nonsense"}, "message_id"), ("peek", {"x": 1}, "x"),
        ("nonsense", {}, "method"),
    ],
)  # fmt: skip
async def test_calls_are_checked(node: Node, method: str, arguments: Any, field: str) -> None:
    topic = await node.topic()
    with pytest.raises(InvalidArgument) as refused:
        await node.call(method, topic=topic, **arguments)
    assert refused.value.field == field
