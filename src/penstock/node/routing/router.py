"""The node's way to partitions that other nodes serve, shared by all of its topics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from penstock.errors import PenstockError, Unavailable
from penstock.node.partition import Partition
from penstock.node.routing.forwarding import WAIT_S, Forwarder, not_there
from penstock.node.routing.ports import ClusterView, Key, PartitionPort, PeerConnection
from penstock.node.routing.remote import RemotePartition

R = TypeVar("R")


class RoutedTopic(Protocol):
    """A topic, as far as its router needs to know it."""

    partitions: list[PartitionPort]


class Router:
    def __init__(
        self, view: Callable[[], ClusterView], *, spawn: Callable[..., None], consumers: bytes
    ) -> None:
        self._view, self._spawn = view, spawn
        self.consumers = consumers  # what the names of all consumers of this node begin with
        self._topics: dict[int, RoutedTopic] = {}
        self._forwarder = Forwarder(self)

    @property
    def cluster(self) -> ClusterView:
        """As of now: a node that joins a cluster replaces its view."""
        return self._view()

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        """Run `work` beside everything else."""
        self._spawn(work, name=name)

    # --- topics ---

    def add(self, topic: RoutedTopic, topic_id: int) -> None:
        self._topics[topic_id] = topic

    def remove(self, topic: RoutedTopic, topic_id: int) -> None:
        if self._topics.get(topic_id) is topic:
            del self._topics[topic_id]

    def elsewhere(self, topic: str, key: Key) -> PartitionPort:
        """The port of a partition that this node does not serve."""
        return RemotePartition(topic, key, forwarder=self._forwarder)

    def on_served(self, key: Key) -> None:
        self._forwarder.on_served(key)

    async def at(
        self,
        key: Key,
        *,
        here: Callable[[Partition], Awaitable[R]],
        away: Callable[[PeerConnection], Awaitable[R]],
        repeat: bool = False,
        within_s: float | None = None,
    ) -> R:
        """Do something at the coordinator of a partition, `here` if that is this node.

        While nobody coordinates it, or who was asked does not, it is tried again; when nobody
        knows whether it was done, only if it may be done twice (`repeat`).
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (WAIT_S if within_s is None else within_s)
        while True:
            unreached = Unavailable(f"nobody serves partition {key[1]} now", partition=key[1])
            try:
                port = self.port(key)
                if isinstance(port, Partition):
                    return await here(port)
                node = self.coordinator(key)
                peer = self.cluster.live(node) if node else None
                if peer is None:
                    raise unreached
                return await away(peer)
            except PenstockError as error:
                undone = error is unreached or not_there(error)
                unknown = isinstance(error, Unavailable) and not undone
                if (unknown and not repeat) or not (isinstance(error, Unavailable) or undone):
                    raise
                if self.cluster.cut_off or loop.time() >= deadline:
                    raise (error if unknown else unreached) from error
            await self.changed(key)

    async def changed(self, key: Key) -> None:
        """Returns when something changed about a partition, or after a short while."""
        await self._forwarder.changed(key)

    # --- where things are ---

    def port(self, key: Key) -> PartitionPort | None:
        topic = self._topics.get(key[0])
        return None if topic is None else topic.partitions[key[1]]

    def coordinator(self, key: Key) -> str:
        """The other node that coordinates a partition; empty: nobody does, or we are to."""
        node = self.cluster.coordinator(key)
        return "" if node == self.cluster.node else node
