"""How long rows took from the log to a sink: counts in buckets, so that a write of 100 000 rows
costs as little as one.

Buckets grow by a quarter from 1 ms to about 11 days: a percentile read from them is at most 25 %
above the true one, at 100 numbers per sink. Percentiles shown to people are those of the last one
to two windows (a minute each); what Prometheus scrapes counts from the start.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

WINDOW_S: Final = 60.0
GROWTH: Final = 1.25
# Inclusive upper ends in seconds; the last bucket goes to infinity.
BOUNDS_S: Final[NDArray[np.float64]] = np.geomspace(0.001, 0.001 * GROWTH**92, 93)
_ENDS_S: Final[list[float]] = BOUNDS_S.tolist()
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

    def record(self, seconds: NDArray[np.float64], *, now: float) -> None:
        """Rows that became visible; `now` is monotonic."""
        if not len(seconds):
            return
        seconds = np.maximum(seconds, 0.0)  # the node's clock may be ahead of ours
        found = np.bincount(np.searchsorted(BOUNDS_S, seconds), minlength=len(BOUNDS_S) + 1)
        with self._lock:
            self._turn(now)
            self.counts = self.counts + found
            self._current = self._current + found
            self.seconds_sum += float(seconds.sum())
            self._greatest[0] = max(self._greatest[0], float(seconds.max()))

    def record_few(self, seconds: Sequence[float], *, now: float) -> None:
        """The same without arrays, which take longer to set up than a few rows to count."""
        with self._lock:
            self._turn(now)
            counts, current = self.counts.copy(), self._current.copy()
            for one in seconds:
                at = bisect_left(_ENDS_S, max(one, 0.0))
                counts[at] += 1
                current[at] += 1
                self.seconds_sum += max(one, 0.0)
                self._greatest[0] = max(self._greatest[0], one)
            self.counts, self._current = counts, current

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
        """Begin a new window when the current one is over."""
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
