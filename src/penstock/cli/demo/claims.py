"""What the demo says about Penstock, each with the evidence for or against it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any


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
