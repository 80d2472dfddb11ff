"""A topic as all its parts know it.

The consumers, readers and dead letters of a topic share one `TopicHandle`: the link, the type of
the values, the configuration as last heard of, and the calls about the topic.
"""

from __future__ import annotations

import asyncio
from typing import Any, Generic, TypeVar

import msgspec

from penstock.client.network.link import Link
from penstock.client.queue.entries import Content, ProducerIdentity
from penstock.client.queue.producer import Producer
from penstock.client.queue.settler import Settler
from penstock.model.topic import TopicConfig

T = TypeVar("T")


class TopicHandle(Generic[T]):
    """One topic. It is opened, and created if `create` says so, at its first use.

    `wanted` are the attributes for its creation."""

    def __init__(
        self,
        link: Link,
        name: str,
        *,
        content: Content[T],
        identity: ProducerIdentity,
        create: bool,
        wanted: dict[str, Any],
    ) -> None:
        self.link, self.name, self.content = link, name, content
        self.settler = Settler(link, name)
        self.producer: Producer | None = None  # None: the topic was not opened yet, or is gone
        self._identity, self._create, self._wanted = identity, create, wanted
        self._opening = asyncio.Lock()

    async def opened(self) -> Producer:
        """Make sure that the topic exists and that its configuration is known."""
        if self.producer is None:
            async with self._opening:
                if self.producer is None:
                    self.producer = Producer(self.link, await self._found(), self._identity)
        return self.producer

    async def _found(self) -> TopicConfig:
        if self._create:
            wanted = {"name": self.name, **self._wanted}
            answer = await self.link.call("topic_create", config=wanted, exists_ok=True)
        else:
            answer = await self.ask("topic_get")
        return msgspec.convert(answer, TopicConfig)

    @property
    def config(self) -> TopicConfig:
        if self.producer is None:
            raise RuntimeError(f"topic {self.name} was not opened yet: await it first")
        return self.producer.config

    async def ask(self, method: str, /, **arguments: Any) -> dict[str, Any]:
        """A call about this topic."""
        return await self.link.call(method, topic=self.name, **arguments)

    async def confirmed(self, method: str, /, *, force: bool, **more: Any) -> dict[str, Any]:
        """A destructive call, with the confirmation that it needs."""
        if force:
            granted = await self.link.call("confirm", method=method, subject=self.name)
            more["confirm"] = granted["confirm"]
        return await self.ask(method, force=force, **more)
