"""End to end under an open loop: the producer keeps its schedule whatever the server does.

Twenty messages fall due every two milliseconds. Each carries the moment at which it *should* have
been put, so a stall counts against every message that had to wait for it, not only against the one
that met it.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import numpy as np

from penstock.bench.queue.server import TOPIC, fresh_server
from penstock.bench.stages import PAYLOAD_BYTES, Run, Times, Values, quantiles, warm
from penstock.errors import Unavailable

RATE_PER_S: Final = 10_000
SECONDS: Final = 6.0
TICK_S: Final = 0.002
BATCHES_HELD_MAX: Final = 50  # received and not yet acknowledged
GRACE_S: Final = 30.0
_STAMP: Final = struct.Struct("<d")
_FILL: Final = bytes(PAYLOAD_BYTES - _STAMP.size)


async def latency(run: Run) -> Values:
    import penstock

    count = run.count(int(RATE_PER_S * SECONDS))
    async with (
        fresh_server(run) as server,
        penstock.connect(server.url) as producer,
        penstock.connect(server.url) as consumer,
    ):
        out = await producer.topic(TOPIC, of=bytes)
        received = asyncio.create_task(receive(await consumer.topic(TOPIC, of=bytes), count))
        await _send(out, count)
        took = await in_time(received, count)
    return quantiles("end_to_end_ms", warm(took) * 1000)


async def _send(topic: Any, count: int) -> None:
    handful = round(RATE_PER_S * TICK_S)
    async with asyncio.TaskGroup() as group:
        async for due in dues(count // handful, every_s=TICK_S):
            group.create_task(topic.put_many([stamped(due)] * handful))


async def dues(count: int, *, every_s: float) -> AsyncIterator[float]:
    """So many moments at which something falls due, each as soon as it is there."""
    start = time.perf_counter()
    for number in range(count):
        due = start + number * every_s
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        yield due


def stamped(due: float) -> bytes:
    """A payload that says when its put was due."""
    return _STAMP.pack(due) + _FILL


async def receive(topic: Any, count: int) -> Times:
    """The time of each message from when its put was due until a consumer has it."""
    took = np.empty(count)
    seen = 0
    batches = topic.consume_batches(size=100, concurrency=BATCHES_HELD_MAX)
    async with asyncio.TaskGroup() as group, batches:
        async for batch in batches:
            now = time.perf_counter()
            for payload in batch.payloads:
                took[seen] = now - _STAMP.unpack_from(payload)[0]
                seen += 1
            # Not awaited here: each waits for its fsync, and the next batch is already there.
            group.create_task(batch.ack())
            if seen == count:
                break
    return took


async def in_time(received: asyncio.Task[Times], count: int) -> Times:
    try:
        return await asyncio.wait_for(received, GRACE_S)
    except TimeoutError as error:
        raise Unavailable(f"{count} messages did not arrive within {GRACE_S} s") from error
