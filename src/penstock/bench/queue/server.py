"""A server that has nothing but the stage's topic, and the time that it works."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from penstock.bench.stages import Run
from penstock.testing.process import ServerProcess, server_process

TOPIC: Final = "bench"


@asynccontextmanager
async def fresh_server(run: Run) -> AsyncIterator[ServerProcess]:
    """A server on an empty folder with the stage's topic in it."""
    from penstock.client.network.endpoints import open_connection

    async with server_process(run.folder / "data") as server:
        connection = await open_connection(server.url)
        await connection.call("topic_create", config={"name": TOPIC})
        await connection.close()
        yield server


@dataclass
class Meter:
    """Wall-clock and server CPU time over a stretch of work."""

    server: ServerProcess
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def __enter__(self) -> Meter:
        self._cpu = self.server.cpu_seconds()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._began
        self.cpu_seconds = self.server.cpu_seconds() - self._cpu
