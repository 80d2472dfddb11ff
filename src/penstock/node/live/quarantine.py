"""What the fold of a partition could not place. It is pushed to nobody, so it must be seen here."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Final

from penstock.model.delta_format import NO_ID
from penstock.node.observe.logs import get_logger
from penstock.node.observe.metrics import Metrics
from penstock.propagation.fold.propagator import FeedOutcome

LINES_S: Final = 60.0  # between two lines of the node's log, at least
log = get_logger(__name__)


class Quarantine:
    """`counts` are of all the log that is folded, and so the same after a restart. Metrics and the
    node's log tell only of what is quarantined while the fold follows its log."""

    def __init__(self, topic: str, partition: int, metrics: Metrics) -> None:
        self._topic, self._partition, self._metrics = topic, partition, metrics
        self.counts: Counter[str] = Counter()  # by reason
        self._told_at = -math.inf
        self._untold = 0

    def count(self, outcome: FeedOutcome) -> None:
        """Of a log that was there before; by whatever thread has the fold."""
        if outcome.reasons:
            self.counts.update(outcome.reasons)

    def add(self, outcome: FeedOutcome) -> None:
        if not outcome.reasons:
            return
        self.counts.update(outcome.reasons)
        for reason, count in Counter(outcome.reasons).items():
            self._metrics.live_quarantined.add((self._topic, reason), count)
        self._untold += len(outcome.reasons)
        now = time.monotonic()
        if now - self._told_at >= LINES_S:
            self._tell(outcome)
            self._told_at, self._untold = now, 0

    def _tell(self, outcome: FeedOutcome) -> None:
        missing = outcome.missing[0]
        log.warning(
            "deltas quarantined", topic=self._topic, partition=self._partition, count=self._untold,
            reason=outcome.reasons[0], delta=outcome.quarantined.delta_ids()[0].hex(),
            missing=None if missing == NO_ID else missing.hex(),
        )  # fmt: skip
