"""Runs the stages of the live path and takes medians."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from penstock.cli.bench.document import QUICK_SCALE, median_of, session, shown
from penstock.cli.bench.live_kernels import kernels
from penstock.cli.bench.live_stages import (
    LiveStage,
    to_cache,
    to_memory,
    to_sink,
    to_sink_in_batches,
)
from penstock.cli.bench.live_stalled import stalled_subscriber
from penstock.cli.bench.live_subscriber import to_subscriber
from penstock.cli.bench.pipeline_load import COMPONENTS, DIMENSIONS
from penstock.cli.bench.stages import Run, Values
from penstock.cli.bench.targets import LIVE_METRICS
from penstock.cli.output import progress, say

STAGE: Final[dict[str, LiveStage]] = {
    "sink": to_sink,
    "memory": to_memory,
    "cache": to_cache,
    "subscriber": to_subscriber,
    "batches": to_sink_in_batches,
    "stalled": stalled_subscriber,
    "kernels": kernels,
}


async def measure_live(
    stages: Sequence[str], *, runs: int, quick: bool, folder: Path | None
) -> dict[str, Any]:
    """The whole document: medians under their metric's name, and everything they came from."""
    scale = QUICK_SCALE if quick else 1.0
    results: dict[str, list[Values]] = {}
    with session(folder) as made, progress("bench", total=len(stages) * runs, unit="runs") as tell:
        for name in stages:
            rows = results.setdefault(name, [])
            for number in range(runs):
                run = Run(folder=made.folder / f"{name}-{number}", scale=scale)
                run.folder.mkdir()
                rows.append(await STAGE[name](run))
                tell(sum(map(len, results.values())))
            say(f"{name}: {shown(median_of(rows))}")
        settings = {
            "runs": runs, "quick": quick, "dimensions": DIMENSIONS, "components": COMPONENTS,
            "fsync": "before every acknowledgement, and before anything is released",
        }  # fmt: skip
        return made.document(results, LIVE_METRICS, settings)
