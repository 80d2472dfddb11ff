"""Runs the chosen stages and takes medians."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from penstock.cli.bench.backlog import backlog
from penstock.cli.bench.gateway import grpc_enqueue, http_put
from penstock.cli.bench.latency import latency
from penstock.cli.bench.machine import machine_facts
from penstock.cli.bench.native import enqueue, pop, put
from penstock.cli.bench.stages import BATCH, PAYLOAD_BYTES, Run, Stage, Values
from penstock.cli.bench.targets import METRICS
from penstock.cli.output import progress

QUICK_SCALE: Final = 0.1
STAGE: Final[dict[str, Stage]] = {
    "enqueue": enqueue,
    "pop": pop,
    "put": put,
    "latency": latency,
    "backlog": backlog,
    "grpc": grpc_enqueue,
    "http": http_put,
}
REPEATS_ITSELF: Final = frozenset({"backlog"})  # fills once and restarts once a run


async def measure(
    stages: Sequence[str], *, runs: int, quick: bool, folder: Path | None
) -> dict[str, Any]:
    """The whole document: medians under their metric's name, and everything they came from."""
    scale = QUICK_SCALE if quick else 1.0
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=folder) as scratch:
        facts = machine_facts(Path(scratch))
        began = datetime.now(UTC)
        results: dict[str, list[Values]] = {}
        with progress("bench", total=len(stages), unit="stages") as advance:
            for done, name in enumerate(stages):
                results[name] = await _stage(name, Path(scratch), scale=scale, runs=runs)
                advance(done + 1)
    medians = {name: value for rows in results.values() for name, value in median_of(rows).items()}
    return {
        **medians,
        "ok": all(metric.met(medians[metric.name]) for metric in METRICS if metric.name in medians),
        "targets": {
            metric.name: {"target": metric.target, "aim": metric.aim, "unit": metric.unit}
            for metric in METRICS
            if metric.name in medians
        },
        "runs": results,
        "settings": {
            "runs": runs, "quick": quick, "payload_bytes": PAYLOAD_BYTES, "batch": BATCH,
            "fsync": "before every acknowledgement",
        },
        "machine": facts,
        "measured_at": began.isoformat(timespec="seconds"),
        "took_s": round((datetime.now(UTC) - began).total_seconds(), 1),
    }  # fmt: skip


async def _stage(name: str, folder: Path, *, scale: float, runs: int) -> list[Values]:
    stage = STAGE[name]
    if name in REPEATS_ITSELF:
        return await stage(Run(folder=folder, scale=scale, runs=runs))
    return [row for _ in range(runs) for row in await stage(Run(folder=folder, scale=scale))]


def median_of(rows: Sequence[Values]) -> Values:
    """The median of each value over the runs."""
    return {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}
