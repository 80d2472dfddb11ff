"""How fast to go: a rate that follows how full the receiver is, and a token bucket without storms.

After each observation an `AdaptiveRate` moves towards a target that depends on the utilisation:
half of it when nearly full, a little less when getting full, a little more when nearly empty.
Smoothing by ALPHA keeps one odd observation from deciding. What is nearly empty is seen more widely
while the rate is all that holds things back: a receiver that uses four tenths of its window may be
able to bear twice as much, and only more of it can tell.

Tokens flow into a `TokenBucket` at the rate and are kept up to BURST_MS of it. Observations of the
receiver's utilisation go to the rate. Left to itself that swings for ever: a queue is slow to fill
and to drain, so by the time it shows that the rate was wrong, the rate has been wrong for long, and
is then corrected for as long. Three things calm it:

- the rate is adjusted once per ADJUST_MS, by the mean of what was observed, lightly smoothed;
- it is left alone while the utilisation is on its way back already: crowded, but falling, or idle,
  but rising;
- each time its direction turns, the next steps are smaller (`gain`), and after several in one
  direction larger again: it settles on a capacity that stays, and follows one that moves.
"""

from __future__ import annotations

from typing import Final

from penstock.errors import InvalidArgument

OVERWHELMED: Final = 0.9  # utilisation above which the rate is halved
CROWDED: Final = 0.7  # … lowered by a tenth
IDLE: Final = 0.3  # … below which it is raised by a tenth
IDLE_HELD: Final = 0.5  # … and below this, while nothing but the rate holds things back
ALPHA: Final = 0.5  # the part of the way to the target that one observation is worth


class AdaptiveRate:
    __slots__ = ("maximum", "minimum", "rate")

    def __init__(self, *, initial: float, minimum: float, maximum: float) -> None:
        if not 0 < minimum <= maximum:
            raise InvalidArgument("minimum must be positive and at most maximum", field="minimum")
        if not minimum <= initial <= maximum:
            raise InvalidArgument(
                f"initial is {initial}, must be from {minimum} to {maximum}", field="initial"
            )
        self.minimum, self.maximum = float(minimum), float(maximum)
        self.rate = float(initial)

    def adjust(self, utilisation: float, *, gain: float = 1.0, held: bool = False) -> float:
        """The rate after an observation: how much of what could be borne was used (1: all).

        With a smaller `gain` it moves by that part of the step. `held`: more would have gone but
        for the rate.
        """
        if not utilisation >= 0:
            raise InvalidArgument("utilisation must not be negative", field="utilisation", limit=0)
        target = min(max(self.rate * _factor(utilisation, held=held), self.minimum), self.maximum)
        self.rate += gain * ALPHA * (target - self.rate)
        return self.rate

    def validate(self) -> None:
        assert self.minimum <= self.rate <= self.maximum


def idle_below(*, held: bool) -> float:
    return IDLE_HELD if held else IDLE


def _factor(utilisation: float, *, held: bool) -> float:
    if utilisation > OVERWHELMED:
        return 0.5
    if utilisation > CROWDED:
        return 0.9
    return 1.1 if utilisation < idle_below(held=held) else 1.0


BURST_MS: Final = 100.0
ADJUST_MS: Final = 100.0
MEMORY: Final = 0.5  # how much of the utilisation before counts at an adjustment
GAIN_MIN: Final = 0.1
CALMER: Final = 0.7  # what a turn does to the gain
BOLDER: Final = 1.3  # what a step does, past so many in one direction:
STEPS_SURE: Final = 4


class TokenBucket:
    """In any stretch of time at most burst + rate × time is given out."""

    __slots__ = (
        "_adjusted_ms", "_count", "_direction", "_filled_ms", "_saved", "_steps", "_sum",
        "burst", "gain", "held", "rate", "tokens", "utilisation",
    )  # fmt: skip

    def __init__(self, rate: AdaptiveRate) -> None:
        self.rate = rate
        self.tokens = self.burst = _burst(rate)
        self._saved = 0  # tokens for rows that go together
        self.utilisation: float | None = None  # smoothed; None: nothing was observed yet
        self.gain = 1.0
        self._filled_ms: float | None = None
        self._adjusted_ms: float | None = None
        self._sum, self._count = 0.0, 0  # of the observations since the last adjustment
        self.held = False  # something that could have gone was kept back since then
        self._direction, self._steps = 0, 0  # of the last adjustments, and how many in a row

    # --- tokens ---

    def take(self, n: int, now_ms: float, *, whole: bool = False) -> int:
        """Up to `n` tokens, as many as there are. With `whole` it is `n` or none, and what there is
        meanwhile is saved up: `n` may be more than the bucket holds."""
        self._fill(now_ms)
        found = min(n, int(self.tokens))
        self.tokens -= found
        if found < n:
            self.held = True
            if whole:
                self._saved += found
                found = 0
                if self._saved >= n:
                    self._saved, found = 0, n
        return found

    def take_all(self, n: int, now_ms: float) -> bool:
        self._fill(now_ms)
        if self.tokens < n:
            self.held = True
            return False
        self.tokens -= n
        return True

    def give_back(self, n: int) -> None:
        """Tokens that were taken and not used."""
        self.tokens = min(self.tokens + n, self.burst)

    def wait_ms(self, now_ms: float) -> float:
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

    def observe(self, utilisation: float, now_ms: float) -> float:
        """Learn how much of what the receiver can bear is used (1: all); the rate after that."""
        if not utilisation >= 0:
            raise InvalidArgument("utilisation must not be negative", field="utilisation", limit=0)
        self._sum += min(utilisation, 1.0)
        self._count += 1
        if self._adjusted_ms is None:
            self._adjusted_ms = now_ms
        if now_ms - self._adjusted_ms >= ADJUST_MS:
            mean = self._sum / self._count
            held, self.held = self.held, False
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
        self.burst = _burst(self.rate)
        self.tokens = min(self.tokens, self.burst)

    def validate(self) -> None:
        assert 0 <= self.tokens <= self.burst
        assert GAIN_MIN <= self.gain <= 1
        self.rate.validate()


def _burst(rate: AdaptiveRate) -> float:
    """Tokens that a bucket holds at most: one at least."""
    return max(1.0, rate.rate * BURST_MS / 1000)
