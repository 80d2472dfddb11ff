"""The benchmark's document as a table."""

from __future__ import annotations

from typing import Any

from penstock.cli.bench.targets import CLUSTER_METRICS, METRICS, PIPELINE_METRICS
from penstock.cli.output import cell

OF = {"queue": METRICS, "pipeline": PIPELINE_METRICS, "cluster": CLUSTER_METRICS}


def view_of(document: dict[str, Any], *, what: str = "queue") -> Any:
    from rich import box
    from rich.table import Table

    settings, machine = document["settings"], document["machine"]
    made = Table(
        title=f"penstock bench {what}: medians of {settings['runs']} runs"
        f"{' (quick: a tenth of the work)' if settings['quick'] else ''}",
        caption=f"{machine['cores']} cores, {machine['cpu']}, load {machine['load_1m']},"
        f" fsync {machine['fsync']}; {document['took_s']} s",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
    )
    for name in ("metric", "value", "unit", "target", "aim", ""):
        made.add_column(name, justify="right" if name in ("value", "target", "aim") else "left")
    for metric in OF[what]:
        if metric.name not in document:
            continue
        value = document[metric.name]
        sign = "≥" if metric.more_is_better else "≤"
        met = "[green]met[/green]" if metric.met(value) else "[red]missed[/red]"
        aim = f"{sign} {number(metric.aim)}" if metric.aim else "–"
        made.add_row(
            metric.name, number(value), metric.unit, f"{sign} {number(metric.target)}", aim, met
        )
    return made


def number(value: float) -> str:
    return cell(round(value)) if value >= 1000 else f"{value:.2f}".rstrip("0").rstrip(".")
