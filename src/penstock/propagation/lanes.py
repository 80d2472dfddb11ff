"""Which priority class goes next: the most urgent, unless a lesser one has waited too long.

Every class waits in a lane of its own. A lane's rank is its class, less one for every `ageing_ms`
that its eldest has waited; the smallest rank goes first, and among equals the more urgent class. So
a CRITICAL change never waits behind LOW ones unless they are older by three times `ageing_ms`, and
nothing waits for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.errors import InvalidArgument
from penstock.model.delta import PriorityClass

AGEING_MS: Final = 10_000
LANES: Final = len(PriorityClass)


class Lanes:
    __slots__ = ("ageing_ms",)

    def __init__(self, *, ageing_ms: int = AGEING_MS) -> None:
        if ageing_ms < 1:
            raise InvalidArgument("ageing_ms must be at least 1", field="ageing_ms", limit=1)
        self.ageing_ms = ageing_ms

    def choose(self, waits_ms: Sequence[float | None]) -> int:
        """The lane to serve, by how long each one's eldest has waited; None: it is empty."""
        if len(waits_ms) != LANES:
            raise InvalidArgument(f"{LANES} lanes are asked about", field="waits_ms", limit=LANES)
        full = [lane for lane, wait_ms in enumerate(waits_ms) if wait_ms is not None]
        if not full:
            raise InvalidArgument("every lane is empty", field="waits_ms")
        return min(full, key=lambda lane: self._rank(lane, waits_ms[lane] or 0))

    def due(self, lane: int, since_ms: float) -> tuple[float, int]:
        """Its place among the lanes by when its eldest came: the smallest goes first.

        It is what `choose` compares, less the present, which is the same for all.
        """
        return since_ms + lane * self.ageing_ms, lane

    def _rank(self, lane: int, wait_ms: float) -> tuple[float, int]:
        return lane - max(wait_ms, 0) / self.ageing_ms, lane

    def validate(self) -> None:
        assert self.ageing_ms >= 1
