"""Stages of the live path: to sinks in the node, steadily, and how fast at most."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from penstock.bench.live.load import LiveBench, Offered, live_bench, until
from penstock.bench.stages import Run, Values
from penstock.bench.targets import CACHE_PER_S, MEMORY_PER_S, SINK_PER_S
from penstock.errors import Unavailable

NULL: Final = "penstock.bench.live.sinks:NullSink"
MEMORY: Final = "penstock.bench.live.sinks:GatedIndex"
CACHE: Final = "penstock.bench.live.sinks:GatedCache"
SINK: Final = {"kind": NULL, "name": "null", "batch_ms": 0}
# While the gate is shut it is tried again and again.
GATED: Final = {"backoff_s_base": 0.02, "backoff_s_cap": 0.02, "breaker_failures": 1_000_000}
SINK_TICK_S: Final = 0.001
SINK_S: Final = 10.0
BATCHES: Final = (1, 10, 100, 1000)
BATCH_DELTAS: Final = {1: 30_000, 10: 150_000, 100: 400_000, 1000: 400_000}


async def to_sink(run: Run) -> Values:
    """From the commit of a change until a sink within the node has written it, steadily loaded."""
    async with following_sink(run.folder / "sink") as bench:
        put = await _steady(run, bench, per_s=SINK_PER_S)
        sink = await timings_of_sink(bench, put=put.changes)
        partition = (await bench.status())["partitions"][0]["timings"]
    return {
        "sink_offered_per_s": put.per_s,
        **_in_us("commit_to_sink", sink["written"]),
        **_in_us("arrival_to_staged", partition["staged"]),
        **_in_us("order", partition["order"]),
        **_in_us("route", partition["route"]),
    }


async def to_memory(run: Run) -> Values:
    """The same, to the index in memory, which has a thread of its own and is fed states."""
    return await _to_real_sink(run, "memory", per_s=MEMORY_PER_S, kind=MEMORY)


async def to_cache(run: Run) -> Values:
    """The same, to a Redis on this machine: until it has answered that it holds the state."""
    from penstock.testing.redis import RedisProcess

    with RedisProcess(run.folder / "redis", durable=False) as redis:
        return await _to_real_sink(run, "cache", per_s=CACHE_PER_S, kind=CACHE, url=redis.url)


async def _to_real_sink(run: Run, stage: str, *, per_s: int, **options: Any) -> Values:
    async with following_sink(run.folder / stage, **options) as bench:
        put = await _steady(run, bench, per_s=per_s)
        sink = await timings_of_sink(bench, put=put.changes)
    offered = {f"{stage}_offered_per_s": put.per_s}
    return {**offered, **_in_us(f"commit_to_{stage}", sink["written"])}


async def _steady(run: Run, bench: LiveBench, *, per_s: int) -> Offered:
    seconds = SINK_S * max(run.scale, 0.5)
    return await bench.steady(per_s=per_s, tick_s=SINK_TICK_S, seconds=seconds)


def _in_us(stage: str, timings: dict[str, float]) -> Values:
    return {f"{stage}_us_{part}": timings[f"{part}_us"] for part in ("p50", "p95", "p99")}


@asynccontextmanager
async def following_sink(folder: Path, **options: Any) -> AsyncIterator[LiveBench]:
    """A node whose sink begins when the vectors are made: it gets nothing but what comes then."""
    gate = folder / "open"
    sink = {**SINK, **GATED, "gate": str(gate), "start": "now", **options}
    async with live_bench(folder, sinks=(sink,)) as bench:
        gate.touch()
        await until(lambda: _following(bench), "a sink's following")
        yield bench


async def _following(bench: LiveBench) -> bool:
    sinks = (await bench.status())["sinks"]
    return bool(sinks) and sinks[0]["following"] == "live"


async def timings_of_sink(bench: LiveBench, *, put: int) -> dict[str, Any]:
    """From commits until the sink's writes returned, of all that was put."""

    async def written() -> bool:
        return bool((await bench.status())["sinks"][0]["written"] >= put)

    await until(written, f"the writing of {put} changes")
    [sink] = (await bench.status())["sinks"]
    check_timed(sink, put=put)
    timings: dict[str, Any] = sink["timings"]
    return timings


def check_timed(sink: dict[str, Any], *, put: int) -> None:
    """Timings mean something if they are of each change once, and none was read from the log."""
    written, timed = sink["written"], sink["timings"]["written"]["count"]
    if not written == timed == put or sink["behind_switches"]:
        raise Unavailable(
            f"of {put} changes the sink has written {written} and timed {timed}; it fell behind"
            f" {sink['behind_switches']} times: this was no steady load"
        )


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
        sink = {**SINK, **GATED, "gate": str(gate), "read_rows": size}
        async with live_bench(folder, sinks=(sink,)) as bench:
            await bench.change(count)
            total = len(bench.ids) + count
            await _fold(bench)
            gate.touch()
            values[f"sink_batch{size}_per_s"] = await _drained_per_s(bench, total)
    return values


async def _fold(bench: LiveBench) -> None:
    """Have the topic's log folded before anything is measured."""
    batches = bench.deltas.subscribe_batches(from_sequence="now")
    coming = asyncio.ensure_future(anext(batches))
    await until(bench.subscribed, "a subscription")
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
