"""Sinks that the nodes of a cluster run, each for the partitions that it coordinates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import pytest_asyncio
from tests.integration.cluster.asking import Asking, asking

import penstock
from penstock.client.delta.deltas import Deltas
from penstock.errors import InvalidArgument
from penstock.sinks.lake import LakeSink

pytestmark = pytest.mark.asyncio(loop_scope="module")
NODES = ("n1", "n2", "n3")
INDEX = {"kind": "memory", "metric": "l2", "batch_ms": 0}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Asking]:
    folder = tmp_path_factory.mktemp("cluster")
    sinks = [{"topic": topic, **INDEX} for topic in ("vectors", "moving", "few")]
    sinks.append({"topic": "kept", "kind": "lake", "path": str(folder / "lake"), "batch_ms": 100})
    options = {"cluster.lease_s": 2, "live.sink": json.dumps(sinks)}
    async with asking(folder, options) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: Asking) -> AsyncIterator[penstock.Client]:
    async with penstock.connect(cluster.processes.url) as client:
        yield client


async def made(client: penstock.Client, topic: str, *, partitions: int, vectors: int) -> Deltas:
    """A delta topic with vectors (0, 0), (1, 0), (2, 0) …"""
    deltas = await client.deltas(
        topic, dimensions=2, create=True, partitions=partitions, replication_factor=3
    )
    for number in range(vectors):
        await deltas.create(f"v{number}", [number, 0])
    return deltas


async def found(cluster: Asking, topic: str, *, at: str, limit: int = 100) -> list[tuple[str, Any]]:
    """All vectors by their distance from the origin, as a node finds them."""
    answer = await cluster.call("vector_search", at=at, topic=topic, vector=[0, 0], limit=limit)
    return [(one["vector_id"], one["distance"]) for one in answer["neighbours"]]


async def all_find(cluster: Asking, topic: str, wanted: list[tuple[str, Any]]) -> None:
    """Until every node that runs finds exactly that."""
    for node in cluster.processes.running:

        async def same(node: str = node) -> bool:
            return await found(cluster, topic, at=node) == wanted

        await cluster.until(same)


async def test_a_search_through_any_node_sees_all_partitions(
    cluster: Asking, client: penstock.Client
) -> None:
    deltas = await made(client, "vectors", partitions=6, vectors=40)
    coordinators = await cluster.processes.coordinators("vectors")
    assert set(coordinators) == set(NODES)
    await all_find(cluster, "vectors", [(f"v{n}", n * n) for n in range(40)])
    sinks = (await deltas.topic.ask("live_status"))["topics"][0]["sinks"]
    assert [row["partition"] for row in sinks] == list(range(6))


async def test_a_coordinator_dies_and_its_vectors_are_found_again(
    cluster: Asking, client: penstock.Client
) -> None:
    deltas = await made(client, "vectors", partitions=6, vectors=40)
    dead = await cluster.coordinator("vectors", 0)
    await all_find(cluster, "vectors", [(f"v{n}", n * n) for n in range(40)])
    await cluster.processes.kill(dead)
    answer = await deltas.search([0, 0], 100)  # the first one: it waited for all to be found
    assert [one["vector_id"] for one in answer] == [f"v{n}" for n in range(40)]
    for number in range(40):
        await deltas.replace(f"v{number}", [number + 1, 0])
    wanted = [(f"v{n}", (n + 1) ** 2) for n in range(40)]
    await all_find(cluster, "vectors", wanted)
    await cluster.restore()
    assert dead in cluster.processes.running
    await all_find(cluster, "vectors", wanted)


async def test_a_partition_that_moved_is_indexed_at_one_node(
    cluster: Asking, client: penstock.Client
) -> None:
    deltas = await made(client, "moving", partitions=6, vectors=30)
    await all_find(cluster, "moving", [(f"v{n}", n * n) for n in range(30)])
    before = await cluster.processes.coordinators("moving")
    key = {"topic": deltas.topic.config.id, "partition": 0}
    heir = next(node for node in NODES if node != before[0])
    await cluster.has_all("moving", heir)

    async def moved() -> bool:
        if await cluster.coordinator("moving") != before[0]:
            return True
        await cluster.call("replica_resign", at=before[0], **key, node=heir)
        return False

    await cluster.until(moved)
    for number in range(30):
        await deltas.replace(f"v{number}", [number + 1, 0])
    await all_find(cluster, "moving", [(f"v{n}", (n + 1) ** 2) for n in range(30)])


async def test_a_sink_gets_every_delta_once_when_its_node_dies(
    cluster: Asking, client: penstock.Client
) -> None:
    deltas = await made(client, "kept", partitions=3, vectors=30)
    dead = await cluster.coordinator("kept", 0)
    await deltas.put_columns([f"v{n % 30}" for n in range(3000)], np.ones((3000, 2)))
    await cluster.processes.kill(dead)
    for number in range(30):
        await deltas.delete(f"v{number}")
    lake = LakeSink("lake", path=str(cluster.processes.folder / "lake"))

    async def held() -> bool:
        return await asyncio.to_thread(_rows, lake) >= 3060

    await cluster.until(held)
    rows = pa.Table.from_batches(lake.history.batches(["partition", "ordinal"])).to_pylist()
    assert len(rows) == len({(row["partition"], row["ordinal"]) for row in rows}) == 3060


def _rows(lake: LakeSink) -> int:
    lake.open()
    return int(lake.history.table.count())


async def test_partitions_without_a_vector_do_not_fail_a_search(
    cluster: Asking, client: penstock.Client
) -> None:
    await made(client, "few", partitions=3, vectors=1)
    await all_find(cluster, "few", [("v0", 0)])


async def test_partitions_of_a_delta_topic_are_fixed(
    cluster: Asking, client: penstock.Client
) -> None:
    await made(client, "fixed", partitions=2, vectors=1)
    with pytest.raises(InvalidArgument, match="partitions are fixed"):
        await cluster.call("topic_update", topic="fixed", changes={"partitions": 3})
