"""One native connection for the length of a command."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.command import folder_of
from penstock.errors import NotFound, Unavailable

if TYPE_CHECKING:
    from penstock.client.client import Client
    from penstock.client.connection import Connection


def quiet_logs() -> None:
    """Errors alone, and to stderr: stdout is for the command's own answer."""
    from penstock.node.logs import configure

    configure("error")


@asynccontextmanager
async def connected(
    url: str, *, api_key: str | None = None, ca: Path | None = None
) -> AsyncIterator[Connection]:
    """Connect to the node at `url`; a folder's path runs the engine inside this process."""
    quiet_logs()
    folder = folder_of(url)
    if folder is None:
        async with _remote(url, api_key=api_key, ca=ca) as connection:
            yield connection
        return
    from penstock.server.embedded import open_embedded

    if not folder.is_dir():
        raise NotFound(f"no data folder at {folder}", folder=str(folder))
    node = await open_embedded(folder)
    try:
        connection = await node.connect(api_key=api_key)
        try:
            yield connection
        finally:
            await connection.close()
    finally:
        await node.close()


@asynccontextmanager
async def opened_client(
    url: str, *, api_key: str | None = None, ca: Path | None = None
) -> AsyncIterator[Client]:
    """The same as a client of the SDK, for commands that do more than call."""
    from penstock import connect

    quiet_logs()
    folder = folder_of(url)
    if folder is not None and not folder.is_dir():
        raise NotFound(f"no data folder at {folder}", folder=str(folder))
    async with connect(url, api_key, ca) as client:
        yield client


@asynccontextmanager
async def _remote(url: str, *, api_key: str | None, ca: Path | None) -> AsyncIterator[Connection]:
    from penstock.client.connection import open_connection

    try:
        connection = await open_connection(url, api_key=api_key, tls=ca)
    except Unavailable as error:
        raise Unavailable(
            f"{error.message}; start a node with `penstock serve`,"
            " or name a data folder with --url",
            url=url,
        ) from error
    try:
        yield connection
    finally:
        await connection.close()


async def create_topic(
    connection: Connection, *, exists_ok: bool = False, **config: Any
) -> dict[str, Any]:
    """Create a topic with the given attributes; its whole configuration."""
    return await connection.call("topic_create", config=config, exists_ok=exists_ok)


async def confirmation(connection: Connection, method: str, subject: str) -> dict[str, Any]:
    """The arguments that let one destructive call through."""
    granted = await connection.call("confirm", method=method, subject=subject)
    return {"force": True, "confirm": granted["confirm"]}
