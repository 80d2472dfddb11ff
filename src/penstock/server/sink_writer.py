"""Topics of other nodes, as the sinks that this node runs write to them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.client.client import Client
from penstock.client.network.endpoints import Remote
from penstock.client.options import Options
from penstock.model.topic import TopicConfig

if TYPE_CHECKING:
    from penstock.sinks.protocol import Items, TopicWriter
    from penstock.sinks.requests import Part

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
        from penstock.sinks.requests import item_requests  # and Arrow with it

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
    """How the sinks of a node reach another one: `penstock.sinks.registry.OpenWriter`."""
    assert url is not None, "a node writes to its own topics without a connection"
    return RemoteTopicWriter(url, api_key=api_key, ca=ca)
