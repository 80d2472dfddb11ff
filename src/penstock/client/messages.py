"""Messages as a reader sees them: peeked, read from the log, or dead."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import msgspec

from penstock.client.content import Content
from penstock.model.ids import MessageId

T = TypeVar("T")
_UNSET: Any = object()
_headers = msgspec.msgpack.Decoder(dict[str, Any])


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
        if isinstance(self._headers, bytes):
            self._headers = _headers.decode(self._headers) if self._headers else {}
        return self._headers

    @property
    def enqueued_at(self) -> datetime:
        return datetime.fromtimestamp(self.time_ms / 1000, UTC)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} priority={self.priority}>"


class DeadMessage(Message[T]):
    """A dead letter, with why and when it died."""

    __slots__ = ("dead_ms", "detail", "reason")

    def __init__(self, content: Content[T], fields: dict[str, Any], *, topic: int) -> None:
        super().__init__(content, topic=topic, **_common(fields))
        self.reason: str = fields.get("reason", "")
        self.detail: str = fields.get("detail", "")
        self.dead_ms: int = fields.get("dead_ms", 0)


def from_map(content: Content[T], fields: dict[str, Any], *, topic: int) -> Message[T]:
    """A message out of a call's answer."""
    return Message(content, topic=topic, **_common(fields))


def _common(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "partition": fields["partition"],
        "sequence": fields["sequence"],
        "priority": fields.get("priority", 0),
        "attempts": fields.get("attempts", 0),
        "time_ms": fields["time_ms"],
        "key": fields.get("key") or b"",
        "headers": fields.get("headers") or {},
        "payload": fields["payload"],
    }
