"""The thread of one sink: it does what its owner has to do, and tries again until that worked.

    closed ──open──► idle ◄──► writing ──fails──► waiting (backoff, or the breaker is open) ─┐
       ▲                 ▲                                                                   │
       └─────────────────┴──────────────────────────try again───────────────────────────────┘

The owner knows what the sink is given next and keeps its cursor; it hands the runner three calls,
all made in the sink's thread. `advance` takes one step and says whether there was one to take;
`rest` waits for news; `end` is called once, before the sink is closed.

Every error of a sink but `SinkRejected` means *try again*: `advance` is called anew after a pause
that doubles (full jitter), with the breaker counting. When the breaker opens the sink is closed, so
that the probe begins with a new connection. A call that never returns hangs this thread and nothing
else: `join` waits a while, then lets go of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

import pyarrow as pa
from structlog.stdlib import BoundLogger

from penstock.errors import SinkRejected
from penstock.sinks.health import Patience, Retry, SinkMeter
from penstock.sinks.protocol import Sink, Work
from penstock.sinks.topics import LetterBox

HANG_S: Final = 60.0  # a call that takes longer is shown as hanging
LOOK_S: Final = 1.0  # the longest pause without a look whether to stop
T = TypeVar("T")


@dataclass(kw_only=True)
class Handover:
    """One work on its way into a sink, and how far it came: after a failure half-way, `write` and
    `bury` go on where they stopped."""

    work: Work
    written: bool = False
    refused: SinkRejected | None = None  # of a work that is written but for these rows


class SinkRunner:
    """`log` is where failures are told, `thread` the name of the thread."""

    def __init__(
        self,
        sink: Sink,
        *,
        thread: str,
        letters: LetterBox,
        patience: Patience,
        log: BoundLogger,
        advance: Callable[[], bool],
        rest: Callable[[], None],
        end: Callable[[], None],
        hang_s: float = HANG_S,
        look_s: float = LOOK_S,
    ) -> None:
        self.sink, self._letters, self._log = sink, letters, log
        self._advance, self._rest, self._end = advance, rest, end
        self._hang_s, self._look_s = hang_s, look_s
        self.meter, self.retry = SinkMeter(), Retry(patience)
        self.opened = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=thread, daemon=True)

    @property
    def state(self) -> str:
        if not self._thread.is_alive():
            return "stopped"
        if self.meter.busy_s(now=time.monotonic()) > self._hang_s:
            return "hanging"
        if self.retry.failures:
            return "waiting"
        if not self.opened:
            return "opening"
        return "idle" if self.meter.busy_since is None else "writing"

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Begin to stop: the step under way is finished, no other is begun. The owner wakes the
        thread if it rests."""
        self._stopping.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; False if it hangs, and is let go of."""
        if self._thread.ident is not None:
            self._thread.join(max(timeout_s, 0.0))
        if not self._thread.is_alive():
            return True
        self._log.warning("sink does not return", sink=self.sink.name)
        return False

    # --- steps of the owner's, in the sink's thread ---

    def open(self, settle: Callable[[], None]) -> None:
        """Open the sink, and have the owner settle where it goes on, by what the sink itself says
        that it holds. The sink counts as open when that went well."""
        self.call(self.sink.open)
        settle()
        self.opened = True

    def reopen(self) -> None:
        """Close the sink: the next step opens it anew, and settles again where it goes on."""
        self._close()

    def write(self, handover: Handover) -> None:
        if handover.written:
            return
        try:
            self.call(lambda: self.sink.write(handover.work))
        except SinkRejected as refused:
            handover.refused = refused
        handover.written = True

    def bury(self, handover: Handover, touching: Callable[[], Iterable[pa.Table]]) -> None:
        """Take the rows that the sink refused, if any, to its dead letters (`LetterBox.bury`)."""
        refused = handover.refused
        if refused is not None and refused.rows:
            bury, name = self._letters.bury, self.sink.name
            self.meter.dead_letters += self.call(
                lambda: bury(refused, work=handover.work, sink=name, touching=touching)
            )
            self.meter.rejected += len(refused.rows)
        handover.refused = None

    def succeeded(self) -> None:
        """The sink is well: the next failure is the first in a row."""
        self.retry.succeeded()

    def call(self, call: Callable[[], T]) -> T:
        self.meter.busy_since = time.monotonic()
        try:
            return call()
        finally:
            self.meter.busy_since = None

    # --- the thread ---

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
        finally:
            self._end()
            if self.opened:
                self._close()

    def _turn(self) -> None:
        delay = self.retry.delay_s(now=time.monotonic())
        if delay > 0:
            self._stopping.wait(min(delay, self._look_s))
            return
        try:
            worked = self._advance()
        except Exception as error:  # noqa: BLE001  a sink may fail in any way, and is tried again
            self._failed(error)
            return
        if not worked and not self._stopping.is_set():
            self._rest()

    def _failed(self, error: Exception) -> None:
        self.meter.failed(error, time_ms=time.time_ns() // 1_000_000)
        if self.retry.failed(now=time.monotonic()):
            self.meter.opens += 1
            self._close()
        self._log.warning(
            "sink failed", sink=self.sink.name, error=str(error), kind=type(error).__name__,
            failures=self.retry.failures, breaker=self.retry.breaker_state,
        )  # fmt: skip

    def _close(self) -> None:
        self.opened = False
        try:
            self.call(self.sink.close)
        except Exception as error:  # noqa: BLE001  what is wrong with it will show when it opens
            self._log.warning("sink did not close", sink=self.sink.name, error=str(error))
