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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, Final, NamedTuple, Protocol

from penstock.errors import FailedPrecondition, LimitExceeded, PenstockError, Unavailable
from penstock.model.columns import Buffer
from penstock.node.clock import Clock, Timer
from penstock.node.live.catch_up import ReadTurns
from penstock.node.live.cursors import CursorPlace, Cursors, check_name
from penstock.node.live.partition import LivePartition
from penstock.node.live.subscription import (
    Emit,
    Outgoing,
    Subscription,
    SubscriptionState,
    SubscriptionTerms,
    encode,
)
from penstock.node.observe.metrics import Metrics
from penstock.node.serve.topic import ServedTopic
from penstock.propagation.flow.route import DeltaRoute
from penstock.propagation.fold.releases import ReleasedRows
from penstock.propagation.options import LiveOptions
from penstock.wire.messages import Changes, OpenSubscription

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


class SinkReading(NamedTuple):
    """A sink of the node, over the partitions that it follows here, as a scrape finds it."""

    sink: str
    up: bool = True
    breaker: str = "closed"
    lag: int = 0  # sequences that are committed and not written
    outbox: int = 0
    rate: float = 0.0
    busy_s: float = 0.0
    rows: int = 0
    retries: int = 0
    rejected: int = 0
    dead_letters: int = 0


class LiveReading(NamedTuple):
    """A delta topic on this node. Subscribers are shown together: there may be thousands."""

    topic: str
    folds: Mapping[int, int] = {}  # by active partition: committed sequences not folded yet
    states: Mapping[str, int] = {}  # subscribers, by state
    lag: int = 0  # of the subscriber that is furthest behind, in sequences
    outbox: int = 0  # deltas that wait in all outboxes
    rate: float = 0.0  # of the slowest subscriber; 0: there is none
    sinks: tuple[SinkReading, ...] = ()


class SinkPort(Protocol):
    """A sink of this node, which reads as subscribers do."""

    @property
    def name(self) -> str: ...

    @property
    def sink(self) -> object: ...

    def serve(self, index: int) -> None: ...

    def unserve(self, index: int) -> None: ...

    def filling(self, partitions: Iterable[int]) -> list[int]: ...

    def reading(self) -> SinkReading: ...

    def status(self, now_ms: int) -> list[Row]: ...

    async def stop(self) -> None: ...


