"""What a person at a terminal sees of a program: texts, numbers, tables and progress.

Results go to stdout; progress, questions and errors go to stderr, so a pipe sees results alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.model.plain import plain, readable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# What columns are called, and which field of a row they show or what they make of it.
Columns = Mapping[str, str | Callable[[Any], object]]
PIPE_COLUMNS: Final = 160  # a pipe has no width; ids and payloads should not be cut at 80


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PIPE_COLUMNS
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def to_json(document: Any, *, indent: int | None = 2) -> str:
    return json.dumps(plain(document), indent=indent, ensure_ascii=False, default=str)


def cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u202f")
    if isinstance(value, float):
        return f"{value:,.2f}".replace(",", "\u202f")
    return str(value)


def say(text: str) -> None:
    console(stderr=True).print(text, markup=False)


class Advance(Protocol):
    def __call__(
        self, done: float, total: float | None = None, what: str | None = None
    ) -> None: ...


@contextmanager
def progress(what: str, *, total: float | None = None, unit: str = "") -> Iterator[Advance]:
    """A progress bar on stderr. Without a terminal there is none, and its updates cost nothing."""
    if not sys.stderr.isatty():
        yield lambda done, total=None, what=None: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(f"{{task.completed:,.0f}} of {{task.total:,.0f}} {unit}")
        if total
        else TextColumn(f"{{task.completed:,.0f}} {unit}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)

        def advance(done: float, total: float | None = None, what: str | None = None) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield advance


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
