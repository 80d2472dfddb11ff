"""The live path of one delta topic: partitions that are folded because somebody subscribes.

A partition is *activated* by the first who wants its releases: its log is folded, in a thread, and
from then on every commit reaches the fold in the step of the loop that hears of it. It stays active
for a while after the last has left. When the tenure ends, all who subscribe are told to look for
the new coordinator; positions mean the same there.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.errors import FailedPrecondition, LimitExceeded, PenstockError, Unavailable
from penstock.model.columns import Buffer
from penstock.node.clock import Clock, Timer
from penstock.node.live.catch_up import ReadTurns
from penstock.node.live.cursors import CursorPlace, Cursors, LiveCursor, check_name
from penstock.node.live.held_changes import SubscriptionTerms
from penstock.node.live.partition import LivePartition
from penstock.node.live.subscription import (
    Emit,
    Outgoing,
    Subscription,
    SubscriptionState,
    encode,
)
from penstock.node.live.telemetry import Quarantine
from penstock.node.observe.metrics import Metrics
from penstock.node.observe.readings import LiveReading, SinkReading
from penstock.propagation.flow.route import DeltaRoute
from penstock.propagation.fold.releases import ReleasedRows
from penstock.propagation.options import LiveOptions
from penstock.wire.messages import Changes, OpenSubscription

if TYPE_CHECKING:
    from penstock.node.serve.topic import ServedTopic

TICK_MS: Final = 100
QUIET_S: Final = 10.0  # that a thread may need to end what it reads
CURSOR_TICKS: Final = 2  # between two writings of cursors
_numbers: Final = itertools.count(1)
# A frame's control part and body, and the most urgent class in it; None: it has no rows.
Send = Callable[[Changes, Buffer, int | None], None]
Fail = Callable[[PenstockError], None]
Spawn = Callable[..., object]
Row = dict[str, Any]
LISTS: Final = ("partitions", "subscriptions", "sinks")  # of a topic, in `live_status`


class SinkPort(Protocol):
    """A sink of this node, which reads as subscribers do."""

    @property
    def name(self) -> str: ...

    @property
    def sink(self) -> object:
        """What it writes to, which can perhaps be searched."""

    def serve(self, index: int) -> None: ...

    def unserve(self, index: int) -> None: ...

    def filling(self, partitions: Iterable[int]) -> list[int]:
        """Those of the partitions that it does not hold all of yet."""

    def reading(self) -> SinkReading: ...

    def status(self, now_ms: int) -> list[Row]: ...

    async def stop(self) -> None: ...


class Hub:
    def __init__(
        self,
        topic: ServedTopic,
        *,
        options: LiveOptions,
        cursors: Cursors,
        clock: Clock,
        metrics: Metrics,
        turns: ReadTurns,
        spawn: Spawn,
    ) -> None:
        self.topic, self.options, self.cursors = topic, options, cursors
        self._turns = turns
        self._clock, self._metrics, self._spawn = clock, metrics, spawn
        self.partitions: dict[int, LivePartition] = {}
        self.sinks: list[SinkPort] = []
        self._ending: list[LivePartition] = []  # closed while a thread was reading their logs
        self._holders: dict[CursorPlace, Subscription] = {}  # who moves a cursor
        self._opening = 0  # subscriptions of clients that are on their way to be opened
        self._timer: Timer | None = None
        self._ticks = 0
        self.closed = False
        topic.follow(self)

    def room(self) -> int:
        """How many more deltas may be written before a fold lags behind its log too much. One that
        is being activated has all of the log before it: nobody waits for that."""
        lag = 0
        for live in self.partitions.values():
            if live.following and not live.closed:
                lag = max(lag, live.partition.coordinator.sequence_committed - live.sequence)
        return self.options.ingest_max - lag

    # --- subscribing ---

    async def subscribe(
        self,
        index: int,
        request: OpenSubscription,
        *,
        send: Send,
        fail: Fail,
    ) -> Subscription:
        """Nothing is sent before this returns to who awaits it."""
        limit = self.options.subscriptions_max
        if self.subscribers + self._opening >= limit:
            raise LimitExceeded(
                f"topic {self.topic.config.name} has {limit} subscriptions", limit=limit
            )
        self._opening += 1
        try:
            return await self.open(
                index,
                self._terms(request),
                start=request.start,
                at=request.at,
                emit=lambda live: _sender(live, send),
                fail=fail,
            )
        finally:
            self._opening -= 1

    def _terms(self, request: OpenSubscription) -> SubscriptionTerms:
        options = self.options
        return SubscriptionTerms(
            name=request.cursor or f"subscriber-{next(_numbers)}",
            routes=tuple(DeltaRoute.parse(text) for text in request.routes),
            cursor=request.cursor,
            credit_entries=request.credit_entries,
            credit_bytes=request.credit_bytes,
            batch_max=request.batch_max,
            batch_rows=request.batch_max,
            read_rows=request.batch_max,
            batch_ms=request.batch_ms,
            coalesce_ms=request.coalesce_ms,
            outbox_entries=options.outbox_entries,
            outbox_bytes=options.outbox_bytes,
            ageing_ms=options.ageing_ms,
            rate_min=options.rate_min,
            rate_max=options.rate_max,
        )

    async def open(
        self,
        index: int,
        terms: SubscriptionTerms,
        *,
        start: str,
        at: int,
        emit: Callable[[LivePartition], Emit],
        fail: Fail,
        held: int | None = None,
    ) -> Subscription:
        """Follow a partition. `held`: whatever its cursor says, it has no more than this."""
        if terms.cursor:
            check_name(terms.cursor)
        committed = self.topic.here(index).sequence_readable
        live = await self.activated(index)
        place = CursorPlace(self.topic.config.id, terms.cursor, index)

        async def first_of(stored: LiveCursor | None) -> int:
            if held is not None and stored is not None and held < stored.position:
                stored = LiveCursor(held, stored.time_ms)
            return await live.position_of(start=start, at=at, stored=stored, committed=committed)

        if (holder := self._holders.get(place)) is not None:
            self._note(place, holder)
            await first_of(await self.cursors.look(place))  # who is refused leaves it alone
            self._take_over(place)
        first = await first_of(await self.cursors.get(place) if terms.cursor else None)
        if live.closed or self.closed:
            raise Unavailable(f"partition {index} of {self.topic.config.name} moved")
        self._take_over(place)  # from who came at the same time
        subscription = Subscription(
            live, terms, first=first, emit=emit(live), fail=fail, clock=self._clock,
            turns=self._turns, forget=lambda gone: self._forget(live, place, gone),
        )  # fmt: skip
        subscription.opened = live.opened_at(first)
        live.add(subscription)
        if terms.cursor:
            self._holders[place] = subscription
        self._tick_soon()
        return subscription

    def _take_over(self, place: CursorPlace) -> None:
        """A cursor has one user: the newest."""
        holder = self._holders.get(place)
        if holder is not None:
            holder.fail(
                FailedPrecondition(f"cursor {place.name} was taken over by another subscriber")
            )

    async def activated(self, index: int) -> LivePartition:
        live = self.partitions.get(index)
        if live is None or live.closed:
            live = self.partitions[index] = LivePartition(
                self.topic.here(index),
                dimensions=self.topic.config.dimensions,
                clock=self._clock,
                quarantine=Quarantine(self.topic.config.name, index, self._metrics),
                released=self._on_released,
            )
            self._spawn(live.activate(), name=f"activate-{self.topic.config.name}-{index}")
            self._tick_soon()
        live.used_ms = self._clock.now_ms()
        await asyncio.shield(live.active)  # who is cancelled does not stop the activation
        return live

    def _forget(self, live: LivePartition, place: CursorPlace, gone: Subscription) -> None:
        live.remove(gone)
        self._count(gone)
        if place.name and self._holders.get(place) is gone:
            self._note(place, gone)
            del self._holders[place]

    @property
    def subscribers(self) -> int:
        """Subscriptions of clients, one for each partition; the node's own sinks are not asked."""
        found = (s for live in self.partitions.values() for s in live.subscriptions)
        return sum(not subscription.terms.hosted for subscription in found)

    # --- which partitions this node serves ---

    def serve(self, index: int) -> None:
        """A tenure began. Sinks of this node go on here; subscribers come by themselves."""
        for sink in self.sinks:
            sink.serve(index)

    def unserve(self, index: int) -> None:
        live = self.partitions.pop(index, None)
        if live is not None:
            name = self.topic.config.name
            live.fail(Unavailable(f"partition {index} of {name} moved", partition=index))
            if not live.quiet:
                self._ending.append(live)
        for sink in self.sinks:
            sink.unserve(index)

    def close(self) -> None:
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        for index in list(self.partitions):
            self.unserve(index)

    # --- time ---

    def _tick_soon(self) -> None:
        if self._timer is None and not self.closed:
            self._timer = self._clock.call_at(self._clock.now_ms() + TICK_MS, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now_ms = self._clock.now_ms()
        self._ticks += 1
        for index, live in list(self.partitions.items()):
            live.tick(now_ms)
            if live.closed or live.idle_ms(now_ms) > self.options.idle_s * 1000:
                live.close()
                del self.partitions[index]
        for live in self.partitions.values():
            for subscription in live.subscriptions:
                self._count(subscription)
        if self._ticks % CURSOR_TICKS == 0:
            for place, holder in self._holders.items():
                self._note(place, holder)
            if self.cursors.due:
                self._spawn(self.cursors.flush(), name=f"cursors-{self.topic.config.name}")
        if self.partitions or self.cursors.due:
            self._tick_soon()

    def _note(self, place: CursorPlace, subscription: Subscription) -> None:
        if subscription.noted != subscription.acknowledged:
            subscription.noted = subscription.acknowledged
            self.cursors.note(place, subscription.acknowledged)

    def _count(self, subscription: Subscription) -> None:
        delivered, switches = subscription.take_counts()
        labels = (self.topic.config.name,)
        if delivered:
            self._metrics.live_delivered.add(labels, delivered)
        if switches:
            self._metrics.live_switches.add(labels, switches)

    def on_written(self, sink: str, rows: int, seconds: float) -> None:
        """A sink of this node has written rows, the oldest of them so long after the log."""
        self._metrics.live_sink_seconds.observe((self.topic.config.name, sink), seconds, rows)

    async def stop_sinks(self) -> None:
        await asyncio.gather(*(sink.stop() for sink in self.sinks))

    async def quiet(self) -> None:
        """Wait, once it is closed, until no thread reads the logs any more."""
        deadline = time.monotonic() + QUIET_S
        while time.monotonic() < deadline:
            if all(live.quiet for live in self._ending):
                return
            await asyncio.sleep(0.002)

    def _on_released(self, rows: int, seconds: float) -> None:
        self._metrics.live_push_seconds.observe((self.topic.config.name,), seconds, rows)

    # --- how things are ---

    def reading(self) -> LiveReading:
        partitions = self.partitions.items()
        found = [s for live in self.partitions.values() for s in live.subscriptions]
        readers = [s for s in found if not s.terms.hosted]
        return LiveReading(
            topic=self.topic.config.name,
            folds={i: live.sequence_committed - live.sequence for i, live in partitions},
            states=Counter(s.state.value for s in readers),
            lag=max((s.lag for s in readers), default=0),
            outbox=sum(s.waiting for s in found),
            rate=min((s.rate.rate for s in readers), default=0.0),
            sinks=tuple(sink.reading() for sink in self.sinks),
        )

    def rows(self, indices: Collection[int], after: str) -> Iterator[tuple[str, str, Row]]:
        """For `live_status`: what there is to tell of these partitions behind a place, in order,
        with the place and the list that it belongs to. Rows of folds and of subscriptions, of which
        there may be many, are made as they are asked for."""
        now_ms = self._clock.now_ms()
        found: list[tuple[str, str, Callable[[], Row]]] = []
        for index, live in self.partitions.items():
            found.append((place_of("partitions", index), "partitions", live.status))
            found += [
                (
                    place_of("subscriptions", index, subscription.terms.name),
                    "subscriptions",
                    partial(subscription.status, now_ms, partition=index),
                )
                for subscription in live.subscriptions
                if subscription.state is not SubscriptionState.CLOSED
                and not subscription.terms.hosted
            ]
        for sink in self.sinks:
            for row in sink.status(now_ms):
                found.append((place_of("sinks", row["partition"], sink.name), "sinks", row.copy))
        wanted = {f"{index:04}" for index in indices}
        for place, kind, make in sorted(found, key=itemgetter(0)):
            if place > after and place[:4] in wanted:
                yield place, kind, make()


def place_of(kind: str, partition: int, name: str = "") -> str:
    """Where a row of `live_status` stands among those of its topic: they are told partition by
    partition, and of each its fold, then its subscriptions, then its sinks, by name."""
    return f"{partition:04} {LISTS.index(kind)} {name}"


def _sender(live: LivePartition, send: Send) -> Emit:
    index = live.partition.index

    def emit(rows: ReleasedRows, position: int, shared: Outgoing | None) -> int:
        count, committed = len(rows.positions), live.partition.coordinator.sequence_committed
        if not count:
            send(Changes(index, 0, position, committed), b"", None)
            return 0
        body = encode(rows) if shared is None else shared.body_of(rows)
        folded = 0 if rows.merged is None else rows.folded
        urgency = int(rows.batch.fixed["priority"].min())
        send(Changes(index, count, position, committed, folded), body, urgency)
        return len(body)

    return emit
