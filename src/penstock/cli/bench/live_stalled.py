"""Ten subscribers, one of whom stops reading: what that costs the nine others, and the node."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any, Final

from penstock.cli.bench.live_load import TOPIC, LiveBench, live_bench, until
from penstock.cli.bench.stages import Run, Values
from penstock.errors import Unavailable

SUBSCRIBERS: Final = 10
DELTAS: Final = 1_000_000
CHUNK: Final = 5_000
WAIT_S: Final = 600.0


class Counter:
    """A subscriber that counts what arrives, and takes it; or, stalled, takes nothing at all."""

    def __init__(self, *, stalled: bool) -> None:
        self.stalled, self.rows = stalled, 0

    async def subscribe(self, connection: Any) -> None:
        from penstock.wire.messages import OpenSubscription

        await connection.subscribe(OpenSubscription(TOPIC, 0), self._on_changes)

    def _on_changes(self, stream: Any, changes: Any, body: memoryview) -> None:
        self.rows += changes.count
        if not self.stalled:
            stream.took(changes.count, len(body))


async def stalled_subscriber(run: Run) -> Values:
    count = run.count(DELTAS, step=CHUNK)
    free_per_s, free_mb = await _run(run, count, stalled=0)
    held_per_s, held_mb = await _run(run, count, stalled=1)
    return {
        "stalled_subscriber_ratio": held_per_s / free_per_s,
        # The fold remembers ids and vectors whoever reads; that is not the stall's.
        "stalled_growth_mb": max(0.0, held_mb - free_mb),
        "stalled_rss_growth_mb": held_mb,
        "free_rss_growth_mb": free_mb,
        "fan_out_per_s": free_per_s * SUBSCRIBERS,
    }


async def _run(run: Run, count: int, *, stalled: int) -> tuple[float, float]:
    """Changes per second that all others got, and how much the node grew meanwhile."""
    from penstock.client.connection import open_connection

    async with live_bench(run.folder / f"stalled-{stalled}") as bench, AsyncExitStack() as stack:
        counters = [Counter(stalled=number < stalled) for number in range(SUBSCRIBERS)]
        for counter in counters:
            connection = await open_connection(bench.server.url)
            stack.push_async_callback(connection.close)
            await counter.subscribe(connection)
        await until(lambda: _all_live(bench), "ten subscriptions")
        await bench.fill(CHUNK)
        await _arrived(counters, CHUNK)
        before = bench.server.rss_bytes()
        began = time.perf_counter()
        await bench.fill(count)
        await _arrived(counters, CHUNK + count)
        seconds = time.perf_counter() - began
        return count / seconds, (bench.server.rss_bytes() - before) / (1 << 20)


async def _all_live(bench: LiveBench) -> bool:
    rows = (await bench.status())["subscriptions"]
    return len(rows) == SUBSCRIBERS and all(row["state"] == "live" for row in rows)


async def _arrived(counters: list[Counter], count: int) -> None:
    """Wait until all who read have it."""
    deadline = time.monotonic() + WAIT_S
    while not all(counter.rows >= count for counter in counters if not counter.stalled):
        if time.monotonic() > deadline:
            raise Unavailable(f"{count} changes did not arrive within {WAIT_S:.0f} s")
        await asyncio.sleep(0.01)
