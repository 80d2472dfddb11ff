"""Runs the cluster's stages, each on a cluster of its own, and takes medians."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
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
from penstock.cli.bench.machine import machine_facts
from penstock.cli.bench.runner import QUICK_SCALE, median_of
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
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=folder) as scratch:
        facts = machine_facts(Path(scratch))
        began = datetime.now(UTC)
        run = Run(folder=Path(scratch), scale=scale, runs=runs)
        with progress("bench", total=len(stages), unit="stages") as advance:
            for done, name in enumerate(stages):
                async with fresh_cluster(run) as bench:
                    results[name] = await STAGE[name](bench)
                say(f"{name}: {_shown(median_of(results[name]))}")
                advance(done + 1)
    medians = {name: value for rows in results.values() for name, value in median_of(rows).items()}
    metrics = [metric for metric in CLUSTER_METRICS if metric.name in medians]
    return {
        **medians,
        "ok": all(metric.met(medians[metric.name]) for metric in metrics),
        "targets": {
            metric.name: {"target": metric.target, "aim": metric.aim, "unit": metric.unit}
            for metric in metrics
        },
        "runs": results,
        "settings": {
            "runs": runs, "quick": quick, "payload_bytes": PAYLOAD_BYTES, "batch": BATCH,
            "nodes": NODES, "partitions": PARTITIONS, "replication_factor": REPLICATION,
            "fsync": "on a quorum before every acknowledgement",
        },
        "machine": facts,
        "measured_at": began.isoformat(timespec="seconds"),
        "took_s": round((datetime.now(UTC) - began).total_seconds(), 1),
    }  # fmt: skip


def _shown(values: Values) -> str:
    return ", ".join(f"{name} {value:,.2f}" for name, value in values.items())
