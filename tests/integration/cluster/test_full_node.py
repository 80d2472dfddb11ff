"""Topics where a node of the cluster has no room: for want of space, or of open files."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.integration.cluster.asking import until
from tests.integration.cluster.nodes import running_node
from tests.integration.test_open_files import files_at_most
from tests.unit.log.mounts import fill, tmpfs

from penstock.config import ClusterOptions, Config
from penstock.errors import DiskFull, LimitExceeded
from penstock.log.flush import LogOptions
from penstock.node.engine import Engine
from penstock.testing.etcd import etcd_process
from penstock.testing.process import free_ports

LOG = LogOptions(segment_bytes=256 << 10, allocate_bytes=128 << 10, reserve_bytes=64 << 10)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "disk", size=4 << 20) as path:
        yield path


@pytest.fixture
async def nodes(tmp_path: Path, disk: Path) -> AsyncIterator[list[Engine]]:
    """Two, of which the second has the small disk."""
    with etcd_process(tmp_path / "etcd") as etcd:
        cluster = ClusterOptions(etcd=(etcd.endpoint,), lease_s=2, serve_s=5.0)
        configs = [
            Config(data=data, node=f"n{n}", native_port=port, cluster=cluster, log=LOG)
            for n, (data, port) in enumerate(
                zip((tmp_path / "n1", disk / "n2"), free_ports(2), strict=True), 1
            )
        ]
        async with AsyncExitStack() as stack:
            started = [await stack.enter_async_context(running_node(each)) for each in configs]
            await until(lambda: _connected(started))
            yield started


async def _connected(nodes: list[Engine]) -> bool:
    assert nodes[0].nodes is not None
    return len(nodes[0].nodes.alive) == 2 and nodes[0].nodes.live("n2") is not None


async def test_a_full_node_gets_no_partitions_and_none_are_recorded_in_vain(
    nodes: list[Engine], disk: Path
) -> None:
    """Before, the topic was recorded, its call failed after serve_s, and its replica on the full
    node was never opened, also when there was space again."""
    await asyncio.to_thread(fill, disk)
    with pytest.raises(DiskFull, match="n2"):
        await nodes[0].administration.create_topic(
            {"name": "two", "replication_factor": 2}, exists_ok=False
        )
    assert await nodes[0].catalog.list() == []
    await nodes[0].administration.create_topic(
        {"name": "one", "replication_factor": 1, "partitions": 4}, exists_ok=False
    )
    assert len(nodes[0].hosts) == 4 and not nodes[1].hosts
    await nodes[0].administration.update_topic("one", {"partitions": 6})
    assert len(nodes[0].hosts) == 6 and not nodes[1].hosts


async def test_a_replica_on_a_full_node_is_opened_once_there_is_space(
    nodes: list[Engine], disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it was tried once. It is recorded when the disk fills up at that very moment."""
    filler = await asyncio.to_thread(fill, disk)
    monkeypatch.setattr(nodes[1].room, "fitting", nodes[0].room.fitting)
    creating = nodes[0].administration.create_topic(
        {"name": "two", "replication_factor": 2}, exists_ok=False
    )
    task = asyncio.ensure_future(creating)
    await until(lambda: _unopened(nodes[1], 1))
    assert nodes[1].fatal_error is None
    filler.unlink()
    await task
    await until(lambda: _unopened(nodes[1], 0))
    assert (1, 0) in nodes[1].hosts


async def _unopened(node: Engine, count: int) -> bool:
    return node.unopened.partitions == count


async def test_a_topic_that_no_node_may_open_the_files_of_is_refused(nodes: list[Engine]) -> None:
    """Before, it was recorded, and the call failed with Unavailable after serve_s."""
    with files_at_most(600), pytest.raises(LimitExceeded, match=r"on n\d: it may open 600 files"):
        await nodes[0].administration.create_topic(
            {"name": "wide", "replication_factor": 1, "partitions": 400}, exists_ok=False
        )
    assert await nodes[0].catalog.list() == []
