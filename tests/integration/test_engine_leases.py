"""Leases: exclusive, extended within a cap, lost, and what becomes of a message afterwards."""

from __future__ import annotations

import pytest
from tests.integration.harness import Node, payloads_of

from penstock.errors import InvalidArgument


async def test_a_leased_message_is_nobody_elses(node: Node) -> None:
    topic = await node.topic()
    await node.put(topic, *(b"%d" % i for i in range(10)))
    other = await node.connect()
    mine, theirs = await node.pop(topic, 6), await other.pop(topic, 6)
    assert (len(mine), len(theirs)) == (6, 4)
    assert not set(payloads_of(mine)) & set(payloads_of(theirs))
    assert await node.counts() == (0, 0, 10, 0)
    assert await node.ack(topic, mine) == [] and await other.ack(topic, theirs) == []
    assert await node.counts() == (0, 0, 0, 0)


async def test_whoever_has_the_token_may_settle(node: Node) -> None:
    topic = await node.topic()
    await node.put(topic, b"x")
    message = await node.pop(topic)
    assert await (await node.connect()).ack(topic, message) == []
    assert await node.ack(topic, message) == [0]


async def test_lost_positions_are_those_of_the_request(node: Node) -> None:
    topic = await node.topic(partitions=2)
    for i in range(6):
        await node.enqueue(topic, [{"payload": b"%d" % i}], partition=i % 2)
    messages = await node.pop(topic, 6)
    assert await node.ack(topic, [messages[1], messages[4]]) == []
    assert await node.ack(topic, messages) == [1, 4]
    again = [messages[0], messages[0]]
    assert await node.ack(topic, again) == [0, 1]


async def test_a_token_named_twice_counts_once(node: Node) -> None:
    topic = await node.topic()
    await node.put(topic, b"x")
    (message,) = await node.pop(topic)
    assert await node.ack(topic, [message, message]) == [1]


async def test_an_expired_lease_is_lost_and_its_message_comes_again(node: Node) -> None:
    topic = await node.topic(visibility_ms=10_000, backoff_ms_base=0)
    await node.put(topic, b"x")
    old = await node.pop(topic)
    await node.advance(9.999)
    assert await node.popped(topic) == []
    await node.advance(0.001)
    (new,) = await node.pop(topic)
    assert (new["attempts"], new["message_id"]) == (1, old[0]["message_id"])
    for settle in (node.ack, node.nack):
        assert await settle(topic, old) == [0]
    assert await node.extend(topic, old, 1000) == [0]
    assert await node.ack(topic, [new]) == []
    assert (await node.stats())["expired_total"] == 1


async def test_a_pops_own_visibility_wins(node: Node) -> None:
    topic = await node.topic(visibility_ms=60_000, backoff_ms_base=0)
    await node.put(topic, b"x")
    (message,) = await node.pop(topic, visibility_ms=1000)
    assert message["deadline_ms"] == node.clock.now_ms() + 1000
    await node.advance(1)
    assert await node.popped(topic) == [b"x"]


async def test_extending_counts_from_now_and_never_shortens(node: Node) -> None:
    topic = await node.topic(visibility_ms=10_000, backoff_ms_base=0)
    await node.put(topic, b"x")
    message = await node.pop(topic)
    await node.advance(8)
    assert await node.extend(topic, message, 5000) == []  # until 13 s
    assert await node.extend(topic, message, 1000) == []
    await node.advance(4.999)
    assert await node.counts() == (0, 0, 1, 0)
    await node.advance(0.001)
    assert await node.counts() == (1, 0, 0, 0)


async def test_no_extension_goes_past_the_cap(node: Node) -> None:
    topic = await node.topic(visibility_ms=4000, visibility_ms_max=10_000, backoff_ms_base=0)
    await node.put(topic, b"x")
    message = await node.pop(topic)
    for _ in range(3):
        await node.advance(3)
        assert await node.extend(topic, message, 10_000) == []
    await node.advance(0.999)
    assert await node.counts() == (0, 0, 1, 0)
    await node.advance(0.001)
    assert await node.counts() == (1, 0, 0, 0)
    with pytest.raises(InvalidArgument) as refused:
        await node.extend(topic, message, 10_001)
    assert (refused.value.field, refused.value.limit) == ("extend_ms", 10_000)


async def test_only_the_extended_lease_of_a_batch_lives_on(node: Node) -> None:
    topic = await node.topic(visibility_ms=1000, backoff_ms_base=0)
    await node.put(topic, b"a", b"b", b"c")
    a, b, c = await node.pop(topic, 3)
    assert await node.extend(topic, [b], 5000) == []
    await node.advance(1)
    assert await node.popped(topic) == [b"a", b"c"]
    assert await node.ack(topic, [a, b, c]) == [0, 2]


async def test_a_thousand_leases_expire_together(node: Node) -> None:
    topic = await node.topic(visibility_ms=1000, backoff_ms_base=0)
    await node.put(topic, *(b"%d" % i for i in range(2500)))
    stream = await node.stream(topic, credits=2500, batch_max=1000)
    assert sum(b.delivery.count for b in await node.delivered(stream)) == 2500
    await stream.close()
    for _ in range(4):
        await node.advance(1)
    assert await node.counts() == (2500, 0, 0, 0)


async def test_a_closed_stream_keeps_its_leases_until_they_end(node: Node) -> None:
    topic = await node.topic(visibility_ms=1000, backoff_ms_base=0)
    await node.put(topic, b"a", b"b")
    stream = await node.stream(topic, credits=1)
    assert len(await node.delivered(stream)) == 1
    await stream.close()
    assert await node.popped(topic) == [b"b"]
    await node.advance(1)
    assert sorted(await node.popped(topic)) == [b"a", b"b"]
