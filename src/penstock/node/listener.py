"""The native listener: sessions on a TCP port, plain or with TLS."""

from __future__ import annotations

import asyncio
import ssl

from penstock.errors import Unavailable
from penstock.node.engine import Engine
from penstock.node.session import Session


async def listen(
    engine: Engine, *, host: str, port: int, tls: ssl.SSLContext | None
) -> asyncio.Server:
    """Accept native connections; the server tells its real port where 0 was asked for."""
    loop = asyncio.get_running_loop()
    try:
        return await loop.create_server(lambda: Session(engine), host, port, ssl=tls, backlog=1024)
    except OSError as error:
        raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def port_of(server: asyncio.Server) -> int:
    return int(server.sockets[0].getsockname()[1])
