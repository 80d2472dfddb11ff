"""What a benchmark prints as JSON: medians, their targets, and all that they came from."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from penstock.cli.bench.machine import machine_facts
from penstock.cli.bench.stages import Values
from penstock.cli.bench.targets import Metric

QUICK_SCALE: Final = 0.1  # of the work, for a quick look


@dataclass(frozen=True)
class Session:
    """One run of the command: its folder, the machine it found, when it began."""

    folder: Path
    facts: dict[str, Any]
    began: datetime

    def document(
        self,
        results: Mapping[str, Sequence[Values]],
        metrics: Sequence[Metric],
        settings: Mapping[str, Any],
    ) -> dict[str, Any]:
        """`results` by stage, a row per run; the medians stand under their metrics' names."""
        medians = {
            name: value for rows in results.values() for name, value in median_of(rows).items()
        }
        known = [metric for metric in metrics if metric.name in medians]
        return {
            **medians,
            "ok": all(metric.met(medians[metric.name]) for metric in known),
            "targets": {
                metric.name: {"target": metric.target, "aim": metric.aim, "unit": metric.unit}
                for metric in known
                if metric.target is not None
            },
            "references": {
                metric.name: metric.reference for metric in known if metric.reference is not None
            },
            "runs": results,
            "settings": settings,
            "machine": self.facts,
            "measured_at": self.began.isoformat(timespec="seconds"),
            "took_s": round((datetime.now(UTC) - self.began).total_seconds(), 1),
        }


@contextmanager
def session(folder: Path | None) -> Iterator[Session]:
    """A scratch folder below `folder` for as long as it is measured."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=folder) as scratch:
        yield Session(Path(scratch), machine_facts(Path(scratch)), datetime.now(UTC))


def median_of(rows: Sequence[Values]) -> Values:
    """The median of each value over the runs."""
    return {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}


def shown(values: Values) -> str:
    return ", ".join(f"{name} {value:,.2f}" for name, value in values.items())
