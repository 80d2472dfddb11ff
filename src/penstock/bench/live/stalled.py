"""Ten subscribers, one of whom stalls: what that costs the nine others, and the node.

There are two ways to stall, and the worse result counts. One *keeps its credit*: it reads its
connection and returns nothing. The other one has all the credit that may be asked for and *does not
read its socket*, so that everything backs up into the node.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from penstock.bench.live.load import TOPIC, LiveBench, live_bench, until
from penstock.bench.stages import Run, Values
from penstock.client.network.connection import Connection
from penstock.client.network.endpoints import Address, dial
from penstock.errors import Unavailable
from penstock.testing.process import ServerProcess
from penstock.wire.messages import OpenSubscription

SUBSCRIBERS: Final = 10
DELTAS: Final = 1_000_000
CHUNK: Final = 5_000
WAIT_S: Final = 600.0
SAMPLE_S: Final = 0.05
CREDIT_MAX: Final = (1_000_000, 256 << 20)  # entries and bytes, as much as a node grants
PATIENT: Final = {"limits.idle_s": 2 * WAIT_S}  # who does not read would be cut off before the end


class Stall(Enum):
    NONE = "free"
    CREDIT = "credit"
    SOCKET = "socket"


class Deaf(Connection):
    """A connection that can stop reading."""

    def stop_reading(self) -> None:
        assert self._transport is not None
        self._transport.pause_reading()


class CountingSubscriber:
    """A subscriber that counts what arrives, and takes it unless it stalls."""

    def __init__(self, stall: Stall) -> None:
        self.stall, self.rows = stall, 0

    async def subscribe(self, connection: Connection) -> None:
        asked = OpenSubscription(TOPIC, 0)
        if self.stall is Stall.SOCKET:
            asked = OpenSubscription(
                TOPIC, 0, credit_entries=CREDIT_MAX[0], credit_bytes=CREDIT_MAX[1]
            )
        await connection.subscribe(asked, self._on_changes)

    def _on_changes(self, stream: Any, changes: Any, body: memoryview) -> None:
        self.rows += changes.count
        if self.stall is not Stall.CREDIT:
            stream.took(changes.count, len(body))


@dataclass(frozen=True)
class FanOut:
    """What one run showed: changes per second that all who read got, and the node's growth."""

    per_s: float
    growth_mb: float


async def stalled_subscriber(run: Run) -> Values:
    count = run.count(DELTAS, step=CHUNK)
    free, *stalled = [await _run(run, count, stall) for stall in Stall]
    peak_mb = max(found.growth_mb for found in stalled)
    return {
        "stalled_subscriber_ratio": min(found.per_s for found in stalled) / free.per_s,
        # The fold remembers ids and vectors whoever reads; that is not the stall's.
        "stalled_growth_mb": peak_mb - free.growth_mb,
        "stalled_peak_growth_mb": peak_mb,
        "free_peak_growth_mb": free.growth_mb,
        "fan_out_per_s": free.per_s * SUBSCRIBERS,
    }


async def _run(run: Run, count: int, stall: Stall) -> FanOut:
    folder = run.folder / f"stalled-{stall.value}"
    async with live_bench(folder, options=PATIENT) as bench, AsyncExitStack() as stack:
        counters = [
            CountingSubscriber(stall),
            *(CountingSubscriber(Stall.NONE) for _ in range(SUBSCRIBERS - 1)),
        ]
        connections = []
        for counter in counters:
            connection = await dial(Address.parse(bench.server.url), Deaf)
            stack.push_async_callback(connection.close)
            await counter.subscribe(connection)
            connections.append(connection)
        await until(lambda: _all_live(bench), "ten subscriptions")
        await bench.change(CHUNK)
        await _arrived(counters[1:], CHUNK)
        if stall is Stall.SOCKET:
            connections[0].stop_reading()
        async with _watched(bench.server) as memory:
            began = time.perf_counter()
            await bench.change(count)
            readers = counters if stall is Stall.NONE else counters[1:]
            await _arrived(readers, CHUNK + count)
            seconds = time.perf_counter() - began
        if stall is not Stall.NONE:
            await _check_stalled(bench)
        return FanOut(count / seconds, memory.growth_mb)


class Memory:
    """A process's resident memory: what it began with, and the most that was seen since."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._before = self._peak = server.rss_bytes()

    def look(self) -> None:
        self._peak = max(self._peak, self._server.rss_bytes())

    @property
    def growth_mb(self) -> float:
        return (self._peak - self._before) / (1 << 20)


@asynccontextmanager
async def _watched(server: ServerProcess) -> AsyncIterator[Memory]:
    """Look at a process's memory again and again."""
    memory = Memory(server)

    async def watch() -> None:
        while True:
            memory.look()
            await asyncio.sleep(SAMPLE_S)

    watching = asyncio.create_task(watch())
    try:
        yield memory
        memory.look()
    finally:
        watching.cancel()


async def _all_live(bench: LiveBench) -> bool:
    rows = (await bench.status())["subscriptions"]
    return len(rows) == SUBSCRIBERS and all(row["state"] == "live" for row in rows)


async def _check_stalled(bench: LiveBench) -> None:
    """Without a stall there would be nothing to compare."""
    rows = (await bench.status())["subscriptions"]
    behind = [row for row in rows if row["state"] == "behind" and row["lag_entries"]]
    if len(rows) != SUBSCRIBERS or not behind:
        raise Unavailable(f"nobody has stalled among {len(rows)} subscribers")


async def _arrived(counters: list[CountingSubscriber], count: int) -> None:
    """Wait until all of them have it."""
    deadline = time.monotonic() + WAIT_S
    while not all(counter.rows >= count for counter in counters):
        if time.monotonic() > deadline:
            raise Unavailable(f"{count} changes did not arrive within {WAIT_S:.0f} s")
        await asyncio.sleep(0.01)
