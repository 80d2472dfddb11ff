"""How far a sink has come, what waits for it in the change log, and which of it it gets next.

**Cursor.** It says: *everything up to here is durably in the sink*. It is saved after the write it
speaks of, so a cursor that is behind the truth is harmless (the sink is given work again, and
takes it once), while a cursor ahead of the truth would lose rows. From that follow the rules:

- A cursor only grows, per lane. Saving is one atomic, durable replacement.
- Each driver writes a file of its own, named by its claim, and goes by that of the greatest claim.
  So a driver that was overtaken and does not know it cannot move the cursor of the one that drives.
  What it has written into the sink meanwhile stays true: where triggers that its cursor covers were
  deleted by it, that cursor is taken over.
- `position[lane]` is the last trigger of which the sink holds that lane's rows. An ordered sink
  has one lane: all.
- `attempt` is the range of triggers that an ordered sink is about to get in one write. It is saved
  *before* that write and gone after it. So after a crash it is known what may have been under way,
  and exactly this range is written again, never a longer one that begins with it: a sink that
  recognises a repeated write by its trigger numbers can rely on that.
- A sink that keeps a mark, or a cursor, of its own knows best what it holds. It may be ahead of
  the file by the attempt; that one is offered again all the same, as the rows it may have rejected
  are not yet dead letters. It may be behind `position`, as it does not hear of triggers without a
  row for it; only if it has lost what it had `told` when the file was saved, rows have gone
  (`SinkMark`).

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

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from penstock.errors import Corruption
from penstock.log.crash import crash_point
from penstock.propagation.flow.lanes import Lanes
from penstock.sinks.protocol import SinkMark
from penstock.spark.fold.state import (
    LANES,
    PRESENT,
    ChangeLog,
    Manifest,
    Section,
    add_counts,
    claim_of,
    claimed,
)
from penstock.spark.settings import DeliveryOptions
from penstock.spark.store import Store

VERSION: Final = 3
NONE: Final = -1  # before the first trigger
CURSORS: Final = "sinks"
DELTAS: Final = LANES
QUARANTINE: Final = LANES + 1
COLUMNS: Final = LANES + 2
STATES: Final = tuple(range(LANES))
READ_MAX: Final = 1000  # manifests read in one go, so that a stop is not kept waiting
_ROWS, _BYTES, _OLDEST = range(3)  # numbers that are kept of each column
_NEVER: Final = np.iinfo(np.int64).max


class SinkCursor(msgspec.Struct, frozen=True, kw_only=True):
    version: int = VERSION
    position: tuple[int, ...]  # per lane; one entry for an ordered sink
    started: int = NONE + 1  # the first trigger this sink was ever given
    attempt: tuple[int, int] | None = None
    told: SinkMark | None = None  # the sink's own mark, if it keeps one, when this was saved

    @classmethod
    def before(cls, trigger: int, *, lanes: int) -> SinkCursor:
        """The cursor of a sink whose first trigger will be `trigger`."""
        return cls(position=(trigger - 1,) * lanes, started=trigger)

    @property
    def through(self) -> int:
        """The last trigger that is complete in every lane."""
        return min(self.position)

    def advanced(self, lanes: dict[int, int], *, told: SinkMark | None = None) -> SinkCursor:
        """The cursor with some lanes moved on; an attempt is over with that."""
        moved = list(self.position)
        for lane, trigger in lanes.items():
            assert trigger >= moved[lane], (lane, trigger, self)
            moved[lane] = trigger
        known = self.told if told is None else told
        return replace(self, position=tuple(moved), told=known, attempt=None)

    def attempting(self, first: int, last: int) -> SinkCursor:
        assert self.through < first <= last, (first, last, self)
        return replace(self, attempt=(first, last))

    def reconciled(self, held: SinkMark | None) -> SinkCursor:
        """The cursor of a sink that says itself what it holds: everything up to `held`.

        It may be ahead (the process died before the cursor was saved) or behind (it was emptied,
        or restored from a copy). None from a sink that has told before means that it is empty;
        from any other that it does not know.
        """
        if self.lost_by(held):
            return self._without_lost(held)
        if held is None:
            return self
        found = held.in_lanes(len(self.position))
        if self.attempt is not None and self.attempt[1] == found[0]:
            return replace(self, told=held)
        position = tuple(map(max, found, self.position))
        attempt = self.attempt if self.attempt and self.attempt[0] > min(position) else None
        return replace(self, position=position, told=held, attempt=attempt)

    def lost_by(self, held: SinkMark | None) -> bool:
        """Whether a sink that says `held` no longer has all that it had told of."""
        return self.told is not None and not self.told.kept_by(held)

    def _without_lost(self, held: SinkMark | None) -> SinkCursor:
        """A copy of the same incarnation holds what its mark says; any other store may be empty."""
        assert self.told is not None, "a sink that told nothing has lost nothing"
        position = (NONE,) * len(self.position)
        if held is not None and held.incarnation == self.told.incarnation:
            position = tuple(map(min, held.in_lanes(len(position)), self.position))
        return replace(self, position=position, told=held, attempt=None)

    def in_lanes(self, lanes: int) -> SinkCursor:
        """The same progress for another number of lanes: a sink became ordered, or ceased to be."""
        if len(self.position) == lanes:
            return self
        return replace(self, position=(self.through,) * lanes, attempt=None)


class CursorFile:
    """One sink's cursor at `sinks/<claim>-<name>.json` of the pipeline's store."""

    def __init__(self, store: Store, sink: str, *, claim: int = 0) -> None:
        """`claim` is that of the driver; 0 for whoever reads, and for jobs while none runs."""
        self._store, self._sink, self._claim = store, sink, claim
        self._older: list[str] = []  # files of earlier drivers that are still there
        self.saved: SinkCursor | None = None  # what is on record

    def load(self) -> SinkCursor | None:
        names = self._names()
        self._older = names[:-1] if names and claim_of(names[-1]) == self._claim else names
        self.saved = self._read(names[-1]) if names else None
        return self.saved

    def furthest(self) -> SinkCursor | None:
        found = [self._read(name) for name in self._names()]
        return max(found, key=lambda cursor: cursor.through, default=None)

    def save(self, cursor: SinkCursor) -> None:
        """Durable on return."""
        document = {"sink": self._sink, **msgspec.structs.asdict(cursor)}
        name = f"{CURSORS}/{claimed(self._claim)}-{self._sink}.json"
        crash_point("delivery.cursor.before")
        self._store.write(name, [msgspec.json.encode(document)])
        crash_point("delivery.cursor.after")
        self.saved = cursor
        if self._older:
            self._store.delete([f"{CURSORS}/{old}" for old in self._older])
            self._older = []

    def _names(self) -> list[str]:
        found = self._store.names(CURSORS)
        return sorted(
            (n for n in found if n.partition("-")[2] == f"{self._sink}.json"), key=claim_of
        )

    def _read(self, name: str) -> SinkCursor:
        where = f"{self._store.url}/{CURSORS}/{name}"
        try:
            cursor = msgspec.json.decode(self._store.read(f"{CURSORS}/{name}"), type=SinkCursor)
        except msgspec.DecodeError as error:
            raise Corruption(f"{where} is not a cursor: {error}") from error
        if cursor.version != VERSION:
            raise Corruption(f"{where} has version {cursor.version}, this release reads {VERSION}")
        if len(cursor.position) not in (1, LANES):
            raise Corruption(f"{where} has {len(cursor.position)} lanes, not 1 or {LANES}")
        return cursor


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
        self._feeds: list[tuple[int, frozenset[str]]] = []  # what is written, from which trigger on

    @property
    def last(self) -> int:
        """The newest trigger that was looked at, -1 before the first."""
        with self._lock:
            return self._last

    def follow(self) -> int:
        """Look at the manifests that came since; returns the newest trigger, -1 if there is none.
        What was pruned meanwhile is skipped: every sink is past it."""
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

    def lacking(self, position: int, needed: frozenset[str]) -> tuple[int, str] | None:
        """The first trigger behind `position` that was written without something of `needed`."""
        while self.follow() < (-1 if self._changes.last is None else self._changes.last):
            pass
        found: tuple[int, str] | None = None
        with self._lock:
            last = self._last
            for first, feed in reversed(self._feeds):
                if last > position and needed - feed:
                    found = max(first, position + 1), min(needed - feed)
                last = first - 1
        return found

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
        count = len(self._table)
        return min(max(position - self._last + count, 0), count)

    def _numbers(self, manifest: Manifest) -> NDArray[np.int64]:
        """The row of a trigger. What its partitions came to is counted on the way."""
        feed = frozenset(manifest.feed)
        if not self._feeds or self._feeds[-1][1] != feed:
            self._feeds.append((manifest.trigger, feed))
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

    def lag(self, cursor: SinkCursor) -> Lag:
        if len(cursor.position) == LANES:
            return self.backlog.lag(dict(enumerate(cursor.position)))
        return self.backlog.lag(dict.fromkeys(self.columns, cursor.through))

    def lacking(self, cursor: SinkCursor, *, payloads: bool) -> tuple[int, str] | None:
        """As of the backlog, for what this sink is fed."""
        named = {"states": STATES[0] in self.columns, "deltas": DELTAS in self.columns}
        needed = frozenset(name for name, wanted in named.items() if wanted)
        return self.backlog.lacking(cursor.through, needed | {"payloads"} if payloads else needed)

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
