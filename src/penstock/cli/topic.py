"""`penstock topic`: make, show, change and delete topics; `penstock stats`: how full they are, and
how fast they move."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer

from penstock.cli.command import (
    Answer,
    Force,
    Interval,
    Invocation,
    Rounds,
    TopicName,
    Watch,
    command,
    group,
    listed,
    looked,
    values_of,
)
from penstock.console import Columns, cell, duration, listing, size, table
from penstock.errors import InvalidArgument

app = group()
topics = group()

TOPIC: Final[Columns] = {
    "topic": "name", "kind": "kind", "mode": "mode", ">partitions": "partitions", ">k": "k",
    ">retries": "max_retries", "paused": "paused",
}  # fmt: skip
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="An attribute as name=value; may be repeated.", metavar="NAME=VALUE"
    ),
]
Stats = dict[str, Any]
FILLED: Final[Columns] = {
    "topic": "name", ">ready": "ready", ">delayed": "delayed", ">leased": "leased", ">dead": "dead",
    ">oldest": lambda t: duration(t["oldest_age_ms"]) if t["ready"] else "–",
    ">enqueued": "enqueued_total", ">acked": "acked_total", ">retried": "retried_total",
}  # fmt: skip
PARTITION: Final[Columns] = {
    "topic": "topic", ">partition": "partition", ">epoch": "epoch", ">first": "sequence_first",
    ">committed": "sequence_committed", ">ready": "ready", ">delayed": "delayed",
    ">leased": "leased", ">dead": "dead", ">bytes": lambda part: size(part["bytes"]),
    ">segments": "segments",
}  # fmt: skip


@command(topics, "create")
async def create(
    cli: Invocation,
    name: TopicName,
    mode: Annotated[str, typer.Option(help="min or max: which priority goes first.")] = "min",
    partitions: Annotated[int, typer.Option(help="Partitions; fixed at creation.")] = 1,
    kind: Annotated[str, typer.Option(help="queue, or delta: changes of vectors.")] = "queue",
    dimensions: Annotated[int, typer.Option(help="Of a delta topic's vectors.")] = 0,
    settings: Settings = None,
    exists_ok: Annotated[bool, typer.Option(help="Be content with an equal topic.")] = False,
) -> Answer:
    """Create a topic."""
    fields = {
        "name": name,
        "mode": mode,
        "partitions": partitions,
        "kind": kind,
        "dimensions": dimensions,
        **values_of(settings, option="set"),
    }
    return Answer(await cli.call("topic_create", config=fields, exists_ok=exists_ok), config_table)


@command(topics, "list")
async def list_topics(cli: Invocation) -> Answer:
    """List all topics."""
    found = await cli.listed("topic_list", "topics")
    return Answer(found, lambda found: listing(found["topics"], TOPIC))


@command(topics, "show")
async def show(cli: Invocation, name: TopicName) -> Answer:
    """Show a topic's configuration."""
    return Answer(await cli.call("topic_get", topic=name), config_table)


@command(topics, "update")
async def update(cli: Invocation, name: TopicName, settings: Settings = None) -> Answer:
    """Change a topic's attributes while it runs."""
    changes = values_of(settings, option="set")
    if not changes:
        raise InvalidArgument("nothing to change: say --set name=value", field="set")
    return Answer(await cli.call("topic_update", topic=name, changes=changes), config_table)


@command(topics, "delete")
async def delete(cli: Invocation, name: TopicName, force: Force = False) -> Answer:
    """Delete a topic with all its messages."""
    question = f"Delete topic {name} with all its messages?"
    await cli.destroy("topic_delete", topic=name, question=question, force=force)
    return Answer({"deleted": name}, f"topic {name} is deleted")


@command(topics, "purge")
async def purge(cli: Invocation, name: TopicName, force: Force = False) -> Answer:
    """Drop a topic's ready and delayed messages; the topic stays."""
    question = f"Drop every ready and delayed message of {name}?"
    found = await cli.destroy("purge", topic=name, question=question, force=force)
    return Answer(found, f"{cell(found['purged'])} messages are gone")


def config_table(config: dict[str, Any]) -> Any:
    def shown(name: str, value: Any) -> Any:
        if name.endswith("_ms") or "_ms_" in name:
            return duration(value)
        return size(value) if name.endswith("bytes_max") else value

    return table("attribute", ">value", rows=[(n, shown(n, v)) for n, v in config.items()])


@command(app, "stats")
async def stats(
    cli: Invocation,
    topic: Annotated[str | None, typer.Argument(help="Only this topic.")] = None,
    watch: Watch = False,
    interval: Interval = 1.0,
    rounds: Rounds = None,
    partitions: Annotated[bool, typer.Option("--partitions", help="A row each.")] = False,
) -> Answer | None:
    """Show ready, delayed, leased and dead messages of topics and partitions."""
    subject = {} if topic is None else {"topic": topic}
    before: tuple[Stats, float] | None = None

    async def look() -> Answer:
        """To watch, with the rates since the look before."""
        nonlocal before
        found = await listed(connection, "stats", "topics", **subject)
        at, rates = time.monotonic(), dict[str, dict[str, float]]()
        if before is not None:
            rates = rates_of(before[0], found, at - before[1])
        before = found, at
        told = {**found, "rates": rates} if watch else found
        return Answer(told, lambda _: stats_view(found, partitions=partitions, rates=rates))

    async with cli.connection() as connection:
        return await looked(cli, look, watch=watch, interval_s=interval, rounds=rounds)


def rates_of(before: Stats, after: Stats, seconds: float) -> dict[str, dict[str, float]]:
    known = {topic["name"]: topic for topic in before["topics"]}
    return {
        topic["name"]: {
            name: (topic[f"{name}_total"] - known[topic["name"]][f"{name}_total"]) / seconds
            for name in ("enqueued", "acked")
        }
        for topic in after["topics"]
        if topic["name"] in known and seconds > 0
    }


def stats_view(
    found: Stats, *, partitions: bool = False, rates: dict[str, dict[str, float]] | None = None
) -> Any:
    from rich.console import Group

    def rate(name: str) -> Callable[[Stats], object]:
        return lambda t: round(speeds[t["name"]][name]) if t["name"] in speeds else "–"

    speeds = rates or {}
    columns = {**FILLED, ">in/s": rate("enqueued"), ">out/s": rate("acked")}
    topics = listing(found["topics"], columns)
    if not partitions:
        return topics
    parts = [part | {"topic": t["name"]} for t in found["topics"] for part in t["partitions"]]
    return Group(topics, listing(parts, PARTITION))
