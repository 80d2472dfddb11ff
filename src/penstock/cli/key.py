"""`penstock key`: create, list and revoke API keys, on a node or on a folder at rest."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.command import Answer, Invocation, command, group
from penstock.cli.connect import confirmation
from penstock.cli.output import table, when

app = group("API keys; --url may be a data folder that no node has open.")


@command(app, "create")
async def create(
    cli: Invocation, name: Annotated[str, typer.Argument(help="What the key is for.")]
) -> Answer:
    """Create a key. Its secret is shown this once."""
    async with cli.connection() as connection:
        made = await connection.call("key_create", name=name)
    return Answer(document=made, view=f"{made['key']}\nKeep it: it is not shown again.")


@command(app, "list")
async def list_keys(cli: Invocation) -> Answer:
    """List keys: created, last used, revoked."""
    async with cli.connection() as connection:
        found = await connection.call("key_list")
    return Answer(document=found, view=lambda: key_table(found["keys"]))


@command(app, "revoke")
async def revoke(
    cli: Invocation,
    id: Annotated[str, typer.Argument(help="The key's id.")],
    force: Annotated[bool, typer.Option("--force", help="Do not ask.")] = False,
) -> Answer:
    """Revoke a key; who uses it is refused from then on."""
    cli.confirm(f"Revoke key {id}?", force=force)
    async with cli.connection() as connection:
        granted = await confirmation(connection, "key_revoke", id)
        await connection.call("key_revoke", id=id, **granted)
    return Answer(document={"revoked": id}, view=f"key {id} is revoked")


def key_table(keys: list[dict[str, Any]]) -> Any:
    return table(
        "id", "name", "created", "last used", "revoked",
        rows=[
            [
                k["id"], k["name"], when(k["created_ms"]), when(k["last_used_ms"]),
                when(k["revoked_ms"]),
            ]
            for k in keys
        ],
    )  # fmt: skip
