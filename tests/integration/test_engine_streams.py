"""Lease streams: credits, fairness, and what a slow consumer costs."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
from tests.integration.harness import (
    Node,
    delivered_payloads,
    delivered_tokens,
)

from penstock.errors import Unavailable
from penstock.node.session import session


async def test_never_more_than_the_credit_is_out(node: Node) -> None:
    topic = await node.topic()
    await node.put(topic, *(b"%d" % i for i in range(100)))
    stream = await node.stream(topic, credits=7, batch_max=3)
    seen: list[bytes] = []
    while len(seen) < 100:
        batches = await node.delivered(stream)
        assert (await node.counts())[2] <= 7
        assert all(batch.delivery.count <= 3 for batch in batches)
        seen += delivered_payloads(batches)
        assert await node.connection.settle(topic, delivered_tokens(batches)) == []
    assert seen == [b"%d" % i for i in range(100)]


async def test_credit_comes_back_however_a_lease_ends(node: Node) -> None:
    topic = await node.topic(visibility_ms=1000, max_retries=0)
    stream = await node.stream(topic, credits=4)
    ids = await node.put(topic, *(b"%d" % i for i in range(4)))
    tokens = delivered_tokens(await node.delivered(stream))
    await node.connection.settle(topic, tokens[:1])
    await node.connection.give_back(topic, tokens[1:2])
    await node.call("move_to_dlq", topic=topic, message_id=ids[2])
    await node.advance(1)  # and the last one expires
    assert await node.counts() == (0, 0, 0, 3)
    await node.put(topic, *(b"new %d" % i for i in range(9)))
    assert len(delivered_tokens(await node.delivered(stream))) == 4


async def test_a_grant_adds_credit(node: Node) -> None:
    topic = await node.topic()
    await node.put(topic, *[b"x"] * 10)
    stream = await node.stream(topic, credits=1)
    assert len(delivered_tokens(await node.delivered(stream))) == 1
    stream.grant(5)
    await asyncio.sleep(0)
    assert len(delivered_tokens(await node.delivered(stream))) == 5


async def test_a_stream_that_settles_nothing_stalls_alone(node: Node) -> None:
    topic = await node.topic(visibility_ms=3_600_000)
    stalled = await node.stream(topic, credits=5)
    lively = await (await node.connect()).connection.lease_stream(topic, credits=5)
    await node.put(topic, *(b"%d" % i for i in range(200)))
    seen = 0
    while seen < 195:
        batches = await node.delivered(lively)
        seen += len(delivered_tokens(batches))
        await node.connection.settle(topic, delivered_tokens(batches))
    assert len(delivered_tokens(await node.delivered(stalled))) == 5
    assert await node.counts() == (0, 0, 5, 0)


async def test_streams_take_turns(node: Node) -> None:
    topic = await node.topic()
    streams = [await node.stream(topic, credits=50, batch_max=5) for _ in range(4)]
    await node.put(topic, *[b"x"] * 100)
    shares = [len(delivered_tokens(await node.delivered(s))) for s in streams]
    assert sum(shares) == 100 and min(shares) >= 20


async def test_a_better_message_goes_out_first_on_the_next_credit(node: Node) -> None:
    topic = await node.topic()
    await node.put(topic, b"low 1", b"low 2", priority=9)
    stream = await node.stream(topic, credits=1)
    (first,) = await node.delivered(stream)
    await node.put(topic, b"high", priority=1)
    await node.connection.settle(topic, delivered_tokens([first]))
    assert delivered_payloads(await node.delivered(stream)) == [b"high"]


async def test_a_pop_waits_for_a_message(node: Node) -> None:
    topic = await node.topic()
    waiting = asyncio.create_task(node.pop(topic, 5, wait_ms=20_000))
    await asyncio.sleep(0.01)
    await node.put(topic, b"a", b"b")
    assert [m["payload"] for m in await waiting] == [b"a", b"b"]
    assert await node.pop(topic, wait_ms=10) == []


async def test_a_pop_that_waits_does_not_hold_up_a_stop(tmp_path: Path) -> None:
    node = await Node(tmp_path / "data").start()
    topic = await node.topic()
    waiting = asyncio.create_task(node.pop(topic, wait_ms=50_000))
    while not node.engine.pops:
        await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await node.stop()
    with pytest.raises(Unavailable, match="nothing was leased") as refused:
        await waiting
    assert refused.value.details["elsewhere"]


async def test_a_pop_is_told_at_a_stop_what_it_has_leased(tmp_path: Path) -> None:
    node = await Node(tmp_path / "data").start()
    topic = await node.topic()
    for turns in range(12):  # between the put and the stop: the lease is further each time
        waiting = asyncio.create_task(node.pop(topic, wait_ms=50_000))
        while not node.engine.pops:
            await asyncio.sleep(0)
        putting = asyncio.create_task(node.put(topic, b"x"))
        for _ in range(turns):
            await asyncio.sleep(0)
        await node.stop()
        answers = await asyncio.gather(waiting, putting, return_exceptions=True)
        await node.start()
        popped = [] if isinstance(answers[0], Unavailable) else answers[0]
        _, _, leased, _ = await node.counts(topic)
        assert leased == len(popped)
        if rest := popped + await node.pop(topic):
            await node.ack(topic, rest)
    await node.stop()


async def test_leases_of_before_a_restart_are_nobodys_credit(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process counts its connections from one: its streams must not be taken for older ones."""
    topic = await node.topic()
    monkeypatch.setattr(session, "_numbers", itertools.count(1))
    await node.restart()
    await node.put(topic, b"a", b"b")
    stream = await node.stream(topic, credits=2)
    old = delivered_tokens(await node.delivered(stream))
    monkeypatch.setattr(session, "_numbers", itertools.count(1))
    await node.restart()
    while node.connection._number < stream.number - 1:
        await node.counts()
    again = await node.stream(topic, credits=1)
    assert again.number == stream.number
    assert await node.connection.settle(topic, old) == []
    await node.put(topic, b"c", b"d")
    assert delivered_payloads(await node.delivered(again)) == [b"c"]


async def test_a_lost_connection_frees_nothing_but_its_streams(node: Node) -> None:
    topic = await node.topic(visibility_ms=1000, backoff_ms_base=0)
    await node.put(topic, b"x")
    other = (await node.connect()).connection
    await other.lease_stream(topic, credits=1)
    await node.settled()
    other.abort()
    await asyncio.sleep(0.01)
    assert await node.counts() == (0, 0, 1, 0)
    assert (await node.stats())["consumers"] == 0
    await node.advance(1)
    assert await node.popped(topic) == [b"x"]
