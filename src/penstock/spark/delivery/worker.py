"""What one sink of a pipeline is given: it follows the change log at its own pace and never waits
for another sink. Its thread, its retries and its dead letters are the runner's (`SinkRunner`).

A worker is *halted* when the change log no longer holds what the sink would need; an operator must
decide then. A call that never returns hangs the sink's thread alone: `join` waits a while, then
lets go of it and takes its right to move the cursor (`_fence`), so that a late return cannot speak
for a sink that somebody else serves by then.

The order of a write matters: the sink takes the rows, then those it refused become letters, then
the cursor moves. Whoever dies in between does all of it again; the sink takes the same rows once
and refuses the same rows again, and the letters' producer keys make the second writing of them a
repetition.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import Final

from penstock.errors import FailedPrecondition, PenstockError
from penstock.log.crash import crash_point
from penstock.node.observe.logs import get_logger
from penstock.sinks.letters import LetterBox
from penstock.sinks.protocol import Sink, Work
from penstock.sinks.runner import Handover, SinkRunner
from penstock.spark.delivery.backlog import STATES, Backlog, Planner
from penstock.spark.delivery.cursors import NONE, CursorFile, SinkCursor
from penstock.spark.delivery.selection import ChangeSelection, Selected
from penstock.spark.fold.changes import LANES
from penstock.spark.settings import DeliveryOptions

log = get_logger(__name__)
SAVE_S: Final = 5.0  # a cursor that moved over empty triggers only is saved this often


@dataclass(frozen=True, kw_only=True)
class SinkWrite:
    """One planned write, which remembers how far it came.

    A write of an ordered sink is one `Work`: its triggers become visible together or not at all.
    One of an unordered sink may be cut into several, each within the bound on rows; the cursor
    moves when the last of them is in.
    """

    moves: dict[int, int]
    selected: Selected
    handovers: list[Handover]


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
    def name(self) -> str:
        return self.sink.name

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
        selected = self._selection.select(plan.spans)
        works = [selected.work] if selected.rows else []
        if self.planner.laned and selected.rows:
            works = _cut(selected.work, self._options.rows_per_write_max)
        handovers = [Handover(work=work) for work in works]
        self._write = SinkWrite(moves=plan.moves, selected=selected, handovers=handovers)
        return True

    def _rest(self) -> None:
        newest = self.planner.backlog.last
        self._selection.changes.wait(newest, timeout_s=self._options.poll_s)

    def _carry_out(self, write: SinkWrite) -> None:
        selected = write.selected
        if not write.handovers:  # no row of these triggers is for this sink
            self.cursor = self.cursor.advanced(write.moves)
            self._save_moved(after_s=SAVE_S)
            return
        self._announce(selected.work)
        began = time.monotonic()
        for handover in write.handovers:
            self._hand_over(handover)
        now = time.monotonic()
        ages = (_now_ms() - selected.log_times_ms) / 1000
        told = None if self.planner.laned else self.runner.call(self.sink.cursor)
        self._save(self.cursor.advanced(write.moves, told=told))
        self.runner.succeeded()
        meter = self.runner.meter
        meter.coalesced += selected.coalesced
        meter.wrote(selected.rows, seconds=now - began, now=now)
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

    def _announce(self, work: Work) -> None:
        """Put the range that an ordered sink is about to get on file."""
        if self.planner.laned or self.cursor.attempt == (work.first, work.last):
            return
        self._save(self.cursor.attempting(work.first, work.last))
        crash_point("delivery.attempt.saved")

    def _settle(self, held: int | None) -> None:
        """The sink is open, and says itself that it holds everything up to `held`, if it does."""
        # Only states are kept by lane; deltas are a history and have one order.
        laned = not self.sink.ordered and self.planner.columns == STATES and held is None
        self.planner.laned = laned and self.cursor.told is None
        lanes = LANES if self.planner.laned else 1
        cursor = self.cursor.in_lanes(lanes).reconciled(held)
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
                " another state folder"
            )
        if first is not None and cursor.through + 1 < first:
            return (
                f"it holds triggers up to {cursor.through}, and those before {first} are no longer"
                " in the change log: rebuild it"
            )
        return None

    def _halt(self, problem: str) -> None:
        error = FailedPrecondition(f"sink {self.name}: {problem}")
        self.runner.meter.failed(error, time_ms=_now_ms())
        self.halted = error.message
        self.runner.stop()
        log.error("sink halted", sink=self.name, problem=problem)

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
            log.warning("cursor not saved", sink=self.name, error=str(error))


def _cut(work: Work, rows_max: int) -> list[Work]:
    assert work.states is not None, "only states are written in pieces"
    starts = range(0, work.states.num_rows, rows_max)
    return [replace(work, states=work.states.slice(start, rows_max)) for start in starts]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
