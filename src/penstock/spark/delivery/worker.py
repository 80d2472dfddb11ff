"""One sink's thread: it follows the change log at its own pace and never waits for another sink.

    closed ──open──► idle ◄──► writing ──fails──► waiting (backoff, or the breaker is open) ─┐
       ▲                 ▲                                                                   │
       └─────────────────┴──────────────────────────try again───────────────────────────────┘
    halted: the change log no longer holds what the sink would need; an operator must decide.

Every error of a sink but `SinkRejected` means *try again*: the very same write, after a pause that
doubles (full jitter), with the breaker counting. A call that never returns hangs this thread and
nothing else: `stop` waits a while, then lets go of the thread and takes its right to move the
cursor (`_fence`), so that a late return cannot speak for a sink that somebody else serves by then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from penstock.errors import FailedPrecondition, PenstockError
from penstock.log.crash import crash_point
from penstock.node.logs import get_logger
from penstock.sinks.meters import SinkMeter
from penstock.sinks.protocol import Sink
from penstock.sinks.retrying import Retry
from penstock.spark.delivery.cursors import NONE, Cursor, CursorFile
from penstock.spark.delivery.deadletters import DeadLetters
from penstock.spark.delivery.options import DeliveryOptions
from penstock.spark.delivery.planning import Plan, Planner
from penstock.spark.delivery.selection import Selection
from penstock.spark.delivery.writing import Write

log = get_logger(__name__)
T = TypeVar("T")
SAVE_S: Final = 5.0  # a cursor that moved over empty triggers only is saved this often


class SinkWorker:
    def __init__(
        self,
        sink: Sink,
        *,
        planner: Planner,
        selection: Selection,
        letters: DeadLetters,
        file: CursorFile,
        options: DeliveryOptions,
        internal: bool = False,
    ) -> None:
        self.sink, self.internal = sink, internal
        self.planner, self.selection, self.letters = planner, selection, letters
        self.options = options
        self.meter = SinkMeter()
        self.retry = Retry(options)
        self.halted: str | None = None
        self._file = file
        self._opened = self._established = False
        self._write: Write | None = None
        self._saved_at = 0.0
        self._stopping = threading.Event()
        self._fence = threading.Lock()
        self._abandoned = False
        self._thread = threading.Thread(
            target=self._run, name=f"penstock-sink-{sink.name}", daemon=True
        )
        self.cursor = self._first_cursor()

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
        if self.halted:
            return "halted"
        if not self._thread.is_alive():
            return "stopped"
        if self.meter.busy_s(now=time.monotonic()) > self.options.hang_s:
            return "hanging"
        if self.retry.waiting:
            return "waiting"
        if self.meter.busy_since is not None:
            return "writing" if self._opened else "opening"
        return "idle"

    def start(self) -> None:
        self._thread.start()

    def caught_up(self, trigger: int) -> bool:
        """Whether the sink holds `trigger`; one with a cursor of its own is asked for it first."""
        known = self._established or self.cursor.told is None
        return known and self.cursor.through >= trigger

    def stop(self) -> None:
        """Begin to stop: what is under way is finished, nothing new is begun."""
        self._stopping.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; False if it hangs and was let go of."""
        if self._thread.ident is not None:
            self._thread.join(max(timeout_s, 0.0))
        if not self._thread.is_alive():
            return True
        if not self._fence.acquire(timeout=1.0):
            return False  # it is saving its cursor at this moment, which is the truth
        self._abandoned = True
        self._fence.release()
        log.warning("sink does not return", sink=self.name)
        return False

    # --- the thread ---

    def _run(self) -> None:
        try:
            while not self._stopping.is_set() and self.halted is None:
                self._turn()
        finally:
            self._end()

    def _turn(self) -> None:
        """One try of what comes next, or a pause."""
        delay = self.retry.delay_s(now=time.monotonic())
        if delay > 0:
            self._stopping.wait(min(delay, self.options.poll_s))
            return
        try:
            worked = self._advance()
            if not worked:
                self._save_moved(after_s=SAVE_S)
        except Exception as error:  # noqa: BLE001  a sink may fail in any way, and is tried again
            self._failed(error)
            return
        if not worked and not self._stopping.is_set():
            newest = self.planner.backlog.last
            self.selection.changes.wait(newest, timeout_s=self.options.poll_s)

    def _advance(self) -> bool:
        """Do one thing; False if there is nothing to do."""
        if not self._opened:
            self._open()
            return self.halted is None
        if self._write is None:
            plan = self.planner.plan(self.cursor, now_ms=_now_ms())
            if plan is None:
                return False
            if not plan.spans:
                self.cursor = self.cursor.advanced(plan.moves)
                return True
            rows_max = self.options.rows_per_write_max if self.planner.laned else None
            selected = self.selection.select(plan.spans)
            self._write = Write(plan=plan, selected=selected, rows_max=rows_max)
        self._carry_out(self._write)
        self._write = None
        return True

    def _carry_out(self, write: Write) -> None:
        plan = write.plan
        if not write.works:  # no row of these triggers is for this sink
            self.cursor = self.cursor.advanced(plan.moves)
            self._save_moved(after_s=SAVE_S)
            return
        self._announce(plan)
        began = time.monotonic()
        self._call(lambda: write.carry_out(self.sink, self.letters, posted=self._posted))
        now = time.monotonic()
        ages = (_now_ms() - write.selected.log_times_ms) / 1000
        told = None if self.planner.laned else self._call(self.sink.cursor)
        self._save(self.cursor.advanced(plan.moves, told=told))
        self.retry.succeeded(now=now)
        self.meter.coalesced += write.selected.coalesced
        self.meter.wrote(write.selected.rows, seconds=now - began, now=now)
        self.meter.freshness.record(ages, now=now)

    def _announce(self, plan: Plan) -> None:
        """Put the range that an ordered sink is about to get on file."""
        if self.planner.laned or self.cursor.attempt == (plan.first, plan.last):
            return
        self._save(self.cursor.attempting(plan.first, plan.last))
        crash_point("delivery.attempt.saved")

    def _open(self) -> None:
        if self.retry.probing:  # it failed for long: begin with a new connection
            self._close()
        self._call(self.sink.open)
        held = self._call(self.sink.cursor)
        laned = not self.sink.ordered and self.planner.can_lane and held is None
        self.planner.laned = laned and self.cursor.told is None
        cursor = self.cursor.in_lanes(self.planner.cursor_lanes).reconciled(held)
        self._check(cursor)
        if self.halted is not None:
            return
        if cursor.position != self.cursor.position:
            self._write = None  # it was planned for another place
        self._save(cursor)
        self._opened = self._established = True
        if self._write is None:  # else the write will show whether it is well
            self.retry.succeeded(now=time.monotonic())

    def _check(self, cursor: Cursor) -> None:
        """Halt where going on would leave rows out."""
        changes = self.selection.changes
        first, last = changes.first, changes.last
        if last is not None and cursor.through > last:
            problem = (
                f"it is at trigger {cursor.through}, the change log only at {last}: it is a sink of"
                " another state folder"
            )
        elif first is not None and cursor.through + 1 < first:
            problem = (
                f"it holds triggers up to {cursor.through}, and those before {first} are no longer"
                " in the change log: rebuild it"
            )
        else:
            return
        error = FailedPrecondition(f"sink {self.name}: {problem}")
        self.meter.failed(error, time_ms=_now_ms())
        self.halted = error.message
        log.error("sink halted", sink=self.name, problem=problem)

    def _failed(self, error: Exception) -> None:
        self.meter.failed(error, time_ms=_now_ms())
        opened = self.retry.failed(now=time.monotonic())
        if opened:
            self.meter.opens += 1
            self._opened = False  # the next try, the probe, opens it anew
        log.warning(
            "sink failed", sink=self.name, error=str(error), kind=type(error).__name__,
            failures=self.retry.failures, breaker=self.retry.breaker_state,
        )  # fmt: skip

    def _posted(self, rejected: int, letters: int) -> None:
        self.meter.rejected += rejected
        self.meter.dead_letters += letters

    def _call(self, call: Callable[[], T]) -> T:
        """A call into the sink, which may take any time."""
        self.meter.busy_since = time.monotonic()
        try:
            return call()
        finally:
            self.meter.busy_since = None

    def _save(self, cursor: Cursor) -> None:
        with self._fence:
            if self._abandoned:
                return
            self._file.save(cursor)
            self.cursor = cursor
            self._saved_at = time.monotonic()

    def _save_moved(self, *, after_s: float) -> None:
        if self.cursor != self._file.saved and time.monotonic() - self._saved_at >= after_s:
            self._save(self.cursor)

    def _first_cursor(self) -> Cursor:
        """The cursor on file; a new sink begins with the oldest trigger there is."""
        found = self._file.load()
        if found is None:
            found = Cursor.before(self.selection.changes.first or 0, lanes=1)
            self._file.save(found)
        return found

    def _close(self) -> None:
        try:
            self._call(self.sink.close)
        except Exception as error:  # noqa: BLE001  what is wrong with it will show when it opens
            log.warning("sink did not close", sink=self.name, error=str(error))

    def _end(self) -> None:
        try:
            self._save_moved(after_s=0.0)
        except PenstockError as error:
            log.warning("cursor not saved", sink=self.name, error=str(error))
        if self._opened:
            self._close()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
