"""A subscriber gets what the pipeline would release: the same deltas, positions and ordinals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.harness import Node
from tests.unit.node.live.subscribing import (
    corpus,
    delta_topic,
    expected,
    payloads_of,
    put,
    subscribe,
    until,
)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path / "data")
    await node.start()
    await delta_topic(node)
    yield node
    await node.stop()


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
