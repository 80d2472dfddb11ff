"""A circuit breaker: when a sink keeps failing, stop trying for a while, then probe.

    CLOSED ── failures_max failures in a row ──► OPEN ── open_s later ──► HALF_OPEN
       ▲                                           ▲                          │
       │                                           └──────── a failure ───────┤
       └──────────────────────────── a success ───────────────────────────────┘

A success closes it from any state. `now` is any clock that never steps back, in seconds. Looking
(`wait_s`) turns OPEN into HALF_OPEN when the time has come; nothing else changes without an event.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from penstock.errors import InvalidArgument

FAILURES_MAX: Final = 10
OPEN_S: Final = 30.0


class BreakerState(Enum):
    CLOSED = "closed"  # try
    OPEN = "open"  # do not try
    HALF_OPEN = "half_open"  # try once, and see


class Breaker:
    __slots__ = ("failures", "failures_max", "open_s", "opened_at", "state")

    def __init__(self, *, failures_max: int = FAILURES_MAX, open_s: float = OPEN_S) -> None:
        if failures_max < 1:
            raise InvalidArgument("failures_max must be at least 1", field="failures_max", limit=1)
        if not open_s > 0:
            raise InvalidArgument("open_s must be positive", field="open_s", limit=0)
        self.failures_max, self.open_s = failures_max, open_s
        self.state = BreakerState.CLOSED
        self.failures = 0  # in a row
        self.opened_at = 0.0  # of the latest opening

    def wait_s(self, now: float) -> float:
        """How long to wait before the next try; 0: now."""
        if self.state is BreakerState.OPEN:
            left = self.opened_at + self.open_s - now
            if left > 0:
                return left
            self.state = BreakerState.HALF_OPEN
        return 0.0

    def succeeded(self) -> None:
        self.state = BreakerState.CLOSED
        self.failures = 0

    def failed(self, now: float) -> None:
        self.failures += 1
        self.wait_s(now)  # a probe may have been due without anyone asking
        probing = self.state is BreakerState.HALF_OPEN
        if probing or (self.state is BreakerState.CLOSED and self.failures >= self.failures_max):
            self.state = BreakerState.OPEN
            self.opened_at = now

    def validate(self) -> None:
        assert self.failures >= 0
        closed = self.state is BreakerState.CLOSED
        assert not closed or self.failures < self.failures_max
        assert closed or self.failures
