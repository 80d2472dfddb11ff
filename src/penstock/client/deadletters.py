"""A topic's dead letters: look at them, send them back, delete them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any, Generic, Protocol, TypeVar

from penstock.client.content import Content
from penstock.client.messages import DeadMessage, Message

T = TypeVar("T")
PAGE = 100


class Source(Protocol):
    """What the dead letters need of their topic."""

    name: str
    content: Content[Any]

    @property
    def id(self) -> int: ...

    async def ask(self, method: str, /, **arguments: Any) -> dict[str, Any]: ...

    async def confirmed(self, method: str, /, *, force: bool, **more: Any) -> dict[str, Any]: ...


Page = tuple[list[DeadMessage[T]], str | None]  # and the next page's cursor


class DeadLetters(Generic[T]):
    """Iterate over it for all of them, oldest first in each partition."""

    def __init__(self, topic: Source) -> None:
        self._topic = topic

    async def peek(self, limit: int = 10) -> list[DeadMessage[T]]:
        """The first few."""
        return (await self.list(limit=limit))[0]

    async def list(self, *, limit: int = PAGE, after: str | None = None) -> Page[T]:
        """A page, and the cursor of the next one (None: this was the last)."""
        answer = await self._topic.ask("dlq_list", after=after, limit=limit)
        return [self._dead(fields) for fields in answer["messages"]], answer.get("next")

    async def __aiter__(self) -> AsyncIterator[DeadMessage[T]]:
        after: str | None = None
        while True:
            page, after = await self.list(after=after)
            for message in page:
                yield message
            if after is None:
                return

    async def replay(
        self, messages: Iterable[str | Message[T]] | None = None, *, limit: int | None = None
    ) -> int:
        """Make dead letters ready again, with no attempts counted; all of them unless named."""
        arguments = {"message_ids": _ids(messages), "limit": limit}
        given = {name: value for name, value in arguments.items() if value is not None}
        replayed: int = (await self._topic.ask("dlq_replay", **given))["replayed"]
        return replayed

    async def delete(
        self, messages: Iterable[str | Message[T]] | None = None, *, force: bool = False
    ) -> int:
        """Delete dead letters for good; all of them unless named. Needs `force=True`."""
        ids = _ids(messages)
        more = {} if ids is None else {"message_ids": ids}
        deleted: int = (await self._topic.confirmed("dlq_delete", force=force, **more))["deleted"]
        return deleted

    def _dead(self, fields: dict[str, Any]) -> DeadMessage[T]:
        return DeadMessage(self._topic.content, fields, topic=self._topic.id)


def _ids(messages: Iterable[str | Message[Any]] | None) -> Any:
    if messages is None:
        return None
    return [item if isinstance(item, str) else item.id for item in messages]
