"""etcd answers, and lets nobody in: nodes that run go on, one that starts says why it does not."""

import asyncio
import http.client
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.integration.cluster.asking import until
from tests.integration.cluster.nodes import running_node

from penstock.client.network.endpoints import open_connection
from penstock.config import ClusterOptions, Config
from penstock.errors import FailedPrecondition
from penstock.model.batch import SCHEMAS, Kind
from penstock.node.engine import Engine
from penstock.testing.etcd import EtcdProcess, etcd_process
from penstock.testing.process import free_ports

BODY = SCHEMAS[Kind.ENQ].encode(1, {"payload": [b"x"]})
ROOT = {"name": "root", "password": "secret"}


class Gate:
    """Whether etcd lets callers in that do not say who they are."""

    def __init__(self, etcd: EtcdProcess) -> None:
        self.etcd = etcd

    def shut(self) -> None:
        self._ask("auth/user/add", ROOT)
        self._ask("auth/role/add", {"name": "root"})
        self._ask("auth/user/grant", {"user": "root", "role": "root"})
        self._ask("auth/enable", {})
        self.etcd.kill()  # it would go on telling those who watch
        self.etcd.start()

    def open(self) -> None:
        token = self._ask("auth/authenticate", ROOT)["token"]
        self._ask("auth/disable", {}, {"Authorization": token})

    def _ask(self, path: str, body: object, headers: dict[str, str] | None = None) -> Any:
        connection = http.client.HTTPConnection(self.etcd.host, self.etcd.port, timeout=30)
        try:
            connection.request("POST", f"/v3/{path}", json.dumps(body), headers or {})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            return json.loads(answer.read())
        finally:
            connection.close()


@pytest.fixture
async def gate(tmp_path: Path) -> AsyncIterator[Gate]:
    with etcd_process(tmp_path / "etcd") as etcd:
        yield Gate(etcd)


async def test_nodes_go_on_without_an_etcd_that_refuses_them(gate: Gate, tmp_path: Path) -> None:
    configs = [_config(gate, tmp_path, name) for name in ("n1", "n2")]
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(running_node(each)) for each in configs]
        await nodes[0].administration.create_topic(
            {"name": "jobs", "replication_factor": 2}, exists_ok=False
        )
        await asyncio.to_thread(gate.shut)
        await until(lambda: _available(nodes, False))
        await _put(configs[0], "jobs")
        await _put(configs[1], "jobs")
        await asyncio.to_thread(gate.open)
        await until(lambda: _available(nodes, True))
        await until(lambda: _all_listed(nodes))
        await nodes[1].administration.create_topic(
            {"name": "more", "replication_factor": 2}, exists_ok=False
        )
        await _put(configs[0], "more")


async def test_a_node_that_is_refused_does_not_start(gate: Gate, tmp_path: Path) -> None:
    await asyncio.to_thread(gate.shut)
    with pytest.raises(FailedPrecondition, match="does not let us in"):
        async with running_node(_config(gate, tmp_path, "n1")):
            pass


async def test_a_node_stops_when_it_cannot_keep_time(gate: Gate, tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("illegal transition")

    async with running_node(_config(gate, tmp_path, "n1")) as node:
        await node.administration.create_topic(
            {"name": "jobs", "replication_factor": 1}, exists_ok=False
        )
        node.hosts[1, 0].on_tick = fail  # type: ignore[method-assign]
        async with asyncio.timeout(60):
            await node.fatal.wait()


def _config(gate: Gate, folder: Path, node: str) -> Config:
    cluster = ClusterOptions(etcd=(gate.etcd.endpoint,), lease_s=2)
    [port] = free_ports(1)
    return Config(data=folder / node, node=node, native_port=port, cluster=cluster)


async def _put(config: Config, topic: str) -> None:
    connection = await open_connection(f"penstock://127.0.0.1:{config.native_port}")
    async with asyncio.timeout(60):
        await connection.enqueue(topic, [(0, 1, BODY)])
    await connection.close()


async def _available(nodes: list[Engine], wanted: bool) -> bool:
    return all(node.nodes is not None and node.nodes.available is wanted for node in nodes)


async def _all_listed(nodes: list[Engine]) -> bool:
    return all(node.nodes is not None and len(node.nodes.alive) == len(nodes) for node in nodes)
