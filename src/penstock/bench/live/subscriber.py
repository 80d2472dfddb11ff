"""Stages of the live path: to a subscriber in another process than the node's."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.bench.live.load import TOPIC, WAIT_S, LiveBench, live_bench, on_schedule, until
from penstock.bench.live.stages import following_sink, timings_of_sink
from penstock.bench.stages import Run, Values, quantiles, warm
from penstock.bench.targets import SUBSCRIBER_PER_S
from penstock.bench.vectors import COMPONENTS
from penstock.errors import Unavailable

SECONDS: Final = 8.0
STAMP: Final = np.dtype([("position", "<u8"), ("committed_at", "<f8")])  # as `sinks` has it


class Arrival(NamedTuple):
    at: float
    position: int


class Heard(NamedTuple):
    """When puts were due, and when they arrived, in the order of arrival; their rate."""

    due: dict[bytes, float]
    arrived: dict[bytes, Arrival]
    per_s: float


async def to_subscriber(run: Run) -> Values:
    """From a put, and from its commit, to its arrival; the former with nobody else in the node."""
    count = round(SUBSCRIBER_PER_S * SECONDS * max(run.scale, 0.25))
    async with live_bench(run.folder / "put") as bench:
        put = await _heard(bench, count)
    put_s = np.array([arrival.at - put.due[i] for i, arrival in put.arrived.items()])
    stamps = run.folder / "stamps"
    async with following_sink(run.folder / "commit", stamps=str(stamps)) as bench:
        stamped = await _heard(bench, count)
        await timings_of_sink(bench, put=count)
    commit_s = since_commit(list(stamped.arrived.values()), np.fromfile(stamps, STAMP))
    return {
        "subscriber_offered_per_s": min(put.per_s, stamped.per_s),
        **quantiles("put_to_subscriber_ms", warm(put_s) * 1e3),
        **quantiles("commit_to_subscriber_us", warm(commit_s) * 1e6),
    }


def since_commit(arrivals: list[Arrival], stamps: NDArray[Any]) -> NDArray[np.float64]:
    """How long after their commits deltas have arrived.

    A stamp tells when what is up to its position was committed, by the clock that all processes of
    a machine share.
    """
    positions = np.array([arrival.position for arrival in arrivals], np.uint64)
    places = np.searchsorted(stamps["position"], positions)
    if len(places) and int(places.max()) >= len(stamps):
        raise Unavailable("changes have arrived that the node has not stamped")
    committed_at: NDArray[np.float64] = stamps["committed_at"][places]
    return np.array([arrival.at for arrival in arrivals]) - committed_at


async def _heard(bench: LiveBench, count: int) -> Heard:
    listening = asyncio.Event()
    reader = asyncio.create_task(_hear(bench, count, listening))
    await listening.wait()
    due_of: dict[bytes, float] = {}
    chosen = bench.rng.integers(0, len(bench.ids), count).tolist()

    async def put(number: int, due: float) -> None:
        vector_id = bench.ids[chosen[number]]
        delta = await bench.deltas.set(vector_id, {number % COMPONENTS: float(number)})
        due_of[delta.delta_id] = due

    per_s = await on_schedule(put, tick_s=1 / SUBSCRIBER_PER_S, count=count)
    return Heard(due_of, await asyncio.wait_for(reader, WAIT_S), per_s)


async def _hear(bench: LiveBench, count: int, listening: asyncio.Event) -> dict[bytes, Arrival]:
    """Subscribe, and note when each of so many changes arrives."""
    import penstock

    arrived: dict[bytes, Arrival] = {}
    async with penstock.connect(bench.server.url) as client:
        batches = client.deltas(TOPIC).subscribe_batches(from_sequence="now")
        coming = asyncio.ensure_future(anext(batches))
        await until(bench.subscribed, "a subscription")
        listening.set()
        while True:
            batch = await coming
            now = time.perf_counter()
            arrived |= {row.delta.delta_id: Arrival(now, row.position) for row in batch}
            if len(arrived) >= count:
                break
            coming = asyncio.ensure_future(anext(batches))
        await batches.aclose()
    return arrived
