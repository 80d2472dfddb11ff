"""What waits in the change log, in numbers: rows, bytes and times of every trigger, by column.

A sink that is behind must not read thousands of manifests to know how far. Each manifest is read
once, by whoever looks first, and kept as running totals, so that the size of any range of triggers
is one subtraction and the longest range within a bound one binary search. A day of triggers, one a
second, takes 13 MB.

Columns: the states of lanes 0 to 3, the deltas, the quarantined deltas. A sink watches those that
it is fed from.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.spark.fold.changes import LANES, ChangeLog, ChangePart, Manifest, Section

DELTAS: Final = LANES
QUARANTINE: Final = LANES + 1
COLUMNS: Final = LANES + 2
STATES: Final = tuple(range(LANES))
READ_MAX: Final = 1000  # manifests read in one go, so that a stop is not kept waiting
_NEVER: Final = np.iinfo(np.int64).max


class Lag(NamedTuple):
    """What a sink has before it."""

    triggers: int = 0
    rows: int = 0
    bytes: int = 0
    oldest_ms: int | None = None  # log time of the oldest row that waits

    def __add__(self, other: object) -> Lag:
        assert isinstance(other, Lag)
        known = [ms for ms in (self.oldest_ms, other.oldest_ms) if ms is not None]
        return Lag(
            triggers=max(self.triggers, other.triggers),
            rows=self.rows + other.rows,
            bytes=self.bytes + other.bytes,
            oldest_ms=min(known, default=None),
        )


class TriggerSpan(NamedTuple):
    """Triggers `first` to `last`."""

    first: int
    last: int


class FoldedPartition:
    """What came out of one partition's log, as far as this process saw it."""

    __slots__ = ("counts", "last")

    def __init__(self) -> None:
        self.last = 0  # the sequence up to which it is folded
        self.counts: Counter[str] = Counter()  # sums; of what is pending, the present number


class Backlog:
    """Any thread may call any method."""

    def __init__(self, changes: ChangeLog) -> None:
        self._changes = changes
        self._known = -1 if changes.last is None else changes.last  # older ones were counted once
        self._folded: dict[tuple[str, int], FoldedPartition] = {}
        self._lock = threading.Lock()
        self._first = 0  # the trigger of row 1; row 0 holds the totals before it
        self._count = 0
        self._rows = np.zeros((1, COLUMNS), np.int64)  # running totals
        self._bytes = np.zeros((1, COLUMNS), np.int64)
        self._oldest = np.full((1, COLUMNS), _NEVER, np.int64)  # of each trigger alone

    @property
    def last(self) -> int:
        """The newest trigger that was looked at, -1 before the first."""
        with self._lock:
            return self._first + self._count - 1

    def follow(self) -> int:
        """Look at the manifests that came since; returns the newest trigger, -1 if there is none.

        What was pruned meanwhile is skipped: every sink is past it.
        """
        with self._lock:
            oldest = self._changes.first
            if oldest is None:
                return -1
            known = self._first + self._count - 1
            if known < oldest - 1:
                self._first, self._count = oldest, 0
                known = oldest - 1
            for manifest in self._changes.after(known, limit=READ_MAX):
                self._append(manifest)
            return self._first + self._count - 1

    def forget(self, through: int) -> None:
        """Drop the numbers of triggers that were pruned."""
        with self._lock:
            gone = min(max(through - self._first + 1, 0), self._count)
            if gone <= len(self._rows) // 2:
                return  # amortised: move the rest only when it is worth it
            keep = slice(gone, self._count + 1)
            self._rows, self._bytes = self._rows[keep].copy(), self._bytes[keep].copy()
            self._oldest = self._oldest[keep].copy()
            self._first += gone
            self._count -= gone

    def partitions(self) -> list[dict[str, Any]]:
        """How far each partition of the source is folded, and what came out. The counts of a
        partition are those of the same triggers."""
        with self._lock:
            return [
                {"topic": topic, "partition": partition, "sequence": folded.last, **folded.counts}
                for (topic, partition), folded in sorted(self._folded.items())
            ]

    def lag(self, position: int, columns: Sequence[int]) -> Lag:
        """What a sink at `position` still has before it in these columns."""
        with self._lock:
            at, end = self._row(position), self._count
            if at >= end:
                return Lag()
            picked = list(columns)
            rows = int((self._rows[end] - self._rows[at])[picked].sum())
            size = int((self._bytes[end] - self._bytes[at])[picked].sum())
            times = self._oldest[at + 1 : end + 1, picked]
            oldest = int(times.min()) if rows else _NEVER
            return Lag(
                triggers=end - at, rows=rows, bytes=size,
                oldest_ms=None if oldest == _NEVER else oldest,
            )  # fmt: skip

    def ahead(
        self, position: int, columns: Sequence[int], *, rows_max: int, bytes_max: int
    ) -> TriggerSpan | None:
        """The longest span behind `position` within the bounds, at least one trigger with rows;
        None if there are only triggers without. Its first and its last trigger have rows."""
        with self._lock:
            at, end = self._row(position), self._count
            rows = self._totals(self._rows, at, end, columns)
            if not len(rows) or rows[-1] == 0:
                return None
            sizes = self._totals(self._bytes, at, end, columns)
            first = int(np.searchsorted(rows, 1))
            most = min(
                int(np.searchsorted(rows, rows_max, "right")),
                int(np.searchsorted(sizes, bytes_max, "right")),
            )
            total = int(rows[max(first, most - 1)])
            last = int(np.searchsorted(rows, total))  # the first to reach it: it has rows itself
            start = self._first + at
            return TriggerSpan(start + first, start + last)

    def _totals(
        self, table: NDArray[np.int64], at: int, end: int, columns: Sequence[int]
    ) -> NDArray[np.int64]:
        """Running totals of the triggers behind row `at`, counted from there."""
        picked = list(columns)
        totals: NDArray[np.int64] = (table[at + 1 : end + 1, picked] - table[at, picked]).sum(
            axis=1
        )
        return totals

    def _row(self, position: int) -> int:
        """The row with the totals up to `position`."""
        return min(max(position - self._first + 1, 0), self._count)

    def _append(self, manifest: Manifest) -> None:
        row = self._count + 1
        if row == len(self._rows):
            self._rows, self._bytes = _doubled(self._rows), _doubled(self._bytes)
            self._oldest = _doubled(self._oldest)
        self._rows[row], self._bytes[row] = self._rows[row - 1], self._bytes[row - 1]
        self._oldest[row] = _NEVER
        for part in manifest.parts:
            self._count_in(manifest.trigger, part)
            for section in part.sections:
                column = column_of(section)
                self._rows[row, column] += section.rows
                self._bytes[row, column] += section.length
                oldest = min(int(self._oldest[row, column]), section.log_time_ms_min)
                self._oldest[row, column] = oldest
        self._count = row

    def _count_in(self, trigger: int, part: ChangePart) -> None:
        folded = self._folded.setdefault((part.topic, part.partition), FoldedPartition())
        folded.last = part.last
        for name, count in part.counts.items():
            if name.startswith("pending"):
                folded.counts[name] = count
            elif trigger > self._known:
                folded.counts[name] += count


def column_of(section: Section) -> int:
    if section.kind == "states":
        assert section.lane is not None, "states are kept by lane"
        return section.lane
    return DELTAS if section.kind == "deltas" else QUARANTINE


def _doubled(table: NDArray[np.int64]) -> NDArray[np.int64]:
    grown = np.empty((max(64, 2 * len(table)), COLUMNS), np.int64)
    grown[: len(table)] = table
    return grown
