"""Stages of the live path: to a sink in the node, to a subscriber, and how fast at most."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import numpy as np

from penstock.cli.bench.live_load import TOPIC, WAIT_S, LiveBench, live_bench, until
from penstock.cli.bench.live_ticks import ticks
from penstock.cli.bench.pipeline_load import COMPONENTS
from penstock.cli.bench.stages import Run, Values

SINK: Final = {"kind": "penstock.testing.live_sink:NullSink", "name": "null", "batch_ms": 0}
SINK_PER_S: Final = 5_000
SINK_TICK_S: Final = 0.001  # so five changes are put together
SINK_S: Final = 10.0  # longer than the node keeps its timings: the first feeds do not count
SUBSCRIBER_PER_S: Final = 1_000
SUBSCRIBER_S: Final = 8.0
WARM_SHARE: Final = 0.2  # of a latency stage, not counted
BATCHES: Final = (1, 10, 100, 1000)
BATCH_DELTAS: Final = {1: 30_000, 10: 150_000, 100: 400_000, 1000: 400_000}

LiveStage = Callable[[Run], Awaitable[Values]]


async def to_sink(run: Run) -> Values:
    """From the commit of a change to its arrival in a sink within the node, under a steady load."""
    async with live_bench(run.folder / "sink", sinks=({**SINK, "start": "now"},)) as bench:
        await until(lambda: _following(bench), "a sink's following")
        await bench.steady(
            per_s=SINK_PER_S, tick_s=SINK_TICK_S, seconds=SINK_S * max(run.scale, 0.5)
        )
        timings = (await bench.status())["partitions"][0]["timings"]
    return {
        f"{name}_us_{quantile}": timings[stage][f"{quantile}_us"]
        for name, stage in (("commit_to_sink", "sent"), ("order", "order"), ("route", "route"))
        for quantile in ("p50", "p95", "p99")
    }


async def _following(bench: LiveBench) -> bool:
    sinks = (await bench.status())["sinks"]
    return bool(sinks) and sinks[0]["following"] == "live"


async def to_subscriber(run: Run) -> Values:
    """From a put to its arrival at a subscriber in another process than the node, synced."""
    count = round(SUBSCRIBER_PER_S * SUBSCRIBER_S * max(run.scale, 0.25))
    async with live_bench(run.folder / "subscriber") as bench:
        listening = asyncio.Event()
        reader = asyncio.create_task(_hear(bench, count, listening))
        await listening.wait()
        due = await _put_on_schedule(bench, count)
        arrived = await asyncio.wait_for(reader, WAIT_S)
    took = [at - due[delta_id] for delta_id, at in arrived.items()]
    counted = np.array(took[int(count * WARM_SHARE) :]) * 1000
    return {
        f"put_to_subscriber_ms_{name}": float(np.percentile(counted, part))
        for name, part in (("p50", 50), ("p95", 95), ("p99", 99))
    }


async def _put_on_schedule(bench: LiveBench, count: int) -> dict[bytes, float]:
    """One change each millisecond; when each was due."""
    due_of: dict[bytes, float] = {}
    chosen = iter(bench.rng.integers(0, len(bench.ids), count).tolist())

    async def put(vector_id: str, number: int, due: float) -> None:
        delta = await bench.deltas.set(vector_id, {number % COMPONENTS: float(number)})
        due_of[delta.delta_id] = due

    async with asyncio.TaskGroup() as group:
        number = 0
        async for due in ticks(1 / SUBSCRIBER_PER_S, count):
            group.create_task(put(bench.ids[next(chosen)], number, due))
            number += 1
    return due_of


async def _hear(bench: LiveBench, count: int, listening: asyncio.Event) -> dict[bytes, float]:
    """Subscribe, and note when each of so many changes arrives."""
    import penstock

    arrived: dict[bytes, float] = {}
    async with penstock.connect(bench.server.url) as client:
        batches = client.deltas(TOPIC).subscribe_batches(from_sequence="now")
        coming = asyncio.ensure_future(anext(batches))
        await until(lambda: _subscribed(bench), "a subscription")
        listening.set()
        while True:
            batch = await coming
            now = time.perf_counter()
            arrived |= dict.fromkeys((released.delta.delta_id for released in batch), now)
            if len(arrived) >= count:
                break
            coming = asyncio.ensure_future(anext(batches))
        await batches.aclose()
    return arrived


async def _subscribed(bench: LiveBench) -> bool:
    return bool((await bench.status())["subscriptions"])


async def to_sink_in_batches(run: Run) -> Values:
    """How many changes a sink within the node can be handed per second, so many at a time.

    The changes are in the log and folded; the sink begins when all is ready, and reads from the
    beginning.
    """
    values: Values = {}
    for size in BATCHES:
        count = run.count(BATCH_DELTAS[size], step=size)
        folder = run.folder / f"batches-{size}"
        gate = folder / "open"
        sink = {
            **SINK, "gate": str(gate), "read_rows": size,
            "backoff_s_base": 0.02, "backoff_s_cap": 0.02, "breaker_failures": 1_000_000,
        }  # fmt: skip
        async with live_bench(folder, sinks=(sink,)) as bench:
            await bench.fill(count)
            total = len(bench.ids) + count
            await _fold(bench)
            gate.touch()
            values[f"sink_batch{size}_per_s"] = await _drained_per_s(bench, total)
    return values


async def _fold(bench: LiveBench) -> None:
    """Have the topic's log folded before anything is measured."""
    batches = bench.deltas.subscribe_batches(from_sequence="now")
    coming = asyncio.ensure_future(anext(batches))
    await until(lambda: _subscribed(bench), "a subscription")
    coming.cancel()
    await asyncio.wait((coming,))
    await batches.aclose()


async def _drained_per_s(bench: LiveBench, total: int) -> float:
    """Rows per second between the first and the last look at a sink that is working."""
    looks: list[tuple[float, int]] = []

    async def done() -> bool:
        sinks: list[dict[str, Any]] = (await bench.status())["sinks"]
        written = sinks[0]["written"] if sinks else 0
        looks.append((time.perf_counter(), written))
        return bool(written >= total)

    await until(done, "a sink's catching up")
    began = max((look for look in looks if look[1] == 0), default=looks[0])
    ended = next(look for look in looks if look[1] >= total)
    return (ended[1] - began[1]) / (ended[0] - began[0])
