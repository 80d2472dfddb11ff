"""What a command prints: one JSON document, or something for a person, and never a mix.

Results go to stdout; progress, questions and errors go to stderr, so a pipe sees results alone.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

PIPE_COLUMNS: Final = 160  # a pipe has no width; ids and payloads should not be cut at 80


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PIPE_COLUMNS
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def to_json(document: Any, *, indent: int | None = 2) -> str:
    return json.dumps(plain(document), indent=indent, ensure_ascii=False, default=str)


def plain(value: Any) -> Any:
    """The value in JSON's own types. Bytes that are text stay readable under the same name;
    other bytes move to `<name>_base64`."""
    if isinstance(value, dict):
        pairs: dict[str, Any] = {}
        for name, item in value.items():
            if isinstance(item, bytes | bytearray | memoryview):
                shown, text = _readable(bytes(item))
                pairs[str(name) if text else f"{name}_base64"] = shown
            else:
                pairs[str(name)] = plain(item)
        return pairs
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return _readable(bytes(value))[0]
    return value


def _readable(data: bytes) -> tuple[str, bool]:
    try:
        return data.decode(), True
    except UnicodeDecodeError:
        return base64.b64encode(data).decode(), False


def preview(data: bytes, *, length_max: int = 60) -> str:
    """A payload on one line of a table."""
    text, readable = _readable(data[: length_max * 4])
    if not readable:
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


def when(time_ms: int | None) -> str:
    """A point in time, in UTC."""
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


def show(view: RenderableType | None) -> None:
    if view is not None:
        console().print(view)


def say(text: str) -> None:
    """A line for a person beside the result."""
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
