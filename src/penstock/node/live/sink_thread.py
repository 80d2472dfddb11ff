"""The thread of a sink that the node runs: it writes parcels, and tries again until it may not.

    opening ──► idle ◄──► writing ──fails──► waiting (backoff, or the breaker is open) ──► opening …

Every error of a sink but `SinkRejected` means *try again*: the same write, after a pause that
doubles, with a breaker that lets one probe through now and then. Parcels that gather meanwhile are
bounded by the credit of whoever hands them over, and those of one partition are written together.
A call that never returns hangs this thread and nothing else.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.errors import SinkRejected
from penstock.model.delta_batch import DeltaBatch
from penstock.node.live.timings import Timings
from penstock.node.logs import get_logger
from penstock.propagation.rows import Rows
from penstock.propagation.states import VectorStates
from penstock.sinks import letters
from penstock.sinks.meters import SinkMeter
from penstock.sinks.newest import newest_of, vector_keys
from penstock.sinks.protocol import Feed, Sink, Work
from penstock.sinks.retrying import Patience, Retry
from penstock.sinks.schema import deltas_table, states_table

HANG_S: Final = 60.0  # a call that takes longer is shown as hanging
WAIT_S: Final = 1.0  # the longest pause without a look whether to stop
log = get_logger(__name__)


class Parcel(NamedTuple):
    """Rows of one partition for a sink; with them it holds everything up to `position`."""

    sender: Any  # who handed it over, and is told when it is written
    partition: int
    rows: Rows
    states: VectorStates | None
    position: int
    bytes: int
    committed_at: float | None = None  # by the performance counter; None: it was read from the log
    moved: bool = False  # no rows come any more: the partition is to be forgotten


class Released(NamedTuple):
    """What `deltas_table` takes."""

    released: DeltaBatch
    positions: NDArray[np.uint64]
    ordinals: NDArray[np.uint64]


@dataclass(kw_only=True)
class _Write:
    """Parcels of one partition on their way, and how far they came."""

    partition: int
    work: Work | None  # None: there is no row in them
    rows: Rows
    parcels: list[Parcel]
    written: bool = False
    refused: SinkRejected | None = None
    moved: bool = False


class SinkThread:
    """`opened` and `done` are called in this thread."""

    def __init__(
        self,
        sink: Sink,
        *,
        topic: str,
        pipeline: Callable[[int], str],
        box: letters.LetterBox,
        patience: Patience,
        opened: Callable[[int | None], None],
        done: Callable[[list[Parcel]], None],
    ) -> None:
        self.sink, self._topic, self._pipeline, self._box = sink, topic, pipeline, box
        self._on_opened, self._on_done = opened, done
        self._wants_deltas = bool(sink.feed & (Feed.DELTAS | Feed.PAYLOADS))
        self._wants_payloads = bool(sink.feed & Feed.PAYLOADS)
        self._wants_rows = bool(sink.feed & Feed.ROWS)
        self.meter, self.retry = SinkMeter(), Retry(patience)
        self.timings = Timings()  # from the commit until `write` has returned
        self._waiting: deque[Parcel] = deque()
        self._news = threading.Condition()
        self._stopping = threading.Event()
        self._open = self._told = False
        self._resting = False  # the thread waits for parcels: nobody is in the sink
        self._thread = threading.Thread(
            target=self._run, name=f"penstock-live-{sink.name}", daemon=True
        )

    # --- from the loop ---

    def start(self) -> None:
        self._thread.start()

    def put(self, parcel: Parcel) -> None:
        with self._news:
            self._waiting.append(parcel)
            self._news.notify()

    def forget(self, partition: int) -> None:
        """Have the sink forget a partition, once what was handed over of it before is written."""
        self.put(Parcel(None, partition, Rows.empty(), None, 0, 0, moved=True))

    def write_now(self, parcel: Parcel) -> bool:
        """Write in the caller's thread, if this one has nothing to do. False: it has, or that
        failed; hand the parcel over, then it is tried again as all others are."""
        if not self._resting or self._waiting or not self._open:
            return False
        write = self._write_of([parcel])
        try:
            self._write(write)
        except Exception as error:  # noqa: BLE001  a sink may fail in any way
            log.warning("sink failed", sink=self.sink.name, error=str(error))
            return False
        return write.refused is None  # letters are the thread's: they wait for the loop

    def stop(self) -> None:
        """Begin to stop: the write under way is finished, nothing else is begun."""
        self._stopping.set()
        with self._news:
            self._news.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; False if it hangs, and is let go of."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("sink does not return", sink=self.sink.name)
            return False
        return True

    @property
    def state(self) -> str:
        if not self._thread.is_alive():
            return "stopped"
        if self.meter.busy_s(now=time.monotonic()) > HANG_S:
            return "hanging"
        if self.retry.waiting:
            return "waiting"
        if not self._open:
            return "opening"
        return "idle" if self.meter.busy_since is None else "writing"

    # --- the thread ---

    def _run(self) -> None:
        try:
            if not self._until_done(self._connect):
                return
            while parcels := self._take():
                for some in _by_partition(parcels):
                    write = self._write_of(some)
                    if not self._until_done(lambda write=write: self._carry_out(write)):  # type: ignore[misc]
                        return
                    self._on_done(some)
        finally:
            if self._open:
                self._close()

    def _take(self) -> list[Parcel]:
        """All that waits; nothing if the thread is to stop."""
        with self._news:
            self._resting = True
            while not self._waiting and not self._stopping.is_set():
                self._news.wait()
            self._resting = False
            if self._stopping.is_set():
                return []
            found = list(self._waiting)
            self._waiting.clear()
            return found

    def _until_done(self, step: Callable[[], None]) -> bool:
        """Try until it works; False if the thread is to stop."""
        while not self._stopping.is_set():
            delay = self.retry.delay_s(now=time.monotonic())
            if delay > 0:
                self._stopping.wait(min(delay, WAIT_S))
                continue
            try:
                step()
            except Exception as error:  # noqa: BLE001  a sink may fail in any way, and is tried again
                self._failed(error)
                continue
            self.retry.succeeded(now=time.monotonic())
            return True
        return False

    def _failed(self, error: Exception) -> None:
        self.meter.failed(error, time_ms=time.time_ns() // 1_000_000)
        if self.retry.failed(now=time.monotonic()):
            self.meter.opens += 1
            self._close()  # the next try, the probe, opens it anew
        log.warning(
            "sink failed", sink=self.sink.name, error=str(error), kind=type(error).__name__,
            failures=self.retry.failures, breaker=self.retry.breaker_state,
        )  # fmt: skip

    def _connect(self) -> None:
        if self._open:
            return
        self._call(self.sink.open)
        self._open = True
        if not self._told:
            held = self._call(self.sink.cursor)
            self._told = True
            self._on_opened(held)

    def _close(self) -> None:
        self._open = False
        try:
            self._call(self.sink.close)
        except Exception as error:  # noqa: BLE001  what is wrong with it will show when it opens
            log.warning("sink did not close", sink=self.sink.name, error=str(error))

    def _call(self, call: Callable[[], Any]) -> Any:
        """A call into the sink, which may take any time."""
        self.meter.busy_since = time.monotonic()
        try:
            return call()
        finally:
            self.meter.busy_since = None

    # --- writing ---

    def _write_of(self, parcels: list[Parcel]) -> _Write:
        partition = parcels[0].partition
        if parcels[0].moved:
            rows = parcels[0].rows
            return _Write(partition=partition, work=None, rows=rows, parcels=parcels, moved=True)
        rows = Rows.concat([parcel.rows for parcel in parcels])
        if not len(rows):
            return _Write(partition=partition, work=None, rows=rows, parcels=parcels)
        deltas = states = None
        if self._wants_deltas:
            deltas = self._deltas(partition, rows, payloads=self._wants_payloads)
        tables = [
            states_table(parcel.states, topic=self._topic, partition=partition)
            for parcel in parcels
            if parcel.states is not None
        ]
        if tables:
            states = tables[0] if len(tables) == 1 else newest_of(pa.concat_tables(tables))
        positions = rows.positions
        ends = (positions[0], positions[-1])
        if not self.sink.ordered:
            ends = (positions.min(), positions.max())
        work = Work(
            pipeline=self._pipeline(partition),
            first=int(ends[0]),
            last=int(ends[1]),
            states=states,
            deltas=deltas,
            rows=rows if self._wants_rows else None,
            committed_at=_oldest(parcels),
        )
        return _Write(partition=partition, work=work, rows=rows, parcels=parcels)

    def _carry_out(self, write: _Write) -> None:
        """Write, then the letters of what was refused; it goes on where it failed."""
        self._connect()
        if write.moved:
            self._call(lambda: self.sink.forget(write.partition))  # type: ignore[attr-defined]
        self._write(write)
        if write.work is not None and write.refused is not None and write.refused.rows:
            self._post(write.work, write, write.refused)

    def _write(self, write: _Write) -> None:
        work = write.work
        if work is None or write.written:
            return
        began = time.monotonic()
        try:
            self._call(lambda: self.sink.write(work))
        except SinkRejected as refused:
            write.refused = refused
        write.written = True
        now = time.monotonic()
        self.meter.wrote(len(write.rows), seconds=now - began, now=now)
        self._time(write.parcels)

    def _time(self, parcels: list[Parcel]) -> None:
        now = time.perf_counter()
        for parcel in parcels:
            if parcel.committed_at is not None and len(parcel.rows):
                self.timings.record(now - parcel.committed_at, len(parcel.rows))

    def _post(self, work: Work, write: _Write, refused: SinkRejected) -> None:
        """What can never be taken goes to the dead letters, as deltas whatever the sink is fed."""
        deltas = self._deltas(write.partition, write.rows, payloads=True)
        table = work.states if refused.table == "states" else work.deltas
        assert table is not None, f"rows of a table that the work does not have: {refused.table}"
        rows = pa.array(refused.rows, pa.int64())
        if refused.table == "deltas":
            deltas = deltas.take(rows)
        else:
            wanted = vector_keys(table.take(rows))
            deltas = deltas.filter(pc.is_in(vector_keys(deltas), value_set=wanted))
        reason = {
            letters.REASON: refused.message,
            letters.ERROR: refused.code,
            letters.SINK: self.sink.name,
        }
        self.meter.dead_letters += self._box.post(
            deltas,
            to=lambda topic: letters.dead_letter_topic(topic, self.sink.name),
            pipeline=work.pipeline,
            purpose=f"dlq-{self.sink.name}",
            reasons=[reason] * deltas.num_rows,
        )
        self.meter.rejected += len(refused.rows)
        write.refused = None

    def _deltas(self, partition: int, rows: Rows, *, payloads: bool) -> pa.Table:
        released = Released(rows.batch, rows.positions, rows.ordinals)
        return deltas_table(released, topic=self._topic, partition=partition, payloads=payloads)


def _oldest(parcels: list[Parcel]) -> float | None:
    """Since when the oldest of their rows is committed, if that is known of all."""
    found = [parcel.committed_at for parcel in parcels if len(parcel.rows)]
    known = [since for since in found if since is not None]
    return min(known) if len(known) == len(found) else None


def _by_partition(parcels: list[Parcel]) -> list[list[Parcel]]:
    """Those of each partition together, in their order; a move is by itself."""
    found: list[list[Parcel]] = []
    open_: dict[int, list[Parcel]] = {}
    for parcel in parcels:
        some = open_.get(parcel.partition)
        if some is None or parcel.moved:
            some = open_[parcel.partition] = []
            found.append(some)
        some.append(parcel)
        if parcel.moved:
            del open_[parcel.partition]
    return found
