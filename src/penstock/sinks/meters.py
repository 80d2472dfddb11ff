"""What one sink did so far: counters that its thread moves and anybody reads.

A reader sees each number before or after an update, never half of it; the numbers of one reading
may be of neighbouring moments.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from penstock.sinks.freshness import Freshness

RATE_S: Final = 10.0  # rows per second are those of so many last seconds, or of all so far
TEXT_MAX: Final = 500  # of an error's message


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The last thing that went wrong."""

    message: str
    time_ms: int

    @classmethod
    def of(cls, error: BaseException, *, time_ms: int) -> Failure:
        text = f"{type(error).__name__}: {error}"
        return cls(
            message=text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]}…", time_ms=time_ms
        )


@dataclass(kw_only=True)
class SinkMeter:
    rows: int = 0  # given to the sink and taken
    coalesced: int = 0  # left out because the same write held a newer revision
    writes: int = 0
    failures: int = 0  # tries that did not succeed; each was, or will be, repeated
    rejected: int = 0  # rows that the sink can never take
    dead_letters: int = 0  # messages written to the DLQ topic for them
    opens: int = 0  # times the breaker opened
    write_s: float = 0.0  # spent in writes that succeeded
    last_error: Failure | None = None
    busy_since: float | None = None  # monotonic; a call of the sink is under way since then
    freshness: Freshness = field(default_factory=Freshness)
    _began: float | None = None  # when the first write began
    _recent: deque[tuple[float, int]] = field(default_factory=deque)

    def wrote(self, rows: int, *, seconds: float, now: float) -> None:
        self.rows += rows
        self.writes += 1
        self.write_s += seconds
        self._began = now - seconds if self._began is None else self._began
        self._recent.append((now, rows))
        while self._recent[0][0] < now - RATE_S:
            self._recent.popleft()

    def failed(self, error: BaseException, *, time_ms: int) -> None:
        self.failures += 1
        self.last_error = Failure.of(error, time_ms=time_ms)

    def rows_per_s(self, *, now: float) -> float:
        seconds = RATE_S if self._began is None else min(RATE_S, max(1.0, now - self._began))
        return sum(rows for at, rows in list(self._recent) if at >= now - seconds) / seconds

    def busy_s(self, *, now: float) -> float:
        since = self.busy_since
        return 0.0 if since is None else now - since
