"""`penstock topic`: make, show, change and delete topics."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.command import (
    Answer,
    Force,
    Invocation,
    command,
    destroyed,
    group,
    listed,
    values_of,
)
from penstock.cli.output import duration, size, table
from penstock.console import cell
from penstock.errors import InvalidArgument

app = group()

Name = Annotated[str, typer.Argument(help="The topic's name.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="An attribute as name=value; may be repeated.", metavar="NAME=VALUE"
    ),
]


@command(app, "create")
async def create(
    cli: Invocation,
    name: Name,
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
    async with cli.connection() as connection:
        config = await connection.call("topic_create", config=fields, exists_ok=exists_ok)
    return Answer(document=config, view=lambda: config_table(config))


@command(app, "list")
async def list_topics(cli: Invocation) -> Answer:
    """List all topics."""
    async with cli.connection() as connection:
        found = await listed(connection, "topic_list", "topics")
    names = ("name", "kind", "mode", "partitions", "k", "max_retries", "paused")
    return Answer(
        document=found,
        view=lambda: table(
            "topic", "kind", "mode", ">partitions", ">k", ">retries", "paused",
            rows=[[config[name] for name in names] for config in found["topics"]],
        ),
    )  # fmt: skip


@command(app, "show")
async def show(cli: Invocation, name: Name) -> Answer:
    """Show a topic's configuration."""
    async with cli.connection() as connection:
        config = await connection.call("topic_get", topic=name)
    return Answer(document=config, view=lambda: config_table(config))


@command(app, "update")
async def update(cli: Invocation, name: Name, settings: Settings = None) -> Answer:
    """Change a topic's attributes while it runs."""
    changes = values_of(settings, option="set")
    if not changes:
        raise InvalidArgument("nothing to change: say --set name=value", field="set")
    async with cli.connection() as connection:
        config = await connection.call("topic_update", topic=name, changes=changes)
    return Answer(document=config, view=lambda: config_table(config))


@command(app, "delete")
async def delete(
    cli: Invocation,
    name: Name,
    force: Force = False,
) -> Answer:
    """Delete a topic with all its messages."""
    question = f"Delete topic {name} with all its messages?"
    await destroyed(cli, "topic_delete", name, question=question, force=force)
    return Answer(document={"deleted": name}, view=f"topic {name} is deleted")


@command(app, "purge")
async def purge(
    cli: Invocation,
    name: Name,
    force: Force = False,
) -> Answer:
    """Drop a topic's ready and delayed messages; the topic stays."""
    question = f"Drop every ready and delayed message of {name}?"
    result = await destroyed(cli, "purge", name, question=question, force=force)
    return Answer(document=result, view=f"{cell(result['purged'])} messages are gone")


def config_table(config: dict[str, Any]) -> Any:
    def shown(name: str, value: Any) -> Any:
        if name.endswith("_ms") or "_ms_" in name:
            return duration(value)
        return size(value) if name.endswith("bytes_max") else value

    return table("attribute", ">value", rows=[(n, shown(n, v)) for n, v in config.items()])
