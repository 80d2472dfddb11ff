"""The pipeline's stages: reading, ordering, the whole way, and how old what one finds is.

A stage is counted from the end of its first triggers on: they start Spark's Python workers, and
they hold the vectors' creation, which is not what is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from penstock.bench.pipeline.load import (
    CORES,
    PARTITIONS,
    PROBE,
    TOPIC,
    Load,
    PipelineBench,
    pipeline_settings,
    steady_changes,
)
from penstock.bench.stages import Values, quantiles
from penstock.bench.vectors import DIMENSIONS
from penstock.errors import Unavailable
from penstock.model.delta import Op
from penstock.testing.process import tree_cpu_seconds
from penstock.testing.redis import RedisProcess

FRESHNESS_PER_S: Final = 1_000
FRESHNESS_S: Final = 30.0
FRESHNESS_WARM_S: Final = 10.0
PROBE_EVERY_S: Final = 0.5
VISIBLE_S_MAX: Final = 120.0
POLL_S: Final = 0.02
FEED_BYTES: Final = 16 << 20
_CHANGES: Final = (
    "'default' as namespace",
    "concat('written-', id % 20000) as vector_id",
    "'sparse' as op",
    "'bench' as origin",
    "cast(id + 1 as bigint) as delta_time",
    "transform(sequence(0, 9), i -> cast(i * 12 as int)) as indices",
    "transform(sequence(0, 9), i -> cast(rand(7) as float)) as values",
)


# --- reading ---


def read(bench: PipelineBench, folder: Path) -> Values:
    """Every delta as a row, and every log batch as one, into Spark's sink for nothing."""
    return {
        "read_per_s": _streamed(bench, folder / "rows", mode="messages"),
        "read_envelopes_per_s": _streamed(bench, folder / "envelopes", mode="envelopes"),
    }


