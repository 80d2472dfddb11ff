"""The nearest-neighbour query of the demo, before and after a person's correction."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.demo.archive import films
from penstock.demo.archive.cinema import Cinema
from penstock.demo.chapters import Chapter

if TYPE_CHECKING:
    from penstock.demo.archive.writers import Editors

SHOWN: Final = 4
FRESH_S_MAX: Final = 120.0
ASK_EVERY_S: Final = 0.1


@dataclass(frozen=True)
class Answers:
    """Who is nearest to the question, the nearest first, with their distances."""

    names: list[str]
    distances: list[float]

    @staticmethod
    async def ask(house: Cinema) -> Answers:
        """Ask the index about all vectors, stills and films."""
        from penstock.sinks.index import Index

        def search() -> Answers:
            with Index(str(house.index_path)) as index:
                found = index.search(films.question(), SHOWN)
            return Answers([one.vector_id for one in found], [one.distance for one in found])

        return await asyncio.to_thread(search)

    def lines(self) -> list[str]:
        return [
            f"{number}  {distance:.2f}  {name}"
            for number, (name, distance) in enumerate(
                zip(self.names, self.distances, strict=True), 1
            )
        ]


async def find_the_fresh_change(
    house: Cinema, editors: Editors, chapter: Chapter, *, before: Answers
) -> None:
    """Correct one film, and ask until the answer has changed."""
    house.doing = "an editor corrects a film"
    began = time.monotonic()
    await editors.correct(films.MISFILED, films.components(films.TRUTH))
    put_s = time.monotonic() - began
    house.mark("an editor corrects a film")
    after = before
    while after.names[0] != films.MISFILED and time.monotonic() - began < FRESH_S_MAX:
        await asyncio.sleep(ASK_EVERY_S)
        after = await Answers.ask(house)
    took = time.monotonic() - began
    chapter.note(f"  nearest to [bold]{' + '.join(films.QUESTION)}[/bold], by cosine distance:\n")
    for left, right in zip(before.lines(), after.lines(), strict=True):
        chapter.note(f"  {left:<44}{_marked(right)}")
    chapter.note("")
    chapter.claim(
        "the model had misfiled it, so nobody found it",
        films.MISFILED not in before.names,
        f"{films.MISFILED} was not among the first {len(before.names)}",
    )
    chapter.claim(
        "once a person corrects it, it is the first answer",
        after.names[0] == films.MISFILED,
        f"durable after {put_s * 1000:.0f} ms, found {took:.1f} s after the keystroke",
    )
    chapter.headline["from a correction to the first search that finds it"] = f"{took:.1f} s"
    chapter.figures["search"] = {
        "question": " + ".join(films.QUESTION),
        "corrected": films.MISFILED,
        "before": before.names,
        "after": after.names,
        "took_s": round(took, 3),
    }


def _marked(line: str) -> str:
    return f"[bold green]{line}[/bold green]" if line.endswith(films.MISFILED) else line
