"""A node inside the caller's process: the same engine and the same protocol, without a socket."""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.client.network.connection import Connection
from penstock.client.network.memory import memory_pair
from penstock.config import Config
from penstock.node.clock import Clock
from penstock.node.engine import Engine
from penstock.node.lifecycle import running_engine
from penstock.node.session.session import Session
from penstock.server.sink_writer import open_writer


async def connect_within(session: Session, api_key: str | None, *, client: str) -> Connection:
    """A connection to a session of this process."""
    connection = Connection(api_key=api_key, client=client)
    memory_pair(connection, session)
    await connection.greeted()
    return connection


class EmbeddedNode:
    """A running engine that hands out in-process connections. Close it when done."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self._started: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    @property
    def engine(self) -> Engine:
        return self._started.result()

    async def start(self, config: Config, clock: Clock | None) -> None:
        # The engine's task group must be left by the task that entered it, and whoever opens and
        # closes this node need not be one task: so the engine lives in a task of its own.
        self._task = asyncio.create_task(self._run(config, clock), name="penstock-embedded")
        await asyncio.shield(self._started)

    async def _run(self, config: Config, clock: Clock | None) -> None:
        try:
            async with running_engine(config, clock=clock, open_writer=open_writer) as engine:
                self._started.set_result(engine)
                await self._stop.wait()
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def connect(self, api_key: str | None = None) -> Connection:
        return await connect_within(Session(self.engine), api_key, client="penstock-embedded")

    async def close(self) -> None:
        self._stop.set()
        if self._task is not None:
            await self._task


async def open_embedded(
    path: Path | str, *, clock: Clock | None = None, config: Config | None = None
) -> EmbeddedNode:
    """Start a node in `path`, alone: the folder is locked while it runs."""
    node = EmbeddedNode()
    await node.start(config or Config(data=Path(path), drain_s=5.0), clock)
    return node
