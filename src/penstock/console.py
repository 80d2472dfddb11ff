"""What a person at a terminal sees of a program: texts, numbers and progress.

Results go to stdout; progress, questions and errors go to stderr, so a pipe sees results alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.model.plain import plain

if TYPE_CHECKING:
    from rich.console import Console

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
