"""How long the last feeds took, by stage: for who looks at the status, not only at averages."""

from __future__ import annotations

from array import array
from typing import Any, Final

import numpy as np

KEPT: Final = 8192  # feeds: some seconds of a steady load
QUANTILES: Final = {"p50_us": 0.50, "p95_us": 0.95, "p99_us": 0.99}


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
