"""Messages for people and calls: read from the log, as maps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from penstock.errors import InvalidArgument, NotFound
from penstock.model.columns import Columns
from penstock.model.delivery import DELIVERY
from penstock.model.ids import MessageId
from penstock.node.atomic import committed
from penstock.node.partition import Partition
from penstock.node.topic import Topic


def bounded(value: int, low: int, high: int, field: str) -> int:
    if not low <= value <= high:
        raise InvalidArgument(f"{field} must be from {low} to {high}", field=field, limit=high)
    return value


def locate(topic: Topic, message_id: str) -> tuple[int, int]:
    """Partition and sequence of a message."""
    place = MessageId.parse(message_id)
    if place.topic != topic.config.id or place.partition >= len(topic.partitions):
        raise NotFound(f"no message {message_id} in this topic", message_id=message_id)
    return place.partition, place.sequence


async def all_committed(topic: Topic, partitions: list[Partition]) -> None:
    """Wait until all that was seen is committed: nothing is shown that could still be lost."""
    topic.wake()
    await asyncio.gather(*(committed(p, p.log.sequence_last) for p in partitions))


async def read_messages(topic: Topic, places: list[tuple[Partition, int]]) -> list[dict[str, Any]]:
    """Messages in the order asked for."""
    by_partition: dict[Partition, list[int]] = {}
    for partition, sequence in places:
        by_partition.setdefault(partition, []).append(sequence)
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for partition, sequences in by_partition.items():
        rows = await asyncio.to_thread(partition.reader.load, sequences)
        attempts = partition.heap.attempts(np.array(sequences, np.uint64))
        columns = DELIVERY.decode(rows.encode(attempts), len(sequences))
        for row in messages_in(topic, partition.index, columns):
            found[partition.index, row["sequence"]] = row
    return [found[partition.index, sequence] for partition, sequence in places]


def messages_in(topic: Topic, partition: int, columns: Columns) -> Iterable[dict[str, Any]]:
    payloads = columns.binary("payload")
    keys, headers = columns.binary("key"), columns.binary("headers")
    for i, sequence in enumerate(columns.fixed("message").tolist()):
        time_ms = int(columns.fixed("time_ms")[i])
        packed = b"" if headers is None else headers[i]
        yield {
            "message_id": str(MessageId(time_ms, topic.config.id, partition, sequence)),
            "partition": partition,
            "sequence": sequence,
            "priority": int(columns.fixed("priority")[i]),
            "attempts": int(columns.fixed("attempts")[i]),
            "time_ms": time_ms,
            "key": b"" if keys is None else keys[i],
            "headers": msgspec.msgpack.decode(packed) if packed else {},
            "payload": b"" if payloads is None else payloads[i],
        }
