"""Which triggers a sink gets next, and of an unordered sink which lane.

**Ordered** sinks get triggers in order, all lanes together, as many as the bounds of a write allow.
A range is cut so that its first and last trigger have rows: what comes out for a given position
and end does not depend on how many empty triggers are known.

**Unordered** sinks that are fed states have a cursor per lane. `Lanes` picks the lane: the most
urgent one, unless another has waited so long that its age outweighs that. The rows of a later
trigger so pass those of an earlier one; a sink takes the newer of two revisions whatever their
order, so nothing is undone by the late one. Few waiting rows go in one write: lanes are about the
order of things that take time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.propagation.flow.lanes import Lanes
from penstock.spark.delivery.backlog import STATES, Backlog, Lag, TriggerSpan
from penstock.spark.delivery.cursors import SinkCursor
from penstock.spark.fold.changes import LANES
from penstock.spark.settings import DeliveryOptions


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """One write: what to read, and where the cursor's lanes are afterwards."""

    spans: dict[int, TriggerSpan]  # by column of the backlog; empty: nothing to write, only to move
    moves: dict[int, int]  # by lane of the cursor

    @property
    def first(self) -> int:
        return min(span.first for span in self.spans.values())

    @property
    def last(self) -> int:
        return max(span.last for span in self.spans.values())


@dataclass(kw_only=True)
class Planner:
    backlog: Backlog
    columns: tuple[int, ...]
    options: DeliveryOptions
    laned: bool = False
    lanes: Lanes = field(default_factory=Lanes)

    @property
    def can_lane(self) -> bool:
        """Only states are kept by lane; deltas are a history and have one order."""
        return self.columns == STATES

    @property
    def cursor_lanes(self) -> int:
        return LANES if self.laned else 1

    def lag(self, cursor: SinkCursor) -> Lag:
        """What the sink still has before it."""
        total = Lag()
        for lane, position in enumerate(cursor.position):
            columns = (lane,) if len(cursor.position) == LANES else self.columns
            total += self.backlog.lag(position, columns)
        return total

    def plan(self, cursor: SinkCursor, *, now_ms: int) -> WritePlan | None:
        """The next write, or None if the sink has everything."""
        end = self.backlog.follow()
        if end <= cursor.through:
            return None
        if self.laned:
            return self._by_lane(cursor, end=end, now_ms=now_ms)
        return self._in_order(cursor, end=end)

    def _in_order(self, cursor: SinkCursor, *, end: int) -> WritePlan:
        if cursor.attempt is not None:
            span = TriggerSpan(*cursor.attempt)
        else:
            found = self._ahead(cursor.through, self.columns)
            if found is None:
                return WritePlan(spans={}, moves={0: end})
            span = found
        return WritePlan(spans=dict.fromkeys(self.columns, span), moves={0: span.last})

    def _by_lane(self, cursor: SinkCursor, *, end: int, now_ms: int) -> WritePlan:
        lags = [self.backlog.lag(cursor.position[lane], (lane,)) for lane in range(LANES)]
        waiting = [lane for lane in range(LANES) if lags[lane].rows]
        moves = {lane: end for lane in range(LANES) if lane not in waiting}
        if sum(lag.rows for lag in lags) <= self.options.rows_together_max:
            chosen = waiting
        else:
            chosen = [self._choose(lags, now_ms=now_ms)]
        spans: dict[int, TriggerSpan] = {}
        for lane in chosen:
            found = self._ahead(cursor.position[lane], (lane,))
            assert found is not None, "a lane with rows has a trigger with rows"
            spans[lane] = found
            moves[lane] = found.last
        return WritePlan(spans=spans, moves=moves)

    def _choose(self, lags: list[Lag], *, now_ms: int) -> int:
        waits = [None if lag.oldest_ms is None else now_ms - lag.oldest_ms for lag in lags]
        return self.lanes.choose(waits)

    def _ahead(self, position: int, columns: tuple[int, ...]) -> TriggerSpan | None:
        return self.backlog.ahead(
            position,
            columns,
            rows_max=self.options.rows_per_write_max,
            bytes_max=self.options.bytes_per_write_max,
        )
