"""Runs the chosen stages and takes medians."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from penstock.cli.bench.backlog import backlog
from penstock.cli.bench.document import QUICK_SCALE, session
from penstock.cli.bench.gateway import grpc_enqueue, http_put
from penstock.cli.bench.latency import latency
from penstock.cli.bench.native import enqueue, pop, put
from penstock.cli.bench.stages import BATCH, PAYLOAD_BYTES, Run, Stage, Values
from penstock.cli.bench.targets import METRICS
from penstock.cli.output import progress

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
    results: dict[str, list[Values]] = {}
    with session(folder) as made:
        with progress("bench", total=len(stages), unit="stages") as advance:
            for done, name in enumerate(stages):
                results[name] = await _stage(name, made.folder, scale=scale, runs=runs)
                advance(done + 1)
        settings = {
            "runs": runs, "quick": quick, "payload_bytes": PAYLOAD_BYTES, "batch": BATCH,
            "fsync": "before every acknowledgement",
        }  # fmt: skip
        return made.document(results, METRICS, settings)


async def _stage(name: str, folder: Path, *, scale: float, runs: int) -> list[Values]:
    stage = STAGE[name]
    if name in REPEATS_ITSELF:
        return await stage(Run(folder=folder, scale=scale, runs=runs))
    return [row for _ in range(runs) for row in await stage(Run(folder=folder, scale=scale))]
