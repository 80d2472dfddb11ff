"""Nodes show each other the cluster's key over TLS; nobody else may speak as a node."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trustme
from tests.integration.cluster.nodes import running_node

from penstock.client.connection import Connection, open_connection
from penstock.client.follow import PeerConnection, connect_peer
from penstock.config import ClusterOptions, Config, TlsOptions
from penstock.errors import PenstockError, Unauthenticated
from penstock.node.engine import Engine
from penstock.replication.messages import Follow
from penstock.testing.etcd import etcd_process, free_ports
from penstock.wire.messages import Told

KEY = "the nodes' own secret"
FOLLOW = Follow("x", "u", 1, 1, 0, [], 10, 1000)


@pytest.fixture
def tls(tmp_path: Path) -> TlsOptions:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    files = {name: tmp_path / f"{name}.pem" for name in ("cert", "key", "ca")}
    issued.cert_chain_pems[0].write_to_path(files["cert"])
    issued.private_key_pem.write_to_path(files["key"])
    authority.cert_pem.write_to_path(files["ca"])
    return TlsOptions(**files)


@pytest.fixture
async def nodes(tmp_path: Path, tls: TlsOptions) -> AsyncIterator[list[Engine]]:
    with etcd_process(tmp_path / "etcd") as etcd:
        cluster = ClusterOptions(etcd=(etcd.endpoint,), key=KEY)
        async with AsyncExitStack() as stack:
            yield [
                await stack.enter_async_context(
                    running_node(
                        Config(
                            data=tmp_path / name,
                            node=name,
                            native_port=port,
                            grpc_port=-1,
                            http_port=-1,
                            tls=tls,
                            require_key=True,
                            cluster=cluster,
                        ).validate()
                    )
                )
                for name, port in zip(("n1", "n2"), free_ports(2), strict=True)
            ]


async def test_only_nodes_may_speak_as_nodes(nodes: list[Engine], tls: TlsOptions) -> None:
    first, _ = nodes
    made = await first.keys.create("somebody")
    await first.create_topic({"name": "jobs", "replication_factor": 2}, exists_ok=False)

    async def connect(key: str | None) -> Connection:
        url = f"penstocks://127.0.0.1:{first.config.native_port}"
        return await open_connection(url, api_key=key, tls=tls.ca)

    with pytest.raises(Unauthenticated):
        await connect(None)
    with pytest.raises(Unauthenticated):
        await connect("wrong")
    caller = await connect(made.text)
    assert (await caller.call("topic_get", topic="jobs"))["replication_factor"] == 2
    for method in ("replica_status", "replica_seed"):
        arguments = {"topic": 1, "partition": 0} if method == "replica_seed" else {}
        with pytest.raises(Unauthenticated):
            await caller.call(method, **arguments)
    peer = await connect(KEY)
    assert (await peer.call("replica_status")).keys() == {"partitions", "copies"}
    await caller.close()
    await peer.close()


async def test_a_stranger_s_messages_reach_no_replica(nodes: list[Engine], tls: TlsOptions) -> None:
    first, _ = nodes
    made = await first.keys.create("somebody")
    await first.create_topic({"name": "jobs", "replication_factor": 2}, exists_ok=False)
    stranger = await _peer(first, made.text, tls)
    ended = asyncio.get_running_loop().create_future()

    class Reader:
        def on_followed(self, reply: object) -> None:
            ended.set_result(reply)

        def on_slice(self, append: object, batches: object) -> None: ...

        def on_lost(self, error: PenstockError | None) -> None:
            ended.set_result(error)

    promised = {key: host.replica.promised for key, host in first.hosts.items()}
    stranger.tell([Told(1, 0, "fence", b"\x92\xa1x\xcd\x03\xe8")])  # a fence of epoch 1000
    stranger.follow(1, 0, follow=FOLLOW, follower=Reader())
    assert isinstance(await asyncio.wait_for(ended, 60), Unauthenticated)
    assert {key: host.replica.promised for key, host in first.hosts.items()} == promised
    await stranger.close()


async def _peer(engine: Engine, key: str, tls: TlsOptions) -> PeerConnection:
    port = engine.config.native_port
    assert port is not None
    return await connect_peer("127.0.0.1", port, api_key=key, tls=tls.ca, node="x")
