"""The topics of this very node, as a sink's thread writes to them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.sinks.letters import letters_config
from penstock.sinks.protocol import Items
from penstock.sinks.requests import Part, item_requests
from penstock.wire.messages import Enqueue, Enqueued
from penstock.wire.messages import Part as WirePart

if TYPE_CHECKING:
    from penstock.node.engine import Engine


class EngineTopicWriter:
    """`penstock.sinks.protocol.TopicWriter` without a connection. Not for the loop's own thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()

    def append(
        self, topic: str, *, producer: str, epoch: int, items: Items, partition: int
    ) -> None:
        """Durable on return; what was appended before under the same keys is left as it is."""
        if not len(items):
            return
        config = self._engine.topic(topic).config
        appended = item_requests(items, config, producer=producer, epoch=epoch, partition=partition)
        for parts in appended:
            asyncio.run_coroutine_threadsafe(self._enqueue(topic, parts), self._loop).result()

    async def _enqueue(self, topic: str, parts: list[Part]) -> None:
        from penstock.node.intake import enqueue  # which needs the engine

        control = Enqueue(topic, [WirePart(p, n, len(body)) for p, n, body in parts])
        answered: asyncio.Future[Enqueued] = self._loop.create_future()

        def reply(result: object) -> None:
            if answered.done():
                return
            if isinstance(result, PenstockError):
                answered.set_exception(result)
            elif isinstance(result, Enqueued):
                answered.set_result(result)

        data = memoryview(b"".join([bytes(body) for _, _, body in parts]))
        enqueue(self._engine, control, data, reply)
        await answered

    def create(self, topic: str) -> None:
        """Make a topic for letters."""
        work = self._engine.create_topic(letters_config(topic), exists_ok=True)
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """The engine goes on."""
