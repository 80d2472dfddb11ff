"""`penstock dlq`: look at dead letters, replay them, delete them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.command import Answer, Invocation, command, group
from penstock.cli.connect import confirmation
from penstock.cli.output import cell, preview, table, when
from penstock.errors import InvalidArgument

app = group("Dead letters: list, replay, delete.")

Topic = Annotated[str, typer.Argument(help="The topic's name.")]
Ids = Annotated[list[str] | None, typer.Argument(help="Message ids.")]
All = Annotated[bool, typer.Option("--all", help="Every dead letter of the topic.")]


@command(app, "list")
async def list_dead(
    cli: Invocation,
    topic: Topic,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1)] = 100,
    after: Annotated[str | None, typer.Option(help="Go on at this cursor.")] = None,
) -> Answer:
    """List dead letters with the reason of their death."""
    page = {"limit": limit} if after is None else {"limit": limit, "after": after}
    async with cli.connection() as connection:
        found = await connection.call("dlq_list", topic=topic, **page)
    return Answer(document={"topic": topic, **found}, view=lambda: dead_table(found))


@command(app, "replay")
async def replay(
    cli: Invocation,
    topic: Topic,
    ids: Ids = None,
    everything: All = False,
    limit: Annotated[int | None, typer.Option(help="At most this many.", min=1)] = None,
) -> Answer:
    """Make dead letters ready again, with their attempts at zero."""
    asked: dict[str, Any] = _chosen(ids, everything)
    if limit is not None:
        asked["limit"] = limit
    async with cli.connection() as connection:
        result = await connection.call("dlq_replay", topic=topic, **asked)
    return Answer(document=result, view=f"{cell(result['replayed'])} messages are ready again")


@command(app, "delete")
async def delete(
    cli: Invocation,
    topic: Topic,
    ids: Ids = None,
    everything: All = False,
    force: Annotated[bool, typer.Option("--force", help="Do not ask.")] = False,
) -> Answer:
    """Delete dead letters for good."""
    asked = _chosen(ids, everything)
    which = f"{len(ids)} dead letters" if ids else "every dead letter"
    async with cli.connection() as connection:
        await connection.call("topic_get", topic=topic)
        cli.confirm(f"Delete {which} of {topic}?", force=force)
        granted = await confirmation(connection, "dlq_delete", topic)
        result = await connection.call("dlq_delete", topic=topic, **asked, **granted)
    return Answer(document=result, view=f"{cell(result['deleted'])} dead letters are gone")


def _chosen(ids: list[str] | None, everything: bool) -> dict[str, Any]:
    if bool(ids) == everything:
        raise InvalidArgument("name message ids, or say --all", field="message_ids")
    return {"message_ids": ids} if ids else {}


def dead_table(found: dict[str, Any]) -> Any:
    rows = [
        [
            m["message_id"], m["priority"], m["attempts"], when(m["dead_ms"]),
            m["reason"], m["detail"] or "", preview(m["payload"]),
        ]
        for m in found["messages"]
    ]  # fmt: skip
    made = table(
        "message", ">priority", ">attempts", "dead since", "reason", "detail", "payload", rows=rows
    )
    if found.get("next"):
        made.caption = f"more: --after {found['next']}"
    return made
