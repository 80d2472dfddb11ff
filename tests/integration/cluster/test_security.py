"""Nodes show each other the cluster's key over TLS; nobody else may speak as a node."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
import trustme
from tests.integration.cluster.nodes import running_node

from penstock.client.network.connection import Connection, PeerConnection
from penstock.client.network.endpoints import Address, dial, open_connection
from penstock.cluster.etcd import EtcdStore, cluster_prefix
from penstock.cluster.keys import KeyRing
from penstock.config import ClusterOptions, Config, TlsOptions
from penstock.errors import PenstockError, Unauthenticated
from penstock.node.engine import Engine
from penstock.replication.effects import Follow
from penstock.testing.etcd import etcd_process
from penstock.testing.process import free_ports
from penstock.wire.frame import FrameType
from penstock.wire.messages import (
    Enqueue,
    Extend,
    OpenFollow,
    OpenSubscription,
    OpenSupply,
    Part,
    Return,
    Settle,
    TokenPart,
    Told,
    pack,
)

KEY = "the nodes' own secret, long enough"
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
    """Before, the cluster's key was good as an API key."""
    first, _ = nodes
    made = await first.keys.create("somebody")
    await first.administration.create_topic(
        {"name": "jobs", "replication_factor": 2}, exists_ok=False
    )

    async def call_with(key: str | None) -> Connection:
        url = f"penstocks://127.0.0.1:{first.config.native_port}"
        return await open_connection(url, api_key=key, tls=tls.ca)

    with pytest.raises(Unauthenticated):
        await call_with(None)
    for wrong in ("wrong", KEY):
        with pytest.raises(Unauthenticated):
            await call_with(wrong)
    caller = await call_with(made.text)
    assert (await caller.call("topic_get", topic="jobs"))["replication_factor"] == 2
    for method in ("replica_status", "replica_seed"):
        arguments = {"topic": 1, "partition": 0} if method == "replica_seed" else {}
        with pytest.raises(Unauthenticated):
            await caller.call(method, **arguments)
    peer = await _peer(first, KEY, tls)
    assert (await peer.call("replica_status")).keys() >= {"partitions", "copies"}
    with pytest.raises(Unauthenticated, match="API key"):
        await peer.call("topic_get", topic="jobs")
    await caller.close()
    await peer.close()


async def test_a_stranger_s_messages_reach_no_replica(nodes: list[Engine], tls: TlsOptions) -> None:
    first, _ = nodes
    made = await first.keys.create("somebody")
    await first.administration.create_topic(
        {"name": "jobs", "replication_factor": 2}, exists_ok=False
    )
    with pytest.raises(Unauthenticated):
        await _peer(first, "not the key of this cluster, but long", tls)
    stranger = await _peer(first, None, tls, api_key=made.text)
    ended = asyncio.get_running_loop().create_future()

    class Reader:
        def on_answer(self, payload: memoryview) -> None:
            ended.set_result(payload)

        def on_batch(self, payload: memoryview) -> None: ...

        def on_end(self, error: PenstockError | None) -> None:
            ended.set_result(error)

    promised = {key: host.replica.promised for key, host in first.hosts.items()}
    stranger.tell([Told(1, 0, "fence", b"\x92\xa1x\xcd\x03\xe8")])  # a fence of epoch 1000
    stranger.open(OpenFollow(1, 0, msgspec.msgpack.encode(FOLLOW)), Reader())
    assert isinstance(await asyncio.wait_for(ended, 60), Unauthenticated)
    assert {key: host.replica.promised for key, host in first.hosts.items()} == promised
    await stranger.close()


async def _peer(
    engine: Engine, key: str | None, tls: TlsOptions, *, api_key: str | None = None
) -> PeerConnection:
    port = engine.config.native_port
    assert port is not None
    return await dial(
        Address("127.0.0.1", port, True),
        lambda: PeerConnection(api_key=api_key, cluster_key=key, client="penstock-node/x"),
        tls=tls.ca,
    )


async def test_the_first_key_is_made_in_etcd(tmp_path: Path) -> None:
    """No node would make it: each asks for a key first, and the cluster's is none."""
    program = Path(sys.executable).with_name("penstock")
    with etcd_process(tmp_path / "etcd") as etcd:
        where = f"etcd://{etcd.endpoint}"
        process = await asyncio.create_subprocess_exec(
            program, "--json", "key", "create", "admin", "--cluster", where,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output, _ = await process.communicate()
        made = json.loads(output)
        store = EtcdStore([etcd.endpoint], prefix=cluster_prefix("penstock"))
        keys = KeyRing(store)
        await keys.load()
        assert keys.verify(made["key"]) == made["id"] and made["name"] == "admin"
        await store.close()


FORWARDED = [
    (FrameType.BATCH, Enqueue("jobs", [Part(0, 1, 0)], forwarded=True)),
    (FrameType.BATCH, Enqueue("jobs", [Part(0, 1, 0)], transaction=b"t")),
    (FrameType.BATCH, Enqueue("jobs", [Part(0, 1, 0)], home=1)),
    (FrameType.ACK, Settle("jobs", [TokenPart(0, 1, 1)], forwarded=True)),
    (FrameType.NACK, Return("jobs", [TokenPart(0, 1, 1)], forwarded=True)),
    (FrameType.HEARTBEAT, Extend("jobs", [TokenPart(0, 1, 1)], 1000, forwarded=True)),
    (FrameType.SUBSCRIBE, OpenSubscription("vectors", 0, forwarded=True)),
    (FrameType.SUBSCRIBE, OpenSupply("jobs", b"n2/")),
]


async def test_what_nodes_forward_is_not_taken_from_others(
    nodes: list[Engine], tls: TlsOptions
) -> None:
    """Before, any caller could say that its request was forwarded."""
    first, _ = nodes
    made = await first.keys.create("somebody")
    await first.administration.create_topic(
        {"name": "jobs", "replication_factor": 2}, exists_ok=False
    )
    vectors = {"name": "vectors", "kind": "delta", "dimensions": 2, "replication_factor": 2}
    await first.administration.create_topic(vectors, exists_ok=False)
    caller = await _peer(first, None, tls, api_key=made.text)
    for type, control in FORWARDED:
        with pytest.raises(Unauthenticated, match="only a node"):
            await caller.ask(type, dict, pack(control), bytes(8))
    await caller.close()
