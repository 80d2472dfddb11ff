"""What both listeners of the gateway do alike for those who call."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable
from typing import Final

from penstock.errors import Backpressure, Unavailable
from penstock.node.door.doorway import Doorway
from penstock.node.door.tls_link import TlsLink

REQUESTS_MAX: Final = 4096  # calls in progress at one listener
HEAD_S: Final = 10.0  # until a request's headers are there


async def listen(
    connection: Callable[[], asyncio.Protocol],
    *,
    host: str,
    port: int | None,
    doorway: Doorway,
    tls: ssl.SSLContext | None,
) -> tuple[asyncio.Server, int]:
    """Accept callers; returns the real port too, for 0 takes any that is free."""

    def accept() -> asyncio.BaseProtocol:
        return connection() if tls is None else TlsLink(tls, connection, doorway)

    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(accept, host, port, backlog=1024)
    except OSError as error:
        raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return server, int(server.sockets[0].getsockname()[1])


def key_id_of(api_key: str | None) -> str | None:
    """The part of a key that is no secret, by which all connections of its owner are counted."""
    return api_key.split("_")[1] if api_key and api_key.count("_") > 1 else None


def retry_after_s(error: Backpressure) -> int:
    """When to come back, in the whole seconds that a header has."""
    return max(1, math.ceil(error.retry_after_s))
