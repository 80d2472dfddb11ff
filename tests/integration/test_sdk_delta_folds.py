"""Folds of a delta topic's log on a clock that the tests move: what waits, and what is found."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from tests.integration.harness import START_MS, Node

from penstock.client.client import Client
from penstock.client.delta.deltas import Deltas
from penstock.client.network.connection import Connection
from penstock.client.options import Options
from penstock.model.delta import Delta, Op
from penstock.node.upkeep import retain

HOUR_S = 3600


class Source:
    """Connections to the node of a test."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def connect(self) -> Connection:
        return (await self._node.connect()).connection

    async def close(self) -> None:
        """The node outlives its clients."""


@pytest.fixture
async def vectors(node: Node) -> AsyncIterator[Deltas]:
    async with Client(Source(node), Options()) as client:
        yield client.deltas("v", dimensions=2, create=True, origin="me")


def delta(number: int, **fields: Any) -> Delta:
    """One more in the first component, by origin `x` unless told otherwise."""
    known: dict[str, Any] = {
        "delta_id": bytes([number]) * 16, "namespace": "default", "vector_id": "a",
        "op": Op.OFFSET, "origin": "x", "time": (START_MS << 16) + number, "clock": {"x": number},
        "indices": np.array([0]), "values": np.array([1.0]),
    }  # fmt: skip
    return Delta(**(known | fields))


async def first(vectors: Deltas, vector_id: str = "a") -> float:
    found = await vectors.get(vector_id)
    return 0.0 if found is None else float(found.values[0])


async def test_a_delta_without_its_parent_is_given_up_after_a_while(
    node: Node, vectors: Deltas
) -> None:
    await vectors.put(delta(1, parent=b"?" * 16))
    assert await first(vectors) == 0
    node.clock.advance(31)
    await vectors.put(delta(1, vector_id="b", delta_id=b"b" * 16))
    assert (await first(vectors, "b"), await first(vectors)) == (1, 0)
    await vectors.put(delta(1, delta_id=b"c" * 16))
    assert await first(vectors) == 1
    assert len(await vectors.history("a")) == 1


async def test_a_parent_from_long_ago_is_found_in_the_log(node: Node, vectors: Deltas) -> None:
    await vectors.put_many([delta(1), delta(2)])
    node.clock.advance(25 * HOUR_S)
    late = delta(3, origin="y", clock={"y": 1}, parent=bytes([1]) * 16)
    await vectors.put(late)
    node.clock.advance(31)
    await vectors.put(delta(1, vector_id="b", delta_id=b"b" * 16))
    assert await first(vectors) == 3
    node.clock.advance(31)
    history = await vectors.history("a")
    assert [d.delta_id[0] for d in history] == [1, 2]  # a vector's own fold has its own time
    await vectors.put(delta(3))
    assert [d.delta_id for d in await vectors.history("a")][2:] == [late.delta_id]


async def test_a_fold_reads_only_what_is_new(node: Node, vectors: Deltas) -> None:
    await vectors.put_many([delta(i) for i in range(1, 100)])
    assert await first(vectors) == 99
    await vectors.put(delta(100))
    last = node.engine.topics["v"].partitions[0].log.sequence_last
    fold = vectors.folds.kept(0)
    released = [len(o.released) async for o in fold.outcomes(sequence_first=1, through=last)]
    assert released == [1]
    assert await first(vectors) == 100


async def test_what_retention_dropped_does_not_stop_a_fold(small_node: Node) -> None:
    node = small_node
    async with Client(Source(node), Options()) as client:
        vectors = await client.deltas("v", dimensions=2, create=True, retention_ms=1000)
        for start in range(1, 201, 10):
            batch = [delta(1, vector_id=f"{start + i}-{'x' * 480}", delta_id=b"%016d" % (start + i))
                     for i in range(10)]  # fmt: skip
            await vectors.put_many(batch)
        await node.advance(10)
        await node.call("snapshot", topic="v")
        await node.call("snapshot", topic="v")
        topic = node.engine.topics["v"]
        await retain(node.engine.hosts[topic.key(0)], node.clock.now_ms())
        assert topic.partitions[0].log.sequence_first > 1
        assert await first(vectors, f"1-{'x' * 480}") == 0
        assert await first(vectors, f"200-{'x' * 480}") == 1
