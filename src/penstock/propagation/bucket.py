"""A token bucket whose rate is steered by how full the receiver is, without storms.

Tokens flow in at the rate and are kept up to `burst_ms` of it. Observations of the receiver's
utilisation go to `AdaptiveRate`, which says in which direction and how far. Left to itself that
swings for ever: a queue is slow to fill and to drain, so by the time it shows that the rate was
wrong, the rate has been wrong for long, and is then corrected for as long. Three things calm it:

- the rate is adjusted once per `adjust_ms`, by the mean of what was observed, lightly smoothed;
- it is left alone while the utilisation is on its way back already: crowded, but falling, or idle,
  but rising;
- each time its direction turns, the next steps are smaller (`gain`), and after several in one
  direction larger again: it settles on a capacity that stays, and follows one that moves.
"""

from __future__ import annotations

from typing import Final

from penstock.errors import InvalidArgument
from penstock.propagation.rate import CROWDED, AdaptiveRate, idle_below

BURST_MS: Final = 100.0
ADJUST_MS: Final = 100.0
MEMORY: Final = 0.5  # how much of the utilisation before counts at an adjustment
GAIN_MIN: Final = 0.1
CALMER: Final = 0.7  # what a turn does to the gain
BOLDER: Final = 1.3  # what a step does, past so many in one direction:
STEPS_SURE: Final = 4


class Bucket:
    """In any stretch of time at most burst + rate × time is given out."""

    __slots__ = (
        "_adjusted_ms", "_count", "_direction", "_filled_ms", "_held", "_steps", "_sum",
        "adjust_ms", "burst_ms", "gain", "rate", "tokens", "utilisation",
    )  # fmt: skip

    def __init__(
        self, rate: AdaptiveRate, *, burst_ms: float = BURST_MS, adjust_ms: float = ADJUST_MS
    ) -> None:
        for field, value in (("burst_ms", burst_ms), ("adjust_ms", adjust_ms)):
            if not value > 0:
                raise InvalidArgument(f"{field} must be positive", field=field)
        self.rate, self.burst_ms, self.adjust_ms = rate, burst_ms, adjust_ms
        self.tokens = self.burst
        self.utilisation: float | None = None  # smoothed; None: nothing was observed yet
        self.gain = 1.0
        self._filled_ms: float | None = None
        self._adjusted_ms: float | None = None
        self._sum, self._count = 0.0, 0  # of the observations since the last adjustment
        self._held = False  # something that could have gone was kept back since then
        self._direction, self._steps = 0, 0  # of the last adjustments, and how many in a row

    @property
    def burst(self) -> float:
        """Tokens that it holds at most: one at least."""
        return max(1.0, self.rate.rate * self.burst_ms / 1000)

    # --- tokens ---

    def take(self, n: int, now_ms: float) -> int:
        """Up to `n` tokens, as many as there are."""
        self._fill(now_ms)
        found = min(n, int(self.tokens))
        if found <= 0:
            return 0
        self.tokens -= found
        return found

    def give_back(self, n: int) -> None:
        """Tokens that were taken and not used."""
        self.tokens = min(self.tokens + n, self.burst)

    def wait_ms(self, now_ms: float) -> float:
        """How long it takes until there is a token."""
        self._fill(now_ms)
        return max(0.0, (1 - self.tokens) * 1000 / self.rate.rate)

    def _fill(self, now_ms: float) -> None:
        if self._filled_ms is None:
            self._filled_ms = now_ms
        passed_ms = now_ms - self._filled_ms
        if passed_ms > 0:
            self.tokens = min(self.tokens + self.rate.rate * passed_ms / 1000, self.burst)
            self._filled_ms = now_ms

    # --- the rate ---

    def observe(self, utilisation: float, now_ms: float, *, held: bool = False) -> float:
        """Learn how much of what the receiver can bear is used (1: all), and whether the rate held
        back what could have gone; the rate after that."""
        if not utilisation >= 0:
            raise InvalidArgument("utilisation must not be negative", field="utilisation", limit=0)
        self._sum += min(utilisation, 1.0)
        self._count += 1
        self._held |= held
        if self._adjusted_ms is None:
            self._adjusted_ms = now_ms
        if now_ms - self._adjusted_ms >= self.adjust_ms:
            mean = self._sum / self._count
            held, self._held = self._held, False
            self._sum, self._count, self._adjusted_ms = 0.0, 0, now_ms
            before = mean if self.utilisation is None else self.utilisation
            self.utilisation = after = MEMORY * before + (1 - MEMORY) * mean
            if not (CROWDED < after < before or before < after < idle_below(held=held)):
                self._fill(now_ms)
                self._adjust(after, held=held)
        return self.rate.rate

    def _adjust(self, utilisation: float, *, held: bool) -> None:
        old = self.rate.rate
        new = self.rate.adjust(utilisation, gain=self.gain, held=held)
        direction = (new > old) - (new < old)
        if direction and direction == -self._direction:
            self.gain, self._steps = max(self.gain * CALMER, GAIN_MIN), 0
        elif direction:
            self._steps += 1
            if self._steps > STEPS_SURE:
                self.gain = min(self.gain * BOLDER, 1.0)
        self._direction = direction or self._direction
        self.tokens = min(self.tokens, self.burst)

    def validate(self) -> None:
        assert 0 <= self.tokens <= self.burst
        assert GAIN_MIN <= self.gain <= 1
        self.rate.validate()
