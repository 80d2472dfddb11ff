"""Several partitions: keys stay together, and a pop's rank among all is bounded."""

from __future__ import annotations

import random
from bisect import bisect_left

import pytest
from tests.integration.harness import Node, Row, body

from penstock.model.ids import MessageId, partition_of


async def test_a_key_always_goes_to_its_partition(node: Node) -> None:
    topic = await node.topic(partitions=5)
    rows = [{"payload": b"%d" % i, "key": b"key-%d" % (i % 40)} for i in range(200)]
    await node.enqueue(topic, rows)
    await node.restart()
    await node.enqueue(topic, rows)
    messages = await node.pop(topic, 400)
    assert {m["partition"] for m in messages} == set(range(5))
    for m in messages:
        assert m["partition"] == partition_of(m["key"], 5)
        assert MessageId.parse(m["message_id"]).partition == m["partition"]


async def test_what_has_no_key_is_spread(node: Node) -> None:
    topic = await node.topic(partitions=3)
    for _ in range(9):
        await node.put(topic, b"x")
    assert [p["ready"] for p in (await node.stats())["partitions"]] == [3, 3, 3]


async def test_a_retry_without_a_key_goes_where_the_first_attempt_went(node: Node) -> None:
    topic = await node.topic(partitions=4)
    rows = [{"payload": b"%d" % i} for i in range(30)]
    await node.enqueue(topic, rows, producer=("p", 1, 1))
    await node.put(topic, b"turns the wheel")
    again = await node.enqueue(topic, rows, producer=("p", 1, 1))
    assert len(again.duplicates) == 30 and not again.placed


def rank_errors(messages: list[Row], waiting: list[int]) -> list[int]:
    """For each popped message, how many better ones stayed behind when its pop began."""
    left = sorted(waiting)
    for m in messages:
        left.remove(m["priority"])
    return [bisect_left(left, m["priority"]) for m in messages]


@pytest.mark.parametrize(("partitions", "k"), [(2, 1), (3, 10), (7, 100)])
async def test_no_pop_passes_k_better_messages(node: Node, partitions: int, k: int) -> None:
    topic = await node.topic(partitions=partitions, k=k)
    dice = random.Random(partitions * k)
    waiting: list[int] = []
    for _ in range(12):
        for partition in range(partitions):
            # One partition holds most of the best ones: what fools a fixed share per partition.
            low = 0 if partition == 0 else 500
            priorities = [dice.randrange(low, 1000) for _ in range(dice.randrange(1, 40))]
            rows = [{"payload": b"x", "priority": p} for p in priorities]
            await node.connection.enqueue(topic, [(partition, len(rows), body(rows))])
            waiting += priorities
        messages = await node.pop(topic, dice.choice([1, 2, 17, 60]))
        assert max(rank_errors(messages, waiting)) < k
        for m in messages:
            waiting.remove(m["priority"])
        await node.ack(topic, messages)
    while messages := await node.pop(topic, 50):
        assert max(rank_errors(messages, waiting)) < k
        for m in messages:
            waiting.remove(m["priority"])
    assert not waiting


async def test_streams_over_partitions_go_by_priority_too(node: Node) -> None:
    topic = await node.topic(partitions=4, mode="max", k=4)
    await node.enqueue(
        topic, [{"payload": b"%d" % i, "key": b"%d" % i, "priority": i} for i in range(100)]
    )
    stream = await node.stream(topic, credits=10, batch_max=10)
    best = {m["priority"] for m in (await node.call("peek", topic=topic, limit=100))["messages"]}
    assert best == set(range(90))
    batches = await node.delivered(stream)
    got = [p for b in batches for p in b.columns.fixed("priority").tolist()]
    assert sorted(got) == list(range(90, 100))


async def test_the_observed_rank_error_is_published(node: Node) -> None:
    topic = await node.topic(partitions=3)
    for i in range(140):
        await node.put(topic, b"x", key=b"%d" % i, priority=i % 7)
    for _ in range(140):
        assert await node.pop(topic)
    text = node.engine.metrics.text().decode()
    assert 'penstock_rank_error_count{topic="jobs"} 2.0' in text
    assert (await node.stats())["rank_error_max"] == 0


async def test_a_pop_over_partitions_is_best_first(node: Node) -> None:
    topic = await node.topic(partitions=4, mode="max")
    rows = [{"payload": b"%d" % i, "key": b"%d" % i, "priority": i} for i in range(60)]
    await node.enqueue(topic, rows)
    assert [m["priority"] for m in await node.pop(topic, 60)] == list(range(59, -1, -1))