def _streamed(bench: PipelineBench, folder: Path, *, mode: str) -> float:
    stream = (
        bench.spark.readStream.format("penstock")
        .options(url=bench.load.url, topic=TOPIC, mode=mode)
        .option("maxRowsPerTrigger", str(bench.rows_per_trigger))
        .load()
    )
    query = (
        stream.writeStream.format("noop")
        .option("checkpointLocation", str(folder))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    triggers = [p for p in query.recentProgress if p["numInputRows"]][1:]
    rows = sum(_sequences(p["sources"][0]) for p in triggers)
    ms: int = sum(p["durationMs"]["triggerExecution"] for p in triggers)
    return rows / ms * 1000


def _sequences(source: Any) -> int:
    """How many sequences a trigger of Spark's covered."""
    begin, end = (json.loads(source[name] or "{}") for name in ("startOffset", "endOffset"))
    return sum(n - begin[topic][p] for topic, found in end.items() for p, n in found.items())


# --- folding, without and with sinks ---


def ordered(bench: PipelineBench, folder: Path) -> Values:
    """Admit, order and merge, committed once, with nobody to deliver to."""
    return {"ordered_per_s": folded(bench, folder, sinks=[])}


def full(bench: PipelineBench, folder: Path) -> Values:
    """The same into lake, index and cache, until all of them hold everything; and which share of
    all the CPU that took was the driver's Python."""
    with RedisProcess(folder / "redis", durable=False) as redis:
        driver, everybody = time.process_time(), tree_cpu_seconds(os.getpid())
        rate = folded(bench, folder, sinks=_sinks(folder, redis.url))
        share = (time.process_time() - driver) / (tree_cpu_seconds(os.getpid()) - everybody)
        return {"full_per_s": rate, "driver_cpu_share": share}


def _sinks(folder: Path, redis_url: str) -> list[dict[str, Any]]:
    return [
        {"kind": "lake", "path": str(folder / "lake")},
        {"kind": "index", "path": str(folder / "index")},
        {"kind": "cache", "url": redis_url},
    ]


@dataclass
class Triggers:
    """When each trigger was first seen to have ended, and how many sequences were folded then."""

    seen: dict[int, tuple[float, int]] = field(default_factory=dict)

    def look(self, source: dict[str, Any]) -> None:
        number = source.get("trigger")
        if number is not None and number not in self.seen:
            folded = sum(source["to"].values())
            self.seen[number] = (time.perf_counter(), folded)

    def counted_from(self, sequences: int) -> tuple[float, int]:
        """The end of the first trigger that got past `sequences`."""
        for ended, folded in self.seen.values():
            if folded >= sequences:
                return ended, folded
        raise Unavailable(f"no trigger got past {sequences} sequences")


@contextmanager
def _watching(look: Callable[[], None]) -> Iterator[None]:
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(POLL_S):
            look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        look()


def folded(
    bench: PipelineBench, folder: Path, *, sinks: list[dict[str, Any]], **more: Any
) -> float:
    """Deltas per second from the end of the first trigger past the creations on."""
    from penstock.spark.pipeline import Pipeline

    rows = bench.rows_per_trigger
    settings = pipeline_settings(
        bench.load,
        folder,
        sinks=sinks,
        rows_per_trigger={"min": rows, "max": rows, "initial": rows},
        **more,
    )
    pipeline = Pipeline(settings, session=bench.spark)
    triggers = Triggers()
    pipeline.start(available_now=True)
    with _watching(lambda: triggers.look(pipeline.ingest.describe())):
        pipeline.wait()
        ended = time.perf_counter()
    began, before = triggers.counted_from(bench.load.vectors)
    last = max(sequences for _, sequences in triggers.seen.values())
    return (last - before) / (ended - began)


# --- writing, and what a vector costs ---


def write(bench: PipelineBench, folder: Path) -> Values:
    """Changes from a DataFrame into a topic, by `df.write`."""
    import penstock.sync

    rows = bench.load.deltas
    # Spark finds Python's data sources by the thread's active session, which this makes it.
    numbers = bench.spark.createDataFrame(pa.table({"id": np.arange(rows)}))
    changes = numbers.repartition(CORES).selectExpr(*_CHANGES).cache()
    options = {"url": bench.load.url, "topic": f"{TOPIC}-{time.time_ns()}"}
    with penstock.sync.connect(bench.load.url) as client:
        client.deltas(options["topic"], dimensions=DIMENSIONS, create=True, partitions=PARTITIONS)
    changes.where("id % 1000 = 0").write.format("penstock").mode("append").options(**options).save()
    changes.count()  # all of them are made before the clock runs
    began = time.perf_counter()
    changes.write.format("penstock").mode("append").options(**options).save()
    took = time.perf_counter() - began
    changes.unpersist()
    return {"write_deltas_per_s": rows / took}


def state(bench: PipelineBench, folder: Path) -> Values:
    """What the fold keeps of vectors that were created once, without its tables' room to grow."""
    from penstock.propagation.fold.propagator import Propagator
    from penstock.spark.fold.partition_step import read_deltas
    from penstock.spark.source.access import NodeAccess

    access = NodeAccess.shared(bench.load.url)
    held = vectors = 0
    for status in access.log_status(TOPIC):
        fold = Propagator(DIMENSIONS)
        last = status.readable
        log = read_deltas(access, TOPIC, status.partition, first=1, last=last, bytes_max=FEED_BYTES)
        with closing(log):
            for deltas, through in log:
                whole = deltas.op <= Op.DENSE
                if not whole.any():
                    break
                fold.feed(deltas.take(whole), through=through)
        held, vectors = held + fold.nbytes, vectors + fold.ordinal
    return {"state_bytes_per_vector": held / vectors}


# --- freshness ---


def freshness(bench: PipelineBench, folder: Path) -> Values:
    """From a put to the moment a reader of the index finds it, under a steady load."""
    with RedisProcess(folder / "redis", durable=False) as redis:
        return asyncio.run(_freshness(bench, folder, redis.url))


async def _freshness(bench: PipelineBench, folder: Path, redis_url: str) -> Values:
    from penstock.spark.pipeline import Pipeline

    settings = pipeline_settings(bench.load, folder, sinks=_sinks(folder, redis_url))
    pipeline = Pipeline(settings, session=bench.spark)
    await asyncio.to_thread(pipeline.start)
    stop = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as group:
            load = group.create_task(steady_changes(bench.load, per_s=FRESHNESS_PER_S, stop=stop))
            took = await _probe(bench.load, folder / "index")
            stop.set()
            await load
    finally:
        await asyncio.to_thread(pipeline.stop)
    return quantiles("freshness_s", took)


async def _probe(load: Load, index: Path) -> list[float]:
    """Change one vector again and again; how long each change took to be found."""
    import penstock

    async with penstock.connect(load.url) as client:
        topic = client.deltas(TOPIC)
        # A vector of its own: the log still has what an earlier run did to its probe.
        probe = f"{PROBE}-{time.time_ns()}"
        await topic.replace(probe, np.zeros(DIMENSIONS, np.float32))
        await asyncio.to_thread(_await_visible, index, probe)  # all that was there has been read
        puts: dict[int, float] = {}
        took: list[float] = []
        watcher = asyncio.create_task(asyncio.to_thread(_watch, index, probe, puts, took))
        start = time.perf_counter()
        for number in range(1, round((FRESHNESS_WARM_S + FRESHNESS_S) / PROBE_EVERY_S) + 1):
            puts[number] = time.perf_counter()
            await topic.set(probe, {0: float(number)})
            due = start + number * PROBE_EVERY_S
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        puts[-1] = 0.0  # no more to come
        await watcher
    return took[round(FRESHNESS_WARM_S / PROBE_EVERY_S) :]


def _value(index: Any, probe: str) -> float | None:
    found = index.get(probe)
    return None if found is None else float(found.values[0])


def _await_visible(path: Path, probe: str) -> None:
    from penstock.sinks.index import Index

    deadline = time.monotonic() + VISIBLE_S_MAX
    while time.monotonic() < deadline:
        if path.exists() and _value(Index(str(path)), probe) is not None:
            return
        time.sleep(0.2)
    raise Unavailable(f"a change was not in the index after {VISIBLE_S_MAX:.0f} s")


def _watch(path: Path, probe: str, puts: dict[int, float], took: list[float]) -> None:
    """Note for every change when it, or a later one, is in the index."""
    from penstock.sinks.index import Index

    index, seen = Index(str(path)), 0
    deadline = time.monotonic() + VISIBLE_S_MAX
    while -1 not in puts or seen < max(puts):
        now_at = int(_value(index, probe) or 0)
        found = time.perf_counter()
        took += [found - puts[number] for number in range(seen + 1, now_at + 1)]
        seen = now_at
        if time.monotonic() > deadline:
            raise Unavailable(f"change {seen + 1} was not in the index in time")
        time.sleep(POLL_S)
