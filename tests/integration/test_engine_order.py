"""Who comes first: priority, time, sequence, delays, ageing."""

from __future__ import annotations

import pytest
from tests.integration.harness import Node

INT64 = (-(2**63), -1, 0, 1, 2**63 - 1)


@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
async def test_order_is_by_priority_in_either_mode(node: Node, mode: str, sign: int) -> None:
    topic = await node.topic(mode=mode)
    for priority in (0, 2**63 - 1, -1, -(2**63), 1):
        await node.put(topic, str(priority).encode(), priority=priority)
    expected = [str(p).encode() for p in sorted(INT64, key=lambda p: sign * p)]
    peeked = await node.call("peek", topic=topic, limit=10)
    assert [m["payload"] for m in peeked["messages"]] == expected
    assert await node.popped(topic) == expected


async def test_equal_priorities_go_by_time_then_sequence(node: Node) -> None:
    topic = await node.topic(mode="max")
    await node.put(topic, b"a1", b"a2", priority=5)
    await node.advance(1)
    await node.put(topic, b"b1", b"b2", priority=5)
    await node.put(topic, b"first", priority=6)
    messages = await node.pop(topic, 10)
    assert [m["payload"] for m in messages] == [b"first", b"a1", b"a2", b"b1", b"b2"]
    assert [m["sequence"] for m in messages[1:]] == sorted(m["sequence"] for m in messages[1:])


async def test_a_message_put_back_keeps_its_place(node: Node) -> None:
    topic = await node.topic()
    await node.put(topic, b"a", b"b")
    (a,) = await node.pop(topic)
    assert await node.nack(topic, [a], delay_ms=0, counted=False) == []
    again = await node.pop(topic, 2)
    assert [(m["payload"], m["attempts"]) for m in again] == [(b"a", 0), (b"b", 0)]


async def test_a_delayed_message_comes_when_its_time_has_come(node: Node) -> None:
    topic = await node.topic()
    await node.put(topic, b"later", delay_ms=5000, priority=-1)
    await node.put(topic, b"now")
    assert await node.counts() == (1, 1, 0, 0)
    assert await node.popped(topic) == [b"now"]
    await node.advance(4.999)
    assert await node.popped(topic) == []
    await node.advance(0.001)
    assert await node.popped(topic) == [b"later"]


async def test_a_waiting_consumer_gets_a_delayed_message_unasked(node: Node) -> None:
    topic = await node.topic()
    stream = await node.stream(topic, credits=10)
    await node.put(topic, b"later", delay_ms=60_000)
    assert await node.delivered(stream) == []
    node.clock.advance(60.001)
    (batch,) = await node.delivered(stream)
    assert list(batch.columns.binary("payload")) == [b"later"]


async def test_delays_survive_a_restart(node: Node) -> None:
    topic = await node.topic()
    await node.put(topic, b"later", delay_ms=5000)
    await node.advance(2)
    await node.restart()
    assert await node.popped(topic) == []
    await node.advance(3)
    assert await node.popped(topic) == [b"later"]


@pytest.mark.parametrize(("ageing_per_s", "first"), [(0, b"new"), (1, b"new"), (2, b"old")])
async def test_ageing_lifts_what_waits(node: Node, ageing_per_s: int, first: bytes) -> None:
    topic = await node.topic(ageing_per_s=ageing_per_s)
    await node.put(topic, b"old", priority=10)
    await node.advance(6)
    await node.put(topic, b"new", priority=0)
    assert (await node.popped(topic))[0] == first


async def test_ageing_changed_while_running_reorders_what_waits(node: Node) -> None:
    topic = await node.topic(mode="max")
    await node.put(topic, b"old", priority=0)
    await node.advance(10)
    await node.put(topic, b"new", priority=5)
    await node.update(topic, ageing_per_s=1)
    assert await node.popped(topic, 1) == [b"old"]


async def test_headers_keys_and_ids_come_back_as_sent(node: Node) -> None:
    topic = await node.topic(partitions=4)
    row = {"payload": b"x", "key": b"k1", "headers": {"a": 1, "b": [b"raw"]}}
    (message_id,) = await node.put(topic, row.pop("payload"), **row)
    (message,) = await node.pop(topic)
    assert message["message_id"] == message_id
    assert (message["key"], message["headers"]) == (b"k1", {"a": 1, "b": [b"raw"]})
    assert message["time_ms"] == node.clock.now_ms()
