"""The story as a person sees it, with a terminal or without."""

from __future__ import annotations

from typing import Any

from penstock.cli.demo.claims import Chapter
from penstock.cli.output import cell, console


class Screen:
    """Prints each chapter as it ends; `quiet` leaves stdout to the JSON document."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet

    def say(self, text: str) -> None:
        if not self._quiet:
            console().print(f"[dim]· {text}[/dim]")

    def chapter(self, number: int, chapter: Chapter) -> None:
        if self._quiet:
            return
        from rich.panel import Panel

        lines = [*chapter.notes, *(_line(c.text, c.holds, c.evidence) for c in chapter.claims)]
        console().print(
            Panel("\n".join(lines), title=f"{number} · {chapter.title}", title_align="left",
                  width=100)
        )  # fmt: skip

    def summary(self, document: dict[str, Any]) -> None:
        if self._quiet:
            return
        from rich import box
        from rich.table import Table

        made = Table(title="What was proved", box=box.ROUNDED, title_justify="left", width=100)
        made.add_column("")
        made.add_column("claim")
        made.add_column("evidence", style="dim")
        for claim in document["claims"]:
            made.add_row(_mark(claim["holds"]), claim["text"], claim["evidence"])
        screen = console()
        screen.print(made)
        figures = ", ".join(f"{_words(n)} {cell(v)}" for n, v in document["figures"].items())
        screen.print(f"[dim]{figures}[/dim]")
        held = sum(claim["holds"] for claim in document["claims"])
        verdict = "[bold green]All claims hold" if document["ok"] else "[bold red]A claim failed"
        screen.print(
            f"{verdict}[/]: {held} of {len(document['claims'])} in {document['seconds']:.1f} s."
        )


def _line(text: str, holds: bool, evidence: str) -> str:
    return f"{_mark(holds)} {text} [dim]({evidence})[/dim]"


def _mark(holds: bool) -> str:
    return "[green]✓[/green]" if holds else "[red]✗[/red]"


def _words(name: str) -> str:
    return name.replace("_", " ")
