"""What a sink of the node is given: parcels of rows, those of one partition written together.

The sink's thread, its retries and its dead letters are the runner's (`SinkRunner`). Parcels that
gather while a sink fails are bounded by the credit of whoever hands them over.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pyarrow as pa

from penstock.node.live.telemetry import Timings
from penstock.node.observe.logs import get_logger
from penstock.propagation.fold.merge import VectorStates
from penstock.propagation.fold.releases import ReleasedRows
from penstock.sinks.health import Patience
from penstock.sinks.letters import LetterBox
from penstock.sinks.protocol import Feed, Sink, Work
from penstock.sinks.runner import Handover, SinkRunner
from penstock.sinks.schema import deltas_table, newest_of, states_table

log = get_logger(__name__)


class Parcel(NamedTuple):
    """Rows of one partition for a sink; with them it holds everything up to `position`."""

    sender: Any  # who handed it over, and is told when it is written
    partition: int
    rows: ReleasedRows
    states: VectorStates | None
    position: int
    bytes: int
    committed_at: float | None = None  # by the performance counter; None: it was read from the log
    moved: bool = False  # no rows come any more: the partition is to be forgotten


class SinkThread:
    """`opened` and `done` are called in the sink's thread."""

    def __init__(
        self,
        sink: Sink,
        *,
        topic: str,
        pipeline: Callable[[int], str],
        box: LetterBox,
        patience: Patience,
        opened: Callable[[int | None], None],
        done: Callable[[list[Parcel]], None],
    ) -> None:
        self.sink, self._topic, self._pipeline = sink, topic, pipeline
        self._on_opened, self._on_done = opened, done
        self._wants_deltas = bool(sink.feed & (Feed.DELTAS | Feed.PAYLOADS))
        self._wants_payloads = bool(sink.feed & Feed.PAYLOADS)
        self._wants_rows = bool(sink.feed & Feed.ROWS)
        self.timings = Timings()  # from the commit until `write` has returned
        self._waiting: deque[Parcel] = deque()
        self._taken: deque[list[Parcel]] = deque()  # by partition; the first is being written
        self._handover: Handover | None = None  # of the first
        self._news = threading.Condition()
        self._told = False
        self._resting = False  # the thread waits for parcels: nobody is in the sink
        self.runner = SinkRunner(
            sink,
            thread=f"penstock-live-{sink.name}",
            letters=box,
            patience=patience,
            log=log,
            advance=self._advance,
            rest=self._rest,
            end=lambda: None,
        )

    # --- from the loop ---

    def put(self, parcel: Parcel) -> None:
        with self._news:
            self._waiting.append(parcel)
            self._news.notify()

    def forget(self, partition: int) -> None:
        """Have the sink forget a partition, once what was handed over of it before is written."""
        self.put(Parcel(None, partition, ReleasedRows.empty(), None, 0, 0, moved=True))

    def write_now(self, parcel: Parcel) -> bool:
        """Write in the caller's thread, if the sink's own has nothing to do. False: it has, or that
        failed; hand the parcel over, then it is tried again as all others are."""
        if not self._resting or self._waiting or not self.runner.opened:
            return False
        if not len(parcel.rows):
            return True
        handover = Handover(work=self._work_of([parcel]))
        try:
            self._hand_over(handover, [parcel])
        except Exception as error:  # noqa: BLE001  a sink may fail in any way
            log.warning("sink failed", sink=self.sink.name, error=str(error))
            return False
        return handover.refused is None  # letters are the thread's: they wait for the loop

    def stop(self) -> None:
        self.runner.stop()
        with self._news:
            self._news.notify()

    # --- steps of the sink's thread ---

    def _advance(self) -> bool:
        """Open the sink, or carry out one write; False if no parcel waits."""
        if not self.runner.opened:
            self.runner.open(self._opened)
            if self._handover is None:  # else the write will show whether it is well
                self.runner.succeeded()
            return True
        if not self._taken and not self._take():
            return False
        self._carry_out(self._taken[0])
        self._handover = None
        self.runner.succeeded()
        self._on_done(self._taken.popleft())
        return True

    def _carry_out(self, parcels: list[Parcel]) -> None:
        """Write, then the letters of what was refused; it goes on where it failed."""
        if parcels[0].moved:
            self.runner.call(lambda: self.sink.forget(parcels[0].partition))  # type: ignore[attr-defined]
        elif any(len(parcel.rows) for parcel in parcels):
            if self._handover is None:
                self._handover = Handover(work=self._work_of(parcels))
            self._hand_over(self._handover, parcels)
            if self._handover.refused is not None:
                self._bury(self._handover, parcels)

    def _opened(self, held: int | None) -> None:
        if not self._told:
            self._on_opened(held)
            self._told = True

    def _take(self) -> bool:
        with self._news:
            self._taken.extend(_by_partition(list(self._waiting)))
            self._waiting.clear()
        return bool(self._taken)

    def _rest(self) -> None:
        with self._news:
            self._resting = True
            self._news.wait_for(lambda: self._waiting or self.runner.stopping)
            self._resting = False

    # --- writing ---

    def _work_of(self, parcels: list[Parcel]) -> Work:
        partition, rows = parcels[0].partition, _joined(parcels)
        deltas = states = None
        if self._wants_deltas:
            deltas = self._deltas(rows, partition, payloads=self._wants_payloads)
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
        return Work(
            pipeline=self._pipeline(partition),
            first=int(ends[0]),
            last=int(ends[1]),
            states=states,
            deltas=deltas,
            rows=rows if self._wants_rows else None,
            committed_at=_oldest(parcels),
        )

    def _hand_over(self, handover: Handover, parcels: list[Parcel]) -> None:
        if handover.written:
            return
        began = time.monotonic()
        self.runner.write(handover)
        now = time.monotonic()
        rows = sum(len(parcel.rows) for parcel in parcels)
        self.runner.meter.wrote(rows, seconds=now - began, now=now)
        self._time(parcels)

    def _time(self, parcels: list[Parcel]) -> None:
        now = time.perf_counter()
        for parcel in parcels:
            if parcel.committed_at is not None and len(parcel.rows):
                self.timings.record(now - parcel.committed_at, len(parcel.rows))

    def _bury(self, handover: Handover, parcels: list[Parcel]) -> None:
        """Letters hold the deltas as they were sent, whatever the sink is fed."""
        whole = self._deltas(_joined(parcels), parcels[0].partition, payloads=True)
        if handover.work.deltas is not None:
            handover.work = replace(handover.work, deltas=whole)
        self.runner.bury(handover, lambda: [whole])

    def _deltas(self, rows: ReleasedRows, partition: int, *, payloads: bool) -> pa.Table:
        return deltas_table(
            rows.batch,
            positions=rows.positions,
            ordinals=rows.ordinals,
            topic=self._topic,
            partition=partition,
            payloads=payloads,
        )


def _joined(parcels: list[Parcel]) -> ReleasedRows:
    return ReleasedRows.concat([parcel.rows for parcel in parcels])


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
