"""Calls about the live path: who is sent what, how far they are, and their durable cursors."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.errors import FailedPrecondition, NotFound
from penstock.model.topic import TopicKind
from penstock.node.calls import Arguments, Caller, TopicArguments, method
from penstock.node.engine import Engine
from penstock.node.live.cursors import check_name
from penstock.node.partition import Partition
from penstock.node.shares import fan_out, merged, shared
from penstock.node.topic import Topic


class LiveStatusArguments(Arguments, frozen=True):
    topic: str | None = None


class CursorArguments(TopicArguments, frozen=True):
    name: str


def delta_topic(engine: Engine, name: str) -> Topic:
    topic = engine.topic(name)
    if topic.config.kind is not TopicKind.DELTA:
        raise FailedPrecondition(f"{name} is no delta topic", topic=name)
    return topic


@method(LiveStatusArguments)
async def live_status(engine: Engine, _: Caller, a: LiveStatusArguments) -> dict[str, Any]:
    """Active partitions, subscriptions and sinks of the delta topics, at their coordinators."""
    if a.topic is not None:
        chosen = [delta_topic(engine, a.topic)]
    else:
        found = [engine.topics[name] for name in sorted(engine.topics)]
        chosen = [topic for topic in found if topic.config.kind is TopicKind.DELTA]
    return {"topics": await asyncio.gather(*(_topic_status(engine, topic) for topic in chosen))}


async def _topic_status(engine: Engine, topic: Topic) -> dict[str, Any]:
    results = await fan_out(engine, topic, live_status_share)
    rows = ("partitions", "subscriptions", "sinks")
    return {
        "topic": topic.config.name,
        "ingest": [row for result in results for row in result["ingest"]],
        **{name: merged(results, name) for name in rows},
    }


@shared()
async def live_status_share(
    engine: Engine, topic: Topic, partitions: list[Partition], _: dict[str, Any]
) -> dict[str, Any]:
    ingest = []
    if topic.ingesting is not None:
        ingest = [{"node": engine.identity.node, **topic.ingesting.status()}]
    if topic.live is None:
        return {"ingest": ingest, "partitions": [], "subscriptions": [], "sinks": []}
    wanted = {partition.index for partition in partitions}
    found = {
        name: [row for row in rows if row["partition"] in wanted]
        for name, rows in topic.live.status().items()
    }
    return {"ingest": ingest, **found}


@method(TopicArguments)
async def cursor_list(engine: Engine, _: Caller, a: TopicArguments) -> dict[str, Any]:
    """The durable cursors of a topic: of named subscribers, and of sinks."""
    topic = delta_topic(engine, a.topic)
    return {"cursors": await engine.cursors.list(topic.config.id)}


@method(CursorArguments, audited=True)
async def cursor_delete(engine: Engine, _: Caller, a: CursorArguments) -> dict[str, Any]:
    """Forget a cursor. Who uses it at the moment goes on, and will write it again."""
    topic = delta_topic(engine, a.topic)
    check_name(a.name)
    deleted = await engine.cursors.delete(topic.config.id, a.name)
    if not deleted:
        raise NotFound(f"topic {a.topic} has no cursor {a.name}", topic=a.topic)
    return {"deleted": deleted}
