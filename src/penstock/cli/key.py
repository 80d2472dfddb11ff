"""`penstock key`: create, list and revoke API keys, on a node or on a folder at rest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.command import (
    Answer,
    Force,
    Invocation,
    command,
    confirmation,
    group,
    listed,
    pairs_of,
)
from penstock.cli.node import ConfigFile, Options
from penstock.cli.output import table, when

app = group()


@command(app, "create")
async def create(
    cli: Invocation,
    name: Annotated[str, typer.Argument(help="What the key is for.")],
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Write it into the cluster's etcd itself: its first key.",
            metavar="etcd://HOST:PORT[,HOST:PORT]",
        ),
    ] = None,
    config: ConfigFile = None,
    options: Options = None,
) -> Answer:
    """Create a key. Its secret is shown this once."""
    if cluster is not None:
        settings = {"cluster.etcd": cluster.removeprefix("etcd://")}
        made = await _create_in_etcd(name, config, settings | pairs_of(options, option="set"))
    else:
        async with cli.connection() as connection:
            made = await connection.call("key_create", name=name)
    return Answer(document=made, view=f"{made['key']}\nKeep it: it is not shown again.")


async def _create_in_etcd(name: str, file: Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Make a key without asking a node, which would want one. Who can write to etcd may."""
    from penstock.cluster.keys import KeyRing
    from penstock.config import Config
    from penstock.node.lifecycle import cluster_store

    loaded = Config.load(file, overrides={"node": "cli", **settings})
    store = cluster_store(loaded.cluster)
    try:
        made = await KeyRing(store).create(name)
    finally:
        await store.close()
    return {**made.record.public(), "key": made.text}


@command(app, "list")
async def list_keys(cli: Invocation) -> Answer:
    """List keys: created, last used, revoked."""
    async with cli.connection() as connection:
        found = await listed(connection, "key_list", "keys")
    return Answer(document=found, view=lambda: key_table(found["keys"]))


@command(app, "revoke")
async def revoke(
    cli: Invocation,
    id: Annotated[str, typer.Argument(help="The key's id.")],
    force: Force = False,
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
