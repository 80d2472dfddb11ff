"""Nodes of one process that know each other: each serves some partitions of the same topics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.harness import Caller, Node

from penstock.client.network.connection import PeerConnection
from penstock.client.network.exchange import memory_pair
from penstock.config import ClusterOptions, Config
from penstock.errors import QuorumUnavailable
from penstock.node.route import Key
from penstock.node.serve.partition import Partition
from penstock.node.session.session import Session


class View:
    """What one node knows of the others: the truth, at once."""

    def __init__(self, node: str, cluster: Cluster) -> None:
        self.node, self._cluster = node, cluster
        self.peers: dict[str, PeerConnection] = {}
        self.alone = self.cut_off = self.rolled_back = False
        self.available = True

    def coordinator(self, key: Key) -> str:
        return self._cluster.coordinators.get(key, "")

    def live(self, node: str) -> PeerConnection | None:
        found = self.peers.get(node)
        return found if found is not None and found.alive else None

    def close(self) -> None:
        """The tests end the connections."""

    async def changed(self, key: Key) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._cluster.waiters.append(waiter)
        await waiter


class Cluster:
    """Several engines; partition `i` of a topic is served by the node that it was given to."""

    def __init__(self, path: Path, names: str) -> None:
        self.nodes = {name: _node(path / name, name) for name in names}
        self.views = {name: View(name, self) for name in names}
        self.coordinators: dict[Key, str] = {}
        self.waiters: list[asyncio.Future[None]] = []
        self._tenures: dict[tuple[str, Key], Partition] = {}

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    async def start(self) -> None:
        for name, node in self.nodes.items():
            await node.start()
            node.engine.cluster = node.engine.router.cluster = self.views[name]
        for name in self.nodes:
            for other in self.nodes:
                if other != name:
                    await self.connect(name, other)

    async def stop(self) -> None:
        for node in self.nodes.values():
            await node.stop()

    async def connect(self, name: str, other: str) -> None:
        connection = PeerConnection(client=f"penstock-node/{name}", cluster_key=CLUSTER_KEY)
        memory_pair(connection, Session(self[other].engine))
        await connection.greeted()
        self.views[name].peers[other] = connection

    def cut(self, name: str, other: str) -> None:
        """End the connection that `name` has to `other`."""
        self.views[name].peers.pop(other).abort()

    async def topic(self, name: str, placed: str, **config: Any) -> str:
        """A topic whose partition `i` is served by the node `placed[i]`; `-`: by nobody."""
        for node in self.nodes.values():
            await node.topic(name, partitions=len(placed), **config)
        for owner, node in self.nodes.items():
            topic = node.engine.topics[name]
            for index, coordinator in enumerate(placed):
                key = (topic.config.id, index)
                self._tenures[owner, key] = topic.here(index)
                if coordinator != owner:
                    topic.unserve(index)
                self.coordinators[key] = coordinator.strip("-")
        return name

    def give(self, name: str, index: int, to: str) -> None:
        """Have another node serve a partition: with what it has of it, which is nothing."""
        topic_id = next(iter(self.nodes.values())).engine.topics[name].config.id
        key = (topic_id, index)
        before, self.coordinators[key] = self.coordinators[key], to
        if before:
            self[before].engine.topics[name].unserve(index)
        if to:
            self[to].engine.topics[name].serve(self._tenures[to, key])
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def caller(self, name: str) -> Caller:
        return await self[name].connect()

    def lose_quorum(self, name: str, topic: str) -> None:
        """Let nothing be committed any more in the topic's first partition, which `name` serves."""
        partition = self[name].engine.topics[topic].here(0)
        partition._writable = lambda: QuorumUnavailable("no majority is alive")


def _node(path: Path, name: str) -> Node:
    options = ClusterOptions(key=CLUSTER_KEY)
    return Node(path, Config(data=path, node=name, drain_s=5.0, cluster=options))


CLUSTER_KEY = "0123456789abcdef0123456789abcdef"
Start = Callable[..., Awaitable[Cluster]]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Three nodes: a, b and c."""
    cluster = Cluster(tmp_path, "abc")
    await cluster.start()
    yield cluster
    await cluster.stop()
