"""All-or-none batches over partitions."""

from __future__ import annotations

import asyncio

import pytest
from tests.integration.harness import Node, body, ids_of

from penstock.client.network.connection import Connection
from penstock.errors import StaleProducer
from penstock.wire.messages import Enqueued


def parts(count: int, *, epoch: int = 1, sequence: int = 1) -> list[tuple[int, int, bytes]]:
    """Two entries for each of `count` partitions, each with a producer of its own."""
    return [
        (p, 2, body([{"payload": b"%d.%d" % (p, i), "priority": i} for i in range(2)],
                    producer=(f"p.{p}", epoch, sequence)))
        for p in range(count)
    ]  # fmt: skip


async def put(connection: Connection, topic: str, count: int = 3, **how: int) -> Enqueued:
    return await connection.enqueue(topic, parts(count, **how), atomic=True)


async def test_an_atomic_batch_lands_in_every_partition(node: Node) -> None:
    topic = await node.topic(partitions=3)
    answer = await put(node.connection, topic)
    assert {p.partition for p in answer.placed} == {0, 1, 2}
    messages = await node.pop(topic, 10)
    assert sorted(m["payload"] for m in messages) == sorted(
        b"%d.%d" % (p, i) for p in range(3) for i in range(2)
    )
    assert sorted(ids_of(answer)) == sorted(m["message_id"] for m in messages)


async def test_its_retry_returns_duplicates(node: Node) -> None:
    topic = await node.topic(partitions=3)
    first = await put(node.connection, topic)
    again = await put(node.connection, topic)
    assert ids_of(again) == ids_of(first) and not again.placed
    await node.restart()
    assert ids_of(await put(node.connection, topic)) == ids_of(first)
    assert await node.counts() == (6, 0, 0, 0)


async def test_the_same_batch_sent_twice_at_once_is_one(node: Node) -> None:
    topic = await node.topic(partitions=3)
    answers = await asyncio.gather(*(put(node.connection, topic) for _ in range(4)))
    assert len({tuple(ids_of(answer)) for answer in answers}) == 1
    assert await node.counts() == (6, 0, 0, 0)


async def test_if_one_partition_refuses_none_has_it(node: Node) -> None:
    topic = await node.topic(partitions=3)
    await node.enqueue(topic, [{"payload": b"newer"}], partition=2, producer=("p.2", 9, 1))
    with pytest.raises(StaleProducer):
        await put(node.connection, topic)
    assert await node.popped(topic) == [b"newer"]
    status = node.engine.topics[topic]
    assert not any(p.heap.prepared for p in status.partitions)
    await node.restart()
    assert await node.counts() == (0, 0, 1, 0)


async def test_what_was_refused_can_be_sent_again(node: Node) -> None:
    topic = await node.topic(partitions=3)
    await node.enqueue(topic, [{"payload": b"newer"}], partition=2, producer=("p.2", 9, 1))
    with pytest.raises(StaleProducer):
        await put(node.connection, topic)
    answer = await put(node.connection, topic, epoch=10)
    assert not answer.duplicates and len(set(ids_of(answer))) == 6
    assert await node.counts() == (7, 0, 0, 0)


async def test_what_is_prepared_is_invisible_until_it_is_decided(node: Node) -> None:
    topic = await node.topic(partitions=3)
    stream = await node.stream(topic, credits=100)
    heaps = [p.heap for p in node.engine.topics[topic].partitions]
    asked = asyncio.create_task(put(node.connection, topic))
    while not any(heap.prepared for heap in heaps):
        await asyncio.sleep(0)
    assert sum(heap.ready + heap.leased for heap in heaps) == 0
    await asked
    assert sum(b.delivery.count for b in await node.delivered(stream)) == 6


async def test_delays_of_an_atomic_batch_hold(node: Node) -> None:
    topic = await node.topic(partitions=2)
    rows = [{"payload": b"x", "delay_ms": 5000}]
    await node.connection.enqueue(topic, [(p, 1, body(rows)) for p in range(2)], atomic=True)
    assert await node.counts() == (0, 2, 0, 0)
    await node.advance(5)
    assert await node.popped(topic) == [b"x", b"x"]


async def test_an_atomic_batch_survives_snapshots_and_crashes(node: Node) -> None:
    topic = await node.topic(partitions=2)
    await put(node.connection, topic, 2)
    await node.call("snapshot", topic=topic)
    await put(node.connection, topic, 2, sequence=3)
    await node.crash()
    assert await node.counts() == (8, 0, 0, 0)
    assert len((await put(node.connection, topic, 2, sequence=3)).duplicates) == 4
