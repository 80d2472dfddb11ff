"""`penstock key`: create, list and revoke API keys, on a node or on a folder at rest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from penstock.cli.command import Answer, Force, Invocation, command, group, pairs_of
from penstock.cli.node import ConfigFile, Options
from penstock.console import Columns, listing, when

app = group()
KEY: Final[Columns] = {
    "id": "id", "name": "name", "created": lambda key: when(key["created_ms"]),
    "last used": lambda key: when(key["last_used_ms"]),
    "revoked": lambda key: when(key["revoked_ms"]),
}  # fmt: skip


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
        made = await cli.call("key_create", name=name)
    return Answer(made, f"{made['key']}\nKeep it: it is not shown again.")


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
    found = await cli.listed("key_list", "keys")
    return Answer(found, lambda found: listing(found["keys"], KEY))


@command(app, "revoke")
async def revoke(
    cli: Invocation,
    id: Annotated[str, typer.Argument(help="The key's id.")],
    force: Force = False,
) -> Answer:
    """Revoke a key; who uses it is refused from then on."""
    await cli.destroy("key_revoke", id=id, question=f"Revoke key {id}?", force=force)
    return Answer({"revoked": id}, f"key {id} is revoked")
