"""etcd is restored from an older copy: ids that folders have are not given out again."""

import asyncio
import shutil
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.integration.cluster.asking import until
from tests.integration.cluster.nodes import running_node

from penstock.config import ClusterOptions, Config
from penstock.node.engine import Engine
from penstock.testing.etcd import EtcdProcess, etcd_process
from penstock.testing.process import free_ports


async def restore(etcd: EtcdProcess, copy: Path) -> None:
    await asyncio.to_thread(etcd.kill)
    await asyncio.to_thread(shutil.rmtree, etcd.folder / "data")
    await asyncio.to_thread(shutil.copytree, copy, etcd.folder / "data")
    await asyncio.to_thread(etcd.start)


async def make(node: Engine, name: str) -> int:
    config = await node.administration.create_topic(
        {"name": name, "replication_factor": 1}, exists_ok=False
    )
    return config.id


@pytest.mark.parametrize("running", [False, True])
async def test_a_topic_gets_an_id_that_no_folder_has(tmp_path: Path, running: bool) -> None:
    """Before, the id was given out again, and the new topic was never served: the node took it for
    a change of the topic that it knew by that id."""
    ports = free_ports(1)
    with etcd_process(tmp_path / "etcd") as etcd:
        cluster = ClusterOptions(etcd=(etcd.endpoint,), lease_s=2, serve_s=20.0)
        config = Config(data=tmp_path / "n1", node="n1", native_port=ports[0], cluster=cluster)
        async with AsyncExitStack() as stack:
            node = await stack.enter_async_context(running_node(config))
            assert await make(node, "kept") == 1
            copy = tmp_path / "copy"
            await asyncio.to_thread(etcd.kill)
            await asyncio.to_thread(shutil.copytree, etcd.folder / "data", copy)
            await asyncio.to_thread(etcd.start)
            await until(lambda: _available(node))
            assert [await make(node, name) for name in ("lost", "lost-too")] == [2, 3]
            if not running:
                await stack.aclose()
                await restore(etcd, copy)
                node = await stack.enter_async_context(running_node(config))
            else:
                await restore(etcd, copy)
                await until(lambda: _available(node))
            assert await make(node, "new") == 4
            assert node.topics["new"].local
            folders = [node.folder.partition(topic, 0) for topic in (1, 2, 3, 4)]
            assert all([await asyncio.to_thread(folder.exists) for folder in folders])
            await stack.aclose()
            # The skipped ids are no deleted topics: their files stay at later starts, too.
            await stack.enter_async_context(running_node(config))
            assert all([await asyncio.to_thread(folder.exists) for folder in folders])


async def _available(node: Engine) -> bool:
    assert node.nodes is not None
    await node.catalog.list()
    return node.nodes.available


async def test_a_topic_with_the_id_of_anothers_folder_is_reported(tmp_path: Path) -> None:
    """Such a topic can be made while the node that has the folder is away. Before, it was served
    with the other one's messages."""
    ports = free_ports(1)
    with etcd_process(tmp_path / "etcd") as etcd:
        cluster = ClusterOptions(etcd=(etcd.endpoint,), lease_s=2, serve_s=20.0)
        config = Config(data=tmp_path / "n1", node="n1", native_port=ports[0], cluster=cluster)
        async with running_node(config) as node:
            assert await make(node, "old") == 1
            old = await node.catalog.get("old")
            store = node.nodes.store if node.nodes is not None else None
            assert store is not None
            entry = await store.get("topics/old")
        async with running_node(config) as node:
            assert node.nodes is not None and entry is not None
            value = entry.value.replace(b'"old"', b'"new"')
            await node.nodes.store.put("topics/new", value)
            await until(lambda: _known(node, "new"))
        await _rename(config, old.id)
        async with running_node(config) as node:
            await until(lambda: _damaged(node))
            assert "another topic (gone)" in (node.damage or "")
            assert node.folder.has_log(1)


async def _rename(config: Config, topic: int) -> None:
    """The folder is of a topic that is gone, as its inventory says."""
    from penstock.log.folder import DataFolder

    with await asyncio.to_thread(DataFolder.open, config.data) as folder:
        await asyncio.to_thread(lambda: folder.inventory.add(topic, 0, name="gone", uuid="0" * 32))


async def _known(node: Engine, name: str) -> bool:
    return any(config.name == name for config in await node.catalog.list())


async def _damaged(node: Engine) -> bool:
    return node.damage is not None
