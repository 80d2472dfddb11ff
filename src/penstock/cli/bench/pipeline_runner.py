"""Runs the pipeline's stages on one Spark session, each several times, and takes medians."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from penstock.cli.bench.machine import machine_facts
from penstock.cli.bench.pipeline_load import COMPONENTS, DIMENSIONS, PARTITIONS, loaded_server
from penstock.cli.bench.pipeline_stages import Bench, freshness, full, ordered, read
from penstock.cli.bench.runner import median_of
from penstock.cli.bench.stages import Values
from penstock.cli.bench.targets import PIPELINE_METRICS
from penstock.cli.output import progress, say

VECTORS: Final = 100_000
DELTAS: Final = 1_500_000
QUICK_SCALE: Final = 0.1
CORES: Final = 2
Stage = Callable[[Bench, Path], Values]
STAGE: Final[dict[str, Stage]] = {
    "read": read,
    "ordered": ordered,
    "full": full,
    "freshness": freshness,
}


async def measure_pipeline(
    stages: Sequence[str], *, runs: int, quick: bool, folder: Path | None
) -> dict[str, Any]:
    """The whole document: medians under their metric's name, and everything they came from."""
    import asyncio

    from penstock.spark.session import spark_session

    scale = QUICK_SCALE if quick else 1.0
    vectors, deltas = round(VECTORS * scale), round(DELTAS * scale)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=folder) as scratch:
        facts = machine_facts(Path(scratch))
        began = datetime.now(UTC)
        say(f"writing {vectors} vectors and {deltas} changes")
        async with loaded_server(Path(scratch), vectors=vectors, deltas=deltas) as load:
            say("starting Spark")
            spark = await asyncio.to_thread(spark_session, "penstock-bench", cores=CORES)
            bench = Bench(spark, load)
            try:
                results = await asyncio.to_thread(
                    _run, stages, bench=bench, folder=Path(scratch), runs=runs
                )
            finally:
                await asyncio.to_thread(spark.stop)
    medians = {name: value for rows in results.values() for name, value in median_of(rows).items()}
    metrics = [metric for metric in PIPELINE_METRICS if metric.name in medians]
    return {
        **medians,
        "ok": all(metric.met(medians[metric.name]) for metric in metrics),
        "targets": {
            metric.name: {"target": metric.target, "aim": metric.aim, "unit": metric.unit}
            for metric in metrics
        },
        "runs": results,
        "settings": {
            "runs": runs, "quick": quick, "vectors": vectors, "deltas": deltas, "cores": CORES,
            "dimensions": DIMENSIONS, "components": COMPONENTS, "partitions": PARTITIONS,
        },
        "machine": facts,
        "measured_at": began.isoformat(timespec="seconds"),
        "took_s": round((datetime.now(UTC) - began).total_seconds(), 1),
    }  # fmt: skip


def _run(
    stages: Sequence[str], *, bench: Bench, folder: Path, runs: int
) -> dict[str, list[Values]]:
    results: dict[str, list[Values]] = {}
    with progress("bench", total=len(stages) * runs, unit="runs") as advance:
        for place, name in enumerate(stages):
            rows = results.setdefault(name, [])
            for number in range(runs):
                with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=folder) as own:
                    rows.append(STAGE[name](bench, Path(own)))
                say(f"{name} {number + 1}: {_shown(rows[-1])}")
                advance(place * runs + number + 1)
    return results


def _shown(values: Values) -> str:
    return ", ".join(f"{name} {value:,.2f}" for name, value in values.items())
