"""What the pipeline's stages share: a log of changes, more of them at a steady pace, and Spark."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.bench.stages import Run
from penstock.bench.vectors import CHUNK, DIMENSIONS, change, create, vector_ids
from penstock.console import say
from penstock.testing.process import ServerProcess, server_process

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPIC: Final = "bench-vectors"
PARTITIONS: Final = 4
VECTORS: Final = 100_000
DELTAS: Final = 1_500_000
CORES: Final = 2
SPARE: Final = 4  # threads for the tasks of three sinks and the quarantine, as a pipeline has them
TRIGGERS: Final = 6  # that a stage takes for all there is
PROBE: Final = "probe"  # vectors that only the freshness stage touches begin so
TICK_S: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class Load:
    """A node whose topic holds `vectors` creations and `deltas` changes behind them."""

    server: ServerProcess
    vectors: int
    deltas: int
    topic: str = TOPIC

    @property
    def url(self) -> str:
        return self.server.url


@dataclass(frozen=True)
class PipelineBench:
    """What every stage has at hand."""

    spark: SparkSession
    load: Load
    local: Path  # where Spark keeps what is an executor's own

    @property
    def rows_per_trigger(self) -> int:
        """A few more than a share: triggers end between log batches, and what is left over would
        be one of its own."""
        return (self.load.vectors + self.load.deltas) // TRIGGERS + CHUNK


@asynccontextmanager
async def pipeline_bench(run: Run) -> AsyncIterator[PipelineBench]:
    """A node with all the changes in its log, and a Spark session for all stages."""
    from penstock.spark.session import spark_session

    vectors, deltas = round(VECTORS * run.scale), round(DELTAS * run.scale)
    async with server_process(run.folder / "data") as server:
        say(f"writing {vectors} vectors and {deltas} changes")
        await _fill(server.url, vectors=vectors, deltas=deltas)
        say("starting Spark")
        local = run.folder / "local"
        spark = await asyncio.to_thread(
            spark_session,
            "penstock-bench",
            cores=CORES,
            spare=SPARE,
            conf={"spark.local.dir": str(local)},
        )
        try:
            yield PipelineBench(spark, Load(server=server, vectors=vectors, deltas=deltas), local)
        finally:
            await asyncio.to_thread(spark.stop)


async def _fill(url: str, *, vectors: int, deltas: int) -> None:
    import penstock

    rng = np.random.default_rng(11)
    async with penstock.connect(url) as client:
        topic = client.deltas(TOPIC, dimensions=DIMENSIONS, create=True, partitions=PARTITIONS)
        ids = vector_ids(vectors)
        await create(topic, ids, rng)
        await change(topic, ids, deltas, rng)


async def steady_changes(load: Load, *, per_s: int, stop: asyncio.Event) -> int:
    """Changes at a fixed rate, on schedule whatever the node does; how many were put."""
    import penstock

    rng, ids, put = np.random.default_rng(12), vector_ids(load.vectors), 0
    async with penstock.connect(load.url) as client:
        topic = client.deltas(TOPIC)
        start = time.perf_counter()
        while not stop.is_set():
            await change(topic, ids, round(per_s * TICK_S), rng)
            put += round(per_s * TICK_S)
            await asyncio.sleep(max(0.0, start + put / per_s - time.perf_counter()))
    return put


def pipeline_settings(load: Load, folder: Path, *, sinks: list[dict[str, Any]], **more: Any) -> Any:
    """Settings of a pipeline over the load, with everything it keeps under `folder`."""
    from penstock.spark.settings import PipelineSettings

    return PipelineSettings.of(
        {
            "name": "bench",
            "url": load.url,
            "topics": [load.topic],
            "state": str(folder / "state"),
            "sink": sinks,
            **more,
        }
    )
