"""Latency of a cluster: under a steady load, and when a coordinator is killed."""

from __future__ import annotations

import asyncio
import time
from itertools import islice
from typing import Any, Final

import numpy as np

from penstock.bench.cluster.stages import PARTITIONS, ClusterBench
from penstock.bench.queue.latency import dues, in_time, receive, stamped
from penstock.bench.stages import Times, Values, quantiles, warm
from penstock.errors import Unavailable

RATE_PER_S: Final = 1000
SECONDS: Final = 10.0
SECONDS_MIN: Final = 3.0
TICK_S: Final = 0.005
KILLS: Final = 12
KILLS_MIN: Final = 3
FAILOVER_S_MAX: Final = 60.0


async def latency(bench: ClusterBench) -> list[Values]:
    """An open loop: what could not be sent on time counts from when it was due."""
    import penstock

    rows = []
    for number in range(bench.run.runs):
        name = await bench.topic(f"latency-{number}")
        count = int(RATE_PER_S * max(SECONDS_MIN, SECONDS * bench.run.scale))
        async with penstock.connect(bench.cluster.url) as consumer:
            topic = consumer.topic(name, of=bytes, create=False)
            received = asyncio.create_task(receive(topic, count))
            put = await _send(bench.client.topic(name, of=bytes, create=False), count)
            popped = await in_time(received, count)
        rows.append(
            quantiles("enqueue_ms", warm(put) * 1000) | quantiles("pop_ms", warm(popped) * 1000)
        )
    return rows


async def _send(topic: Any, count: int) -> Times:
    """Puts that fall due in handfuls every tick; the time of each until it was acknowledged."""
    handful = round(RATE_PER_S * TICK_S)
    took = np.zeros(count // handful * handful)
    indices = iter(range(len(took)))

    async def put(index: int, due: float) -> None:
        await topic.put(stamped(due))
        took[index] = time.perf_counter() - due

    async with asyncio.TaskGroup() as group:
        async for due in dues(count // handful, every_s=TICK_S):
            for index in islice(indices, handful):
                group.create_task(put(index, due))
    return took


async def failover(bench: ClusterBench) -> list[Values]:
    """`kill -9` of one node after the other; from the kill until each of the partitions that it
    coordinated has acknowledged a write."""
    name = await bench.topic("failover")
    topic = bench.client.topic(name, of=bytes, create=False)
    keys = _keys()
    await asyncio.gather(*(topic.put(b"before", key=key) for key in keys))
    took: list[float] = []
    kills = max(KILLS_MIN, round(KILLS * bench.run.scale))
    for number in range(kills):
        victim = list(bench.cluster.nodes)[number % len(bench.cluster.nodes)]
        owners = await bench.cluster.coordinators(name)
        orphans = [keys[p] for p, owner in enumerate(owners) if owner == victim]
        began = time.perf_counter()
        await bench.cluster.kill(victim)
        took += await asyncio.gather(*(_written(topic, key, began) for key in orphans))
        await bench.cluster.start(victim)
        await bench.cluster.wait_ready()
        await _settled(bench, name)
    if not took:
        raise Unavailable("no node that was killed coordinated anything")
    return [
        {
            "failover_s_p50": float(np.percentile(took, 50)),
            "failover_s_p99": float(np.percentile(took, 99)),
            "failover_kills": float(kills),
        }
    ]


async def _written(topic: Any, key: bytes, began: float) -> float:
    await topic.put(b"after", key=key)
    return time.perf_counter() - began


async def _settled(bench: ClusterBench, topic: str) -> None:
    """Until every partition is back with its preferred coordinator, as before the kill."""
    deadline = time.monotonic() + FAILOVER_S_MAX
    while True:
        parts = [p for p in (await bench.cluster.status())["partitions"] if p["topic"] == topic]
        if all(part["coordinator"] == part["voters"][0] for part in parts):
            return
        if time.monotonic() > deadline:
            raise Unavailable("coordinators did not return to the node that was restarted")
        await asyncio.sleep(0.1)


def _keys() -> list[bytes]:
    """A key of each partition."""
    from penstock.model.ids import partition_of

    found: dict[int, bytes] = {}
    number = 0
    while len(found) < PARTITIONS:
        key = b"key-%d" % number
        found.setdefault(partition_of(key, PARTITIONS), key)
        number += 1
    return [found[partition] for partition in range(PARTITIONS)]
