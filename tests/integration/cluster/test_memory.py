"""What a slow follower costs: its window of memory, on both sides, however much is written."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.integration.cluster.asking import Asking, asking

from penstock.model.batch import SCHEMAS, Kind
from penstock.testing.cluster import ClusterProcesses

pytestmark = pytest.mark.asyncio(loop_scope="module")
CREDIT_BYTES = 2 << 20
FOLLOWERS = 2
# Besides the windows: requests under way, frames being read, what the allocator keeps for itself.
ALLOWANCE_BYTES = 32 << 20
WRITERS = 4
ENTRIES, ENTRY_BYTES = 4, 256 << 10
BODY = SCHEMAS[Kind.ENQ].encode(ENTRIES, {"payload": [os.urandom(ENTRY_BYTES)] * ENTRIES})
REQUESTS_WARM, REQUESTS = 64, 300  # of 1 MiB each
OPTIONS = {
    "cache_bytes": 4 << 20,
    "log.cache_bytes": 1 << 20,
    "replication.credit_bytes": CREDIT_BYTES,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Asking]:
    folder = tmp_path_factory.mktemp("memory")
    async with asking(folder, OPTIONS) as made:
        yield made
    await asyncio.to_thread(shutil.rmtree, folder)  # nobody wants to keep a gigabyte


async def test_a_stopped_follower_costs_its_window(cluster: Asking) -> None:
    await cluster.create("large")
    await write(cluster, await cluster.coordinator("large"), REQUESTS_WARM)
    coordinator = await cluster.coordinator("large")
    _, stopped = await cluster.followers("large")
    await cluster.has_all("large", stopped)
    before = forget_peaks(cluster.processes)
    cluster.processes.pause(stopped)
    await write(cluster, coordinator, REQUESTS)
    cluster.processes.resume(stopped)  # now it has all of that to catch up with
    await cluster.until(lambda: caught_up(cluster, stopped), within_s=60)
    grown = {node: peak - before[node] for node, peak in peaks(cluster.processes).items()}
    assert max(grown.values()) < FOLLOWERS * CREDIT_BYTES + ALLOWANCE_BYTES, grown


async def write(cluster: Asking, node: str, requests: int) -> None:
    left = iter(range(requests))

    async def put() -> bool:
        connection = await cluster.connection(node)
        return bool((await connection.enqueue("large", [(0, ENTRIES, BODY)])).placed)

    async def writer() -> None:
        for _ in left:
            await cluster.until(put)  # again, if the partition moves meanwhile

    async with asyncio.TaskGroup() as tasks:
        for _ in range(WRITERS):
            tasks.create_task(writer())


async def caught_up(cluster: Asking, node: str) -> bool:
    found = await cluster.partition("large")
    [follower] = [f for f in found["followers"] if f["node"] == node]
    return bool(follower["sequence"] >= (REQUESTS_WARM + REQUESTS) * ENTRIES)


def forget_peaks(processes: ClusterProcesses) -> dict[str, int]:
    """Begin to measure anew; the memory that each node has now."""
    for node in processes.nodes.values():
        Path(f"/proc/{node.pid}/clear_refs").write_text("5")
    return {name: node.rss_bytes() for name, node in processes.nodes.items()}


def peaks(processes: ClusterProcesses) -> dict[str, int]:
    """The most that each node has had since."""
    return {name: _peak(node.pid) for name, node in processes.nodes.items()}


def _peak(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
