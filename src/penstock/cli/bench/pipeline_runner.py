"""Runs the pipeline's stages on one Spark session, each several times, and takes medians."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from penstock.cli.bench.document import QUICK_SCALE, session, shown
from penstock.cli.bench.pipeline_load import COMPONENTS, DIMENSIONS, PARTITIONS, loaded_server
from penstock.cli.bench.pipeline_stages import Bench, freshness, full, ordered, read
from penstock.cli.bench.stages import Values
from penstock.cli.bench.targets import PIPELINE_METRICS
from penstock.cli.output import progress, say

VECTORS: Final = 100_000
DELTAS: Final = 1_500_000
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
    with session(folder) as made:
        say(f"writing {vectors} vectors and {deltas} changes")
        async with loaded_server(made.folder, vectors=vectors, deltas=deltas) as load:
            say("starting Spark")
            spark = await asyncio.to_thread(spark_session, "penstock-bench", cores=CORES)
            bench = Bench(spark, load)
            try:
                results = await asyncio.to_thread(
                    _run, stages, bench=bench, folder=made.folder, runs=runs
                )
            finally:
                await asyncio.to_thread(spark.stop)
        settings = {
            "runs": runs, "quick": quick, "vectors": vectors, "deltas": deltas, "cores": CORES,
            "dimensions": DIMENSIONS, "components": COMPONENTS, "partitions": PARTITIONS,
        }  # fmt: skip
        return made.document(results, PIPELINE_METRICS, settings)


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
                say(f"{name} {number + 1}: {shown(rows[-1])}")
                advance(place * runs + number + 1)
    return results
