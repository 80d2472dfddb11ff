"""What is seen of a fold: how long its feeds took, stage by stage, and what it could not place."""

from __future__ import annotations

import math
import time
from array import array
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from penstock.model.delta import NO_ID
from penstock.node.observe.logs import get_logger
from penstock.node.observe.metrics import Metrics
from penstock.propagation.fold.propagator import FeedOutcome

KEPT: Final = 8192  # feeds: some seconds of a steady load
COMMITS_MAX: Final = 256  # told apart while a fold lags; even
QUANTILES: Final = {"p50_us": 0.50, "p95_us": 0.95, "p99_us": 0.99}
LINES_S: Final = 60.0  # between two lines of the node's log, at least
log = get_logger(__name__)

Stretch = tuple[int, float]  # of the log, up to a sequence, and since when it is committed


@dataclass(slots=True, eq=False)
class Commits:
    """Stretches of the log that are committed and not delivered, times by the performance counter.

    Where there are too many, two become one that counts since the older: a fold that lags may seem
    a little slower than it is, never faster.
    """

    _ends: list[int] = field(default_factory=list)
    _since: list[float] = field(default_factory=list)

    def add(self, sequence: int, at: float) -> None:
        if len(self._ends) >= COMMITS_MAX:
            self._ends, self._since = self._ends[1::2], self._since[::2]
        self._ends.append(sequence)
        self._since.append(at)

    def take(self, sequence: int) -> list[Stretch]:
        """What is delivered up to a sequence; the last stretch may have a rest that is not."""
        ends, since = self._ends, self._since
        whole = bisect_right(ends, sequence)
        found = list(zip(ends[:whole], since[:whole], strict=True))
        if whole < len(ends) and not (whole and ends[whole - 1] == sequence):
            found.append((sequence, since[whole]))
        del ends[:whole], since[:whole]
        return found


class Timings:
    """A ring of durations of one stage, each with the rows that it was for."""

    __slots__ = ("_at", "_rows", "_seconds", "count")

    def __init__(self) -> None:
        self._seconds, self._rows = array("d", bytes(8 * KEPT)), array("q", bytes(8 * KEPT))
        self._at = 0
        self.count = 0  # rows, ever

    def record(self, seconds: float, rows: int) -> None:
        at = self._at
        self._seconds[at], self._rows[at] = seconds, rows
        self._at = (at + 1) % KEPT
        self.count += rows

    def summary(self) -> dict[str, Any]:
        """Quantiles over rows, in microseconds; None while there are none."""
        rows = np.array(self._rows)
        used = np.flatnonzero(rows)
        seconds, rows = np.array(self._seconds)[used], rows[used]
        total = int(rows.sum())
        found: dict[str, Any] = {"count": self.count}
        if not total:
            return found | dict.fromkeys(QUANTILES)
        order = np.argsort(seconds, kind="stable")
        reached = np.cumsum(rows[order])
        for name, part in QUANTILES.items():
            at = int(np.searchsorted(reached, part * total))
            found[name] = round(float(seconds[order[min(at, len(used) - 1)]]) * 1e6, 1)
        return found


@dataclass(eq=False)
class Quarantine:
    """Deltas that the fold could not place. They are pushed to nobody, so they must be seen here.

    `counts` are of all the log that is folded, and so the same after a restart. Metrics and the
    node's log tell only of what is quarantined while the fold follows its log.
    """

    topic: str
    partition: int
    metrics: Metrics
    counts: Counter[str] = field(default_factory=Counter)  # by reason
    _told_at: float = -math.inf
    _untold: int = 0

    def add(self, outcome: FeedOutcome) -> None:
        self.counts.update(outcome.reasons)
        for reason, count in Counter(outcome.reasons).items():
            self.metrics.live_quarantined.add((self.topic, reason), count)
        self._untold += len(outcome.reasons)
        now = time.monotonic()
        if now - self._told_at >= LINES_S:
            self._tell(outcome)
            self._told_at, self._untold = now, 0

    def _tell(self, outcome: FeedOutcome) -> None:
        missing = outcome.missing[0]
        log.warning(
            "deltas quarantined", topic=self.topic, partition=self.partition, count=self._untold,
            reason=outcome.reasons[0], delta=outcome.quarantined.delta_ids()[0].hex(),
            missing=None if missing == NO_ID else missing.hex(),
        )  # fmt: skip
