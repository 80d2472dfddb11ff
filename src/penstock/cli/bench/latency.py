"""End to end under an open loop: the producer keeps its schedule whatever the server does.

Twenty messages fall due every two milliseconds. Each carries the moment at which it *should* have
been put, so a stall counts against every message that had to wait for it, not only against the one
that met it.
"""

from __future__ import annotations

import asyncio
import struct
import time
from typing import Any, Final

import numpy as np

from penstock.cli.bench.stages import PAYLOAD_BYTES, TOPIC, Run, Values, fresh_server
from penstock.errors import Unavailable

RATE_PER_S: Final = 10_000
SECONDS: Final = 6.0
WARM_SHARE: Final = 0.2  # at the start, not counted
TICK_S: Final = 0.002
BATCHES_HELD_MAX: Final = 50  # received and not yet acknowledged
GRACE_S: Final = 20.0
_STAMP: Final = struct.Struct("<d")
_FILL: Final = bytes(PAYLOAD_BYTES - _STAMP.size)
Times = np.ndarray[Any, np.dtype[np.float64]]


async def latency(run: Run) -> list[Values]:
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
        try:
            took = await asyncio.wait_for(received, GRACE_S)
        except TimeoutError as error:
            raise Unavailable(f"{count} messages did not arrive within {GRACE_S} s") from error
    counted = took[int(len(took) * WARM_SHARE) :] * 1000
    return [
        {
            "end_to_end_ms_p50": float(np.percentile(counted, 50)),
            "end_to_end_ms_p95": float(np.percentile(counted, 95)),
            "end_to_end_ms_p99": float(np.percentile(counted, 99)),
        }
    ]


async def _send(topic: Any, count: int) -> None:
    """A handful falls due every tick; each message says when it did."""
    handful = round(RATE_PER_S * TICK_S)
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for tick in range(count // handful):
            due = start + tick * TICK_S
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(topic.put_many([stamped(due)] * handful))


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
