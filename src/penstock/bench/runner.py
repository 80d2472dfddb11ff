"""Runs the stages of a subject, several times each, and takes medians."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.bench.document import measurement, median_of, shown
from penstock.bench.stages import Run, Values
from penstock.bench.targets import Metric
from penstock.console import progress, say

QUICK_SCALE: Final = 0.1  # of the work, for a quick look

Stage = Callable[[Run], Awaitable[list[Values]]]  # a row of values for each of its runs


class StageSet(NamedTuple):
    """Stages by name, ready to run, and what a reader has to know about their work."""

    stages: Mapping[str, Stage]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Subject:
    """What a benchmark measures. Its stages may share something, which is open while they run."""

    metrics: tuple[Metric, ...]
    prepare: Callable[[Run], AbstractAsyncContextManager[StageSet]]

    @property
    def names(self) -> tuple[str, ...]:
        """Of all stages, in the order of their metrics."""
        return tuple(dict.fromkeys(metric.stage for metric in self.metrics))


def each_run(stage: Callable[[Run], Awaitable[Values]]) -> Stage:
    """A stage that is repeated as a whole, each time in a folder of its own."""

    async def repeated(run: Run) -> list[Values]:
        rows = []
        for _ in range(run.runs):
            with tempfile.TemporaryDirectory(prefix="run-", dir=run.folder) as folder:
                rows.append(await stage(replace(run, folder=Path(folder), runs=1)))
        return rows

    return repeated


async def measure(
    subject: Subject, names: Sequence[str], *, runs: int, quick: bool, folder: Path | None
) -> dict[str, Any]:
    """The whole document: medians under their metric's name, and everything they came from."""
    results: dict[str, list[Values]] = {}
    with measurement(folder) as made:
        run = Run(folder=made.folder, scale=QUICK_SCALE if quick else 1.0, runs=runs)
        async with subject.prepare(run) as prepared:
            with progress("bench", total=len(names), unit="stages") as advance:
                for name in names:
                    results[name] = await _measured(prepared.stages[name], run)
                    say(f"{name}: {shown(median_of(results[name]))}")
                    advance(len(results))
        settings = {"runs": runs, "quick": quick, **prepared.settings}
        return made.document(results, subject.metrics, settings)


async def _measured(stage: Stage, run: Run) -> list[Values]:
    with tempfile.TemporaryDirectory(prefix="stage-", dir=run.folder) as folder:
        return await stage(replace(run, folder=Path(folder)))
