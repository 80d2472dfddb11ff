"""Messages as a reader sees them: peeked, read from the log, or among the dead letters."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from penstock.client.queue.entries import Content
from penstock.client.queue.handle import TopicHandle
from penstock.model.ids import MessageId
from penstock.model.plain import headers_of

T = TypeVar("T")
_UNSET: Any = object()


class Message(Generic[T]):
    """One message. `value` is decoded when it is first asked for."""

    __slots__ = (
        "_content", "_headers", "_topic", "_value", "attempts", "key", "partition", "payload",
        "priority", "sequence", "time_ms",
    )  # fmt: skip

    def __init__(
        self,
        content: Content[T],
        *,
        topic: int,
        partition: int,
        sequence: int,
        priority: int,
        attempts: int,
        time_ms: int,
        key: bytes,
        headers: bytes | Mapping[str, Any],
        payload: bytes,
    ) -> None:
        self._content, self._topic, self._headers = content, topic, headers
        self.partition, self.sequence = partition, sequence
        self.priority = priority
        self.attempts = attempts  # earlier deliveries that ended unfinished
        self.time_ms = time_ms  # when it was enqueued
        self.key, self.payload = key, payload
        self._value: Any = _UNSET

    @property
    def id(self) -> str:
        return str(MessageId(self.time_ms, self._topic, self.partition, self.sequence))

    @property
    def value(self) -> T:
        """The payload as the topic's type; raises `InvalidArgument` when it is not one."""
        if self._value is _UNSET:
            self._value = self._content.decode(self.payload)
        value: T = self._value
        return value

    @property
    def headers(self) -> Mapping[str, Any]:
        """What it was put with. In place of headers that cannot be read, as an old log may hold
        some, there is one, `penstock-unreadable`, that says why."""
        if isinstance(self._headers, bytes):
            self._headers = headers_of(self._headers)
        return self._headers

    @property
    def enqueued_at(self) -> datetime:
        return datetime.fromtimestamp(self.time_ms / 1000, UTC)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} priority={self.priority}>"


class DeadMessage(Message[T]):
    """A dead letter, with why and when it died."""

    __slots__ = ("dead_ms", "detail", "reason")

    def __init__(self, content: Content[T], fields: dict[str, Any]) -> None:
        super().__init__(content, **_common(fields))
        self.reason: str = fields.get("reason", "")
        self.detail: str = fields.get("detail", "")
        self.dead_ms: int = fields.get("dead_ms", 0)


def from_map(content: Content[T], fields: dict[str, Any]) -> Message[T]:
    """A message out of a call's answer."""
    return Message(content, **_common(fields))


def _common(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        # Not the id that this client knows the topic by: another may have its name by now.
        "topic": MessageId.parse(fields["message_id"]).topic,
        "partition": fields["partition"],
        "sequence": fields["sequence"],
        "priority": fields.get("priority", 0),
        "attempts": fields.get("attempts", 0),
        "time_ms": fields["time_ms"],
        "key": fields.get("key") or b"",
        "headers": fields.get("headers") or {},
        "payload": fields["payload"],
    }


PAGE = 100


Page = tuple[list[DeadMessage[T]], str | None]  # and the next page's cursor


class DeadLetters(Generic[T]):
    """Iterate over it for all of them, oldest first in each partition."""

    def __init__(self, topic: TopicHandle[T]) -> None:
        self._topic = topic

    async def peek(self, limit: int = 10) -> list[DeadMessage[T]]:
        """The first few."""
        return (await self.list(limit=limit))[0]

    async def list(self, *, limit: int = PAGE, after: str | None = None) -> Page[T]:
        """A page, and the cursor of the next one (None: this was the last)."""
        answer = await self._topic.ask("dlq_list", after=after, limit=limit)
        found = [DeadMessage(self._topic.content, fields) for fields in answer["messages"]]
        return found, answer.get("next")

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


def _ids(messages: Iterable[str | Message[Any]] | None) -> Any:
    if messages is None:
        return None
    return [item if isinstance(item, str) else item.id for item in messages]
