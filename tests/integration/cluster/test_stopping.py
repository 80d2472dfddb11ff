"""Nodes that are told to stop say nothing that an operator would have to look into."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from tests.integration.cluster.asking import SOON_S, Asking, asking

from penstock.errors import Unavailable
from penstock.testing.cluster import ClusterProcesses
from penstock.testing.process import ServerProcess

TOPIC = "jobs"
SUSPECT = re.compile(r"never awaited|not everything was handed over|Traceback|Warning|task failed")


def suspect_lines(*nodes: ServerProcess) -> list[str]:
    """What of the nodes' logs should not be there."""
    lines = [line for node in nodes for line in node.log_path.read_text().splitlines()]
    return [line for line in lines if SUSPECT.search(line)]


async def test_a_node_waits_for_no_heir_that_was_killed(tmp_path: Path) -> None:
    """Before, it took the killed nodes for ones that could take over, because their leases ran on,
    and waited for them until `drain_s` was over."""
    async with asking(tmp_path, {"cluster.lease_s": 600, "drain_s": 600}) as cluster:
        await cluster.create(TOPIC, partitions=3)
        await asyncio.gather(cluster.processes.kill("n2"), cluster.processes.kill("n3"))
        async with asyncio.timeout(SOON_S):
            assert await cluster.processes.stop("n1") == 0
        assert suspect_lines(cluster.processes.nodes["n1"]) == []


async def test_all_nodes_stop_at_once_under_load(tmp_path: Path) -> None:
    """Before, nodes that were leaving took over from each other, and then complained that not
    everything was handed over."""
    async with asking(tmp_path, {"cluster.lease_s": 2, "log.reserve_bytes": 8 << 10}) as cluster:
        processes = cluster.processes
        await cluster.create(TOPIC, partitions=12)
        writers = [asyncio.ensure_future(keep_writing(cluster, node)) for node in processes.nodes]
        await asyncio.sleep(0)
        for round in range(2):
            if round:
                await asyncio.gather(*(processes.start(node) for node in processes.nodes))
                await processes.wait_ready()
            codes = await asyncio.gather(*(processes.stop(node) for node in processes.nodes))
            assert codes == [0, 0, 0]
        for writer in writers:
            writer.cancel()
        await asyncio.gather(*writers, return_exceptions=True)
        assert suspect_lines(*processes.nodes.values()) == []


async def keep_writing(cluster: Asking, node: str) -> None:
    while True:
        try:
            await asyncio.gather(
                *(cluster.put(TOPIC, b"x", at=node, partition=p, within_s=1) for p in range(12))
            )
        except (Unavailable, TimeoutError):
            await asyncio.sleep(0.05)


async def test_a_node_that_waits_for_etcd_stops_without_complaint(tmp_path: Path) -> None:
    """Before, it said that not everything was handed over, though it had never joined."""
    cluster = ClusterProcesses(tmp_path, nodes=1)
    node = cluster.nodes["n1"]
    starting = asyncio.ensure_future(node.start())
    try:
        async with asyncio.timeout(SOON_S):
            while not waits(node):
                await asyncio.sleep(0.05)
            assert await node.stop() == 0
        await asyncio.gather(starting, return_exceptions=True)
        assert suspect_lines(node) == []
    finally:
        starting.cancel()
        await node.kill()


def waits(node: ServerProcess) -> bool:
    return node.log_path.exists() and "waiting for the metadata" in node.log_path.read_text()
