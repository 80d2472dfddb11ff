"""How a command shows what it found to a person: tables, previews, times and sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from penstock.console import cell
from penstock.model.plain import readable

if TYPE_CHECKING:
    from rich.table import Table

# What columns are called, and which field of a row they show or what they make of it.
Columns = Mapping[str, str | Callable[[Any], object]]


def preview(data: bytes, *, length_max: int = 60) -> str:
    text, is_text = readable(data[: length_max * 4])
    if not is_text:
        text = f"{len(data)} bytes: {data[:16].hex(' ')}"
    text = text.replace("\n", "↵ ")
    return text if len(text) <= length_max else f"{text[: length_max - 1]}…"


def table(*columns: str, rows: Iterable[Sequence[object]] = (), title: str | None = None) -> Table:
    """A plain table; a column whose name starts with `>` is aligned to the right."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        right = name.startswith(">")
        made.add_column(name.lstrip(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(escape(cell(value)) for value in row))
    return made


def listing(
    rows: Iterable[Mapping[str, Any]], columns: Columns, *, title: str | None = None
) -> Table:
    shown = [[c(row) if callable(c) else row.get(c) for c in columns.values()] for row in rows]
    return table(*columns, rows=shown, title=title)


def when(time_ms: int | None) -> str:
    if not time_ms:
        return "–"
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def duration(ms: float | None) -> str:
    if ms is None:
        return "–"
    if ms < 1000:
        return f"{ms:.0f} ms"
    seconds = ms / 1000
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
