"""A node starts while its disk does not let it take up a topic: it keeps what it has of it."""

from pathlib import Path

import pytest
from tests.integration.cluster.asking import until
from tests.integration.cluster.nodes import running_node

from penstock.config import ClusterOptions, Config
from penstock.model.topic import TopicConfig
from penstock.node import lifecycle
from penstock.node.lifecycle import EngineLocal
from penstock.testing.etcd import etcd_process
from penstock.testing.process import free_ports


async def test_files_of_a_topic_in_trouble_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [port] = free_ports(1)
    with etcd_process(tmp_path / "etcd") as etcd:
        cluster = ClusterOptions(etcd=(etcd.endpoint,), lease_s=2)
        config = Config(data=tmp_path / "n1", node="n1", native_port=port, cluster=cluster)
        async with running_node(config) as node:
            await node.administration.create_topic({"name": "jobs"}, exists_ok=False)
            uuid = node.hosts[1, 0].replica.uuid
        full, add_topic = True, EngineLocal.add_topic

        async def add_if_there_is_room(local: EngineLocal, config: TopicConfig) -> None:
            if full:
                raise OSError("no space left")
            await add_topic(local, config)

        monkeypatch.setattr(EngineLocal, "add_topic", add_if_there_is_room)
        monkeypatch.setattr(lifecycle, "SETTLE_S_MAX", 0.5)
        async with running_node(config) as node:
            assert not node.topics
            full = False

            async def served() -> bool:
                return "jobs" in node.topics and bool(node.topics["jobs"].local)

            await until(served)
            assert node.hosts[1, 0].replica.uuid == uuid
