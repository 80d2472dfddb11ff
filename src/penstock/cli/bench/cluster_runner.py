"""Runs the cluster's stages, each on a cluster of its own, and takes medians."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from penstock.cli.bench.cluster_latency import failover, latency
from penstock.cli.bench.cluster_stages import (
    NODES,
    PARTITIONS,
    REPLICATION,
    ClusterStage,
    enqueue,
    fresh_cluster,
    pop,
    put,
    slow_follower,
)
from penstock.cli.bench.document import QUICK_SCALE, median_of, session, shown
from penstock.cli.bench.stages import BATCH, PAYLOAD_BYTES, Run, Values
from penstock.cli.bench.targets import CLUSTER_METRICS
from penstock.cli.output import progress, say

STAGE: Final[dict[str, ClusterStage]] = {
    "enqueue": enqueue,
    "pop": pop,
    "put": put,
    "latency": latency,
    "failover": failover,
    "slow": slow_follower,
}


async def measure_cluster(
    stages: Sequence[str], *, runs: int, quick: bool, folder: Path | None
) -> dict[str, Any]:
    """The whole document: medians under their metric's name, and everything they came from."""
    scale = QUICK_SCALE if quick else 1.0
    results: dict[str, list[Values]] = {}
    with session(folder) as made:
        run = Run(folder=made.folder, scale=scale, runs=runs)
        with progress("bench", total=len(stages), unit="stages") as advance:
            for done, name in enumerate(stages):
                async with fresh_cluster(run) as bench:
                    results[name] = await STAGE[name](bench)
                say(f"{name}: {shown(median_of(results[name]))}")
                advance(done + 1)
        settings = {
            "runs": runs, "quick": quick, "payload_bytes": PAYLOAD_BYTES, "batch": BATCH,
            "nodes": NODES, "partitions": PARTITIONS, "replication_factor": REPLICATION,
            "fsync": "on a quorum before every acknowledgement",
        }  # fmt: skip
        return made.document(results, CLUSTER_METRICS, settings)
