"""Virtual time: one queue of events, one source of chance."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any, Final

MS: Final = 1000  # time is counted in microseconds
SECOND: Final = 1000 * MS


class Schedule:
    """Events fire in the order of their time, those of one time in the order they were asked."""

    def __init__(self, seed: int) -> None:
        self.now = 0
        self.rng = Random(seed)
        self.random = self.rng.random
        self.fired = 0
        self._queue: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def after(self, delay_us: int, action: Callable[..., None], *args: Any) -> None:
        self._order = order = self._order + 1
        at = self.now + delay_us if delay_us > 0 else self.now
        heappush(self._queue, (at, order, action, args))

    def run_until(self, end_us: int, done: Callable[[], bool] | None = None) -> bool:
        """Fire events up to `end_us`, or until `done` (asked now and then); False: time was up."""
        queue, fired = self._queue, self.fired
        try:
            while queue and queue[0][0] <= end_us:
                self.now, _, action, args = heappop(queue)
                fired += 1
                action(*args)
                if not fired & 31 and done is not None and done():
                    return True
        finally:
            self.fired = fired
        self.now = max(self.now, end_us)
        return done is not None and done()

    # --- chance ---

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.random() < probability

    def between(self, low: int, high: int) -> int:
        """Evenly from [low, high]; quicker than `randint`."""
        return low + int(self.random() * (high - low + 1))

    def skewed(self, low: int, high: int) -> int:
        """From [low, high], mostly near the lower end."""
        drawn = self.random()
        return low + int(drawn * drawn * drawn * (high - low + 1))
