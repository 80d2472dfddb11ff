"""What every stage shares: its size, its server, its payloads."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.cli.connect import create_topic
from penstock.testing.process import ServerProcess, server_process

PAYLOAD_BYTES: Final = 200
BATCH: Final = 100
TOPIC: Final = "bench"
PAYLOADS_DISTINCT: Final = 1000

Values = dict[str, float]
Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of one stage: how much work, where, and whom to tell how it goes."""

    folder: Path
    scale: float = 1.0  # 0.1 for a quick look
    runs: int = 1  # only the backlog stage, which fills once, runs by itself

    def count(self, full: int, *, step: int = BATCH) -> int:
        """`full` scaled, in whole steps."""
        return max(step, round(full * self.scale) // step * step)


Stage = Callable[[Run], Awaitable[list[Values]]]


@asynccontextmanager
async def fresh_server(run: Run) -> AsyncIterator[ServerProcess]:
    """A server on an empty folder with the stage's topic in it."""
    from penstock.client.connection import open_connection

    with tempfile.TemporaryDirectory(prefix="bench-", dir=run.folder) as folder:
        async with server_process(Path(folder) / "data") as server:
            connection = await open_connection(server.url)
            await create_topic(connection, name=TOPIC)
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


def payloads(count: int = PAYLOADS_DISTINCT) -> list[bytes]:
    """Payloads that do not compress and are not all the same."""
    block = os.urandom(PAYLOAD_BYTES * count)
    return [block[at : at + PAYLOAD_BYTES] for at in range(0, len(block), PAYLOAD_BYTES)]


async def ready_count(connection: Any, topic: str = TOPIC) -> int:
    stats = await connection.call("stats", topic=topic)
    return int(stats["topics"][0]["ready"])
