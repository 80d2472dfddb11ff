"""What waits in the change log, in numbers, and which of it a sink gets next.

**Backlog.** A sink that is behind must not read thousands of manifests to know how far. Each
manifest is read once, by whoever looks first, and kept as a row of numbers. A day of triggers, one
a second, takes 13 MB. Columns: the states of lanes 0 to 3, the deltas, the quarantined deltas. A
sink watches those that it is fed from.

**Planner.** *Ordered* sinks get triggers in order, all lanes together, as many as the bounds of a
write allow. A range is cut so that its first and last trigger have rows: what comes out for a given
position and end does not depend on how many empty triggers are known.

*Unordered* sinks that are fed states have a cursor per lane. `Lanes` picks the lane: the most
urgent one, unless another has waited so long that its age outweighs that. The rows of a later
trigger so pass those of an earlier one; a sink takes the newer of two revisions whatever their
order, so nothing is undone by the late one. Few waiting rows go in one write: lanes are about the
order of things that take time.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.propagation.flow.lanes import Lanes
from penstock.spark.delivery.cursors import SinkCursor
from penstock.spark.fold.changes import LANES, PRESENT, ChangeLog, Manifest, Section, add_counts
from penstock.spark.settings import DeliveryOptions

DELTAS: Final = LANES
QUARANTINE: Final = LANES + 1
COLUMNS: Final = LANES + 2
STATES: Final = tuple(range(LANES))
READ_MAX: Final = 1000  # manifests read in one go, so that a stop is not kept waiting
_ROWS, _BYTES, _OLDEST = range(3)  # numbers that are kept of each column
_NEVER: Final = np.iinfo(np.int64).max


class Lag(NamedTuple):
    triggers: int
    rows: int
    bytes: int
    oldest_ms: int | None  # log time of the oldest row that waits


class TriggerSpan(NamedTuple):
    first: int
    last: int


class Backlog:
    """Any thread may call any method."""

    def __init__(self, changes: ChangeLog) -> None:
        self._changes = changes
        self._known = -1 if changes.last is None else changes.last  # older ones were counted once
        self._folded: dict[tuple[str, int], dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._last = -1  # the trigger of the table's last row
        self._table = np.zeros((0, 3, COLUMNS), np.int64)

    @property
    def last(self) -> int:
        """The newest trigger that was looked at, -1 before the first."""
        with self._lock:
            return self._last

    def follow(self) -> int:
        """Look at the manifests that came since; returns the newest trigger, -1 if there is none.

        What was pruned meanwhile is skipped: every sink is past it.
        """
        with self._lock:
            oldest = self._changes.first
            if oldest is None:
                return -1
            if self._last < oldest - 1:
                self._last, self._table = oldest - 1, self._table[:0]
            found = self._changes.after(self._last, limit=READ_MAX)
            if found:
                rows = np.stack([self._numbers(manifest) for manifest in found])
                self._table = np.concatenate([self._table, rows])
                self._last = found[-1].trigger
            return self._last

    def forget(self, through: int) -> None:
        with self._lock:
            self._table = self._table[self._row(through) :]

    def partitions(self) -> list[dict[str, Any]]:
        """How far each partition of the source is folded, and what came out as far as this process
        saw it. The counts of a partition are those of the same triggers."""
        with self._lock:
            return [dict(folded) for _, folded in sorted(self._folded.items())]

    def bytes_after(self, trigger: int) -> int:
        """Size of what a sink whose cursor is at `trigger` still has before it, at most."""
        with self._lock:
            return int(self._table[self._row(trigger) :, _BYTES].sum())

    def lag(self, positions: Mapping[int, int]) -> Lag:
        """What a sink still has before it that is at these triggers in these columns."""
        triggers = rows = size = 0
        oldest = _NEVER
        with self._lock:
            for column, position in positions.items():
                waiting = self._table[self._row(position) :, :, column]
                triggers = max(triggers, len(waiting))
                rows += int(waiting[:, _ROWS].sum())
                size += int(waiting[:, _BYTES].sum())
                oldest = min(oldest, int(waiting[:, _OLDEST].min(initial=_NEVER)))
        return Lag(triggers, rows, size, None if oldest == _NEVER else oldest)

    def ahead(
        self, position: int, columns: tuple[int, ...], *, rows_max: int, bytes_max: int
    ) -> TriggerSpan | None:
        """The longest span behind `position` within the bounds, at least one trigger with rows;
        None if there are only triggers without. Its first and its last trigger have rows."""
        with self._lock:
            at = self._row(position)
            start = self._last - len(self._table) + 1 + at
            waiting = self._table[at:, :_OLDEST, columns].sum(axis=2)
        rows, sizes = np.cumsum(waiting, axis=0).T
        if not len(rows) or rows[-1] == 0:
            return None
        first = int(np.searchsorted(rows, 1))
        most = min(
            int(np.searchsorted(rows, rows_max, "right")),
            int(np.searchsorted(sizes, bytes_max, "right")),
        )
        total = int(rows[max(first, most - 1)])
        last = int(np.searchsorted(rows, total))  # the first to reach it: it has rows itself
        return TriggerSpan(start + first, start + last)

    def _row(self, position: int) -> int:
        """The row behind the trigger `position`."""
        count = len(self._table)
        return min(max(position - self._last + count, 0), count)

    def _numbers(self, manifest: Manifest) -> NDArray[np.int64]:
        """The row of a trigger. What its partitions came to is counted on the way."""
        row = np.zeros((3, COLUMNS), np.int64)
        row[_OLDEST] = _NEVER
        for part in manifest.parts:
            place = {"topic": part.topic, "partition": part.partition}
            folded = self._folded.setdefault((part.topic, part.partition), place)
            folded["sequence"] = part.last
            new = manifest.trigger > self._known
            add_counts(folded, {n: c for n, c in part.counts.items() if new or n in PRESENT})
            for section in part.sections:
                column = column_of(section)
                row[_ROWS, column] += section.rows
                row[_BYTES, column] += section.length
                row[_OLDEST, column] = min(row[_OLDEST, column], section.log_time_ms_min)
        return row


def column_of(section: Section) -> int:
    if section.kind == "states":
        assert section.lane is not None, "states are kept by lane"
        return section.lane
    return DELTAS if section.kind == "deltas" else QUARANTINE


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """One write: what to read, and where the cursor's lanes are afterwards."""

    spans: dict[int, TriggerSpan]  # by column of the backlog; empty: nothing to write, only to move
    moves: dict[int, int]  # by lane of the cursor


