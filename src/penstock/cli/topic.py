"""`penstock topic`: make, show, change and delete topics."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from penstock.cli.command import (
    Answer,
    Force,
    Invocation,
    TopicName,
    command,
    group,
    values_of,
)
from penstock.console import Columns, cell, duration, listing, size, table
from penstock.errors import InvalidArgument

app = group()

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


@command(app, "create")
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


@command(app, "list")
async def list_topics(cli: Invocation) -> Answer:
    """List all topics."""
    found = await cli.listed("topic_list", "topics")
    return Answer(found, lambda found: listing(found["topics"], TOPIC))


@command(app, "show")
async def show(cli: Invocation, name: TopicName) -> Answer:
    """Show a topic's configuration."""
    return Answer(await cli.call("topic_get", topic=name), config_table)


@command(app, "update")
async def update(cli: Invocation, name: TopicName, settings: Settings = None) -> Answer:
    """Change a topic's attributes while it runs."""
    changes = values_of(settings, option="set")
    if not changes:
        raise InvalidArgument("nothing to change: say --set name=value", field="set")
    return Answer(await cli.call("topic_update", topic=name, changes=changes), config_table)


@command(app, "delete")
async def delete(cli: Invocation, name: TopicName, force: Force = False) -> Answer:
    """Delete a topic with all its messages."""
    question = f"Delete topic {name} with all its messages?"
    await cli.destroy("topic_delete", topic=name, question=question, force=force)
    return Answer({"deleted": name}, f"topic {name} is deleted")


@command(app, "purge")
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
