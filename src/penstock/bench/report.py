"""The benchmark's document as a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.bench.targets import Metric
from penstock.console import cell


def view_of(document: dict[str, Any], metrics: Iterable[Metric], *, what: str) -> Any:
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
    missing = document.get("missing", ())
    asked = [metric for metric in metrics if metric.name in document or metric.name in missing]
    # Another language's hopes stand beside, where there are any.
    further = "seed" if any(metric.reference for metric in asked) else "aim"
    for name in ("metric", "value", "unit", "target", further, ""):
        made.add_column(name, justify="right" if name in ("value", "target", further) else "left")
    for metric in asked:
        beside = metric.reference if further == "seed" else metric.aim
        value = document.get(metric.name)
        made.add_row(
            metric.name, "–" if value is None else number(value), metric.unit,
            _bound(metric, metric.target), _bound(metric, beside), _verdict(metric, value),
        )  # fmt: skip
    return made


def _bound(metric: Metric, value: float | None) -> str:
    return "–" if value is None else f"{'≥' if metric.more_is_better else '≤'} {number(value)}"


def _verdict(metric: Metric, value: float | None) -> str:
    if value is None:
        return "[red]not measured[/red]"
    if metric.target is None:
        return ""
    return "[green]met[/green]" if metric.met(value) else "[red]missed[/red]"


def number(value: float) -> str:
    return cell(round(value)) if value >= 1000 else f"{value:.2f}".rstrip("0").rstrip(".")
