"""The chapters of the demo with their claims, and the screen that shows them to a person."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from penstock.console import console

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.status import Status

WIDTH: Final = 100
LINE_EVERY_S: Final = 5.0  # of progress, where there is no terminal to show it in one place


@dataclass(frozen=True)
class Claim:
    text: str
    holds: bool
    evidence: str


@dataclass
class Chapter:
    """One part of the story: what was done, and what it shows."""

    title: str
    notes: list[str] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)  # for programs
    headline: dict[str, str] = field(default_factory=dict)  # the few that people remember

    def note(self, text: str) -> None:
        self.notes.append(text)

    def claim(self, text: str, holds: bool, evidence: str) -> None:
        self.claims.append(Claim(text, bool(holds), evidence))


def document_of(chapters: list[Chapter], *, seconds: float) -> dict[str, Any]:
    claims = list(all_claims(chapters))
    return {
        "ok": bool(claims) and all(claim.holds for claim in claims),
        "claims": [asdict(claim) for claim in claims],
        "figures": {name: value for c in chapters for name, value in c.figures.items()},
        "headline": {name: text for c in chapters for name, text in c.headline.items()},
        "seconds": round(seconds, 2),
    }


def all_claims(chapters: list[Chapter]) -> Iterator[Claim]:
    for chapter in chapters:
        yield from chapter.claims


class Screen:
    """Prints each chapter as it ends; `quiet` leaves stdout to the JSON document."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._console = console()  # one for all: a line that changes must know of the others
        self._chapters = 0
        self._status: Status | None = None
        self._line_at = float("-inf")

    def say(self, text: str) -> None:
        self.show(f"[dim]· {text}[/dim]")

    def show(self, what: RenderableType) -> None:
        if not self._quiet:
            self._console.print(what)

    def act(self, title: str, text: str) -> None:
        self.show(f"\n[bold]{title}[/bold]\n[dim]{text}[/dim]\n")

    def progress(self, text: str) -> None:
        """What goes on right now: one line that changes, or one line now and then."""
        if self._quiet:
            return
        if sys.stdout.isatty():
            if self._status is None:
                self._status = self._console.status(text, spinner="dots")
                self._status.start()
            self._status.update(f"[dim]{text}[/dim]")
        elif time.monotonic() - self._line_at >= LINE_EVERY_S:
            self._line_at = time.monotonic()
            self.show(f"[dim]  … {text}[/dim]")

    def rest(self) -> None:
        """Nothing goes on any more."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def chapter(self, chapter: Chapter) -> None:
        from rich.panel import Panel

        self._chapters += 1
        self.rest()
        lines = [*chapter.notes, *(_line(c.text, c.holds, c.evidence) for c in chapter.claims)]
        title = f"{self._chapters} · {chapter.title}"
        self.show(Panel("\n".join(lines), title=title, title_align="left", width=WIDTH))

    def table(self, title: str, *columns: str, rows: Sequence[Sequence[object]]) -> None:
        from rich import box
        from rich.table import Table

        made = Table(
            title=title, title_justify="left", box=box.ROUNDED, show_header=any(columns),
            width=min(WIDTH, self._console.width),
        )  # fmt: skip
        for name in columns:
            made.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left")
        for row in rows:
            made.add_row(*map(str, row))
        self.show(made)

    def summary(self, document: Mapping[str, Any]) -> None:
        """The claims that failed, if any, and what a person would tell a colleague."""
        from rich.markup import escape

        self.rest()
        claims = document["claims"]
        failed = [claim for claim in claims if not claim["holds"]]
        if failed:
            rows = [(_mark(False), escape(c["text"]), escape(c["evidence"])) for c in failed]
            self.table("What did not hold", "", "claim", "evidence", rows=rows)
        if document["headline"]:
            self.table("In short", "", "", rows=list(document["headline"].items()))
        verdict = "[bold green]All claims hold" if document["ok"] else "[bold red]A claim failed"
        held = len(claims) - len(failed)
        self.show(f"{verdict}[/]: {held} of {len(claims)} in {document['seconds']:.0f} s.")
        if "picture" in document:
            self.show(f"What happened, as a picture: {escape(document['picture'])}")


def _line(text: str, holds: bool, evidence: str) -> str:
    from rich.markup import escape

    return f"{_mark(holds)} {escape(text)} [dim]({escape(evidence)})[/dim]"


def _mark(holds: bool) -> str:
    return "[green]✓[/green]" if holds else "[red]✗[/red]"
