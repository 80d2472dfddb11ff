"""One sink's way along the change log, at its own pace: what it gets next, and how far it is.

A worker never waits for another sink. Its thread, retries and breaker are the runner's
(`SinkRunner`). Rows are written by tasks on Spark where the sink can be made there
(`SparkTaskWriter`), else by the sink's thread in the driver (`DriverWriter`).

A sink may be emptied, or exchanged for an older copy, at any time. Its mark shows it: the worker
looks at that when it opens the sink, and before each commit, which would overwrite it. Then the
sink is opened anew, and filled if the change log no longer has what it lost.

A worker is *halted* when the change log no longer holds what the sink would need; an operator must
decide then. A call that never returns hangs the sink's thread alone: `join` waits a while, then
lets go of it and takes its right to move the cursor (`_fence`), so that a late return cannot speak
for a sink that somebody else serves by then.
"""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol

import msgspec
import numpy as np

from penstock.errors import FailedPrecondition, PenstockError, Unavailable
from penstock.log.crash import crash_point
from penstock.node.observe.logs import get_logger
from penstock.sinks.protocol import Feed, SinkCommit, SinkMark, TaskSink
from penstock.sinks.runner import Handover, SinkRunner
from penstock.sinks.topics import LetterBox
from penstock.spark.delivery.attachment import RoutedSink, SinkSpec
from penstock.spark.delivery.backlog import (
    NONE,
    QUARANTINE,
    STATES,
    Backlog,
    CursorFile,
    Planner,
    SinkCursor,
    WritePlan,
)
from penstock.spark.delivery.lakes import lake_position
from penstock.spark.delivery.selection import (
    ChangeSelection,
    Portion,
    SelectedChanges,
    TakenPart,
    portion_of,
)
from penstock.spark.delivery.tasks import SinkJobs, SinkOrder, SinkOutcome, joined, shares
from penstock.spark.fold.state import DATA, LANES, ChangeLog, ChangePart, Manifest
from penstock.spark.settings import DeliveryOptions

log = get_logger(__name__)
SAVE_S: Final = 5.0  # a cursor that moved over empty triggers only is saved this often


class SinkWriter(Protocol):
    """Carries out one portion after the other; one that failed is tried again."""

    def open(self) -> None:
        """The sink is open in the driver; do so wherever else it will be written."""
        ...

    def prepare(self, portion: Portion, *, rows_max: int | None) -> bool:
        """Whether there may be anything in it for the sink."""
        ...

    def write(self) -> SinkOutcome:
        """Write what was prepared, durably. After a failure it goes on where it stopped, or begins
        again where that is the same."""
        ...

    def commit(self, outcome: SinkOutcome, commit: SinkCommit) -> None: ...

    def begin(self, commit: SinkCommit) -> None:
        """Leave the first mark of an incarnation, in a sink that keeps marks."""
        ...

    def held(self) -> SinkMark | None:
        """Up to which triggers the sink itself says that it holds everything, if it knows."""
        ...


class DriverWriter:
    """Writes by the sink's own thread: for sinks that only this process has, or that have no part
    in tasks."""

    def __init__(self, selection: ChangeSelection, runner: SinkRunner) -> None:
        self._selection, self._runner = selection, runner
        self._portion: Portion | None = None
        self._selected: SelectedChanges | None = None
        self._handovers: list[Handover] = []

    def open(self) -> None:
        return

    def prepare(self, portion: Portion, *, rows_max: int | None) -> bool:
        if self._portion is not portion:
            self._selected = self._selection.select(portion, rows_max=rows_max)
            self._handovers = [Handover(work=work) for work in self._selected.works]
            self._portion = portion
        return bool(self._handovers)

    def write(self) -> SinkOutcome:
        assert self._selected is not None, "nothing was prepared"
        for handover in self._handovers:
            self._hand_over(handover)
        selected = self._selected
        return SinkOutcome(
            rows=selected.rows,
            coalesced=selected.coalesced,
            log_times_ms=selected.log_times_ms,
            time_rows=np.ones(len(selected.log_times_ms), np.int64),
        )

    def _hand_over(self, handover: Handover) -> None:
        taken = () if self._portion is None else self._portion.taken
        if not handover.written:
            crash_point("delivery.write.before")
            self._runner.write(handover)
            crash_point("delivery.write.after")
        if handover.refused is not None:
            crash_point("delivery.rejected.before")
            self._runner.bury(handover, lambda: self._selection.all_deltas(taken))
            crash_point("delivery.rejected.after")

    def commit(self, outcome: SinkOutcome, commit: SinkCommit) -> None:
        """Every write was one; what was selected is no longer needed."""
        self._portion, self._selected, self._handovers = None, None, []

    def begin(self, commit: SinkCommit) -> None:
        return

    def held(self) -> SinkMark | None:
        held = self._runner.call(self._runner.sink.cursor)
        return None if held is None else SinkMark(position=(held,))


