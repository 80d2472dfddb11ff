"""From the tables of `[[live.sink]]` to sinks that follow the topics of this node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from penstock.errors import InvalidArgument, Unsupported
from penstock.model.topic import NAME, TopicKind
from penstock.node.live.hosted import HostedOptions, HostedSink
from penstock.node.live.outgoing import Routes
from penstock.node.live.topic_writer import EngineTopicWriter
from penstock.propagation.route import Route
from penstock.sinks import registry
from penstock.sinks.letters import LetterBox
from penstock.sinks.protocol import Sink, TopicWriter

if TYPE_CHECKING:
    from penstock.node.engine import Engine
    from penstock.node.live.hub import Hub
    from penstock.node.topic import Topic


class SinkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One table, checked."""

    topic: str
    name: str
    routes: Routes
    options: HostedOptions
    table: dict[str, Any]  # what the registry makes the sink of


def plans(tables: Sequence[Mapping[str, Any]]) -> list[SinkPlan]:
    """Raises `InvalidArgument` for the first table that will not do."""
    found = [_plan(dict(table)) for table in tables]
    for (topic, name), count in Counter((plan.topic, plan.name) for plan in found).items():
        if count > 1:
            raise InvalidArgument(f"topic {topic} has two sinks called {name}", field="live.sink")
    return found


def _plan(table: dict[str, Any]) -> SinkPlan:
    topic, texts = table.pop("topic", None), table.pop("route", [])
    name = table.setdefault("name", table.get("kind"))
    if not isinstance(topic, str) or not NAME.fullmatch(topic):
        raise InvalidArgument("a sink of the node needs the topic that it follows", field="topic")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidArgument(f"a sink's name must match {NAME.pattern}", field="name")
    if isinstance(texts, str):
        texts = [texts]
    known = [field for field in HostedOptions.__struct_fields__ if field in table]
    own = {field: table.pop(field) for field in known}
    try:
        options = msgspec.convert(own, HostedOptions)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"sink {name}: {error}", field="live.sink") from error
    for field in ("batch_rows", "read_rows", "window_rows", "window_bytes", "breaker_failures"):
        if getattr(options, field) < 1:
            raise InvalidArgument(f"sink {name}: {field} must be at least 1", field=field, limit=1)
    routes = tuple(Route.parse(text) for text in texts)
    return SinkPlan(topic=topic, name=name, routes=routes, options=options, table=table)


def check_sinks(engine: Engine) -> None:
    """Raise unless every sink of the configuration can be made. None is opened."""
    for plan in plans(engine.config.live.sink):
        _sink(engine, plan, numbering="", writer=EngineTopicWriter(engine))
    # Arrow loads pandas, where it is there, with the first scalar: a second or more that the node
    # has before it serves, and that the first change would have to wait for.
    pa.scalar(0)


def host_sinks(engine: Engine, topic: Topic) -> None:
    """Have the node's own sinks follow a topic from now on."""
    for plan in plans(engine.config.live.sink):
        if plan.topic == topic.config.name and topic.config.kind is TopicKind.DELTA:
            _host(engine, topic.hub(), plan)


def _sink(engine: Engine, plan: SinkPlan, *, numbering: str, writer: TopicWriter) -> Sink:
    def open_writer(*, url: str | None, api_key: str | None, ca: str | None) -> TopicWriter:
        if url is None:
            return writer
        if engine.open_writer is None:
            raise Unsupported(f"sink {plan.name}: this node cannot reach others; leave out url")
        return engine.open_writer(url=url, api_key=api_key, ca=ca)

    return registry.build(plan.table, pipeline=numbering, open_writer=open_writer)


def _host(engine: Engine, hub: Hub, plan: SinkPlan) -> None:
    identity, config = engine.identity, hub.topic.config
    numbering = f"live-{identity.cluster_uuid or identity.replica_uuid}-{config.id}"
    writer = EngineTopicWriter(engine)
    sink = _sink(engine, plan, numbering=numbering, writer=writer)
    hosted = HostedSink(
        hub,
        sink,
        routes=plan.routes,
        options=plan.options,
        pipeline=lambda partition: f"{numbering}-{partition}",
        box=LetterBox(writer=writer, create=writer.create),
        spawn=engine.spawn,
    )
    hub.sinks.append(hosted)
    hosted.start()
