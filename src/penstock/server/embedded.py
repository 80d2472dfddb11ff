"""A node inside the caller's process: the same engine and the same protocol, without a socket. And
the topics of other nodes, as the sinks that a node runs write to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.client.client import Client
from penstock.client.network.connection import Connection
from penstock.client.network.endpoints import Remote
from penstock.client.network.exchange import memory_pair
from penstock.client.options import Options
from penstock.config import Config
from penstock.model.topic import TopicConfig
from penstock.node.clock import Clock
from penstock.node.engine import Engine
from penstock.node.lifecycle import running_engine
from penstock.node.session.session import Session

if TYPE_CHECKING:
    from penstock.sinks.protocol import Items, Part, TopicWriter


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
    return Config(data=Path(folder), drain_s=5.0)


async def open_embedded(
    path: Path | str, *, clock: Clock | None = None, config: Config | None = None
) -> EmbeddedNode:
    node = EmbeddedNode(config or config_of(path), clock=clock)
    await node.start()
    return node


R = TypeVar("R")
# A sink has pauses and a breaker of its own: what does not pass soon is its business.
RETRY_S: Final = 1.0


class RemoteTopicWriter:
    """`penstock.sinks.protocol.TopicWriter` over a client on the node's own loop. It is used from
    a sink's thread, and connects when it is first needed, or needed again after `close`."""

    def __init__(self, url: str, *, api_key: str | None, ca: str | None) -> None:
        self._source = Remote(url, api_key=api_key, tls=ca, client="penstock-sink")
        self._loop = asyncio.get_running_loop()
        self._client: Client | None = None

    def append(
        self, topic: str, *, producer: str, epoch: int, items: Items, partition: int
    ) -> None:
        """Durable on return; what was appended before under the same keys is left as it is."""
        from penstock.sinks.protocol import item_requests  # and Arrow with it

        if not len(items):
            return
        config = self._run(self._config(topic))
        requests = item_requests(items, config, producer=producer, epoch=epoch, partition=partition)
        for parts in requests:
            self._run(self._enqueue(topic, parts))

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            self._run(client.close())

    def _run(self, work: Coroutine[Any, Any, R]) -> R:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # --- on the loop ---

    async def _connected(self) -> Client:
        if self._client is None:
            client = Client(self._source, Options(retry_s=RETRY_S, drain_s=1.0))
            await client.__aenter__()
            self._client = client
        return self._client

    async def _config(self, topic: str) -> TopicConfig:
        """As it was when the topic was first written to: only what never changes is used."""
        client = await self._connected()
        return (await client.topic(topic, bytes, create=False)).config

    async def _enqueue(self, topic: str, parts: list[Part]) -> None:
        """The bodies carry producer keys: they are sent again until they are answered."""
        client = await self._connected()
        await client.link.request(
            lambda connection: connection.enqueue(topic, parts), at=(topic, parts[0][0])
        )


def open_writer(*, url: str | None, api_key: str | None, ca: str | None) -> TopicWriter:
    """How the sinks of a node reach another one: `penstock.sinks.protocol.OpenWriter`."""
    assert url is not None, "a node writes to its own topics without a connection"
    return RemoteTopicWriter(url, api_key=api_key, ca=ca)
