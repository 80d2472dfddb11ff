"""Calls about one topic: look at it, change it, empty it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import msgspec

from penstock.client.content import Content
from penstock.client.link import Link
from penstock.client.messages import Message, from_map
from penstock.client.stats import TopicStats
from penstock.model.topic import TopicConfig

T = TypeVar("T")


class Administration(ABC, Generic[T]):
    """The administrative half of a topic."""

    def __init__(self, link: Link, name: str, content: Content[T]) -> None:
        self.link, self.name, self.content = link, name, content

    @property
    @abstractmethod
    def config(self) -> TopicConfig: ...

    @abstractmethod
    def _configure(self, config: TopicConfig | None) -> None:
        """Remember the configuration; None: the topic is gone."""

    @abstractmethod
    async def opened(self) -> Any: ...

    @property
    def id(self) -> int:
        return self.config.id

    async def peek(self, limit: int = 10) -> list[Message[T]]:
        """The best ready messages, without leasing them."""
        await self.opened()
        answer = await self.ask("peek", limit=limit)
        return [from_map(self.content, fields, topic=self.id) for fields in answer["messages"]]

    async def stats(self) -> TopicStats:
        answer = await self.ask("stats")
        return msgspec.convert(answer["topics"][0], TopicStats)

    async def update(self, /, **changes: Any) -> TopicConfig:
        """Change the topic's attributes while it runs."""
        config = msgspec.convert(await self.ask("topic_update", changes=changes), TopicConfig)
        self._configure(config)
        return config

    async def pause(self) -> None:
        """No deliveries until `resume`; puts and settling go on."""
        await self.update(paused=True)

    async def resume(self) -> None:
        await self.update(paused=False)

    async def move_to_dlq(self, message: str | Message[T], reason: str = "") -> None:
        """Move a message to the dead letters, whatever its state."""
        message_id = message if isinstance(message, str) else message.id
        await self.ask("move_to_dlq", message_id=message_id, reason=reason)

    async def purge(self, *, force: bool = False) -> int:
        """Drop all ready and delayed messages. Needs `force=True`."""
        purged: int = (await self.confirmed("purge", force=force))["purged"]
        return purged

    async def delete(self, *, force: bool = False) -> None:
        """Delete the topic with everything in it. Needs `force=True`."""
        await self.confirmed("topic_delete", force=force)
        self._configure(None)

    async def ask(self, method: str, /, **arguments: Any) -> dict[str, Any]:
        """A call about this topic."""
        return await self.call(method, topic=self.name, **arguments)

    async def confirmed(self, method: str, /, *, force: bool, **more: Any) -> dict[str, Any]:
        """A destructive call, with the confirmation that it needs."""
        if force:
            granted = await self.call("confirm", method=method, subject=self.name)
            more["confirm"] = granted["confirm"]
        return await self.ask(method, force=force, **more)

    async def call(self, method: str, /, **arguments: Any) -> dict[str, Any]:
        return await self.link.call(method, **arguments)
