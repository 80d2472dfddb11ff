"""A topic on this node: its partitions, its consumers, and the turn that serves them.

A turn runs at most once per loop iteration: every partition turns what has gathered into batches,
ready messages are leased to the streams that have credit, and all of it goes out in one write per
partition. An enqueue and the lease that follows from it thus share one fsync.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from penstock.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PenstockError,
    Unavailable,
    WrongEpoch,
)
from penstock.heap import Applied
from penstock.model.columns import Buffer
from penstock.model.topic import TopicConfig, TopicKind
from penstock.node.atomic import resolve_in_doubt
from penstock.node.clock import Alarm, Clock, Timer
from penstock.node.confirming import Confirming
from penstock.node.delivering import Deliveries
from penstock.node.dispatching import Dispatch
from penstock.node.metrics import Metrics
from penstock.node.partition import Partition
from penstock.node.routing.demands import Demand
from penstock.node.routing.ports import Key, PartitionPort
from penstock.node.routing.router import Router
from penstock.node.streams import LeaseStream, LogSource, LogStream
from penstock.wire.messages import Changes, OpenSubscription

if TYPE_CHECKING:
    from penstock.node.ingesting import Ingesting
    from penstock.node.live.hub import Hub
    from penstock.node.live.subscription import Subscription

IN_DOUBT_MS: Final = 5000  # that a batch is prepared before its home is asked
DOUBT_PAUSE_MS: Final = 500  # before the next question, at least


class Topic:
    def __init__(
        self,
        config: TopicConfig,
        *,
        clock: Clock,
        metrics: Metrics,
        on_damage: Callable[[PenstockError], None],
        on_fatal: Callable[[BaseException], None],
        router: Router,
    ) -> None:
        self.config, self.router = config, router
        self.partitions: list[PartitionPort] = []  # all, wherever they are served
        self.local: list[Partition] = []  # those that this node serves, by index
        self._add_ports()
        router.add(self, config.id)
        self.metrics = metrics
        self.totals = dict.fromkeys(("enqueued", "acked", "retried", "dead", "expired"), 0)
        self._clock = clock
        self._on_fatal = on_fatal
        self._deliveries = Deliveries(
            config.name, metrics=metrics, on_damage=on_damage, on_fatal=on_fatal
        )
        self._dispatching = Dispatch(self, self._deliveries, clock=clock, router=router)
        self._demands: list[Demand] = []  # other nodes whose consumers want our messages
        self._log_streams: list[LogStream] = []
        self._loop = asyncio.get_running_loop()
        self._turn_due = False
        self._dispatch_waiters: list[asyncio.Future[None]] = []
        self._alarm = Alarm(clock, self._on_timer)
        self._confirming = Confirming(self, clock)
        self._doubt: Timer | None = None  # set until what was prepared too long ago has asked
        self._armed_for: list[int] = []  # where the logs ended when the timers were set
        self.rotation = 0  # the partition that keyless messages go to next
        self.live: Hub | None = None  # of a delta topic, once somebody subscribed
        self.open_hub: Callable[[Topic], Hub] | None = None  # makes it
        self.ingesting: Ingesting | None = None  # of a delta topic
        # How many more deltas may be written before the live path lags too much; None: any.
        self.live_room: Callable[[], int] | None = None
        self.closed = False

    def reconfigure(self, config: TopicConfig) -> None:
        self.config = config
        self._add_ports()
        self._dispatching.reconfigure()

    def _add_ports(self) -> None:
        """A port for each partition that has none; until it is served here, it is elsewhere."""
        for index in range(len(self.partitions), self.config.partitions):
            self.partitions.append(self._elsewhere(index))

    def _elsewhere(self, index: int) -> PartitionPort:
        return self.router.elsewhere(self.config.name, self.key(index))

    # --- which partitions this node serves ---

    def serve(self, index: int, partition: Partition) -> None:
        """A tenure began: this node coordinates the partition."""
        self.partitions[index] = partition
        self._place_local()
        self.router.on_served(self.key(index))
        if self.live is not None:
            self.live.serve(index)
        self._recount()
        self.wake()

    def unserve(self, index: int) -> None:
        """A tenure ended. What had gathered for it has surely not happened."""
        gone = self.partitions[index]
        if not isinstance(gone, Partition):
            return
        self.partitions[index] = self._elsewhere(index)
        self._place_local()
        moved = Unavailable(f"partition {index} of {self.config.name} moved", partition=index)
        if self.ingesting is not None:
            self.ingesting.fail(index, moved)
        gone.enqueueing.fail(moved)
        gone.settling.fail(moved)
        self.end_readers(gone)
        if self.live is not None:
            self.live.unserve(index)
        self._recount()
        self._dispatching.rounds.renew()
        self.wake()

    def end_readers(self, source: LogSource) -> None:
        """A log is not to be read here any more: whoever does looks for it elsewhere."""
        for stream in tuple(self._log_streams):
            if stream.source is source:
                stream.fail(
                    Unavailable(
                        f"partition {stream.partition} of {self.config.name} moved",
                        partition=stream.partition,
                    )
                )

    def reached(self, index: int | None = None) -> bool:
        """Whether a partition, or each of them, can be served: here, or by a node that we reach."""
        indices = range(len(self.partitions)) if index is None else (index,)
        return all(self._reaches(self.partitions[i]) for i in indices)

    def _reaches(self, port: PartitionPort) -> bool:
        if isinstance(port, Partition):
            return port.journal.may_commit
        node = self.router.coordinator(self.key(port.index))
        return bool(node) and self.router.cluster.live(node) is not None

    def end_pops(self, error: PenstockError) -> None:
        """Answer the pops that wait and have leased nothing."""
        for stream in list(self._dispatching.streams.values()):
            if stream.fail is not None and not (stream.out or stream.away):
                stream.fail(error)

    def doubt(self, partition: Partition, error: PenstockError) -> int:
        """Nobody knows whether a partition's last leases will be: pops, which are counted, do not
        wait for them. Streams do, and get them should they be committed."""
        pops = [
            stream
            for stream in self._dispatching.streams.values()
            if stream.fail is not None and partition.leased_to(stream.consumer)
        ]
        for stream in pops:
            assert stream.fail is not None
            stream.fail(error)
        return len(pops)

    def _recount(self) -> None:
        """Partitions came or went, and with them leases of consumers here and elsewhere."""
        for stream in self._dispatching.streams.values():
            stream.recount(sum(p.leased_to(stream.consumer) for p in self.local))
        for demand in self._demands:
            demand.recount(self.local)

    def _place_local(self) -> None:
        self.local = [p for p in self.partitions if isinstance(p, Partition)]
        self._armed_for = []

    def key(self, index: int) -> Key:
        return (self.config.id, index)

    def here(self, index: int) -> Partition:
        """A partition that this node serves."""
        found = self.partition(index)
        if not isinstance(found, Partition):
            raise self.not_here(index)
        return found

    def not_here(self, index: int) -> WrongEpoch:
        """The refusal of what only the coordinator may do; it says who that is."""
        return WrongEpoch(
            f"partition {index} of {self.config.name} is not served by this node",
            partition=index,
            coordinator=self.router.coordinator(self.key(index)) or None,
        )

    # --- for sessions ---

    async def subscribe(
        self,
        partition: int,
        request: OpenSubscription,
        *,
        send: Callable[[Changes, Buffer], None],
        fail: Callable[[PenstockError], None],
    ) -> Subscription:
        """Push what a partition of a delta topic releases. `send` is not called before this
        returns."""
        return await self.hub().subscribe(partition, request, send=send, fail=fail)

    def hub(self) -> Hub:
        """The live path of a delta topic, made when it is asked for."""
        if self.live is None:
            if self.open_hub is None or self.config.kind is not TopicKind.DELTA:
                raise FailedPrecondition(f"{self.config.name} is no delta topic")
            self.live = self.open_hub(self)
        return self.live

    def partition(self, index: int) -> PartitionPort:
        if not 0 <= index < len(self.partitions):
            raise InvalidArgument(
                f"topic {self.config.name} has partitions 0 to {len(self.partitions) - 1}",
                field="partition",
                limit=len(self.partitions) - 1,
            )
        return self.partitions[index]

    def add_stream(self, stream: LeaseStream) -> None:
        self._dispatching.add(stream)
        self.wake()

    def remove_stream(self, stream: LeaseStream) -> None:
        self._dispatching.remove(stream)
        self.wake()

    def streams_of(self, key_id: str | None) -> int:
        return sum(1 for s in self._dispatching.streams.values() if s.key_id == key_id)

    def add_demand(self, consumers: bytes, send: Callable[..., None]) -> Demand:
        """Consumers of another node, whose names begin so, may lease our messages."""
        demand = Demand(self, self._deliveries, consumers=consumers, clock=self._clock, send=send)
        self._demands.append(demand)
        self.wake()
        return demand

    def remove_demand(self, demand: Demand) -> None:
        demand.close()
        if demand in self._demands:
            self._demands.remove(demand)

    @property
    def lease_streams(self) -> int:
        return len(self._dispatching.streams)

    @property
    def rank_error_max(self) -> int:
        return self._dispatching.rank_error_max

    @property
    def log_streams(self) -> int:
        return len(self._log_streams)

    @property
    def unused_credit(self) -> int:
        return self._dispatching.unused_credit

    def add_log_stream(self, stream: LogStream) -> None:
        self._log_streams.append(stream)
        self.wake()

    def on_readable(self) -> None:
        """A replica of this node that does not serve its partition may show more of its log."""
        if self._log_streams:
            self.wake()

    def remove_log_stream(self, stream: LogStream) -> None:
        stream.open = False
        if stream in self._log_streams:
            self._log_streams.remove(stream)

    def wake(self) -> None:
        if not self._turn_due and not self.closed:
            self._turn_due = True
            self._loop.call_soon(self._due_turn)

    def observe(self, applied: Applied, reason: str) -> None:
        """A batch is committed: return credits, count what happened."""
        for consumer, count in applied.released.items():
            stream = self._dispatching.streams.get(consumer)
            if stream is not None:
                stream.on_released(count)
            else:
                any(demand.on_released(consumer) for demand in self._demands)
        self._count(applied, reason)

    def _count(self, applied: Applied, reason: str) -> None:
        name, metrics, totals = self.config.name, self.metrics, self.totals
        totals["enqueued"] += applied.enqueued
        if applied.acked:
            totals["acked"] += applied.acked
            metrics.acked(name, applied.acked)
        if applied.retried:
            totals["retried"] += applied.retried
            metrics.retried(name, applied.retried)
        if applied.expired:
            totals["expired"] += applied.expired
            metrics.leases_expired(name, applied.expired)
        if applied.replayed:
            metrics.replayed(name, applied.replayed)
        if applied.dead:
            totals["dead"] += applied.dead
            metrics.dead_lettered(name, applied.dead, reason=reason)

    @property
    def leased(self) -> int:
        return sum(p.heap.leased for p in self.local)

    # --- the turn ---

    def _due_turn(self) -> None:
        if self._turn_due:  # not taken since
            self.turn()

    def turn(self) -> None:
        self._turn_due = False
        if self.closed:
            return
        try:
            self._take_turn()
        except Exception as error:  # noqa: BLE001 - state and log may differ now: stop the node
            self._on_fatal(error)

    def _take_turn(self) -> None:
        if self.ingesting is not None and self.ingesting.queue.depth:
            self.ingesting.drain()
        for partition in self.local:
            if partition.enqueueing.gathered:
                partition.take_enqueues()
        for demand in self._demands:
            demand.take_turn()
        self._dispatch()
        for partition in self.local:
            partition.journal.flush()
        # Nobody waits for a settlement as for a message: it is worked on during that write.
        for partition in self.local:
            if partition.settling.gathered:
                partition.take_settlements()
                partition.journal.flush()
        for stream in tuple(self._log_streams):
            stream.pump()
        for demand in self._demands:
            demand.after_turn()
        self._arm()

    async def dispatched(self) -> None:
        """Wait until every ready message was offered to the streams that are open now."""
        waiter = self._loop.create_future()
        self._dispatch_waiters.append(waiter)
        self._dispatching.rounds.renew()
        self.wake()
        await waiter

    def _dispatch(self) -> None:
        if self._dispatching.offer():
            for waiter in self._dispatch_waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._dispatch_waiters.clear()

    # --- time ---

    def _arm(self) -> None:
        """Set the timers anew, unless nothing was appended that could have changed them."""
        ends = [p.journal.log.sequence_last for p in self.local]
        if ends != self._armed_for:
            self._armed_for = ends
            self._arm_timer()
            self._arm_doubt()
            self._confirming.arm()

    def _arm_timer(self) -> None:
        due = [w for p in self.local if (w := p.next_wakeup()) is not None]
        if not due:
            return
        earliest_ms, set_ms = min(due), self._alarm.when_ms
        if set_ms is None or set_ms > earliest_ms:
            self._alarm.set(max(earliest_ms, self._clock.now_ms() + 1))

    def _on_timer(self) -> None:
        self._armed_for = []
        for partition in self.local:
            partition.expire()
        self.wake()

    def _arm_doubt(self) -> None:
        """Have what is prepared for too long ask for its decision."""
        if self._doubt is not None:
            return
        times = [t.time_ms - p.ahead_ms for p in self.local for t in p.heap.prepared.values()]
        if times:
            when_ms = max(min(times) + IN_DOUBT_MS, self._clock.now_ms() + DOUBT_PAUSE_MS)
            self._doubt = self._clock.call_at(when_ms, self._on_doubt)

    def _on_doubt(self) -> None:
        if not self.closed:
            self.router.spawn(self._resolve(), name="resolve-in-doubt")

    async def _resolve(self) -> None:
        try:
            await resolve_in_doubt(self, older_ms=IN_DOUBT_MS)
        finally:
            self._doubt = None
            self._armed_for = []
            self.wake()

    def close(self) -> None:
        self.closed = True
        if self.live is not None:
            self.live.close()
        if self.ingesting is not None:
            self.ingesting.close(topic_not_found(self.config.name))
        if self._doubt is not None:
            self._doubt.cancel()
        self.router.remove(self, self.config.id)
        self._alarm.cancel()
        self._confirming.cancel()
        for waiter in self._dispatch_waiters:
            if not waiter.done():
                waiter.set_exception(topic_not_found(self.config.name))
        self._dispatching.rounds.close()
        for partition in self.local:
            partition.reader.forget()


def reject_delta_topic(name: str) -> InvalidArgument:
    return InvalidArgument(f"{name} is a delta topic: read it with deltas()", field="topic")


def topic_not_found(name: str) -> NotFound:
    return NotFound(f"no topic {name}", topic=name)
