"""Two million ready messages, `kill -9`, and the time until a new process has them all."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from penstock.bench.queue.native import fill
from penstock.bench.queue.server import TOPIC, fresh_server
from penstock.bench.stages import Run, Values
from penstock.errors import Corruption, PenstockError
from penstock.testing.process import ServerProcess

MESSAGES: Final = 2_000_000
RECOVER_S_MAX: Final = 120.0


async def backlog(run: Run) -> list[Values]:
    """Fill once, then kill and restart `run.runs` times."""
    from penstock.client.network.endpoints import open_connection

    count = run.count(MESSAGES)
    async with fresh_server(run) as server:
        connection = await open_connection(server.url)
        await fill(connection, count)
        await connection.close()
        return [await _recover(server, count) for _ in range(run.runs)]


async def _recover(server: ServerProcess, count: int) -> Values:
    await server.kill()
    began = time.perf_counter()
    await server.start()
    ready = await _all_ready(server, count, deadline=began + RECOVER_S_MAX)
    seconds = time.perf_counter() - began
    if ready != count:
        raise Corruption(f"{ready} of {count} messages are ready after recovery")
    return {"backlog_2m_recover_s": seconds, "backlog_2m_rss_mb": server.rss_bytes() / 1e6}


async def _all_ready(server: ServerProcess, count: int, *, deadline: float) -> int:
    """How many are ready, asked until it is all of them or time is up."""
    from penstock.client.network.endpoints import open_connection

    ready = 0
    while time.perf_counter() < deadline:
        try:
            connection = await open_connection(server.url)
            ready = (await connection.call("stats", topic=TOPIC))["topics"][0]["ready"]
            await connection.close()
        except PenstockError as error:
            if not error.retryable:
                raise
        if ready == count:
            break
        await asyncio.sleep(0.02)
    return ready
