"""A subscriber gets what the pipeline would release: the same deltas, positions and ordinals."""

from __future__ import annotations

import pytest
from tests.integration.harness import Node
from tests.unit.node.live.subscribing import (
    corpus,
    expected,
    payloads_of,
    put,
    subscribe,
    until,
)


@pytest.mark.parametrize("size", [1, 7, 300, 2500])
async def test_live_equals_the_pipeline(node: Node, size: int) -> None:
    reader = await subscribe(node)
    rows = payloads_of(corpus(min(3000, 100 * size), seed=size))
    await put(node, rows, size=size)
    wanted = expected(node)
    await until(lambda: len(reader.rows) >= len(wanted))
    assert reader.rows == wanted
    assert reader.frames[-1].position == reader.opened.settled


async def test_a_log_that_is_there_is_folded_first(node: Node) -> None:
    some = corpus(900)
    await put(node, payloads_of(some, 0, 600))
    reader = await subscribe(node, start="sequence", at=1)
    await put(node, payloads_of(some, 600))
    wanted = expected(node)
    await until(lambda: len(reader.rows) >= len(wanted))
    assert reader.rows == wanted


async def test_many_subscribers_get_the_same(node: Node) -> None:
    readers = [await subscribe(node) for _ in range(5)]
    await put(node, payloads_of(corpus(300)), size=10)
    wanted = expected(node)
    await until(lambda: all(len(reader.rows) >= len(wanted) for reader in readers))
    assert all(reader.rows == wanted for reader in readers)


async def test_a_queue_topic_knows_nothing_of_it(node: Node) -> None:
    await node.topic("jobs")
    await node.put("jobs", b"a")
    jobs = node.engine.topics["jobs"]
    assert jobs.live is None
    assert all(partition.listener is None for partition in jobs.local)


async def test_the_fold_is_given_up_after_the_last_has_left(node: Node) -> None:
    reader = await subscribe(node)
    topic = node.engine.topics["vectors"]
    assert topic.live is not None
    reader.opened.close()
    await node.advance(59)
    assert topic.live.partitions
    await node.advance(2)
    assert not topic.live.partitions
    assert topic.here(0).listener is None
    again = await subscribe(node, start="sequence", at=1)
    await put(node, payloads_of(corpus(50)))
    await until(lambda: again.rows == expected(node))
