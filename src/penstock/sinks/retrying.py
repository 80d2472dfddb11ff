"""When a sink that failed is tried again: exponential backoff with full jitter, then a breaker.

After the n-th failure in a row the pause is drawn evenly from 0 to `base · 2^(n-1)`, at most
`cap`: sinks that failed together do not come back together. The breaker opens at the tenth, and
from then on only one try in thirty seconds goes out, as a probe; the first success closes it. Both
numbers are the options' defaults.
"""

from __future__ import annotations

import random
from typing import Any, Final

import msgspec

from penstock.propagation.breaker import FAILURES_MAX, OPEN_S, Breaker, BreakerState

DOUBLINGS_MAX: Final = 30


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long a sink that fails is waited for between two tries."""

    backoff_s_base: float = 0.1  # before the second try; doubles with each further one
    backoff_s_cap: float = 10.0
    breaker_failures: int = FAILURES_MAX  # in a row; then the sink is left alone
    breaker_open_s: float = OPEN_S  # before it is tried once more


class Retry:
    """One sink's patience. `now` is monotonic; one thread calls, any thread looks."""

    def __init__(self, options: Patience) -> None:
        self._options = options
        self._breaker = Breaker(
            failures_max=options.breaker_failures, open_s=options.breaker_open_s
        )
        self._not_before = 0.0
        self.failures = 0  # in a row

    @property
    def waiting(self) -> bool:
        return self.failures > 0

    @property
    def probing(self) -> bool:
        """The next try is the breaker's probe, or comes after it was open."""
        return self._breaker.state is not BreakerState.CLOSED

    @property
    def breaker_state(self) -> str:
        state: str = self._breaker.state.value
        return state

    def delay_s(self, *, now: float) -> float:
        """How long to wait before the next try; 0: try."""
        return max(self._not_before - now, self._breaker.wait_s(now), 0.0)

    def succeeded(self, *, now: float) -> None:
        self._breaker.succeeded(now)
        self.failures = 0
        self._not_before = 0.0

    def failed(self, *, now: float) -> bool:
        """Count a failure; True if it opened the breaker."""
        was_open = self._breaker.state is BreakerState.OPEN
        self._breaker.failed(now)
        self.failures += 1
        doublings = min(self.failures - 1, DOUBLINGS_MAX)
        ceiling = min(self._options.backoff_s_base * 2**doublings, self._options.backoff_s_cap)
        self._not_before = now + random.uniform(0.0, ceiling)
        return self._breaker.state is BreakerState.OPEN and not was_open

    def describe(self, *, now: float) -> dict[str, Any]:
        return {
            "state": self.breaker_state,
            "failures": self.failures,
            "retry_in_s": round(self.delay_s(now=now), 3),
        }
