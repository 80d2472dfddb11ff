"""Replicas move from node to node while they are written to."""

import pytest
from tests.integration.cluster.asking import Asking

from penstock.errors import FailedPrecondition, NotFound

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_drained_node_holds_nothing_and_nothing_is_lost(cluster: Asking) -> None:
    await cluster.create("ones", partitions=3, replication_factor=1)
    await cluster.create("twos", partitions=3, replication_factor=2)
    written = {
        (topic, index): [await _put(cluster, topic, index, n) for n in range(20)]
        for topic in ("ones", "twos")
        for index in range(3)
    }
    planned = await cluster.call("cluster_drain", node="n1", dry_run=True)
    assert planned["moves"] and await _replicas(cluster, "n1") > 0
    async with cluster.writing("ones") as acknowledged:
        moves = (await cluster.call("cluster_drain", at="n3", node="n1"))["moves"]
        assert all("n1" in m["from"] and "n1" not in m["to"] for m in moves)
        await cluster.until(lambda: _holds_nothing(cluster, "n1"))
    for (topic, index), payloads in written.items():
        held = await cluster.payloads(topic, partition=index)
        assert set(payloads) <= set(held)
    held = await cluster.payloads("ones")
    assert {payload for payload, _ in acknowledged} <= set(held)
    with pytest.raises(FailedPrecondition):
        await cluster.create("three")


async def test_a_node_that_is_back_is_given_its_share(cluster: Asking) -> None:
    await cluster.processes.restart("n1")
    await cluster.processes.wait_ready()
    moves = (await cluster.call("cluster_rebalance", at="n1"))["moves"]
    assert any("n1" in move["to"] for move in moves)

    async def even() -> bool:
        planned = await cluster.call("cluster_rebalance", dry_run=True)
        status = await cluster.call("cluster_status")
        return not planned["moves"] and not any(p["target"] for p in status["partitions"])

    await cluster.until(even)
    assert await _replicas(cluster, "n1") == 3  # of nine
    for index in range(3):
        assert len(await cluster.payloads("twos", partition=index)) == 20


async def test_only_what_is_there_can_be_moved(cluster: Asking) -> None:
    with pytest.raises(NotFound):
        await cluster.call("cluster_drain", node="n9")
    with pytest.raises(NotFound):
        await cluster.call("cluster_remove_replica", topic="ones", partition=0, node="n9")
    [only] = (await cluster.partition("ones"))["voters"]
    with pytest.raises(FailedPrecondition):
        await cluster.call("cluster_remove_replica", topic="ones", partition=0, node=only)


async def _put(cluster: Asking, topic: str, partition: int, number: int) -> bytes:
    payload = b"before %d" % number
    await cluster.put(topic, payload, at=f"n{number % 3 + 1}", partition=partition)
    return payload


async def _replicas(cluster: Asking, node: str) -> int:
    status = await cluster.call("cluster_status")
    return sum(int(n["replicas"]) for n in status["nodes"] if n["id"] == node)


async def _holds_nothing(cluster: Asking, node: str) -> bool:
    status = await cluster.call("cluster_status")
    moving = any(p["target"] or p["joint"] for p in status["partitions"])
    return not moving and await _replicas(cluster, node) == 0
