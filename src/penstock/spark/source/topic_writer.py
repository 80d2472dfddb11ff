"""Sinks that write to a topic, on a node: the port they are handed, over the client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.sinks.requests import item_requests

if TYPE_CHECKING:
    from penstock.sinks.protocol import Items
    from penstock.spark.source.access import NodeAccess


class NodeTopicWriter:
    """`penstock.sinks.protocol.TopicWriter` for the topics of one node."""

    def __init__(self, access: NodeAccess) -> None:
        self._access = access

    def append(
        self, topic: str, *, producer: str, epoch: int, items: Items, partition: int
    ) -> None:
        """Durable on return; what was appended before under the same keys is left as it is."""
        if not len(items):
            return
        config = self._access.config(topic)
        appended = item_requests(items, config, producer=producer, epoch=epoch, partition=partition)
        self._access.enqueue_all(topic, appended)

    def close(self) -> None:
        """The access is shared; it is closed by whoever opened it."""
