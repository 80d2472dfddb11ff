"""What a comparison found: how much was compared, and the first places that differ.

Time goes on while things are compared. A difference may have an *excuse*: the sink is `behind` the
log, or `ahead` of the place up to which the log was folded. Whether the excuse holds is for the
caller to know, who looks at cursors and at the log: at rest none does. What a sink refused and its
dead letters hold is excused as `dead`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, Literal

SHOWN_MAX: Final = 20  # differences that are described one by one; all are counted
Excuse = Literal["behind", "ahead", "dead"]


@dataclass
class _Found:
    counts: Counter[str] = field(default_factory=Counter)  # by kind
    shown: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Comparison:
    """Differences by the excuses that each of them has; one of them is enough."""

    expected: int = 0
    compared: int = 0
    _found: dict[frozenset[Excuse], _Found] = field(default_factory=dict)

    def differ(
        self, kind: str, places: Iterable[dict[str, Any]], count: int, *excuses: Excuse
    ) -> None:
        """Count `count` differences of a kind, and keep the first places for people."""
        if count:
            found = self._found.setdefault(frozenset(excuses), _Found())
            found.counts[kind] += count
            found.shown += ({"kind": kind, **p} for p in islice(places, self._room(found)))

    def add(self, other: Comparison) -> None:
        """Take over what another comparison found."""
        self.expected += other.expected
        self.compared += other.compared
        for excuses, more in other._found.items():
            found = self._found.setdefault(excuses, _Found())
            found.counts += more.counts
            found.shown += more.shown[: self._room(found)]

    def _room(self, found: _Found) -> int:
        return max(0, SHOWN_MAX - len(found.shown))

    def wrong(self, excused: Set[Excuse] = frozenset()) -> Counter[str]:
        """The differences by kind that none of the accepted excuses covers."""
        total = Counter[str]()
        for excuses, found in self._found.items():
            if not excuses & excused:
                total += found.counts
        return total

    def pending(self, excused: Set[Excuse]) -> int:
        """How many differences there are that an accepted excuse covers."""
        found = (found.counts.total() for e, found in self._found.items() if e & excused)
        return sum(found)

    def to_dict(self, excused: Set[Excuse] = frozenset()) -> dict[str, Any]:
        document: dict[str, Any] = {"expected": self.expected, "compared": self.compared}
        if pending := self.pending(excused):
            document["pending"] = pending
        if wrong := self.wrong(excused):
            shown = [s for e, f in self._found.items() if not e & excused for s in f.shown]
            document |= {"differences": dict(wrong), "first_differences": shown[:SHOWN_MAX]}
        return document
