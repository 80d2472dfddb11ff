"""Sinks that write to a topic, on a node: the port they are handed, over the client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.model.topic import TopicKind
from penstock.sinks.requests import Rows, delta_targets, requests

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
        if config.kind is TopicKind.DELTA:
            targets = delta_targets(items.payloads, config.partitions)
        else:
            targets = np.full(len(items), partition % config.partitions, np.int64)
        rows = Rows(
            sequences=items.sequences,
            payloads=items.payloads,
            priorities=items.priorities,
            headers=items.headers,
        )
        self._access.enqueue_all(topic, requests(rows, targets, producer=producer, epoch=epoch))

    def close(self) -> None:
        """The access is shared; it is closed by whoever opened it."""
