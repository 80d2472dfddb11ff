"""Letters, which are quarantined deltas and dead letters, back from their queue to their topic.

They are leased, written to the topic that they came from and then acknowledged. The producer key is
made of the letter's place in its queue: whoever dies in between writes it again, and the node takes
it once. The pipeline may run meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from penstock.client.client import Client
from penstock.client.queue.leases import LeasedMessage
from penstock.errors import FailedPrecondition
from penstock.sinks.protocol import Items
from penstock.sinks.topics import PREFIX
from penstock.spark.source.access import NodeAccess, NodeTopicWriter

LEASED_MAX: Final = 500  # letters under way at once
Progress = Callable[[float, float | None], None]


def replay_letters(
    access: NodeAccess,
    queue: str,
    *,
    topic: str | None = None,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Empty `queue` into `topic`, or into the topic that each letter names."""
    sent = 0
    while messages := access.run(_lease(access.client, queue)):
        for (target, partition), some in _groups(messages, queue, topic).items():
            _append(access, target, queue, partition, some)
        for message in messages:
            access.run(message.ack())
        sent += len(messages)
        progress(sent, None)
    return {"queue": queue, "replayed": sent}


async def _lease(client: Client, queue: str) -> Sequence[LeasedMessage[bytes]]:
    return await client.topic(queue, create=False).pop(limit=LEASED_MAX)


def _groups(
    messages: Sequence[LeasedMessage[bytes]], queue: str, topic: str | None
) -> dict[tuple[str, int], list[LeasedMessage[bytes]]]:
    found = defaultdict(list)
    for message in sorted(messages, key=lambda message: message.sequence):
        target = topic or message.headers.get(f"{PREFIX}topic")
        if not target:
            raise FailedPrecondition(
                f"{queue} holds a message that does not say where it comes from: give --topic",
                field="topic",
            )
        found[str(target), message.partition].append(message)
    return found


def _append(
    access: NodeAccess,
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
    writer = NodeTopicWriter(lambda: access)
    writer.append(target, producer=producer, epoch=1, items=items, partition=partition)


def _headers(message: LeasedMessage[bytes]) -> bytes | None:
    """The headers that the delta came with, without what was added about its fate."""
    kept = {name: v for name, v in message.headers.items() if not name.startswith(PREFIX)}
    return msgspec.msgpack.encode(kept) if kept else None
