"""How one sink fares: what it did so far, how fresh it is, and when it is tried again.

**Counters** (`SinkMeter`) are moved by the sink's thread and read by anybody. A reader sees each
number before or after an update, never half of it; the numbers of one reading may be of
neighbouring moments.

**Freshness** is how long rows took from the log to the sink: counts in buckets, so that a write of
100 000 rows costs as little as one. Buckets grow by a quarter from 1 ms to about 11 days: a
percentile read from them is at most 25 % above the true one, at 100 numbers per sink. Percentiles
shown to people are those of the last one to two windows (a minute each); what Prometheus scrapes
counts from the start.

**Retries** follow an exponential backoff with full jitter, then a breaker. After the n-th failure
in a row the pause is drawn evenly from 0 to `base · 2^(n-1)`, at most `cap`: sinks that failed
together do not come back together. When the breaker is open, only one try now and then goes out, as
a probe; the first success closes it.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidArgument

WINDOW_S: Final = 60.0
GROWTH: Final = 1.25
# Inclusive upper ends in seconds; the last bucket goes to infinity.
BOUNDS_S: Final[NDArray[np.float64]] = np.geomspace(0.001, 0.001 * GROWTH**92, 93)
# Of these, Prometheus gets about every third: enough for its quantiles, few enough to store.
EXPORTED: Final = tuple(range(0, len(BOUNDS_S), 3))


class Freshness:
    """Seconds from a row's place in the log to its visibility in one sink."""

    __slots__ = ("_current", "_greatest", "_lock", "_previous", "_since", "counts", "seconds_sum")

    def __init__(self) -> None:
        self._lock = threading.Lock()  # the sink's thread records, whoever asks turns windows
        self.counts = _zeros()
        self.seconds_sum = 0.0
        self._current, self._previous = _zeros(), _zeros()
        self._greatest = [0.0, 0.0]  # of the current and the previous window
        self._since: float | None = None

    def record(
        self,
        seconds: NDArray[np.float64],
        rows: NDArray[np.int64] | None = None,
        *,
        now: float,
    ) -> None:
        """Rows that became visible, so many after each time (None: one); `now` is monotonic."""
        if not len(seconds):
            return
        rows = np.ones(len(seconds), np.int64) if rows is None else rows
        seconds = np.maximum(seconds, 0.0)  # the node's clock may be ahead of ours
        found = np.bincount(
            np.searchsorted(BOUNDS_S, seconds), weights=rows, minlength=len(BOUNDS_S) + 1
        ).astype(np.int64)
        with self._lock:
            self._turn(now)
            self.counts = self.counts + found
            self._current = self._current + found
            self.seconds_sum += float(seconds @ rows)
            self._greatest[0] = max(self._greatest[0], float(seconds.max()))

    def recent(self, *, now: float) -> dict[str, float | int]:
        """Percentiles of the last minute or two, in seconds; empty if nothing was written."""
        with self._lock:
            self._turn(now)
            counts = self._current + self._previous
            greatest = max(self._greatest)
        total = int(counts.sum())
        if not total:
            return {}
        found = {f"p{percent}": _quantile(counts, percent / 100) for percent in (50, 95, 99)}
        return {
            **{name: round(min(seconds, greatest), 6) for name, seconds in found.items()},
            "max": round(greatest, 6),
            "rows": total,
        }

    def _turn(self, now: float) -> None:
        if self._since is None:
            self._since = now
        windows = int((now - self._since) // WINDOW_S)
        if windows <= 0:
            return
        self._previous = self._current if windows == 1 else _zeros()
        self._greatest = [0.0, self._greatest[0] if windows == 1 else 0.0]
        self._current = _zeros()
        self._since += windows * WINDOW_S


def _zeros() -> NDArray[np.int64]:
    return np.zeros(len(BOUNDS_S) + 1, np.int64)


def _quantile(counts: NDArray[np.int64], share: float) -> float:
    """The upper end of the bucket in which the share's row lies."""
    at = int(np.searchsorted(np.cumsum(counts), share * counts.sum()))
    return float(BOUNDS_S[at]) if at < len(BOUNDS_S) else float("inf")


RATE_S: Final = 10.0  # rows per second are those of so many last seconds, or of all so far
TEXT_MAX: Final = 500  # of an error's message


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
    last_error: dict[str, Any] | None = None  # message and time_ms
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
        text = f"{type(error).__name__}: {error}"
        shown = text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]}…"
        self.last_error = {"message": shown, "time_ms": time_ms}

    def rows_per_s(self, *, now: float) -> float:
        seconds = RATE_S if self._began is None else min(RATE_S, max(1.0, now - self._began))
        return sum(rows for at, rows in list(self._recent) if at >= now - seconds) / seconds

    def busy_s(self, *, now: float) -> float:
        since = self.busy_since
        return 0.0 if since is None else now - since


DOUBLINGS_MAX: Final = 30


class BreakerState(StrEnum):
    CLOSED = "closed"  # try
    OPEN = "open"  # do not try
    HALF_OPEN = "half_open"  # try once, and see


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long a sink that fails is waited for between two tries."""

    backoff_s_base: float = 0.1  # before the second try; doubles with each further one
    backoff_s_cap: float = 10.0
    breaker_failures: int = 10  # in a row; then the sink is left alone
    breaker_open_s: float = 30.0  # before it is tried once more


class Retry:
    """One sink's patience, and its breaker. `now` is monotonic; one thread calls, any looks.

    CLOSED ── breaker_failures in a row ──► OPEN ── breaker_open_s later ──► HALF_OPEN
       ▲                                      ▲                                  │
       │                                      └──────────── a failure ───────────┤
       └───────────────────────────────── a success ─────────────────────────────┘
    """

    def __init__(self, options: Patience) -> None:
        for field_, least in (("breaker_failures", 1), ("breaker_open_s", 0.001)):
            if not getattr(options, field_) >= least:
                raise InvalidArgument(f"{field_} must be positive", field=field_, limit=least)
        self._options = options
        self.breaker_state = BreakerState.CLOSED
        self._open_until = 0.0  # of the latest opening
        self._not_before = 0.0
        self.failures = 0  # in a row

    def delay_s(self, *, now: float) -> float:
        """How long to wait before the next try; 0: try."""
        wait_s = self._not_before - now
        if self.breaker_state is BreakerState.OPEN:
            if now >= self._open_until:
                self.breaker_state = BreakerState.HALF_OPEN
            else:
                wait_s = max(wait_s, self._open_until - now)
        return max(wait_s, 0.0)

    def succeeded(self) -> None:
        self.breaker_state, self.failures, self._not_before = BreakerState.CLOSED, 0, 0.0

    def failed(self, *, now: float) -> bool:
        """Count a failure; True if it opened the breaker."""
        self.delay_s(now=now)  # a probe may have been due without anyone asking
        self.failures += 1
        many = self.failures >= self._options.breaker_failures
        closed = self.breaker_state is BreakerState.CLOSED
        opens = many if closed else self.breaker_state is BreakerState.HALF_OPEN
        if opens:
            self.breaker_state = BreakerState.OPEN
            self._open_until = now + self._options.breaker_open_s
        doublings = min(self.failures - 1, DOUBLINGS_MAX)
        ceiling = min(self._options.backoff_s_base * 2**doublings, self._options.backoff_s_cap)
        self._not_before = now + random.uniform(0.0, ceiling)
        return opens

    def describe(self, *, now: float) -> dict[str, Any]:
        return {
            "state": self.breaker_state,
            "failures": self.failures,
            "retry_in_s": round(self.delay_s(now=now), 3),
        }
