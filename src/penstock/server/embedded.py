"""A node inside the caller's process: the same engine and the same protocol, without a socket."""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.client.network.connection import Connection
from penstock.client.network.exchange import memory_pair
from penstock.config import Config
from penstock.node.clock import Clock
from penstock.node.engine import Engine
from penstock.node.lifecycle import running_engine
from penstock.node.session.session import Session
from penstock.server.sink_writer import open_writer


async def connect_within(session: Session, api_key: str | None, *, client: str) -> Connection:
    connection = Connection(api_key=api_key, client=client)
    memory_pair(connection, session)
    await connection.greeted()
    return connection


class EmbeddedNode:
    """An engine that hands out in-process connections, alone: its folder is locked while it runs.

    It starts when it is first asked for a connection. Close it when done."""

    def __init__(
        self, config: Config, *, clock: Clock | None = None, api_key: str | None = None
    ) -> None:
        self._config, self._clock, self._api_key = config, clock, api_key
        self._stop = asyncio.Event()
        self._started: asyncio.Future[Engine] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def engine(self) -> Engine:
        assert self._started is not None
        return self._started.result()

    async def start(self) -> None:
        # The engine's task group must be left by the task that entered it, and whoever opens and
        # closes this node need not be one task: so the engine lives in a task of its own.
        if self._started is None or (self._started.done() and self._started.exception()):
            self._started = asyncio.get_running_loop().create_future()
            running = self._run(self._started)
            self._task = asyncio.create_task(running, name="penstock-embedded")
        await asyncio.shield(self._started)

    async def _run(self, started: asyncio.Future[Engine]) -> None:
        try:
            async with running_engine(
                self._config, clock=self._clock, open_writer=open_writer
            ) as engine:
                started.set_result(engine)
                await self._stop.wait()
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    async def connect(self, api_key: str | None = None) -> Connection:
        await self.start()
        key = api_key or self._api_key
        return await connect_within(Session(self.engine), key, client="penstock-embedded")

    async def close(self) -> None:
        self._stop.set()
        if self._task is not None:
            await self._task


def config_of(folder: Path | str) -> Config:
    """The configuration of a node that only this process uses."""
    return Config(data=Path(folder), drain_s=5.0)


async def open_embedded(
    path: Path | str, *, clock: Clock | None = None, config: Config | None = None
) -> EmbeddedNode:
    node = EmbeddedNode(config or config_of(path), clock=clock)
    await node.start()
    return node
