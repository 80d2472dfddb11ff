"""Each tenure has its own time: a log from a faster clock is no concern of the other partitions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.harness import START_MS, Node, payloads_of
from tests.unit.node.replica.tenures import HOUR_MS, Doubt, enter, take_over

from penstock.model.batch import Kind
from penstock.node.clock import ManualClock
from penstock.node.upkeep import retain


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = await Node(tmp_path / "data").start()
    yield node
    assert node.engine.fatal_error is None
    await node.stop()


@pytest.mark.parametrize("other", ["jobs", "others"])
async def test_a_lease_elsewhere_lives_its_full_time(node: Node, other: str) -> None:
    await node.topic("jobs", partitions=2, visibility_ms=10_000, backoff_ms_base=0)
    await node.topic("others", partitions=2)
    await node.enqueue("jobs", [{"payload": b"x"}], partition=0)
    held = await node.pop("jobs")
    await node.advance(4)
    await take_over(node, other, 1)
    assert node.clock.now_ms() == START_MS + 4000
    await node.advance(5.999)
    assert (await node.popped("jobs"), await node.counts()) == ([], (0, 0, 1, 0))
    await node.advance(0.001)
    assert await node.popped("jobs") == [b"x"]
    assert await node.ack("jobs", held) == [0]


async def test_a_topic_that_is_opened_moves_no_clock(node: Node) -> None:
    topic = await node.topic()
    await node.advance(3600)
    await node.put(topic, b"x")
    await node.stop()
    node.clock = ManualClock(START_MS)
    await node.start()
    assert node.clock.now_ms() == START_MS
    assert (await node.stats())["partitions"][0]["oldest_age_ms"] == 0


@pytest.mark.parametrize(("latest_s", "begins_s"), [(4, 4), (12, 10), (-5, 0)])
async def test_time_begins_no_later_than_it_may_and_catches_up(
    node: Node, latest_s: int, begins_s: int
) -> None:
    topic = await node.topic()
    await node.advance(10)
    doubt = Doubt(START_MS + latest_s * 1000)
    await enter(node, topic, 0, doubt=doubt)
    partition = node.engine.topics[topic].here(0)
    assert partition.now_ms() == START_MS + begins_s * 1000  # nor behind its log
    doubt.agreed = True
    for host in node.engine.hosts.values():
        host.on_tick()
    assert partition.now_ms() == START_MS + 10_000


@pytest.mark.parametrize("partitions", [1, 2])
async def test_delays_fall_due_at_their_distance(node: Node, partitions: int) -> None:
    topic = await node.topic(partitions=partitions)
    await take_over(node, topic, partitions - 1)
    rows = [{"payload": b"%d" % at, "delay_ms": at * 10_000} for at in (1, 2)]
    for partition in range(partitions):
        await node.enqueue(topic, rows, partition=partition)
    for expected in (b"1", b"2"):
        await node.advance(9.999)
        assert await node.popped(topic) == []
        await node.advance(0.001)
        assert await node.popped(topic) == [expected] * partitions


async def test_a_delay_from_before_the_takeover_falls_due(node: Node) -> None:
    topic = await node.topic(partitions=2)
    await enter(node, topic, 1, ahead_ms=HOUR_MS)
    await node.enqueue(topic, [{"payload": b"x", "delay_ms": 10_000}], partition=1)
    await enter(node, topic, 1)
    await node.advance(9.999)
    assert (await node.call("peek", topic=topic, limit=5))["messages"] == []
    await node.advance(0.001)
    assert payloads_of((await node.call("peek", topic=topic, limit=5))["messages"]) == [b"x"]


async def test_leases_there_run_and_return_on_its_own_time(node: Node) -> None:
    topic = await node.topic(visibility_ms=10_000, visibility_ms_max=15_000, backoff_ms_base=0)
    await take_over(node, topic, 0)
    await node.put(topic, b"x")
    held = await node.pop(topic)
    assert held[0]["deadline_ms"] == START_MS + 10_000
    await node.advance(9)
    assert await node.extend(topic, held, 15_000) == []
    await node.advance(5.999)
    assert await node.counts() == (0, 0, 1, 0)
    await node.advance(0.001)
    again = await node.pop(topic)
    await node.nack(topic, again, delay_ms=5000)
    await node.advance(4.999)
    assert await node.popped(topic) == []
    await node.advance(0.001)
    assert await node.popped(topic) == [b"x"]


async def test_a_stream_gets_what_falls_due_without_being_asked(node: Node) -> None:
    topic = await node.topic(partitions=2)
    await take_over(node, topic, 1)
    stream = await node.stream(topic, credits=10)
    await node.enqueue(topic, [{"payload": b"x", "delay_ms": 5000}], partition=1)
    await node.advance(4.999)
    assert await node.delivered(stream) == []
    await node.advance(0.001)
    assert [b.delivery.partition for b in await node.delivered(stream)] == [1]


async def test_what_is_in_doubt_there_asks_in_time(node: Node) -> None:
    topic = await node.topic()
    await take_over(node, topic, 0)
    partition = node.engine.topics[topic].here(0)
    values = {"payload": [b"x"], "transaction": [b"t" * 16], "home": [0]}
    partition.append_record(Kind.PREPARE, 1, values)
    node.engine.topics[topic].wake()
    await node.settled()
    await node.advance(4.999)
    assert partition.heap.prepared
    await node.advance(0.001)
    await node.settled()
    assert not partition.heap.prepared


async def test_retention_counts_from_its_own_time(node: Node) -> None:
    topic = await node.topic(dlq_retention_ms=60_000)
    await take_over(node, topic, 0)
    await node.put(topic, b"x")
    await node.nack(topic, await node.pop(topic), reject=True)
    found = node.engine.topics[topic]
    for seconds, dead in ((60, 1), (0.001, 0)):
        await node.advance(seconds)
        await retain(node.engine.hosts[found.key(0)], node.clock.now_ms())
        assert len(await node.dead()) == dead
