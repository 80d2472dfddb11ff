"""Enqueue bodies built straight from columns, for commands that have many equal messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.model.batch import SCHEMAS, Kind
from penstock.model.ids import MessageId

if TYPE_CHECKING:
    from penstock.client.connection import Connection
    from penstock.wire.messages import Enqueued


@dataclass(frozen=True, kw_only=True)
class Attributes:
    """What a command's messages have in common."""

    priority: int = 0
    key: bytes = b""
    delay_ms: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    max_retries: int | None = None


def body_of(payloads: Sequence[bytes], attributes: Attributes) -> bytes:
    """One ENQ body; an attribute that has its default costs no column."""
    count = len(payloads)
    columns: dict[str, Any] = {"payload": payloads}
    if attributes.priority:
        columns["priority"] = [attributes.priority] * count
    if attributes.delay_ms:
        columns["delay_ms"] = [attributes.delay_ms] * count
    if attributes.max_retries is not None:
        columns["max_retries"] = [attributes.max_retries] * count
    if attributes.key:
        columns["key"] = [attributes.key] * count
    if attributes.headers:
        columns["headers"] = [msgspec.msgpack.encode(attributes.headers)] * count
    return SCHEMAS[Kind.ENQ].encode(count, columns)


def ids_of(answer: Enqueued, count: int) -> list[str]:
    """The message ids of a request's entries, in its order."""
    ids = [""] * count
    for placed in answer.placed:
        for i in range(placed.count):
            ids[placed.index + i] = str(
                MessageId(placed.time_ms, answer.topic, placed.partition, placed.sequence + i)
            )
    for same in answer.duplicates:
        ids[same.index] = str(MessageId(same.time_ms, answer.topic, same.partition, same.sequence))
    return ids


async def enqueue(
    connection: Connection, topic: str, payloads: Sequence[bytes], attributes: Attributes
) -> list[str]:
    """Enqueue the payloads wherever the node puts them; their ids once they are durable."""
    part = (0, len(payloads), body_of(payloads, attributes))
    answer = await connection.enqueue(topic, [part], partitioned=False)
    return ids_of(answer, len(payloads))