class SparkTaskWriter:
    """Writes by tasks, and commits here what they wrote."""

    def __init__(self, spec: SinkSpec, sink: TaskSink, runner: SinkRunner, jobs: SinkJobs) -> None:
        self._sink, self._runner, self._jobs = sink, runner, jobs
        self._portion: Portion | None = None
        self._order = SinkOrder(spec=spec, changes=jobs.state)

    def open(self) -> None:
        joined([self._runner.call(lambda: self._jobs.open(self._order))])

    def prepare(self, portion: Portion, *, rows_max: int | None) -> bool:
        self._portion, self._order = portion, replace(self._order, rows_max=rows_max)
        return bool(portion.taken)

    def write(self) -> SinkOutcome:
        assert self._portion is not None, "nothing was prepared"
        order = self._order
        tasks = shares(self._portion, tasks=self._jobs.slots(), shards=self._sink.shards)
        crash_point("delivery.write.before")
        found = joined(self._runner.call(lambda: self._jobs.run(order, tasks)))
        crash_point("delivery.write.after")
        meter = self._runner.meter
        meter.rejected += found.rejected
        meter.dead_letters += found.dead_letters
        return found

    def commit(self, outcome: SinkOutcome, commit: SinkCommit) -> None:
        self._runner.call(lambda: self._sink.commit(outcome.receipts, commit))
        crash_point("delivery.commit.after")

    def begin(self, commit: SinkCommit) -> None:
        self._runner.call(lambda: self._sink.commit([], commit))
        self._order = replace(self._order, incarnation=commit.incarnation)

    def held(self) -> SinkMark | None:
        return self._runner.call(self._sink.mark)


@dataclass
class Filling:
    """A sink on its way to hold all vectors as of a trigger."""

    manifest: Manifest
    origin: Literal["log", "lake"] = "log"
    awaited: bool = False  # whether a lake is on its way to that trigger
    portion: Portion | None = None  # once the files are there


