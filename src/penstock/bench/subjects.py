"""The subjects of `penstock bench`, by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Final

from penstock.bench.cluster import latency as cluster_latency
from penstock.bench.cluster import stages as on_cluster
from penstock.bench.live import kernels, stages, stalled, subscriber
from penstock.bench.pipeline import load, scale
from penstock.bench.pipeline import stages as on_spark
from penstock.bench.queue import backlog, gateway, latency, native
from penstock.bench.runner import Stage, StageSet, Subject, each_run
from penstock.bench.stages import BATCH, PAYLOAD_BYTES, Run, Values
from penstock.bench.targets import (
    CLUSTER_METRICS,
    LIVE_METRICS,
    PIPELINE_METRICS,
    PIPELINE_SCALE_METRICS,
    QUEUE_METRICS,
)
from penstock.bench.vectors import COMPONENTS, DIMENSIONS

QUEUE: Final = StageSet(
    stages={
        "enqueue": each_run(native.enqueue),
        "pop": each_run(native.pop),
        "put": each_run(native.put),
        "latency": each_run(latency.latency),
        "backlog": backlog.backlog,
        "grpc": each_run(gateway.grpc_enqueue),
        "http": each_run(gateway.http_put),
    },
    settings={
        "payload_bytes": PAYLOAD_BYTES,
        "batch": BATCH,
        "fsync": "before every acknowledgement",
    },
)

LIVE: Final = StageSet(
    stages={
        "sink": each_run(stages.to_sink),
        "memory": each_run(stages.to_memory),
        "cache": each_run(stages.to_cache),
        "subscriber": each_run(subscriber.to_subscriber),
        "batches": each_run(stages.to_sink_in_batches),
        "stalled": each_run(stalled.stalled_subscriber),
        "kernels": each_run(kernels.kernels),
    },
    settings={
        "dimensions": DIMENSIONS,
        "components": COMPONENTS,
        "fsync": "before every acknowledgement, and before anything is released",
    },
)


def _clustered(stage: Callable[[on_cluster.ClusterBench], Awaitable[list[Values]]]) -> Stage:
    """A stage on a cluster of its own, which serves all of its runs."""

    async def clustered(run: Run) -> list[Values]:
        async with on_cluster.fresh_cluster(run) as bench:
            return await stage(bench)

    return clustered


CLUSTER: Final = StageSet(
    stages={
        "enqueue": _clustered(on_cluster.enqueue),
        "pop": _clustered(on_cluster.pop),
        "put": _clustered(on_cluster.put),
        "latency": _clustered(cluster_latency.latency),
        "failover": _clustered(cluster_latency.failover),
        "slow": _clustered(on_cluster.slow_follower),
    },
    settings={
        "payload_bytes": PAYLOAD_BYTES,
        "batch": BATCH,
        "nodes": on_cluster.NODES,
        "partitions": on_cluster.PARTITIONS,
        "replication_factor": on_cluster.REPLICATION,
        "fsync": "on a quorum before every acknowledgement",
    },
)


@asynccontextmanager
async def _pipeline(run: Run) -> AsyncIterator[StageSet]:
    """All stages work on one node and one Spark session, each run in a thread."""
    async with load.pipeline_bench(run) as bench:

        def threaded(stage: Callable[[load.PipelineBench, Path], Values]) -> Stage:
            return each_run(lambda run: asyncio.to_thread(stage, bench, run.folder))

        yield StageSet(
            stages={
                "read": threaded(on_spark.read),
                "ordered": threaded(on_spark.ordered),
                "full": threaded(on_spark.full),
                "write": threaded(on_spark.write),
                "state": threaded(on_spark.state),
                "freshness": threaded(on_spark.freshness),
            },
            settings={
                "vectors": bench.load.vectors,
                "deltas": bench.load.deltas,
                "cores": load.CORES,
                "dimensions": DIMENSIONS,
                "components": COMPONENTS,
                "partitions": load.PARTITIONS,
            },
        )


@asynccontextmanager
async def _pipeline_scale(run: Run) -> AsyncIterator[StageSet]:
    async with load.pipeline_bench(run) as bench:
        yield StageSet(
            stages={
                "tasks": each_run(lambda one: asyncio.to_thread(scale.tasks, bench, one.folder)),
                "vectors": each_run(lambda one: scale.vectors(bench, one.folder, scale=run.scale)),
            },
            settings={"cores": load.CORES, "dimensions": DIMENSIONS, "partitions": load.PARTITIONS},
        )


SCALES: Final = {"pipeline": Subject(PIPELINE_SCALE_METRICS, _pipeline_scale)}
SUBJECTS: Final = {
    "queue": Subject(QUEUE_METRICS, lambda run: nullcontext(QUEUE)),
    "pipeline": Subject(PIPELINE_METRICS, _pipeline),
    "cluster": Subject(CLUSTER_METRICS, lambda run: nullcontext(CLUSTER)),
    "live": Subject(LIVE_METRICS, lambda run: nullcontext(LIVE)),
}
