"""Deltas that were set aside, back into the topic that they came from.

Quarantined deltas and dead letters wait in queue topics. They are leased, written to their topic
and then acknowledged. The producer key is made of the letter's place in its queue: whoever dies in
between writes it again, and the node takes it once.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from penstock.client.client import Client
from penstock.client.network.endpoints import Remote
from penstock.client.options import Options
from penstock.client.queue.leases import LeasedMessage
from penstock.errors import FailedPrecondition
from penstock.sinks.letters import PREFIX
from penstock.sinks.protocol import Items
from penstock.spark.source.access import NodeAccess, NodeTopicWriter

LEASED_MAX: Final = 500  # letters under way at once
EPOCH: Final = 1
TOPIC: Final = f"{PREFIX}topic"
Progress = Callable[[float, float | None], None]


async def replay_letters(
    access: NodeAccess,
    remote: Remote,
    queue: str,
    *,
    topic: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Empty `queue` into `topic`, or into the topic that each letter names."""
    sent = 0
    writer = NodeTopicWriter(lambda: access)
    async with Client(remote, Options()) as client:
        letters = client.topic(queue, create=False)
        while messages := await letters.pop(limit=LEASED_MAX):
            for (target, partition), some in _groups(messages, queue, topic).items():
                await asyncio.to_thread(_append, writer, target, queue, partition, some)
            for message in messages:
                await message.ack()
            sent += len(messages)
            if progress is not None:
                progress(sent, None)
    return {"queue": queue, "replayed": sent}


def _groups(
    messages: Sequence[LeasedMessage[bytes]], queue: str, topic: str | None
) -> dict[tuple[str, int], list[LeasedMessage[bytes]]]:
    """The letters by the topic they go to and the partition of the queue they come from."""
    found = defaultdict(list)
    for message in sorted(messages, key=lambda message: message.sequence):
        target = topic or message.headers.get(TOPIC)
        if not target:
            raise FailedPrecondition(
                f"{queue} holds a message that does not say where it comes from: give --topic",
                field="topic",
            )
        found[str(target), message.partition].append(message)
    return found


def _append(
    writer: NodeTopicWriter,
    target: str,
    queue: str,
    partition: int,
    messages: Sequence[LeasedMessage[bytes]],
) -> None:
    items = Items(
        sequences=np.array([message.sequence for message in messages], np.int64),
        payloads=pa.array([message.payload for message in messages], pa.binary()),
        priorities=np.array([message.priority for message in messages], np.int64),
        headers=pa.array([_headers(message) for message in messages], pa.binary()),
    )
    producer = f"penstock-letters-back-{queue}-{partition}"
    writer.append(target, producer=producer, epoch=EPOCH, items=items, partition=partition)


def _headers(message: LeasedMessage[bytes]) -> bytes | None:
    """The headers that the delta came with, without what was added about its fate."""
    kept = {name: v for name, v in message.headers.items() if not name.startswith(PREFIX)}
    return msgspec.msgpack.encode(kept) if kept else None
