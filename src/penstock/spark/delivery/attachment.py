"""The sinks of a pipeline, made of its settings: once in the driver, and again in every process
that runs their tasks. A `SinkSpec` is what travels there; nothing of an opened sink does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Final

import msgspec

from penstock.errors import InvalidArgument
from penstock.sinks.protocol import Feed, Sink, TaskSink, TopicWriter, build_sink
from penstock.sinks.topics import LetterBox, QuarantineSink, letters_config
from penstock.spark.delivery.selection import SinkRoutes
from penstock.spark.delivery.transform import Transform, transform_named
from penstock.spark.settings import NO_TRANSFORM, PipelineSettings, SinkSettings
from penstock.spark.source.access import NodeTopicWriter
from penstock.spark.source.options import Connecting

_QUARANTINE: Final = SinkSettings(kind="quarantine", name=QuarantineSink.name)


class SinkSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a sink is made of, in whatever process."""

    settings: SinkSettings
    pipeline: str  # the id of the numbering of triggers
    node: Connecting

    @classmethod
    def of_quarantine(cls, *, pipeline: str, node: Connecting) -> SinkSpec:
        return cls(settings=_QUARANTINE, pipeline=pipeline, node=node)

    @property
    def routes(self) -> SinkRoutes:
        return SinkRoutes.parse(self.settings.route)

    def build(self) -> Sink:
        """The sink, not yet opened: nothing is connected to."""
        if self.settings == _QUARANTINE:
            return QuarantineSink(letter_box(self.node))
        sink = self.settings
        table = {"kind": sink.kind, "name": sink.name, **sink.options}
        return build_sink(table, pipeline=self.pipeline, open_writer=self._open_writer)

    def _open_writer(self, *, url: str | None, api_key: str | None, ca: str | None) -> TopicWriter:
        given = {"api_key": api_key, "tls": ca}
        chosen = {name: value for name, value in given.items() if value is not None}
        known = self.node if url is None else Connecting(url=url)
        return NodeTopicWriter(msgspec.structs.replace(known, **chosen).access)


@dataclass(frozen=True, kw_only=True)
class RoutedSink:
    sink: Sink
    routes: SinkRoutes = field(default_factory=SinkRoutes)
    spec: SinkSpec | None = None  # None: it cannot be made elsewhere, and is written by the driver
    lake: SinkSpec | None = None  # that it may be filled from
    lakeless: str = "the pipeline has no lake"  # why it may be filled from none, if that is so


def attach(settings: PipelineSettings, *, pipeline: str, node: Connecting) -> list[RoutedSink]:
    """The sinks with their routes, not yet opened; `pipeline` is the id of its state folder."""
    attached = []
    for place, one in enumerate(settings.sinks):
        spec = SinkSpec(settings=one, pipeline=pipeline, node=node)
        try:
            attached.append(RoutedSink(sink=spec.build(), routes=spec.routes, spec=spec))
        except InvalidArgument as error:
            raise InvalidArgument(
                f"sink {one.name}: {error.message}",
                field=f"sink[{place}].{error.field}",
                limit=error.limit,
            ) from error
    return attached


def transforms_of(
    settings: PipelineSettings,
    sinks: Sequence[RoutedSink],
    given: Transform | Mapping[str, Transform] | None = None,
) -> dict[str, Transform]:
    """The function of each sink that has one: what is `given` in the program, else the settings."""
    names = {one.sink.name for one in sinks}
    fed = {one.sink.name: one for one in sinks if one.sink.feed & Feed.STATES}
    without = {one.name for one in settings.sinks if one.transform == NO_TRANSFORM}
    if given is not None and not isinstance(given, Mapping):
        given = dict.fromkeys(fed.keys() - without, given)
    named = {
        one.name: text
        for one in settings.sinks
        if one.name in (names if one.transform else fed) and (text := settings.transform_of(one))
    }
    found = {name: transform_named(text, field="transform") for name, text in named.items()}
    found |= {name: one for name, one in (given or {}).items() if name in names}
    for name in found.keys() - {n for n, one in fed.items() if isinstance(one.sink, TaskSink)}:
        raise InvalidArgument(
            f"{name} takes no transform, as it is not fed vectors, or not written in tasks: say"
            f' transform = "{NO_TRANSFORM}" in its table to leave it without',
            field="transform",
        )
    return found


def feed_of(sinks: Sequence[RoutedSink]) -> Feed:
    """What some sink is fed. Deltas are wanted wherever there is a sink at all: its routes and
    its dead letters are made of them."""
    return reduce(or_, (one.sink.feed | Feed.DELTAS for one in sinks), Feed(0))


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
