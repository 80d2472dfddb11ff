"""How fast to go, from how full things are.

After each observation the rate moves towards a target that depends on the utilisation: half
of it when nearly full, a little less when getting full, a little more when nearly empty. Smoothing
by `alpha` keeps one odd observation from deciding.

What is nearly empty is seen more widely while the rate is all that holds things back: a receiver
that uses four tenths of its window may be able to bear twice as much, and only more of it can tell.
"""

from __future__ import annotations

from typing import Final

from penstock.errors import InvalidArgument

OVERWHELMED: Final = 0.9  # utilisation above which the rate is halved
CROWDED: Final = 0.7  # … lowered by a tenth
IDLE: Final = 0.3  # … below which it is raised by a tenth
IDLE_HELD: Final = 0.5  # … and below this, while nothing but the rate holds things back
ALPHA: Final = 0.5


class AdaptiveRate:
    __slots__ = ("alpha", "maximum", "minimum", "rate")

    def __init__(
        self, *, initial: float, minimum: float, maximum: float, alpha: float = ALPHA
    ) -> None:
        if not 0 < minimum <= maximum:
            raise InvalidArgument("minimum must be positive and at most maximum", field="minimum")
        if not minimum <= initial <= maximum:
            raise InvalidArgument(
                f"initial is {initial}, must be from {minimum} to {maximum}", field="initial"
            )
        if not 0 < alpha <= 1:
            raise InvalidArgument(f"alpha is {alpha}, must be in (0, 1]", field="alpha", limit=1)
        self.minimum, self.maximum, self.alpha = float(minimum), float(maximum), alpha
        self.rate = float(initial)

    def adjust(self, utilisation: float, *, gain: float = 1.0, held: bool = False) -> float:
        """The rate after an observation: how much of what could be borne was used (1: all).

        With a smaller `gain` it moves by that part of the step. `held`: more would have gone but
        for the rate.
        """
        if not utilisation >= 0:
            raise InvalidArgument("utilisation must not be negative", field="utilisation", limit=0)
        target = min(max(self.rate * _factor(utilisation, held=held), self.minimum), self.maximum)
        self.rate += gain * self.alpha * (target - self.rate)
        return self.rate

    def validate(self) -> None:
        assert self.minimum <= self.rate <= self.maximum


def idle_below(*, held: bool) -> float:
    """The utilisation below which more is tried."""
    return IDLE_HELD if held else IDLE


def _factor(utilisation: float, *, held: bool) -> float:
    if utilisation > OVERWHELMED:
        return 0.5
    if utilisation > CROWDED:
        return 0.9
    return 1.1 if utilisation < idle_below(held=held) else 1.0
