"""What a subscriber or a sink lets gather: sent when there is enough of it, or after its time."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.harness import Node
from tests.unit.node.live.subscribing import (
    Reader,
    corpus,
    expected,
    payloads_of,
    put,
    subscribe,
    until,
)
from tests.unit.node.live.test_hosted_sink import Hosting, hosting

from penstock.node.live.subscription import Subscription, SubscriptionState

BATCH_MS = 50


def some(deltas: int) -> list[bytes]:
    """Deltas that are all released as they come."""
    return payloads_of(corpus(deltas, duplicates=0.0, disorder=0.0))


def sizes(reader: Reader) -> list[int]:
    return [frame.count for frame in reader.frames if frame.count]


async def followed(subscription: Subscription) -> None:
    await until(lambda: subscription.state is SubscriptionState.LIVE)


async def test_a_batch_waits_for_its_time(node: Node) -> None:
    reader = await subscribe(node, batch_ms=BATCH_MS, batch_max=10)
    await followed(reader.opened)
    deltas = some(7)
    await put(node, deltas[:3])
    await node.advance(0.02)
    await put(node, deltas[3:])
    await node.advance(0.029)
    assert sizes(reader) == [] and reader.opened.waiting == 7
    await node.advance(0.001)  # since the first of them
    assert sizes(reader) == [7] and reader.opened.waiting == 0
    assert reader.rows == expected(node)


async def test_a_batch_that_is_full_does_not_wait(node: Node) -> None:
    reader = await subscribe(node, batch_ms=BATCH_MS, batch_max=10)
    await followed(reader.opened)
    await put(node, some(25), size=5)
    await node.settled()
    assert sizes(reader) == [10, 10] and reader.opened.waiting == 5
    await node.advance(BATCH_MS / 1000)
    assert sizes(reader) == [10, 10, 5] and reader.rows == expected(node)


async def test_without_a_time_nothing_waits(node: Node) -> None:
    reader = await subscribe(node, batch_max=10)
    await followed(reader.opened)
    await put(node, some(9), size=3)
    await node.settled()
    assert sizes(reader) == [3, 3, 3]


@pytest.fixture
async def sinking(tmp_path: Path) -> Hosting:
    return await hosting(tmp_path / "data", batch_ms=BATCH_MS, batch_rows=10)


def written(node: Hosting) -> list[int]:
    return [0 if work.deltas is None else len(work.deltas) for work in node.sink.works]


async def test_a_sink_is_written_to_by_count_and_by_time(sinking: Hosting) -> None:
    node = sinking
    await until(lambda: node.hosted.readings())
    ((_, subscription),) = node.hosted.readings()
    await followed(subscription)
    deltas = some(14)
    await put(node, deltas[:9])
    await node.settled()
    assert subscription.waiting == 9 and not node.sink.works
    await put(node, deltas[9:10])
    await until(lambda: written(node) == [10])
    await put(node, deltas[10:])
    await node.advance((BATCH_MS - 1) / 1000)
    assert subscription.waiting == 4 and written(node) == [10]
    await node.advance(0.001)
    await until(lambda: written(node) == [10, 4])
    await node.caught_up()
    await node.stop()
