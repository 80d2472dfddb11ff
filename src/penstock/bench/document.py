"""What a benchmark prints as JSON: medians, their targets, and all that they came from."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.bench.stages import Values
from penstock.bench.targets import Metric
from penstock.model.version import __version__


@dataclass(frozen=True)
class Measurement:
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
        """`results` by stage, a row per run; the medians stand under their metrics' names. A
        target of a stage that was run is met by a value alone, not by there being none."""
        values = _values(results, metrics)
        asked = [metric for metric in metrics if metric.stage in results]
        return {
            **values,
            "ok": all(metric.met(values.get(metric.name)) for metric in asked),
            "missing": [metric.name for metric in asked if metric.name not in values],
            "targets": {
                metric.name: {"target": metric.target, "aim": metric.aim, "unit": metric.unit}
                for metric in asked
                if metric.target is not None
            },
            "references": {
                metric.name: metric.reference for metric in asked if metric.reference is not None
            },
            "runs": results,
            "settings": settings,
            "machine": self.facts,
            "measured_at": self.began.isoformat(timespec="seconds"),
            "took_s": round((datetime.now(UTC) - self.began).total_seconds(), 1),
        }


@contextmanager
def measurement(folder: Path | None) -> Iterator[Measurement]:
    """A scratch folder below `folder` for as long as it is measured."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=folder) as scratch:
        yield Measurement(Path(scratch), machine_facts(Path(scratch)), datetime.now(UTC))


def _values(results: Mapping[str, Sequence[Values]], metrics: Sequence[Metric]) -> Values:
    """Medians, but of a load the worst run: what was measured under less than was meant to be
    there must not hide behind the others."""
    values = {name: value for rows in results.values() for name, value in median_of(rows).items()}
    for metric in metrics:
        if metric.of_worst_run and metric.name in values:
            found = [row[metric.name] for row in results[metric.stage]]
            values[metric.name] = round(min(found) if metric.more_is_better else max(found), 3)
    return values


def median_of(rows: Sequence[Values]) -> Values:
    """The median of each value over the runs; one that a run lacks has none."""
    return {
        name: round(statistics.median(row[name] for row in rows), 3)
        for name in (rows[0] if rows else {})
        if all(name in row for row in rows)
    }


def shown(values: Values) -> str:
    return ", ".join(f"{name} {value:,.2f}" for name, value in values.items())


def machine_facts(folder: Path) -> dict[str, Any]:
    """What is worth knowing about the machine, so that two results can be compared."""
    from penstock.log.files import measure_sync

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "penstock": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mb": memory // 1_000_000,
        "disk_free_mb": shutil.disk_usage(folder).free // 1_000_000,
        "fsync": str(measure_sync(folder)),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
