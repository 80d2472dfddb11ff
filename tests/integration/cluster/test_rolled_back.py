"""A data folder that was restored from an older copy has forgotten what it acknowledged."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.integration.cluster.asking import SOON_S, Asking, asking

from penstock.errors import Unavailable
from penstock.testing.cluster import cluster_processes
from verification.crash_points import DISK_POINTS

OPTIONS = {"cluster.lease_s": 2}
TOPIC = "jobs"
ACKNOWLEDGED = 100


@asynccontextmanager
async def three_nodes(folder: Path) -> AsyncIterator[Asking]:
    async with asking(folder, OPTIONS) as cluster:
        await cluster.create(TOPIC, partitions=1)
        yield cluster


def keep_copy(cluster: Asking, node: str) -> Path:
    """Copy the folder of a node that is down."""
    data = cluster.processes.nodes[node].data
    return Path(shutil.copytree(data, data.with_name(f"{node}.copy")))


def roll_back(cluster: Asking, node: str, copy: Path) -> None:
    """Put an older copy in the place of the folder of a node that is down."""
    data = cluster.processes.nodes[node].data
    shutil.rmtree(data)
    shutil.copytree(copy, data)


async def acknowledge(cluster: Asking, count: int) -> list[bytes]:
    payloads = [b"%d" % number for number in range(count)]
    for payload in payloads:
        await cluster.put_somehow(TOPIC, payload)
    return payloads


async def test_a_rolled_back_disk_does_not_make_a_quorum(tmp_path: Path) -> None:
    """Before, n1's older copy counted: n1 and n3 served without the 100 messages that n1 and n2 had
    acknowledged, and n2 cut them off when it came back."""
    async with three_nodes(tmp_path) as cluster:
        processes = cluster.processes
        await processes.stop("n1")
        copy = keep_copy(cluster, "n1")
        await processes.start("n1")
        await cluster.has_all(TOPIC, "n1")
        await processes.stop("n3")
        written = await acknowledge(cluster, ACKNOWLEDGED)
        epoch = (await cluster.partition(TOPIC))["epoch"]
        await processes.kill("n1")
        roll_back(cluster, "n1", copy)
        await processes.kill("n2")
        await asyncio.gather(processes.start("n1"), processes.start("n3"))

        async def tried() -> bool:
            found = await cluster.partition(TOPIC, at="n3")
            return bool(found["epoch"] > epoch and found["state"] == "electing")

        await cluster.until(tried)
        assert [node["id"] for node in await nodes(cluster) if node["rolled_back"]] == ["n1"]
        await processes.start("n2")
        await cluster.has_all(TOPIC, "n2")
        assert sorted(await cluster.payloads(TOPIC), key=int) == written
        await cluster.until(lambda: counts(cluster, "n1"))
        assert not any(node["rolled_back"] for node in await nodes(cluster))


async def nodes(cluster: Asking) -> list[dict[str, Any]]:
    return list((await cluster.call("cluster_status"))["nodes"])


async def counts(cluster: Asking, node: str) -> bool:
    """Whether a node's acknowledgements make a majority again."""
    found = await cluster.partition(TOPIC)
    told = {follower["node"]: follower["counts"] for follower in found["followers"]}
    return bool(found["coordinator"] == node or told[node])


@asynccontextmanager
async def one_node(folder: Path, **options: Any) -> AsyncIterator[Asking]:
    """A cluster of one, whose topic has one replica."""
    async with cluster_processes(folder, nodes=1, options=OPTIONS | options) as processes:
        cluster = Asking(processes)
        try:
            await cluster.call("topic_create", config={"name": TOPIC, "replication_factor": 1})
            yield cluster
        finally:
            await cluster.close()


async def test_a_node_that_dies_while_it_raises_its_generation_still_counts(
    tmp_path: Path,
) -> None:
    """The only replica is served again, whichever point the node died at."""
    async with one_node(tmp_path) as cluster:
        node = cluster.processes.nodes["n1"]
        written = await acknowledge(cluster, 1)
        for point in DISK_POINTS:
            await node.stop()
            node.environment["PENSTOCK_CRASH"] = point
            with pytest.raises(Unavailable, match=f"ended with -{signal.SIGKILL}"):
                await node.start()
            del node.environment["PENSTOCK_CRASH"]
            await node.start()
            assert await cluster.payloads(TOPIC) == written, point


async def test_the_only_replica_is_served_from_an_older_copy_if_that_is_accepted(
    tmp_path: Path,
) -> None:
    """Before, it was served in any case, and nobody said that something was missing."""
    async with one_node(tmp_path) as cluster:
        node = cluster.processes.nodes["n1"]
        kept = await acknowledge(cluster, 1)
        await node.stop()
        copy = keep_copy(cluster, "n1")
        await node.start()
        await acknowledge(cluster, 2)
        await node.kill()
        roll_back(cluster, "n1", copy)
        await node.start()
        assert (await cluster.partition(TOPIC))["state"] == "electing"
        assert "an older copy of itself" in node.log_path.read_text()
        await node.stop()
        roll_back(cluster, "n1", copy)
        node.options["cluster.accept_rollback"] = "true"
        await node.start()
        assert await cluster.payloads(TOPIC) == kept


async def test_the_first_of_two_nodes_on_copies_of_one_folder_stops(tmp_path: Path) -> None:
    """Before, both ran on under one name."""
    async with one_node(tmp_path, **{"cluster.generation_s": 0.2}) as cluster:
        first = cluster.processes.nodes["n1"]
        await first.stop()
        copy = keep_copy(cluster, "n1")
        await first.start()
        second = dataclasses.replace(first, data=copy, ports={"grpc": -1, "http": -1})
        try:
            await second.start()
            async with asyncio.timeout(SOON_S):
                assert await first.ended() != 0
            assert "another node runs on a copy" in first.log_path.read_text()
        finally:
            await second.kill()
