"""What is fuzzed: a node alone, or the nodes of a cluster."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Sequence
from typing import Final

import numpy as np

from penstock.client.network.connection import ChangeStream, Connection
from penstock.client.network.endpoints import open_connection
from penstock.cluster.etcd import EtcdStore, cluster_prefix
from penstock.cluster.placement import Records
from penstock.errors import Unavailable
from penstock.model.batch import SCHEMAS, Kind
from penstock.model.delta import Delta, Op, encode, hybrid_time
from penstock.model.entries import CHANGES
from penstock.testing.cluster import ClusterProcesses
from penstock.testing.process import ServerProcess
from penstock.wire.messages import Changes, OpenSubscription
from verification.fuzz import corpus, peer_corpus
from verification.fuzz.corpus import Valid

HEALTHY: Final = "healthy"
TOPICS: Final = (
    {"name": corpus.QUEUE, "partitions": 2},
    {"name": corpus.DELTAS, "kind": "delta", "dimensions": corpus.DIMENSIONS},
)


class NodeTarget:
    """One node. Whatever it is sent, everybody is served as before."""

    valid: Valid = staticmethod(corpus.valid)

    def __init__(self, server: ServerProcess) -> None:
        self.servers: Sequence[ServerProcess] = [server]
        self._connection: Connection | None = None
        self._numbers = itertools.count(1)

    async def prepare(self) -> None:
        connection = await self._connected()
        for config in TOPICS:
            await connection.call("topic_create", config=config)

    async def use(self) -> None:
        """A message is taken, and a delta reaches who subscribes to it."""
        connection = await self._connected()
        await _put(connection, corpus.QUEUE)
        await _heard(connection, f"v{next(self._numbers)}")

    async def _connected(self) -> Connection:
        if self._connection is None or not self._connection.alive:
            self._connection = await open_connection(self.servers[0].url)
        return self._connection

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()


class ClusterTarget:
    """Nodes that take what they are sent for the word of another node. A replica may be talked out
    of serving that way (`cluster.key` is what keeps strangers from it), but nothing ends a node,
    and the topics that nobody spoke of are served as before."""

    valid: Valid

    def __init__(self, cluster: ClusterProcesses) -> None:
        self._cluster = cluster
        self.servers: Sequence[ServerProcess] = list(cluster.nodes.values())
        self._numbers = itertools.count(1)

    async def prepare(self) -> None:
        connection = await open_connection(self._cluster.url)
        for config in TOPICS:
            await connection.call("topic_create", config={"replication_factor": 3, **config})
        for _ in range(20):
            await _put(connection, corpus.QUEUE)
        await connection.close()
        store = EtcdStore([self._cluster.etcd.endpoint], prefix=cluster_prefix(self._cluster.name))
        try:
            self.valid = peer_corpus.PeerCorpus(await Records(store).list()).valid
        finally:
            await store.close()

    async def use(self) -> None:
        """A topic that is new, so that nothing was said of it yet, through every node."""
        name = f"fuzz-used-{next(self._numbers)}"
        connections = [await open_connection(server.url) for server in self.servers]
        try:
            config = {"name": name, "replication_factor": 3}
            await connections[0].call("topic_create", config=config)
            await asyncio.gather(*(_put(connection, name) for connection in connections))
            given = await connections[0].call("confirm", method="topic_delete", subject=name)
            token = given["confirm"]
            await connections[0].call("topic_delete", topic=name, force=True, confirm=token)
        finally:
            for connection in connections:
                await connection.close()

    async def close(self) -> None:
        """The cluster is its owner's."""


async def _put(connection: Connection, topic: str) -> None:
    body = SCHEMAS[Kind.ENQ].encode(1, {"payload": [b"healthy"]})
    await connection.enqueue(topic, [(0, 1, body)])


async def _heard(connection: Connection, vector_id: str) -> None:
    """Put a delta of a vector that is new, and wait until a subscriber has it."""
    came: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()

    def arrived(_: ChangeStream, changes: Changes, body: memoryview) -> None:
        if changes.count and not came.done():
            payloads = CHANGES.decode(body, changes.count).binary("payload")
            came.set_result([] if payloads is None else payloads.tolist())

    delta = encode(
        Delta(
            delta_id=uuid.uuid4().bytes, namespace=HEALTHY, vector_id=vector_id, op=Op.CREATE,
            origin=HEALTHY, time=hybrid_time(time.time_ns() // 1_000_000), clock={HEALTHY: 1},
            values=np.ones(corpus.DIMENSIONS, np.float32),
        ),
        dimensions=corpus.DIMENSIONS,
    )  # fmt: skip
    request = OpenSubscription(corpus.DELTAS, 0, [f"vector={HEALTHY}/{vector_id}"])
    stream, _ = await connection.subscribe(request, arrived)
    try:
        body = SCHEMAS[Kind.ENQ].encode(1, {"payload": [delta]})
        await connection.enqueue(corpus.DELTAS, [(0, 1, body)])
        await asyncio.wait((came, stream.ended), return_when=asyncio.FIRST_COMPLETED)
        if not came.done() or came.result() != [delta]:
            raise Unavailable(f"{vector_id} was put, and its subscriber was not told so")
    finally:
        await stream.close()
