"""Pops over partitions of several nodes: best first, no polling, credit that comes back."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from tests.integration.harness import tokens_of
from tests.unit.node.conftest import Cluster
from tests.unit.node.replica.hosting import SlowDisk
from tests.unit.node.replica.tenures import take_over

from penstock.client.network.connection import LeaseStream, PeerConnection
from penstock.errors import Unavailable
from penstock.model.batch import SCHEMAS, Kind
from penstock.model.ids import LeaseToken
from penstock.node.calls import messages as message_calls
from penstock.wire.frame import FrameType
from verification.malformed_maps import MALFORMED_MAPS


async def fill(cluster: Cluster, topic: str, priorities: list[list[int]]) -> None:
    """Messages with these priorities in partition 0, 1, …; each is its own payload."""
    for index, mine in enumerate(priorities):
        rows = [{"payload": b"%d" % p, "priority": p} for p in mine]
        if rows:
            await cluster["a"].enqueue(topic, rows, partition=index)


async def receive(stream: LeaseStream, count: int) -> list[tuple[int, LeaseToken]]:
    """Priorities and tokens of the next messages."""
    found: list[tuple[int, LeaseToken]] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            batch = await anext(stream)
            d = batch.delivery
            for i, priority in enumerate(batch.columns.fixed("priority").tolist()):
                found.append((priority, d.token(i)))
    return found


async def test_a_pop_takes_the_best_of_all_nodes(cluster: Cluster) -> None:
    await cluster.topic("jobs", "abc")
    await fill(cluster, "jobs", [[5, 2, 8], [1, 9, 4], [3, 7, 6]])
    assert await cluster["a"].popped("jobs", 2) == [b"1", b"2"]
    assert await cluster["b"].popped("jobs", 3) == [b"3", b"4", b"5"]
    assert await cluster["c"].popped("jobs", 10) == [b"6", b"7", b"8", b"9"]
    assert await cluster["a"].popped("jobs", 10) == []


async def test_a_pop_after_an_empty_one_finds_what_came(cluster: Cluster) -> None:
    await cluster.topic("jobs", "ab")
    assert await cluster["a"].popped("jobs", 1) == []
    await fill(cluster, "jobs", [[], [7]])
    assert await cluster["a"].popped("jobs", 1) == [b"7"]


@pytest.mark.parametrize("consumer", "ab")
async def test_a_pop_takes_what_is_due_by_each_partition_s_own_time(
    cluster: Cluster, consumer: str
) -> None:
    await cluster.topic("jobs", "ab")
    await take_over(cluster["b"], "jobs", 1)
    await cluster["a"].enqueue("jobs", [{"payload": b"x", "delay_ms": 5000}], partition=1)
    for seconds, ready in ((4.999, 0), (0.001, 1)):
        for node in cluster.nodes.values():
            await node.advance(seconds)
        peeked = await cluster[consumer].call("peek", topic="jobs", limit=5)
        assert len(peeked["messages"]) == ready
    assert await cluster[consumer].popped("jobs") == [b"x"]


async def test_a_partition_with_all_the_best_is_not_passed(cluster: Cluster) -> None:
    await cluster.topic("jobs", "abc", k=3)
    await fill(cluster, "jobs", [[900] * 50, list(range(300)), [800] * 50])
    found = [int(p) for p in await cluster["a"].popped("jobs", 200)]
    assert found == list(range(200))


async def test_messages_of_other_nodes_are_acknowledged_through_any(cluster: Cluster) -> None:
    await cluster.topic("jobs", "bc")
    await fill(cluster, "jobs", [[1, 2, 3], [4, 5, 6]])
    held = await cluster["a"].pop("jobs", 6)
    assert await cluster["b"].ack("jobs", held) == []
    assert await cluster["c"].ack("jobs", held) == [0, 1, 2, 3, 4, 5]
    assert len(tokens_of(held)) == 6


async def test_a_stream_gets_what_becomes_ready_elsewhere(cluster: Cluster) -> None:
    await cluster.topic("jobs", "bc")
    stream = await cluster["a"].stream("jobs", credits=10)
    await asyncio.sleep(0.05)
    await fill(cluster, "jobs", [[7], []])
    assert [p for p, _ in await receive(stream, 1)] == [7]
    await fill(cluster, "jobs", [[], [3, 4]])
    assert [p for p, _ in await receive(stream, 2)] == [3, 4]


async def test_after_a_round_that_found_little_the_next_one_gathers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.node.serve.rounds.LULL_S", 0.5)
    await cluster.topic("jobs", "bc")
    stream = await cluster["a"].stream("jobs", credits=1000)
    rounds = cluster["a"].engine.topics["jobs"].rounds
    loop = asyncio.get_running_loop()
    began = loop.time()
    for i in range(10):
        await fill(cluster, "jobs", [[i], []])
    assert [p for p, _ in await receive(stream, 10)] == list(range(10))
    assert rounds._number <= 3 + (loop.time() - began) / 0.5


async def test_credit_bounds_what_is_out_and_comes_back(cluster: Cluster) -> None:
    await cluster.topic("jobs", "abc")
    await fill(cluster, "jobs", [list(range(i, 90, 3)) for i in range(3)])
    stream = await cluster["a"].stream("jobs", credits=9)
    seen: list[int] = []
    while len(seen) < 90:
        some = await receive(stream, 1)
        seen += [p for p, _ in some]
        leased = sum(n.engine.topics["jobs"].leased for n in cluster.nodes.values())
        assert leased <= 9
        await cluster["a"].connection.settle("jobs", [t for _, t in some])
    assert sorted(seen) == list(range(90))


async def test_an_idle_stream_sends_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.topic("jobs", "abc")
    await cluster["a"].stream("jobs", credits=10)
    await asyncio.sleep(0.05)
    sent: list[FrameType] = []
    send = PeerConnection.send

    def noted(peer: PeerConnection, type: FrameType, *rest: Any, **how: Any) -> None:
        sent.append(type)
        send(peer, type, *rest, **how)

    monkeypatch.setattr(PeerConnection, "send", noted)
    await asyncio.sleep(0.3)
    assert sent == []


async def test_several_consumers_share_without_overlap(cluster: Cluster) -> None:
    await cluster.topic("jobs", "abcabc")
    await fill(cluster, "jobs", [[i * 100 + j for j in range(50)] for i in range(6)])
    streams = [await cluster[name].stream("jobs", credits=100) for name in "aabbcc"]
    got: Counter[int] = Counter()

    async def consume(stream: LeaseStream) -> None:
        async for batch in stream:
            got.update(batch.columns.fixed("priority").tolist())

    tasks = [asyncio.create_task(consume(stream)) for stream in streams]
    async with asyncio.timeout(60):
        while sum(got.values()) < 300:
            await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    assert set(got.values()) == {1}


async def test_what_a_lost_node_owed_is_no_credit(cluster: Cluster) -> None:
    """The stream to b breaks while the consumer holds messages of it: the count is asked anew."""
    await cluster.topic("jobs", "b")
    await fill(cluster, "jobs", [[1, 2, 3, 4, 5, 6]])
    stream = await cluster["a"].stream("jobs", credits=4)
    held = await receive(stream, 4)
    cluster.cut("a", "b")
    await asyncio.sleep(0.05)
    await cluster.connect("a", "b")
    await asyncio.sleep(0.4)
    assert len(stream._arrived) == 0  # four are still out there
    await cluster["a"].connection.settle("jobs", [t for _, t in held])
    assert [p for p, _ in await receive(stream, 2)] == [5, 6]


async def test_a_partition_that_moves_is_popped_from_its_new_node(cluster: Cluster) -> None:
    await cluster.topic("jobs", "b")
    stream = await cluster["a"].stream("jobs", credits=4)
    await asyncio.sleep(0.02)
    cluster.give("jobs", 0, "c")
    await fill(cluster, "jobs", [[1]])
    assert [p for p, _ in await receive(stream, 1)] == [1]
    cluster.give("jobs", 0, "a")
    await fill(cluster, "jobs", [[2]])
    assert [p for p, _ in await receive(stream, 1)] == [2]


async def test_what_came_for_a_closed_stream_goes_back(cluster: Cluster) -> None:
    await cluster.topic("jobs", "bb")
    stream = await cluster["a"].stream("jobs", credits=50)
    await fill(cluster, "jobs", [list(range(50)), []])
    await stream.close()
    for _ in range(50):
        await asyncio.sleep(0.01)
        taken = len(stream._arrived)
    b = cluster["b"].engine.topics["jobs"]
    assert b.leased + sum(p.heap.ready for p in b.local) == 50
    assert taken == 0


async def test_the_observed_rank_error_is_published(cluster: Cluster) -> None:
    await cluster.topic("jobs", "abc")
    await fill(cluster, "jobs", [[1, 2], [3, 4], [5, 6]])
    await cluster["a"].pop("jobs", 3)
    await asyncio.sleep(0.02)
    text = cluster["a"].engine.metrics.text().decode()
    assert 'penstock_rank_error_count{topic="jobs"} 1.0' in text


async def test_credit_moves_with_a_partition(cluster: Cluster) -> None:
    await cluster.topic("jobs", "ab")
    await fill(cluster, "jobs", [[1, 2, 3, 4], [5, 6, 7, 8]])
    stream = await cluster["a"].stream("jobs", credits=4)
    here = await receive(stream, 4)
    cluster.give("jobs", 0, "")
    there = await receive(stream, 4)
    cluster.give("jobs", 0, "a")
    assert await cluster["a"].connection.settle("jobs", [token for _, token in here]) == []
    assert await cluster["a"].connection.settle("jobs", [token for _, token in there]) == []
    await fill(cluster, "jobs", [[9, 10], [11, 12]])
    assert sorted(p for p, _ in await receive(stream, 4)) == [9, 10, 11, 12]


async def test_a_pop_ends_when_the_partition_it_has_leased_of_moves(cluster: Cluster) -> None:
    """The lease was not committed: it gets nothing of it, and does not wait for it either."""
    await cluster.topic("jobs", "a")
    await fill(cluster, "jobs", [[1, 2, 3]])
    topic = cluster["a"].engine.topics["jobs"]
    disk = SlowDisk(cluster["a"].engine.hosts[topic.key(0)])
    pop = asyncio.create_task(cluster["a"].pop("jobs", 3))
    try:
        async with asyncio.timeout(30):
            while not topic.leased:
                await asyncio.sleep(0.001)
            cluster.give("jobs", 0, "b")
            assert await pop == []
    finally:
        disk.let_go()


async def test_credit_at_another_node_comes_back_when_that_one_s_tenure_ends(
    cluster: Cluster,
) -> None:
    """It has leased for us, and is replaced before that is committed."""
    await cluster.topic("jobs", "b")
    await fill(cluster, "jobs", [[1, 2, 3, 4]])
    there = cluster["b"].engine.topics["jobs"]
    disk = SlowDisk(cluster["b"].engine.hosts[there.key(0)])
    try:
        await cluster["a"].stream("jobs", credits=4)
        here = cluster["a"].engine.topics["jobs"]
        async with asyncio.timeout(30):
            while here.dispatch.unused_credit or not there.leased:
                await asyncio.sleep(0.001)
            cluster.give("jobs", 0, "")
            while here.dispatch.unused_credit < 4:
                await asyncio.sleep(0.001)
    finally:
        disk.let_go()


async def test_a_pop_does_not_wait_for_ever_for_what_another_node_has_leased(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That node may hear no quorum, and then neither commits the lease nor takes it back."""
    monkeypatch.setattr(message_calls, "ARRIVE_MS_MAX", 100)
    await cluster.topic("jobs", "b")
    await fill(cluster, "jobs", [[1, 2, 3]])
    there = cluster["b"].engine.topics["jobs"]
    disk = SlowDisk(cluster["b"].engine.hosts[there.key(0)])
    try:
        async with asyncio.timeout(30):
            with pytest.raises(Unavailable, match="unknown"):
                await cluster["a"].pop("jobs", 3)
    finally:
        disk.let_go()
    async with asyncio.timeout(30):
        while there.leased:  # it came late, and was given back
            await asyncio.sleep(0.001)
    monkeypatch.undo()
    assert await cluster["a"].popped("jobs", 3) == [b"1", b"2", b"3"]


async def test_what_cannot_be_read_on_another_node_dies_there(cluster: Cluster) -> None:
    """Headers from before they were checked. Before, the node that was asked could not decode what
    it was lent, and the pop failed with Unavailable."""
    await cluster.topic("jobs", "ab")
    away = cluster["b"].engine.topics["jobs"].here(1)
    headers = [MALFORMED_MAPS["980-deep"], b"", MALFORMED_MAPS["array"]]
    packed = SCHEMAS[Kind.ENQ].encode(3, {"headers": headers, "payload": [b"x", b"good", b"y"]})
    batch = away.append(Kind.ENQ, packed, 3)
    cluster["b"].engine.topics["jobs"].wake()
    await away.committed(batch.last)
    async with asyncio.timeout(60):
        found = await cluster["a"].pop("jobs", 3, wait_ms=30_000)
        assert [message["payload"] for message in found] == [b"good"]
        assert await cluster["a"].ack("jobs", found) == []
        while len(dead := await cluster["a"].dead("jobs")) < 2:
            await asyncio.sleep(0.01)
    assert [message["reason"] for message in dead] == ["unreadable"] * 2
    assert all(cluster[name].engine.fatal_error is None for name in "ab")
