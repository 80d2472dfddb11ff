"""What each stage of the live path costs by itself: its own code, on batches of a steady load.

Ordering and routing are measured in a node, under load (`stages.to_sink`); what comes before
the log and what a real sink does is measured here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.bench.stages import Run, Values, quantiles
from penstock.bench.vectors import DIMENSIONS, payloads, vector_ids
from penstock.testing.redis import RedisProcess

BATCH: Final = 10  # changes that are put together
BATCHES: Final = 2_000
WARM: Final = 200
VECTORS: Final = 2_000


async def kernels(run: Run) -> Values:
    return await asyncio.to_thread(_kernels, run.folder, max(WARM * 2, round(BATCHES * run.scale)))


def _kernels(folder: Path, batches: int) -> Values:
    from penstock.sinks.cache import CacheSink
    from penstock.sinks.memory_index import MemoryIndexSink

    values = _in_us("ingest", _ingest(batches))
    with RedisProcess(folder / "redis", durable=False) as server:
        values |= _in_us("cache", _writes(CacheSink("cache", url=server.url), batches))
    return values | _in_us("index", _writes(MemoryIndexSink("memory"), batches))


def _in_us(stage: str, took: list[float]) -> Values:
    return quantiles(f"{stage}_us", np.array(took[WARM:]) * 1e6)


def _ingest(batches: int) -> list[float]:
    """A batch into the queue before the log, and out of it."""
    from penstock.propagation.flow.lanes import IngestQueue

    queue: IngestQueue[int] = IngestQueue()
    took = []
    for number in range(batches):
        began = time.perf_counter()
        if queue.fits(BATCH):
            queue.put(number, priority=number % 4, count=BATCH, now_ms=number)
        queue.take(BATCH, number)
        took.append(time.perf_counter() - began)
    return took


def _writes(sink: Any, batches: int) -> list[float]:
    """A batch of states into a sink, from their columns to its return."""
    sink.open()
    took = []
    try:
        for number, make in enumerate(_states(batches)):
            began = time.perf_counter()
            sink.write(make(number))
            took.append(time.perf_counter() - began)
    finally:
        sink.close()
    return took


def _states(batches: int) -> Iterator[Callable[[int], Any]]:
    """Works with the states of some vectors, made when they are asked for."""
    from penstock.model.delta_batch import DeltaBatch
    from penstock.propagation.fold.propagator import Propagator
    from penstock.sinks.protocol import Work
    from penstock.sinks.schema import states_table

    every = payloads(vector_ids(VECTORS), batches * BATCH, np.random.default_rng(5))
    fold = Propagator(DIMENSIONS)
    for first in range(0, batches * BATCH, BATCH):
        deltas = DeltaBatch.of(
            every[first : first + BATCH],
            sequences=np.arange(first + 1, first + 1 + BATCH, dtype=np.uint64),
            log_times_ms=np.full(BATCH, 1, np.int64),
        )
        fold.feed(deltas, through=first + BATCH, states=True)
        touched = fold.take_touched()

        def work(number: int, touched: Any = touched) -> Work:
            states = states_table(touched, topic="bench", partition=0)
            return Work(pipeline="bench", first=number, last=number, states=states)

        yield work
