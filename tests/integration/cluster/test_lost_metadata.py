"""etcd comes back without its contents: nodes keep theirs, and go on serving."""

import asyncio
import shutil
from contextlib import AsyncExitStack
from pathlib import Path

from tests.integration.cluster.asking import until
from tests.integration.cluster.nodes import running_node

from penstock.client.network.endpoints import open_connection
from penstock.config import ClusterOptions, Config
from penstock.model.batch import SCHEMAS, Kind
from penstock.node.engine import Engine
from penstock.testing.etcd import etcd_process
from penstock.testing.process import free_ports

BODY = SCHEMAS[Kind.ENQ].encode(1, {"payload": [b"x"]})


async def test_nothing_is_removed_because_etcd_lost_its_contents(tmp_path: Path) -> None:
    ports = free_ports(2)
    with etcd_process(tmp_path / "etcd") as etcd:
        cluster = ClusterOptions(etcd=(etcd.endpoint,), lease_s=2)
        configs = [
            Config(data=tmp_path / f"n{n}", node=f"n{n}", native_port=port, cluster=cluster)
            for n, port in enumerate(ports, 1)
        ]
        async with AsyncExitStack() as stack:
            nodes = [await stack.enter_async_context(running_node(each)) for each in configs]
            await nodes[0].administration.create_topic(
                {"name": "jobs", "replication_factor": 2}, exists_ok=False
            )
            await _put(ports[0])
            await asyncio.to_thread(etcd.kill)
            await asyncio.to_thread(shutil.rmtree, etcd.folder / "data")
            await asyncio.to_thread(etcd.start)
            await until(lambda: _noticed(nodes))
            assert await _put(ports[1]) == 3  # the barrier, and the two of ours
            folders = [node.folder.partition(1, 0) for node in nodes]
            assert all([await asyncio.to_thread(folder.exists) for folder in folders])


async def _put(port: int) -> int:
    connection = await open_connection(f"penstock://127.0.0.1:{port}")
    answer = await connection.enqueue("jobs", [(0, 1, BODY)])
    await connection.close()
    return answer.placed[0].sequence


async def _noticed(nodes: list[Engine]) -> bool:
    return not any(node.nodes is None or node.nodes.available for node in nodes)
