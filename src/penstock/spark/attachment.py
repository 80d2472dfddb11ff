"""From a pipeline's settings to its sinks, and to the writers that lead to nodes' topics.

Nothing here connects: a sink whose store is away at the start is tried again later, like one whose
store goes away.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.errors import InvalidArgument
from penstock.sinks import registry
from penstock.sinks.letters import LetterBox, letters_config
from penstock.sinks.protocol import Feed, TopicWriter
from penstock.spark.delivery.delivery import RoutedSink
from penstock.spark.delivery.selection import SinkRoutes
from penstock.spark.settings import PipelineSettings
from penstock.spark.source.access import NodeTopicWriter
from penstock.spark.source.options import Connecting


def node_of(settings: PipelineSettings) -> Connecting:
    """The node of a pipeline, as a task is told of it; each process opens its own connection."""
    file, ca = settings.api_key_file, settings.ca
    return Connecting(
        url=settings.url,
        api_key=settings.api_key,
        api_key_file=None if file is None else str(file.absolute()),
        tls=None if ca is None else str(ca.absolute()),
    )


def letter_box(node: Connecting) -> LetterBox:
    """Where a pipeline's letters go: to topics of its node, made when they are first needed."""

    def create(topic: str) -> None:
        node.access().call("topic_create", config=letters_config(topic), exists_ok=True)

    return LetterBox(writer=NodeTopicWriter(node.access), create=create)


def attach(settings: PipelineSettings, *, pipeline: str, node: Connecting) -> list[RoutedSink]:
    """The sinks with their routes, not yet opened; `pipeline` is the id of its state folder."""

    def open_writer(*, url: str | None, api_key: str | None, ca: str | None) -> TopicWriter:
        if url is not None:
            return NodeTopicWriter(Connecting(url=url, api_key=api_key, tls=ca).access)
        given = {"api_key": api_key, "tls": ca}
        chosen = {name: value for name, value in given.items() if value is not None}
        return NodeTopicWriter(msgspec.structs.replace(node, **chosen).access)

    attached = []
    for place, sink in enumerate(settings.sinks):
        try:
            built = registry.build(sink.table, pipeline=pipeline, open_writer=open_writer)
            routes = SinkRoutes.parse(sink.route)
        except InvalidArgument as error:
            raise InvalidArgument(
                f"sink {sink.name}: {error.message}",
                field=f"sink[{place}].{error.field}",
                limit=error.limit,
            ) from error
        attached.append(RoutedSink(sink=built, routes=routes))
    return attached


def feed_of(sinks: Sequence[RoutedSink]) -> Feed:
    """What some sink is fed. Deltas are wanted wherever there is a sink at all: its routes and
    its dead letters are made of them."""
    feed = Feed.DELTAS if sinks else Feed(0)
    for attached in sinks:
        feed |= attached.sink.feed
    return feed
