"""From the tables of `[[live.sink]]` to sinks that follow the topics of this node."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from penstock.errors import InvalidArgument, PenstockError, Unsupported
from penstock.model.topic import NAME, TopicKind
from penstock.node.engine import Engine
from penstock.node.hosted.sink import HostedOptions, HostedSink
from penstock.node.live.hub import Hub
from penstock.node.serve.intake import enqueue
from penstock.node.serve.topic import ServedTopic
from penstock.propagation.flow.route import DeltaRoute, Routes
from penstock.sinks.protocol import Items, Part, Sink, TopicWriter, build_sink, item_requests
from penstock.sinks.topics import LetterBox, letters_config
from penstock.wire.messages import Enqueue, Enqueued
from penstock.wire.messages import Part as WirePart


class SinkPlan(msgspec.Struct, frozen=True, kw_only=True):
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
    routes = tuple(DeltaRoute.parse(text) for text in texts)
    return SinkPlan(topic=topic, name=name, routes=routes, options=options, table=table)


def check_sinks(engine: Engine) -> None:
    """Raise unless every sink of the configuration can be made. None is opened."""
    for plan in plans(engine.config.live.sink):
        _sink(engine, plan, numbering="", writer=EngineTopicWriter(engine))
    # Arrow loads pandas, where it is there, with the first scalar: a second or more that the node
    # has before it serves, and that the first change would have to wait for.
    pa.scalar(0)


def host_sinks(engine: Engine, topic: ServedTopic) -> None:
    for plan in plans(engine.config.live.sink):
        if plan.topic == topic.config.name and topic.config.kind is TopicKind.DELTA:
            _host(engine, engine.hub(topic), plan)


def _sink(engine: Engine, plan: SinkPlan, *, numbering: str, writer: TopicWriter) -> Sink:
    def open_writer(*, url: str | None, api_key: str | None, ca: str | None) -> TopicWriter:
        if url is None:
            return writer
        if engine.open_writer is None:
            raise Unsupported(f"sink {plan.name}: this node cannot reach others; leave out url")
        return engine.open_writer(url=url, api_key=api_key, ca=ca)

    return build_sink(plan.table, pipeline=numbering, open_writer=open_writer)


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
        numbering=numbering,
        box=LetterBox(writer=writer, create=writer.create),
        spawn=engine.spawn,
    )
    hub.sinks.append(hosted)
    hosted.start()


class EngineTopicWriter:
    """`penstock.sinks.protocol.TopicWriter` without a connection. Not for the loop's own thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()

    def append(
        self, topic: str, *, producer: str, epoch: int, items: Items, partition: int
    ) -> None:
        if not len(items):
            return
        config = self._engine.topics[topic].config
        appended = item_requests(items, config, producer=producer, epoch=epoch, partition=partition)
        for parts in appended:
            asyncio.run_coroutine_threadsafe(self._enqueue(topic, parts), self._loop).result()

    async def _enqueue(self, topic: str, parts: list[Part]) -> None:
        control = Enqueue(topic, [WirePart(p, n, len(body)) for p, n, body in parts])
        answered: asyncio.Future[Enqueued] = self._loop.create_future()

        def reply(result: object) -> None:
            if answered.done():
                return
            if isinstance(result, PenstockError):
                answered.set_exception(result)
            elif isinstance(result, Enqueued):
                answered.set_result(result)

        data = memoryview(b"".join([bytes(body) for _, _, body in parts]))
        limit = self._engine.config.limits.raw_bytes_max
        enqueue(self._engine.topics[topic], control, data, reply, raw_bytes_max=limit)
        await answered

    def create(self, topic: str) -> None:
        work = self._engine.administration.create_topic(letters_config(topic), exists_ok=True)
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """The engine goes on."""
