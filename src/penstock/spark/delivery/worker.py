"""One sink's way from the change log: which rows it gets, and their writing, at its own pace. It
never waits for another sink. Its thread, retries and dead letters are the runner's (`SinkRunner`).

**Selection.** Sections are mapped from the change files, so that what is not asked for is not read.
Rows that no route of the sink matches are left out; a trigger's rows are judged by that trigger
alone, so the outcome does not depend on how many triggers are taken together.

**Routes** are those of `penstock.propagation.flow.route`, on Arrow. Deltas are judged one by one. A
*state* has a namespace and a vector, but neither an operation nor headers: a route by one of those
takes the vectors that a matching delta touched in this trigger, each with its whole state, whatever
else has touched it. A row that several routes take comes once.

**Coalescing.** When a sink is behind, a vector that changed in several of the triggers needs only
its newest state: the highest revision. Deltas are history, and all of them are kept, in order.

A worker is *halted* when the change log no longer holds what the sink would need; an operator must
decide then. A call that never returns hangs the sink's thread alone: `join` waits a while, then
lets go of it and takes its right to move the cursor (`_fence`), so that a late return cannot speak
for a sink that somebody else serves by then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final, Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.errors import FailedPrecondition, PenstockError
from penstock.log.crash import crash_point
from penstock.model.delta import Op
from penstock.node.observe.logs import get_logger
from penstock.propagation.flow.route import DeltaRoute, RouteKind
from penstock.sinks.protocol import Feed, Sink, Work
from penstock.sinks.runner import Handover, SinkRunner
from penstock.sinks.schema import newest_of, vector_keys
from penstock.sinks.topics import LetterBox
from penstock.spark.delivery.backlog import (
    DELTAS,
    NONE,
    STATES,
    Backlog,
    CursorFile,
    Planner,
    SinkCursor,
    WritePlan,
    column_of,
)
from penstock.spark.fold.state import LANES, ChangeLog, ChangePart
from penstock.spark.settings import DeliveryOptions

_BY_DELTAS: Final = frozenset({RouteKind.OP, RouteKind.HEADER})
log = get_logger(__name__)
SAVE_S: Final = 5.0  # a cursor that moved over empty triggers only is saved this often


@dataclass(frozen=True, kw_only=True)
class SinkRoutes:
    """A sink's routes; none: everything."""

    routes: tuple[DeltaRoute, ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Self:
        return cls(routes=tuple(DeltaRoute.parse(text) for text in texts))

    @property
    def all(self) -> bool:
        return not self.routes or any(route.kind is RouteKind.ALL for route in self.routes)

    @property
    def judge_states_by_deltas(self) -> bool:
        return not self.all and any(route.kind in _BY_DELTAS for route in self.routes)

    def deltas(self, deltas: pa.Table) -> pa.Table:
        if self.all:
            return deltas
        return deltas.filter(_any(_delta_mask(route, deltas) for route in self.routes))

    def states(self, states: pa.Table, touching: pa.Table | None) -> pa.Table:
        """The states that some route takes; `touching` are all deltas of their trigger."""
        if self.all:
            return states
        masks = [_name_mask(r, states) for r in self.routes if r.kind not in _BY_DELTAS]
        judged = [r for r in self.routes if r.kind in _BY_DELTAS]
        if judged and touching is not None:
            taken = touching.filter(_any(_delta_mask(route, touching) for route in judged))
            keys, wanted = (vector_keys(table, topics=True) for table in (states, taken))
            masks.append(pc.is_in(keys, value_set=wanted))
        return states.filter(_any(masks)) if masks else states.slice(0, 0)


def _any(masks: Iterable[Any]) -> Any:
    return reduce(pc.or_, masks)


def _delta_mask(route: DeltaRoute, deltas: pa.Table) -> Any:
    if route.kind is RouteKind.OP:
        return pc.equal(deltas["op"], pa.scalar(int(Op[route.value]), pa.int8()))
    if route.kind is RouteKind.HEADER:
        found = [_header(data, route.name) == route.value for data in deltas["headers"].to_pylist()]
        return pa.chunked_array([pa.array(found, pa.bool_())])
    return _name_mask(route, deltas)


def _name_mask(route: DeltaRoute, table: pa.Table) -> Any:
    if route.kind is RouteKind.NAMESPACE:
        return pc.equal(table["namespace"], route.value)
    assert route.kind is RouteKind.VECTOR, route
    same = pc.equal(table["namespace"], route.name)
    return pc.and_(same, pc.equal(table["vector_id"], route.value))


def _header(data: bytes | None, name: str) -> Any:
    """A header of a message; what is no map has none."""
    try:
        found = msgspec.msgpack.decode(data) if data else {}
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return found.get(name) if isinstance(found, dict) else None


@dataclass(frozen=True, kw_only=True)
class SinkWrite:
    """One write, which remembers how far it came. That of an ordered sink is one `Work`: its
    triggers become visible together or not at all. That of an unordered one may be several, each
    within the bound on rows; the cursor moves when the last of them is in."""

    first: int  # trigger
    last: int
    handovers: list[Handover]  # empty: no row of these triggers is for this sink
    moves: dict[int, int]  # where the cursor's lanes are afterwards
    rows: int
    log_times_ms: NDArray[np.int64]  # of every row, those overtaken by a newer revision included
    coalesced: int  # how many were


@dataclass(frozen=True, kw_only=True)
class ChangeSelection:
    changes: ChangeLog
    pipeline: str
    routes: SinkRoutes
    payloads: bool = False

    def select(self, plan: WritePlan, *, rows_max: int | None) -> SinkWrite:
        """What is planned, cut into works of up to `rows_max` states, if that is given."""
        spans = plan.spans
        first = min(span.first for span in spans.values())
        last = max(span.last for span in spans.values())
        states: list[pa.Table] = []
        deltas: list[pa.Table] = []
        for trigger in range(first, last + 1):
            wanted = {c for c, span in spans.items() if span.first <= trigger <= span.last}
            for part in self.changes.manifest(trigger).parts:
                states += self._states(part, wanted)
                deltas += self._deltas(part, wanted)
        times = [table["log_time_ms"].to_numpy() for table in states or deltas]
        merged = pa.concat_tables(states) if states else None
        if merged is not None and first < last:  # within a trigger a vector comes once
            merged = newest_of(merged, topics=True)
        chosen = pa.concat_tables(deltas) if deltas else None
        work = Work(pipeline=self.pipeline, first=first, last=last, states=merged, deltas=chosen)
        held, rows = (0 if table is None else table.num_rows for table in (merged, chosen))
        works = [work]
        if merged is not None and rows_max:
            starts = range(0, held, rows_max)
            works = [replace(work, states=merged.slice(at, rows_max)) for at in starts]
        return SinkWrite(
            first=first,
            last=last,
            handovers=[Handover(work=one) for one in works if held + rows],
            moves=plan.moves,
            rows=held + rows,
            log_times_ms=np.concatenate([np.zeros(0, np.int64), *times]),
            coalesced=sum(table.num_rows for table in states) - held,
        )

    def _states(self, part: ChangePart, wanted: set[int]) -> Iterator[pa.Table]:
        sections = [s for s in part.sections if column_of(s) in wanted and s.kind == "states"]
        if not sections:
            return
        touching = self._deltas_of(part) if self.routes.judge_states_by_deltas else None
        for section in sections:
            table = self.routes.states(self.changes.table(part, section), touching)
            if table.num_rows:
                yield table

    def _deltas(self, part: ChangePart, wanted: set[int]) -> Iterator[pa.Table]:
        """The part's deltas, or its quarantined ones for the sink of those."""
        for section in part.sections:
            if section.kind == "states" or column_of(section) not in wanted:
                continue
            table = self.changes.table(part, section)
            if section.kind == "deltas":
                table = self.routes.deltas(table)
                if not self.payloads:
                    table = _without_payload(table)
            if table.num_rows:
                yield table

    def all_deltas(self, triggers: Iterable[int]) -> Iterator[pa.Table]:
        for trigger in triggers:
            for part in self.changes.manifest(trigger).parts:
                deltas = self._deltas_of(part)
                if deltas is not None:
                    yield deltas

    def _deltas_of(self, part: ChangePart) -> pa.Table | None:
        found = [s for s in part.sections if s.kind == "deltas"]
        return self.changes.table(part, found[0]) if found else None


def columns_of(feed: Feed) -> tuple[int, ...]:
    states = STATES if feed & Feed.STATES else ()
    deltas = (DELTAS,) if feed & (Feed.DELTAS | Feed.PAYLOADS) else ()
    return (*states, *deltas)


def _without_payload(table: pa.Table) -> pa.Table:
    at = table.schema.get_field_index("payload")
    if at < 0 or table["payload"].null_count == table.num_rows:
        return table
    return table.set_column(at, table.schema.field(at), pa.nulls(table.num_rows, pa.binary()))


class SinkWorker:
    def __init__(
        self,
        sink: Sink,
        *,
        columns: tuple[int, ...],
        backlog: Backlog,
        selection: ChangeSelection,
        letters: LetterBox,
        file: CursorFile,
        options: DeliveryOptions,
    ) -> None:
        self.sink, self._selection, self._options = sink, selection, options
        self.planner = Planner(backlog=backlog, columns=columns, options=options)
        self.halted: str | None = None
        self._file = file
        self._established = False
        self._write: SinkWrite | None = None
        self._saved_at = 0.0
        self._fence = threading.Lock()
        self._abandoned = False
        self.cursor = self._first_cursor()
        self.runner = SinkRunner(
            sink,
            thread=f"penstock-sink-{sink.name}",
            letters=letters,
            patience=options,
            log=log,
            advance=self._advance,
            rest=self._rest,
            end=self._end,
            hang_s=options.hang_s,
            look_s=options.poll_s,
        )

    @property
    def durable_through(self) -> int:
        """The last trigger that will not be asked for again, whatever happens."""
        saved = self._file.saved
        return NONE if saved is None or self.halted else saved.through

    @property
    def state(self) -> str:
        return "halted" if self.halted else self.runner.state

    def caught_up(self, trigger: int) -> bool:
        """Whether the sink holds `trigger`; one with a cursor of its own is asked for it first."""
        known = self._established or self.cursor.told is None
        return known and self.cursor.through >= trigger

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; False if it hangs and was let go of."""
        if self.runner.join(timeout_s):
            return True
        if self._fence.acquire(timeout=1.0):  # else it saves its cursor just now: that is the truth
            self._abandoned = True
            self._fence.release()
        return False

    # --- steps of the sink's thread ---

    def _advance(self) -> bool:
        """Do one thing; False if there is nothing to do."""
        if not self.runner.opened:
            self.runner.open(self._settle)
            return True
        if self._write is None and not self._plan():
            return False
        if self._write is not None:
            self._carry_out(self._write)
            self._write = None
        return True

    def _plan(self) -> bool:
        plan = self.planner.plan(self.cursor, now_ms=_now_ms())
        if plan is None:
            self._save_moved(after_s=SAVE_S)
            return False
        if not plan.spans:
            self.cursor = self.cursor.advanced(plan.moves)
            return True
        rows_max = self._options.rows_per_write_max if self.planner.laned else None
        self._write = self._selection.select(plan, rows_max=rows_max)
        return True

    def _rest(self) -> None:
        newest = self.planner.backlog.last
        self._selection.changes.wait(newest, timeout_s=self._options.poll_s)

    def _carry_out(self, write: SinkWrite) -> None:
        if not write.handovers:
            self.cursor = self.cursor.advanced(write.moves)
            self._save_moved(after_s=SAVE_S)
            return
        self._announce(write)
        began = time.monotonic()
        for handover in write.handovers:
            self._hand_over(handover)
        now = time.monotonic()
        ages = (_now_ms() - write.log_times_ms) / 1000
        told = None if self.planner.laned else self.runner.call(self.sink.cursor)
        self._save(self.cursor.advanced(write.moves, told=told))
        self.runner.succeeded()
        meter = self.runner.meter
        meter.coalesced += write.coalesced
        meter.wrote(write.rows, seconds=now - began, now=now)
        meter.freshness.record(ages, now=now)

    def _hand_over(self, handover: Handover) -> None:
        if not handover.written:
            crash_point("delivery.write.before")
            self.runner.write(handover)
            crash_point("delivery.write.after")
        if handover.refused is not None:
            triggers = range(handover.work.first, handover.work.last + 1)
            crash_point("delivery.rejected.before")
            self.runner.bury(handover, lambda: self._selection.all_deltas(triggers))
            crash_point("delivery.rejected.after")

    def _announce(self, write: SinkWrite) -> None:
        if self.planner.laned or self.cursor.attempt == (write.first, write.last):
            return
        self._save(self.cursor.attempting(write.first, write.last))
        crash_point("delivery.attempt.saved")

    def _settle(self, held: int | None) -> None:
        """The sink is open, and says itself that it holds everything up to `held`, if it does."""
        # Only states are kept by lane; deltas are a history and have one order.
        laned = not self.sink.ordered and self.planner.columns == STATES and held is None
        self.planner.laned = laned and self.cursor.told is None
        lanes = LANES if self.planner.laned else 1
        cursor = self.cursor.in_lanes(lanes).reconciled(held)
        problem = self._gap(cursor)
        if problem is not None and (furthest := self._file.furthest()) is not None:
            # A driver that was overtaken has served the sink meanwhile, and deleted the triggers.
            cursor = furthest.in_lanes(lanes).reconciled(held)
            problem = self._gap(cursor)
        if problem is not None:
            self._halt(problem)
            return
        if cursor.position != self.cursor.position:
            self._write = None  # it was planned for another place
        self._save(cursor)
        self._established = True
        if self._write is None:  # else the write will show whether it is well
            self.runner.succeeded()

    def _gap(self, cursor: SinkCursor) -> str | None:
        """Why going on from there would leave rows out, if it would."""
        changes = self._selection.changes
        first, last = changes.first, changes.last
        if last is not None and cursor.through > last:
            return (
                f"it is at trigger {cursor.through}, the change log only at {last}: it is a sink of"
                " another state"
            )
        if first is not None and cursor.through + 1 < first:
            return (
                f"it holds triggers up to {cursor.through}, and those before {first} are no longer"
                " in the change log: rebuild it"
            )
        lacking = self.planner.lacking(cursor, payloads=self._selection.payloads)
        if lacking is not None:
            return (
                f"trigger {lacking[0]} was written while no sink took {lacking[1]}: fill it by"
                " reindex or replay"
            )
        return None

    def _halt(self, problem: str) -> None:
        error = FailedPrecondition(f"sink {self.sink.name}: {problem}")
        self.runner.meter.failed(error, time_ms=_now_ms())
        self.halted = error.message
        self.runner.stop()
        log.error("sink halted", sink=self.sink.name, problem=problem)

    # --- the cursor ---

    def _save(self, cursor: SinkCursor) -> None:
        with self._fence:
            if self._abandoned:
                return
            self._file.save(cursor)
            self.cursor = cursor
            self._saved_at = time.monotonic()

    def _save_moved(self, *, after_s: float) -> None:
        if self.cursor != self._file.saved and time.monotonic() - self._saved_at >= after_s:
            self._save(self.cursor)

    def _first_cursor(self) -> SinkCursor:
        """The cursor on file; a new sink begins with the oldest trigger there is."""
        found = self._file.load()
        if found is None:
            found = SinkCursor.before(self._selection.changes.first or 0, lanes=1)
            self._file.save(found)
        return found

    def _end(self) -> None:
        try:
            self._save_moved(after_s=0.0)
        except PenstockError as error:
            log.warning("cursor not saved", sink=self.sink.name, error=str(error))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
