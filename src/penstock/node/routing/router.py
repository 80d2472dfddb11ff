"""The node's way to partitions that other nodes serve, shared by all of its topics."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from penstock.node.routing.forwarding import Forwarder
from penstock.node.routing.ports import ClusterView, Key, PartitionPort
from penstock.node.routing.remote import RemotePartition


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

    # --- where things are ---

    def port(self, key: Key) -> PartitionPort | None:
        topic = self._topics.get(key[0])
        return None if topic is None else topic.partitions[key[1]]

    def coordinator(self, key: Key) -> str:
        """The other node that coordinates a partition; empty: nobody does, or we are to."""
        node = self.cluster.coordinator(key)
        return "" if node == self.cluster.node else node