@dataclass(eq=False)
class Hub:
    topic: ServedTopic
    _: KW_ONLY
    options: LiveOptions
    cursors: Cursors
    clock: Clock
    metrics: Metrics
    turns: ReadTurns
    spawn: Spawn
    partitions: dict[int, LivePartition] = field(default_factory=dict)
    sinks: list[SinkPort] = field(default_factory=list)
    # Closed while a thread was reading their logs.
    _ending: list[LivePartition] = field(default_factory=list)
    _holders: dict[CursorPlace, Subscription] = field(default_factory=dict)  # who moves a cursor
    _opening: int = 0  # subscriptions of clients that are on their way to be opened
    _timer: Timer | None = None
    _ticks: int = 0
    closed: bool = False

    def __post_init__(self) -> None:
        self.topic.follow(self)

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
        self, index: int, request: OpenSubscription, *, send: Send, fail: Fail
    ) -> Subscription:
        """Nothing is sent before this returns to who awaits it."""
        limit = self.options.subscriptions_max
        if self.subscribers + self._opening >= limit:
            raise LimitExceeded(
                f"topic {self.topic.config.name} has {limit} subscriptions", limit=limit
            )
        self._opening += 1
        try:
            terms = self._terms(request)
            return await self.open(index, terms, emit=lambda live: _sender(live, send), fail=fail)
        finally:
            self._opening -= 1

    def _terms(self, request: OpenSubscription) -> SubscriptionTerms:
        return SubscriptionTerms(
            name=request.cursor or f"subscriber-{next(_numbers)}",
            options=self.options,
            routes=tuple(DeltaRoute.parse(text) for text in request.routes),
            cursor=request.cursor,
            start=request.start,
            at=request.at,
            credit_entries=request.credit_entries,
            credit_bytes=request.credit_bytes,
            batch_max=request.batch_max,
            batch_rows=request.batch_max,
            read_rows=request.batch_max,
            batch_ms=request.batch_ms,
            coalesce_ms=request.coalesce_ms,
        )

    async def open(
        self,
        index: int,
        terms: SubscriptionTerms,
        *,
        emit: Callable[[LivePartition], Emit],
        fail: Fail,
    ) -> Subscription:
        if terms.cursor:
            check_name(terms.cursor)
        committed = self.topic.here(index).sequence_readable
        live = await self.activated(index)
        place = CursorPlace(self.topic.config.id, terms.cursor, index)
        first = await self._first_of(live, place, terms, committed)
        if live.closed or self.closed:
            raise Unavailable(f"partition {index} of {self.topic.config.name} moved")
        self._take_over(place)  # from who came at the same time
        subscription = Subscription(
            live, terms, first=first, emit=emit(live), fail=fail, clock=self.clock,
            turns=self.turns, forget=lambda gone: self._forget(live, place, gone),
        )  # fmt: skip
        subscription.opened = live.opened_at(first)
        live.add(subscription)
        if terms.cursor:
            self._holders[place] = subscription
        self._tick_soon()
        return subscription

    async def _first_of(
        self, live: LivePartition, place: CursorPlace, terms: SubscriptionTerms, committed: int
    ) -> int:
        if (holder := self._holders.get(place)) is not None:
            self._note(place, holder)
            # Who is refused leaves the cursor alone.
            await live.position_of(terms, await self.cursors.look(place), committed=committed)
            self._take_over(place)
        stored = await self.cursors.get(place) if terms.cursor else None
        return await live.position_of(terms, stored, committed=committed)

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
                topic=self.topic.config,
                clock=self.clock,
                metrics=self.metrics,
            )
            self.spawn(live.activate(), name=f"activate-{self.topic.config.name}-{index}")
            self._tick_soon()
        live.used_ms = self.clock.now_ms()
        await asyncio.shield(live.active)  # who is cancelled does not stop the activation
        return live

    def _forget(self, live: LivePartition, place: CursorPlace, gone: Subscription) -> None:
        live.remove(gone)
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
            self._timer = self.clock.call_at(self.clock.now_ms() + TICK_MS, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now_ms = self.clock.now_ms()
        self._ticks += 1
        for index, live in list(self.partitions.items()):
            live.tick(now_ms)
            if live.closed or live.idle_ms(now_ms) > self.options.idle_s * 1000:
                live.close()
                del self.partitions[index]
        if self._ticks % CURSOR_TICKS == 0:
            for place, holder in self._holders.items():
                self._note(place, holder)
            if self.cursors.due:
                self.spawn(self.cursors.flush(), name=f"cursors-{self.topic.config.name}")
        if self.partitions or self.cursors.due:
            self._tick_soon()

    def _note(self, place: CursorPlace, subscription: Subscription) -> None:
        if subscription.noted != subscription.acknowledged:
            subscription.noted = subscription.acknowledged
            self.cursors.note(place, subscription.acknowledged)

    async def stop_sinks(self) -> None:
        await asyncio.gather(*(sink.stop() for sink in self.sinks))

    async def quiet(self) -> None:
        """Wait, once it is closed, until no thread reads the logs any more."""
        deadline = time.monotonic() + QUIET_S
        while time.monotonic() < deadline:
            if all(live.quiet for live in self._ending):
                return
            await asyncio.sleep(0.002)

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

    def rows(self, indices: Iterable[int], after: str) -> Iterator[tuple[str, str, Row]]:
        """For `live_status`: what there is to tell of these partitions behind a place, in order,
        with the place and the list that it belongs to. Rows of folds and of subscriptions, of which
        there may be many, are made as they are asked for."""
        now_ms = self.clock.now_ms()
        sinks = [row for sink in self.sinks for row in sink.status(now_ms)]
        for index in sorted(indices):
            for kind, name, make in self._told_of(index, sinks, now_ms):
                if (place := place_of(kind, index, name)) > after:
                    yield place, kind, make()

    def _told_of(
        self, index: int, sinks: list[Row], now_ms: int
    ) -> Iterator[tuple[str, str, Callable[[], Row]]]:
        live = self.partitions.get(index)
        if live is not None:
            yield "partitions", "", live.status
            for s in sorted(live.subscriptions, key=lambda one: one.terms.name):
                if s.state is not SubscriptionState.CLOSED and not s.terms.hosted:
                    yield "subscriptions", s.terms.name, partial(s.status, now_ms, partition=index)
        for row in sorted(sinks, key=itemgetter("name")):
            if row["partition"] == index:
                yield "sinks", row["name"], row.copy


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