@dataclass(kw_only=True)
class Planner:
    backlog: Backlog
    columns: tuple[int, ...]
    options: DeliveryOptions
    laned: bool = False
    lanes: Lanes = field(default_factory=Lanes)

    def lag(self, cursor: SinkCursor) -> Lag:
        if len(cursor.position) == LANES:
            return self.backlog.lag(dict(enumerate(cursor.position)))
        return self.backlog.lag(dict.fromkeys(self.columns, cursor.through))

    def plan(self, cursor: SinkCursor, *, now_ms: int) -> WritePlan | None:
        """The next write, or None if the sink has everything."""
        end = self.backlog.follow()
        if end <= cursor.through:
            return None
        if self.laned:
            return self._by_lane(cursor, end=end, now_ms=now_ms)
        if cursor.attempt is not None:
            span: TriggerSpan | None = TriggerSpan(*cursor.attempt)
        else:
            span = self._ahead(cursor.through, self.columns)
        if span is None:
            return WritePlan(spans={}, moves={0: end})
        return WritePlan(spans=dict.fromkeys(self.columns, span), moves={0: span.last})

    def _by_lane(self, cursor: SinkCursor, *, end: int, now_ms: int) -> WritePlan:
        lags = [self.backlog.lag({lane: at}) for lane, at in enumerate(cursor.position)]
        chosen = [lane for lane, lag in enumerate(lags) if lag.rows]
        moves = {lane: end for lane in range(LANES) if lane not in chosen}
        if sum(lag.rows for lag in lags) > self.options.rows_together_max:
            waits = [None if lag.oldest_ms is None else now_ms - lag.oldest_ms for lag in lags]
            chosen = [self.lanes.choose(waits)]
        spans: dict[int, TriggerSpan] = {}
        for lane in chosen:
            found = self._ahead(cursor.position[lane], (lane,))
            assert found is not None, "a lane with rows has a trigger with rows"
            spans[lane] = found
            moves[lane] = found.last
        return WritePlan(spans=spans, moves=moves)

    def _ahead(self, position: int, columns: tuple[int, ...]) -> TriggerSpan | None:
        return self.backlog.ahead(
            position,
            columns,
            rows_max=self.options.rows_per_write_max,
            bytes_max=self.options.bytes_per_write_max,
        )
