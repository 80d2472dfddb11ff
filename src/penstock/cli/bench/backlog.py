"""Two million ready messages, `kill -9`, and the time until a new process has them all."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from penstock.cli.bench.native import fill
from penstock.cli.bench.stages import Run, Values, fresh_server, ready_count
from penstock.cli.output import progress
from penstock.errors import Corruption, PenstockError
from penstock.testing.process import ServerProcess

MESSAGES: Final = 2_000_000
FILL_STEP: Final = 50_000
RECOVER_S_MAX: Final = 120.0


async def backlog(run: Run) -> list[Values]:
    """Fill once, then kill and restart `run.runs` times."""
    from penstock.client.connection import open_connection

    count = run.count(MESSAGES)
    async with fresh_server(run) as server:
        connection = await open_connection(server.url)
        with progress("backlog", total=count, unit="messages") as advance:
            for done in range(0, count, FILL_STEP):
                await fill(connection, min(FILL_STEP, count - done))
                advance(min(done + FILL_STEP, count))
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
    from penstock.client.connection import open_connection

    ready = 0
    while time.perf_counter() < deadline:
        try:
            connection = await open_connection(server.url)
            ready = await ready_count(connection)
            await connection.close()
        except PenstockError as error:
            if not error.retryable:
                raise
        if ready == count:
            break
        await asyncio.sleep(0.02)
    return ready
