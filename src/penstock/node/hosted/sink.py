"""A sink that the node itself runs for a delta topic.

To the live path it is a subscriber with a durable cursor: it has an outbox, credit, a rate, and
reads on from the log when it falls behind. Its frames are parcels for a thread of its own, which
writes them; what is written returns its credit and moves the cursor. So a sink that is slow or
broken costs its bounds and delays nobody.

Sinks that are fed states get the vectors that their rows have touched as they are at the time: at
least as new as the rows. Of two states a sink keeps the newer, so nothing is lost by that. States
are copied in the loop, and a change of a few bytes may need a vector of many: so they count as the
deltas do, and a parcel has few enough of them to be made in a moment.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from penstock.errors import NotFound, PenstockError
from penstock.model.delta_batch import halves
from penstock.node.live.catch_up import OLDEST
from penstock.node.live.cursors import SINK_PREFIX, CursorPlace
from penstock.node.live.hub import Hub, SinkReading
from penstock.node.live.partition import LivePartition
from penstock.node.live.subscription import (
    Emit,
    Outgoing,
    Subscription,
    SubscriptionState,
    SubscriptionTerms,
)
from penstock.node.live.telemetry import Timings
from penstock.node.observe.logs import get_logger
from penstock.propagation.flow.outbox import bytes_of
from penstock.propagation.flow.route import Routes
from penstock.propagation.fold.merge import VectorStates
from penstock.propagation.fold.releases import ReleasedRows
from penstock.sinks.health import Patience
from penstock.sinks.protocol import Feed, Sink, Work
from penstock.sinks.runner import Handover, SinkRunner
from penstock.sinks.schema import deltas_table, newest_of, states_table
from penstock.sinks.topics import LetterBox

AGAIN_S: Final = 1.0  # after which a partition that could not be followed is tried again
PROBE_S: Final = 5.0  # after which it is seen whether the cursor of one that is halted is gone
JOIN_S: Final = 10.0  # for the write under way when the node stops
STATES_BYTES: Final = 1 << 20  # copied in one step of the loop, or a single state
COMPONENT_BYTES: Final = 4
log = get_logger(__name__)


class HostedOptions(Patience, frozen=True, kw_only=True):
    start: Literal["beginning", "now"] = "beginning"  # of a sink without a cursor
    batch_rows: int = 100  # so many are written at once, …
    batch_ms: int = 10  # … or those that have gathered in so long; 0: at once
    read_rows: int = 10_000  # handed over at a time while it reads on from the log, at most
    window_rows: int = 10_000  # handed to the sink and not written yet
    window_bytes: int = 32 << 20  # … states included


@dataclass(eq=False)
class AttachedPartition:
    index: int
    subscription: Subscription | None = None
    _found: int = 0  # committed when the subscription began

    def follow(self, subscription: Subscription) -> None:
        self.subscription, self._found = subscription, subscription.source.sequence_committed

    @property
    def filled(self) -> bool:
        return self.subscription is not None and self.subscription.handled(self._found)


class HostedSink:
    def __init__(
        self,
        hub: Hub,
        sink: Sink,
        *,
        routes: Routes,
        options: HostedOptions,
        numbering: str,
        box: LetterBox,
        spawn: Callable[..., object],
    ) -> None:
        self.hub, self.sink, self.routes, self.options = hub, sink, routes, options
        self.name = sink.name
        self._with_states = bool(sink.feed & Feed.STATES)
        self._spawn, self._loop = spawn, asyncio.get_running_loop()
        self.thread = SinkThread(
            sink, topic=hub.topic.config.name, numbering=numbering, box=box, patience=options,
            opened=lambda held: self._in_loop(self._opened, held),
            done=lambda parcels: self._in_loop(self._done, parcels),
        )  # fmt: skip
        self._attached: dict[int, AttachedPartition] = {}
        self._held: int | None = None  # what the sink says that it holds, if it does
        self._ready = False
        self.halted: dict[int, str] = {}  # by partition, why it cannot go on
        self.stopped = False

    def _in_loop(self, call: Callable[[Any], None], value: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, value)

    # --- the beginning and the end ---

    def start(self) -> None:
        self.thread.runner.start()

    def _opened(self, held: int | None) -> None:
        """The sink is open, perhaps not for the first time."""
        if not self._ready:
            self._held, self._ready = held, True
            for partition in self.hub.topic.local:
                self.serve(partition.index)

    def serve(self, index: int) -> None:
        here = self._ready and not self.stopped and self._is_here(index)
        if here and index not in self._attached:
            attached = self._attached[index] = AttachedPartition(index)
            self._spawn(self._attach(attached), name=f"sink-{self.name}-{index}")

    def unserve(self, index: int) -> None:
        """The tenure ended: who waits to follow the partition need not any more."""
        self.halted.pop(index, None)
        attached = self._attached.get(index)
        if attached is not None and attached.subscription is None:
            del self._attached[index]

    async def stop(self) -> None:
        """Let the write under way end; cursors are noted when this returns."""
        self.stopped = True
        self.thread.stop()
        await asyncio.to_thread(self.thread.runner.join, JOIN_S)
        await asyncio.sleep(0)  # what was written last is told by a callback
        for attached in list(self._attached.values()):
            if attached.subscription is not None:
                attached.subscription.close()

    # --- following partitions ---

    async def _attach(self, attached: AttachedPartition) -> None:
        index = attached.index
        while self._wants(attached):
            try:
                if index in self.halted and not await self._may_go_on(attached):
                    continue
                subscription = await self.hub.open(
                    index,
                    self._terms(),
                    emit=lambda live: self._emitter(live, attached),
                    fail=lambda error: self._lost(attached, error),
                )
            except NotFound as error:  # what it would need next is no longer in the log
                self.halted[index] = error.message
                log.error("sink halted", sink=self.name, partition=index, problem=error.message)
            except PenstockError as error:
                log.warning("sink waits", sink=self.name, partition=index, error=error.message)
                await asyncio.sleep(AGAIN_S)
            else:
                attached.follow(subscription)
                return
        if self._attached.get(index) is attached:
            del self._attached[index]

    async def _may_go_on(self, attached: AttachedPartition) -> bool:
        """Whether somebody has decided, by now, that what is gone may be left out."""
        await asyncio.sleep(PROBE_S)
        topic, cursor = self.hub.topic.config.id, self._terms().cursor
        stored = await self.hub.cursors.look(CursorPlace(topic, cursor, attached.index))
        if stored is not None or not self._wants(attached):
            return False
        self.halted.pop(attached.index, None)
        return True

    def _is_here(self, index: int) -> bool:
        return self.hub.topic.served(index) is not None and not self.hub.closed

    def _wants(self, attached: AttachedPartition) -> bool:
        index = attached.index
        return self._is_here(index) and not self.stopped and self._attached.get(index) is attached

    def _lost(self, attached: AttachedPartition, error: PenstockError) -> None:
        """The subscription ended: the tenure did, or something went wrong with it."""
        if self._attached.get(attached.index) is attached:
            del self._attached[attached.index]
            log.info("sink detached", sink=self.name, partition=attached.index, why=error.message)
            here = self.hub.topic.served(attached.index)
            if here is None and hasattr(self.sink, "forget"):
                self.thread.forget(attached)
            self._loop.call_later(AGAIN_S, self.serve, attached.index)

    def _terms(self) -> SubscriptionTerms:
        options, live = self.options, self.hub.options
        in_order, rows = self.sink.ordered, self._parcel_rows()
        waiting = rows if in_order else options.window_rows  # in order, all that waits is a parcel
        return SubscriptionTerms(
            name=self.name,
            options=msgspec.structs.replace(
                live,
                outbox_entries=min(live.outbox_entries, waiting),
                outbox_bytes=min(live.outbox_bytes, options.window_bytes),
            ),
            hosted=True,
            routes=self.routes,
            start="cursor",
            at=0 if options.start == "now" else OLDEST,
            held=self._held,
            cursor="" if getattr(self.sink, "volatile", False) else SINK_PREFIX + self.name,
            credit_entries=options.window_rows,
            credit_bytes=options.window_bytes,
            batch_max=rows,
            batch_rows=options.batch_rows,
            read_rows=options.read_rows,
            batch_ms=options.batch_ms,
            in_order=in_order,
            needs_fold=self._with_states,
        )

    def _parcel_rows(self) -> int:
        """Rows of one parcel: no more than there may be states, should each be of a vector."""
        options = self.options
        if not self._with_states:
            return options.window_rows
        size = COMPONENT_BYTES * self.hub.topic.config.dimensions
        fitting = min(STATES_BYTES, options.window_bytes) // size
        return min(max(fitting, 1), options.window_rows)

    # --- parcels ---

    def _emitter(self, live: LivePartition, attached: AttachedPartition) -> Emit:
        with_states = self._with_states
        inline = getattr(self.sink, "inline", False)

        def emit(rows: ReleasedRows, position: int, shared: Outgoing | None) -> int:
            states = _states(live, rows) if with_states and len(rows) else None
            size = bytes_of(rows)
            if states is not None:
                size += states.values.nbytes + len(states.metadata.blob)
            # Shared is what a feed has just released; everything else has waited somewhere.
            since = None if shared is None else _committed_at(live, rows)
            parcel = Parcel(attached, rows, states, position, size, since)
            if inline and self.thread.write_now(parcel):
                self._loop.call_soon(self._done, [parcel])
            else:
                self.thread.put(parcel)
            return size

        return emit

    def _done(self, parcels: list[Parcel]) -> None:
        senders = {id(parcel.sender): parcel.sender for parcel in parcels if not parcel.moved}
        for sender in senders.values():
            self._settle(sender, [parcel for parcel in parcels if parcel.sender is sender])
        times = [parcel.rows.batch.log_times_ms for parcel in parcels if len(parcel.rows)]
        if times:
            ages_s = (time.time_ns() // 1_000_000 - np.concatenate(times)) / 1000
            self.thread.runner.meter.freshness.record(ages_s, now=time.monotonic())
            place = (self.hub.topic.config.name, self.name)
            oldest_s = max(0.0, float(ages_s.max()))
            self.hub.metrics.live_sink_seconds.observe(place, oldest_s, len(ages_s))

    def _settle(self, sender: AttachedPartition, parcels: list[Parcel]) -> None:
        """Return the credit of all of them at once: each return may have the next parcel made."""
        subscription = sender.subscription
        if subscription is not None and subscription.state is not SubscriptionState.CLOSED:
            subscription.acknowledge(max(parcel.position for parcel in parcels))
            entries = sum(len(parcel.rows) for parcel in parcels)
            subscription.grant(entries, sum(parcel.bytes for parcel in parcels))

    # --- how things are ---

    def filling(self, partitions: Iterable[int]) -> list[int]:
        """Those of the partitions of which it does not hold yet what it found in their logs."""
        attached = self._attached
        return [i for i in partitions if i not in attached or not attached[i].filled]

    def readings(self) -> list[tuple[int, Subscription]]:
        found = sorted(self._attached.items())
        return [(i, a.subscription) for i, a in found if a.subscription is not None]

    def reading(self) -> SinkReading:
        runner = self.thread.runner
        meter = runner.meter
        found = [subscription for _, subscription in self.readings()]
        well = not self.halted and runner.state in ("idle", "writing", "opening")
        return SinkReading(
            sink=self.name,
            up=well,
            breaker=runner.retry.breaker_state,
            lag=sum(s.source.sequence_committed - s.acknowledged for s in found),
            outbox=sum(s.waiting for s in found),
            rate=min((s.rate.rate for s in found), default=0.0),
            busy_s=meter.busy_s(now=time.monotonic()),
            rows=meter.rows,
            retries=meter.failures,
            rejected=meter.rejected,
            dead_letters=meter.dead_letters,
        )

    def status(self, now_ms: int) -> list[dict[str, Any]]:
        meter, now = self.thread.runner.meter, time.monotonic()
        shared = {
            "name": self.name,
            "breaker": self.thread.runner.retry.describe(now=now) | {"opened": meter.opens},
            "written": meter.rows,
            "writes": meter.writes,
            "write_s": round(meter.write_s, 6),
            "rows_per_s": round(meter.rows_per_s(now=now), 1),
            "retries": meter.failures,
            "rejected": meter.rejected,
            "dead_letters": meter.dead_letters,
            "busy_s": round(meter.busy_s(now=now), 3),
            "visible_s": meter.freshness.recent(now=now),
            "timings": {"written": self.thread.timings.summary()},
            "last_error": meter.last_error,
        }
        rows = []
        for partition in self.hub.topic.local:
            attached = self._attached.get(partition.index)
            subscription = None if attached is None else attached.subscription
            state = "halted" if partition.index in self.halted else self.thread.runner.state
            known = {} if subscription is None else subscription.status(now_ms)
            followed = {"following": known.get("state", "activating"), "state": state}
            rows.append({**known, "partition": partition.index, **shared, **followed})
        return rows


def _states(live: LivePartition, rows: ReleasedRows) -> VectorStates:
    fold = live.fold
    vectors = np.unique(np.ascontiguousarray(rows.batch.vector), axis=0)
    numbers = fold.ledger.vectors.find(*halves(vectors))
    return fold.states(numbers[numbers >= 0])


def _committed_at(live: LivePartition, rows: ReleasedRows) -> float | None:
    """When the first of the rows that are being delivered was committed."""
    first = int(rows.positions[0]) if len(rows) else 0
    return next((since for last, since in live.delivered if last >= first), None)


class Parcel(NamedTuple):
    """Rows of one partition for a sink; with them it holds everything up to `position`."""

    sender: AttachedPartition  # who handed it over, and is told when it is written
    rows: ReleasedRows
    states: VectorStates | None
    position: int
    bytes: int
    committed_at: float | None = None  # by the performance counter; None: it was read from the log
    moved: bool = False  # no rows come any more: the partition is to be forgotten


class SinkThread:
    """Writes parcels, those of one partition together. The thread itself, its retries and its dead
    letters are the runner's. Parcels that gather while a sink fails are bounded by the credit of
    whoever hands them over. `opened` and `done` are called in the sink's thread."""

    def __init__(
        self,
        sink: Sink,
        *,
        topic: str,
        numbering: str,
        box: LetterBox,
        patience: Patience,
        opened: Callable[[int | None], None],
        done: Callable[[list[Parcel]], None],
    ) -> None:
        self.sink, self._topic, self._numbering = sink, topic, numbering
        self._on_opened, self._on_done = opened, done
        self._wants_deltas = bool(sink.feed & (Feed.DELTAS | Feed.PAYLOADS))
        self._wants_payloads = bool(sink.feed & Feed.PAYLOADS)
        self._wants_rows = bool(sink.feed & Feed.ROWS)
        self.timings = Timings()  # from the commit until `write` has returned
        self._waiting: deque[Parcel] = deque()
        self._taken: deque[list[Parcel]] = deque()  # by partition; the first is being written
        self._handover: Handover | None = None  # of the first
        self._news = threading.Condition()
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

    def forget(self, sender: AttachedPartition) -> None:
        """Have the sink forget a partition, once what was handed over of it before is written."""
        self.put(Parcel(sender, ReleasedRows.empty(), None, 0, 0, moved=True))

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
            self.runner.open(lambda: self._on_opened(self.runner.call(self.sink.cursor)))
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
            self.runner.call(lambda: self.sink.forget(parcels[0].sender.index))  # type: ignore[attr-defined]
        elif any(len(parcel.rows) for parcel in parcels):
            if self._handover is None:
                self._handover = Handover(work=self._work_of(parcels))
            self._hand_over(self._handover, parcels)
            if self._handover.refused is not None:
                self._bury(self._handover, parcels)

    def _take(self) -> bool:
        with self._news:
            waiting = sorted(self._waiting, key=lambda parcel: parcel.sender.index)
            self._waiting.clear()
        # Those of each partition together, in their order; a move is by itself.
        groups = itertools.groupby(waiting, lambda parcel: (parcel.sender.index, parcel.moved))
        self._taken.extend(list(group) for _, group in groups)
        return bool(self._taken)

    def _rest(self) -> None:
        with self._news:
            self._resting = True
            self._news.wait_for(lambda: self._waiting or self.runner.stopping)
            self._resting = False

    # --- writing ---

    def _work_of(self, parcels: list[Parcel]) -> Work:
        partition, rows = parcels[0].sender.index, _joined(parcels)
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
            pipeline=f"{self._numbering}-{partition}",
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
        now = time.perf_counter()
        for parcel in parcels:
            if parcel.committed_at is not None and len(parcel.rows):
                self.timings.record(now - parcel.committed_at, len(parcel.rows))

    def _bury(self, handover: Handover, parcels: list[Parcel]) -> None:
        """Letters hold the deltas as they were sent, whatever the sink is fed."""
        whole = self._deltas(_joined(parcels), parcels[0].sender.index, payloads=True)
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