class SinkWorker:
    def __init__(
        self,
        one: RoutedSink,
        *,
        pipeline: str,
        columns: tuple[int, ...],
        changes: ChangeLog,
        backlog: Backlog,
        letters: LetterBox,
        options: DeliveryOptions,
        jobs: SinkJobs | None,
    ) -> None:
        self.sink, self._changes, self._options = one.sink, changes, options
        self._pipeline, self._payloads = pipeline, bool(one.sink.feed & Feed.PAYLOADS)
        self.planner = Planner(backlog=backlog, columns=columns, options=options)
        self.halted: str | None = None
        self._file = CursorFile(changes.store, one.sink.name, claim=changes.claim)
        self._established = False
        self._lake, self._lakeless = one.lake, one.lakeless
        fed_states = bool(one.sink.feed & Feed.STATES)
        self._judges_deltas = fed_states and one.routes.judge_states_by_deltas
        self._backfill = None if one.spec is None else one.spec.settings.backfill
        self._plan: WritePlan | None = None
        self._portion: Portion | None = None  # of the plan
        self._filling: Filling | None = None
        self._saved_at = 0.0
        self._fence = threading.Lock()
        self._abandoned = False
        self._jobs = jobs
        self.cursor = self._first_cursor()
        self.runner = SinkRunner(
            one.sink,
            thread=f"penstock-sink-{one.sink.name}",
            letters=letters,
            patience=options,
            log=log,
            advance=self._advance,
            rest=self._rest,
            end=self._end,
            hang_s=options.hang_s,
            look_s=options.poll_s,
        )
        self._writer = self._writer_of(one)

    def _writer_of(self, one: RoutedSink) -> SinkWriter:
        sink, jobs = one.sink, self._jobs
        if jobs is not None and one.spec is not None and isinstance(sink, TaskSink):
            return SparkTaskWriter(one.spec, sink, self.runner, jobs)
        selection = ChangeSelection(
            store=self._changes.store,
            pipeline=self._pipeline,
            routes=one.routes,
            payloads=self._payloads,
        )
        return DriverWriter(selection, self.runner)

    @property
    def durable_through(self) -> int:
        """The last trigger that will not be asked for again, whatever happens. What a filling
        covers is not: should it fail, the next one covers more."""
        if self._filling is not None:
            return self._filling.manifest.trigger
        saved = self._file.saved
        return NONE if saved is None or self.halted else saved.through

    @property
    def state(self) -> str:
        if self.halted:
            return "halted"
        state, runs = self.runner.state, self.runner.meter.busy_since is not None
        if self._filling is None or state == "stopped" or (state == "waiting" and not runs):
            return state
        return "filling"  # one call, which takes longer than others may

    @property
    def filling(self) -> dict[str, Any] | None:
        """How far a sink that is filled is, for people."""
        filling = self._filling
        if filling is None or self._jobs is None:
            return None
        done, tasks = self._jobs.filled(self.sink.name)
        return {
            "trigger": filling.manifest.trigger,
            "from": filling.origin,
            "tasks": tasks,
            "done": done,
            "writing": filling.portion is not None,
        }

    def caught_up(self, trigger: int) -> bool:
        """Whether the sink holds `trigger`; one with a cursor of its own is asked for it first."""
        known = self._established or self.cursor.told is None
        return known and self.cursor.through >= trigger

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; False if it hangs and was let go of."""
        if self.runner.join(timeout_s):
            return True
        if self._jobs is not None:
            self._jobs.cancel(self.sink.name)
        if self._fence.acquire(timeout=1.0):  # else it saves its cursor just now: that is the truth
            self._abandoned = True
            self._fence.release()
        return False

    # --- steps of the sink's thread ---

    def _advance(self) -> bool:
        """Do one thing; False if there is nothing to do."""
        if not self.runner.opened:
            self.runner.open(self._open)
            return True
        if self._filling is not None:
            self._fill(self._filling)
            self._filling = None
            self._changes.unpin(self.sink.name)
            return True
        if self._plan is None:
            self._plan = self.planner.plan(self.cursor, now_ms=_now_ms())
            self._portion = None
        if self._is_cut_off():
            self._plan = None
            self.runner.reopen()
            return True
        if self._plan is None:
            self._save_moved(after_s=SAVE_S)
            return False
        self._carry_out(self._plan)
        self._plan = None
        return True

    def _is_cut_off(self) -> bool:
        """Whether triggers were deleted that the sink needs after all: it lost rows and went back
        in the moment in which the others were found to be past them. A plan made since then may
        leave them out."""
        return self.cursor.through + 1 < (self._changes.first or 0)

    def _rest(self) -> None:
        self._changes.wait(self.planner.backlog.last, timeout_s=self._options.poll_s)

    def _carry_out(self, plan: WritePlan) -> None:
        if plan.spans and self._portion is None:
            self._portion = portion_of(self._changes, plan)
        moved = self.cursor.advanced(plan.moves)
        if self._portion is None or not self._prepared(self._portion):
            self.cursor = moved
            self._save_moved(after_s=SAVE_S)
            return
        self._announce(plan)
        self._deliver(self._portion, moved)

    def _prepared(self, portion: Portion) -> bool:
        rows_max = self._options.rows_per_write_max if self.planner.laned else None
        return self._writer.prepare(portion, rows_max=rows_max)

    def _deliver(self, portion: Portion, moved: SinkCursor) -> None:
        """Write what was prepared; after it the sink is where `moved` says."""
        began = time.monotonic()
        outcome = self._writer.write()
        held = self._found_whole()
        if outcome.rows:
            commit = self._commit_of(portion, moved, held)
            self._writer.commit(outcome, commit)
            # What a mark of an incarnation says now is known. The next look will show if it is so.
            held = commit.mark if commit.incarnation else self._writer.held()
        now = time.monotonic()
        ages = (_now_ms() - outcome.log_times_ms) / 1000
        self._save(moved.advanced({}, told=held))
        self.runner.succeeded()
        meter = self.runner.meter
        meter.coalesced += outcome.coalesced
        meter.wrote(outcome.rows, seconds=now - began, now=now)
        if self._filling is None:  # what is filled in was not waited for
            meter.freshness.record(ages, outcome.time_rows, now=now)

    def _found_whole(self) -> SinkMark | None:
        """The sink's mark before a commit overwrites it. A sink that lost rows since it was opened
        is opened anew, and settles again what it lacks. What tasks have just written into it does
        no harm: it is written again, and sinks compare revisions."""
        held = self._writer.held()
        if self.cursor.lost_by(held):
            self.runner.reopen()
            raise Unavailable(
                f"{self.sink.name} was emptied or exchanged: its mark says {held}, not"
                f" {self.cursor.told}"
            )
        return held

    def _commit_of(self, portion: Portion, moved: SinkCursor, held: SinkMark | None) -> SinkCommit:
        return SinkCommit(
            pipeline=self._pipeline,
            first=portion.first,
            last=portion.last,
            position=moved.position,
            claim=self._changes.claim,
            incarnation="" if held is None else held.incarnation,
            after=held,
        )

    def _fill(self, filling: Filling) -> None:
        """Give the sink all that the fold held as of a trigger. The files are made once, and tried
        until the sink has taken them."""
        assert self._jobs is not None, "only tasks fill a sink"
        store = self._changes.store
        if filling.portion is None:
            filling.portion = self._filled_portion(self._jobs, filling)
        trigger = filling.portion.last
        moved = self.cursor.advanced(dict.fromkeys(range(len(self.cursor.position)), trigger))
        if self._prepared(filling.portion):
            self._deliver(filling.portion, moved)
        else:
            self._save(moved)
            self.runner.succeeded()
        store.delete([f"{DATA}/{one.part.file}" for one in filling.portion.taken if one.part.file])
        log.info("sink is filled", sink=self.sink.name, trigger=trigger)

    def _filled_portion(self, jobs: SinkJobs, filling: Filling) -> Portion:
        name, feed = self.sink.name, self.sink.feed
        if not filling.awaited:
            # Each try is as of the newest trigger: the log may have let go of what an older needs.
            filling.manifest = self._changes.pin(name) or filling.manifest
        manifest = filling.manifest
        lake = self._lake_instead(jobs, manifest)
        filling.origin = "log" if lake is None else "lake"
        log.info("sink is being filled", sink=name, trigger=manifest.trigger, origin=filling.origin)
        if lake is None:
            parts = self.runner.call(lambda: jobs.fill(name, feed, manifest))
        else:
            parts = self._lake_parts(jobs, lake, filling)
        columns, trigger = frozenset(self.planner.columns), manifest.trigger
        return Portion(trigger, trigger, tuple(TakenPart(part, columns) for part in parts))

    def _lake_instead(self, jobs: SinkJobs, manifest: Manifest) -> SinkSpec | None:
        """The lake that is to fill the sink, None where the log can."""
        if self._judges_deltas:
            raise _unfillable("its routes go by what deltas are like, and vectors do not tell")
        if self._backfill == "lake":
            return self._lake
        lost = self.runner.call(lambda: jobs.lost(self.sink.feed, manifest))
        if lost is None:
            return None
        if self._lake is None:
            raise _unfillable(f"{lost}; {self._lakeless}")
        return self._lake

    def _lake_parts(self, jobs: SinkJobs, lake: SinkSpec, filling: Filling) -> list[ChangePart]:
        name, feed, manifest = self.sink.name, self.sink.feed, filling.manifest
        try:
            self._await_lake(lake, filling)
            return self.runner.call(lambda: jobs.fill_from(lake, name, feed, manifest))
        except FailedPrecondition as error:  # it does not hold everything
            raise _unfillable(error.message) from error

    def _await_lake(self, lake: SinkSpec, filling: Filling) -> None:
        """Go on once the lake holds the trigger that the sink is to be filled up to. Until then
        that trigger stays the same one, or a lake that is always a little behind never would. For a
        lake that lacks something itself no trigger is kept: it may never come to it."""
        trigger = filling.manifest.trigger
        held = self.runner.call(lambda: lake_position(self._changes.store, lake))
        filling.awaited = (self._changes.first or 0) <= held + 1 <= trigger
        if held < trigger:
            raise Unavailable(
                f"{lake.settings.name} is to fill it, and holds triggers up to {held}, not yet"
                f" {trigger}"
            )

    def _announce(self, plan: WritePlan) -> None:
        if self.planner.laned or self.cursor.attempt == (plan.first, plan.last):
            return
        self._save(self.cursor.attempting(plan.first, plan.last))
        crash_point("delivery.attempt.saved")

    def _open(self) -> None:
        # Hardly any pipeline has deltas in quarantine: its processes are started when one has.
        if QUARANTINE not in self.planner.columns:
            self._writer.open()
        self._settle(self._writer.held())

    def _settle(self, held: SinkMark | None) -> None:
        """The sink is open, and says itself that it holds everything up to `held`, if it does."""
        # Only states are kept by lane; deltas are a history and have one order. A cursor of a sink
        # written here is one number, a mark may have one for each lane.
        told = held is not None or self.cursor.told is not None
        one_number = told and isinstance(self._writer, DriverWriter)
        laned = not self.sink.ordered and self.planner.columns == STATES
        self.planner.laned = laned and not one_number
        lanes = LANES if self.planner.laned else 1
        cursor = self.cursor.in_lanes(lanes).reconciled(held)
        problem = self._gap(cursor)
        if problem is not None and (furthest := self._file.furthest()) is not None:
            # A driver that was overtaken has served the sink meanwhile, and deleted the triggers.
            taken_over = furthest.in_lanes(lanes).reconciled(held)
            if self._gap(taken_over) is None:
                cursor, problem = taken_over, None
        if problem is not None and self._can_fill(cursor):
            newest = self._changes.pin(self.sink.name)
            if newest is not None:
                log.warning("sink lacks what the change log no longer has", sink=self.sink.name)
                self._filling, problem = self._filling or Filling(newest), None
        if problem is not None:
            self._halt(problem)
            return
        if cursor.position != self.cursor.position:
            self._plan = None  # it was made for another place
        if held is None or self.cursor.lost_by(held):
            cursor = self._begun(cursor)
        self._save(cursor)
        self._established = True
        if self._plan is None:  # else the write will show whether it is well
            self.runner.succeeded()

    def _begun(self, cursor: SinkCursor) -> SinkCursor:
        """The cursor after a new incarnation has begun in the sink, which holds nothing of this
        pipeline, or only what the cursor says."""
        through = cursor.through
        commit = SinkCommit(
            pipeline=self._pipeline,
            first=through,
            last=through,
            position=cursor.position,
            claim=self._changes.claim,
            incarnation=uuid.uuid4().hex,
        )
        self._writer.begin(commit)
        held, told = self._writer.held(), self.cursor.told
        if held is None and told is not None and told.incarnation:
            raise Unavailable(f"{self.sink.name} was emptied while it was opened")
        return msgspec.structs.replace(cursor, told=held)

    def _can_fill(self, cursor: SinkCursor) -> bool:
        last, fed = self._changes.last, QUARANTINE not in self.planner.columns
        ahead = last is not None and cursor.through > last  # whose state is this?
        return self._backfill != "none" and fed and self._jobs is not None and not ahead

    def _gap(self, cursor: SinkCursor) -> str | None:
        """Why going on from there would leave rows out, if it would."""
        first, last = self._changes.first, self._changes.last
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
        lacking = self.planner.lacking(cursor, payloads=self._payloads)
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
        """The cursor on file. A new sink begins with the first trigger of all, which it may have to
        be filled for, or with the oldest that is there if it is not to be."""
        found = self._file.load()
        if found is None:
            filled = self._can_fill(SinkCursor.before(0, lanes=1))
            found = SinkCursor.before(0 if filled else self._changes.first or 0, lanes=1)
            self._file.save(found)
        return found

    def _end(self) -> None:
        try:
            self._save_moved(after_s=0.0)
        except PenstockError as error:
            log.warning("cursor not saved", sink=self.sink.name, error=str(error))


def _unfillable(why: str) -> FailedPrecondition:
    return FailedPrecondition(
        f'{why}: give the sink a new name and backfill = "none" to begin with what comes',
        field="backfill",
    )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
