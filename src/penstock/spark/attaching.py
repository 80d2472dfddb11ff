"""From a pipeline's settings to its sinks, and to the writers that lead to nodes' topics.

Nothing here connects: a sink whose store is away at the start is tried again later, like one whose
store goes away.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.errors import InvalidArgument
from penstock.sinks import registry
from penstock.sinks.protocol import Feed, Items, TopicWriter
from penstock.spark.delivery.delivery import Attached
from penstock.spark.delivery.routes import Routes
from penstock.spark.settings import PipelineSettings
from penstock.spark.source.options import Connecting
from penstock.spark.source.topic_writer import NodeTopicWriter


class LazyTopicWriter:
    """Writes to a node's topics; connects with the first write."""

    def __init__(self, node: Connecting) -> None:
        self._node = node

    def append(
        self, topic: str, *, producer: str, epoch: int, items: Items, partition: int
    ) -> None:
        writer = NodeTopicWriter(self._node.access())
        writer.append(topic, producer=producer, epoch=epoch, items=items, partition=partition)

    def close(self) -> None:
        return  # the access is the process' own


def attach(settings: PipelineSettings, *, pipeline: str, node: Connecting) -> list[Attached]:
    """The sinks with their routes, not yet opened; `pipeline` is the id of its state folder."""

    def open_writer(*, url: str | None, api_key: str | None, ca: str | None) -> TopicWriter:
        if url is not None:
            return LazyTopicWriter(Connecting(url=url, api_key=api_key, tls=ca))
        given = {"api_key": api_key, "tls": ca}
        chosen = {name: value for name, value in given.items() if value is not None}
        return LazyTopicWriter(msgspec.structs.replace(node, **chosen))

    attached = []
    for place, sink in enumerate(settings.sinks):
        try:
            built = registry.build(sink.table, pipeline=pipeline, open_writer=open_writer)
            routes = Routes.parse(sink.route)
        except InvalidArgument as error:
            raise InvalidArgument(
                f"sink {sink.name}: {error.message}",
                field=f"sink[{place}].{error.field}",
                limit=error.limit,
            ) from error
        attached.append(Attached(sink=built, routes=routes))
    return attached


def feed_of(sinks: Sequence[Attached]) -> Feed:
    """What some sink is fed. Deltas are wanted wherever there is a sink at all: its routes and
    its dead letters are made of them."""
    feed = Feed.DELTAS if sinks else Feed(0)
    for attached in sinks:
        feed |= attached.sink.feed
    return feed
