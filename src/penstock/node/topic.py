"""A topic on this node: its partitions, its consumers, and the turn that serves them.

A turn runs at most once per loop iteration: every partition turns what has gathered into batches,
ready messages are leased to the streams that have credit, and all of it goes out in one write per
partition. An enqueue and the lease that follows from it thus share one fsync.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidArgument, NotFound, PenstockError, Unavailable, WrongEpoch
from penstock.heap import Applied, Spine
from penstock.model.topic import TopicConfig
from penstock.node.clock import Clock, Timer
from penstock.node.delivering import Deliveries
from penstock.node.enqueueing import COALESCE_ENTRIES
from penstock.node.journal import Journal
from penstock.node.metrics import Metrics
from penstock.node.partition import Partition
from penstock.node.routing.ports import PartitionPort
from penstock.node.routing.router import Router
from penstock.node.streams import LeaseStream, LogStream

LEASES_PER_TURN: Final = 5000
LEASE_MAX: Final = 1000  # messages leased by one record
RANK_SAMPLE: Final = 64  # one pick in so many has its rank error measured exactly


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
        self.config, self._router = config, router
        self.partitions: list[PartitionPort] = []  # all, wherever they are served
        self.local: list[Partition] = []  # those that this node serves, by index
        self._add_ports()
        router.add(self, config.id)
        self.metrics = metrics
        self.totals = dict.fromkeys(("enqueued", "acked", "retried", "dead", "expired"), 0)
        self.rank_error_max = 0
        self._clock = clock
        self._on_fatal = on_fatal
        self._deliveries = Deliveries(
            config.name, metrics=metrics, on_damage=on_damage, on_fatal=on_fatal
        )
        self._streams: dict[bytes, LeaseStream] = {}
        self._log_streams: dict[LogStream, Partition] = {}
        self._loop = asyncio.get_running_loop()
        self._turn_due = False
        self._dispatch_waiters: list[asyncio.Future[None]] = []
        self._timer: Timer | None = None
        self._timer_ms = 0
        self._spine = Spine(config.k, config.partitions)
        self._picks = 0
        self._awaited: list[tuple[Journal, int]] | None = None  # writes that a small lease awaits
        self.rotation = 0  # the partition that keyless messages go to next
        self.closed = False

    def reconfigure(self, config: TopicConfig) -> None:
        self.config = config
        self._spine = Spine(config.k, config.partitions)
        self._add_ports()

    def _add_ports(self) -> None:
        """A port for each partition that has none; until it is served here, it is elsewhere."""
        for index in range(len(self.partitions), self.config.partitions):
            self.partitions.append(self._elsewhere(index))

    def _elsewhere(self, index: int) -> PartitionPort:
        return self._router.elsewhere(self.config.name, (self.config.id, index))

    # --- which partitions this node serves ---

    def serve(self, index: int, partition: Partition) -> None:
        """A tenure began: this node coordinates the partition."""
        self.partitions[index] = partition
        self._place_local()
        self._router.on_served((self.config.id, index))
        self.wake()

    def unserve(self, index: int) -> None:
        """A tenure ended. What had gathered for it has surely not happened."""
        gone = self.partitions[index]
        if not isinstance(gone, Partition):
            return
        self.partitions[index] = self._elsewhere(index)
        self._place_local()
        moved = Unavailable(f"partition {index} of {self.config.name} moved", partition=index)
        gone.enqueueing.fail(moved)
        gone.settling.fail(moved)
        for stream, partition in list(self._log_streams.items()):
            if partition is gone:
                stream.fail(moved)
        self.wake()

    def _place_local(self) -> None:
        self.local = [p for p in self.partitions if isinstance(p, Partition)]

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
            coordinator=self._router.coordinator((self.config.id, index)) or None,
        )

    # --- for sessions ---

    def partition(self, index: int) -> PartitionPort:
        if not 0 <= index < len(self.partitions):
            raise InvalidArgument(
                f"topic {self.config.name} has partitions 0 to {len(self.partitions) - 1}",
                field="partition",
                limit=len(self.partitions) - 1,
            )
        return self.partitions[index]

    def add_stream(self, stream: LeaseStream) -> None:
        self._streams[stream.consumer] = stream
        self.wake()

    def remove_stream(self, stream: LeaseStream) -> None:
        stream.open = False
        self._streams.pop(stream.consumer, None)

    def streams_of(self, key_id: str | None) -> int:
        return sum(1 for s in self._streams.values() if s.key_id == key_id)

    @property
    def lease_streams(self) -> int:
        return len(self._streams)

    @property
    def log_streams(self) -> int:
        return len(self._log_streams)

    @property
    def unused_credit(self) -> int:
        return sum(max(0, s.window - s.out) for s in self._streams.values())

    def add_log_stream(self, stream: LogStream, partition: Partition) -> None:
        self._log_streams[stream] = partition
        self.wake()

    def remove_log_stream(self, stream: LogStream) -> None:
        stream.open = False
        self._log_streams.pop(stream, None)

    def wake(self) -> None:
        if not self._turn_due and not self.closed:
            self._turn_due = True
            self._loop.call_soon(self._due_turn)

    def observe(self, applied: Applied, reason: str) -> None:
        """A batch is committed: return credits, count what happened."""
        for consumer, count in applied.released.items():
            stream = self._streams.get(consumer)
            if stream is not None:
                stream.on_released(count)
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
        for partition in self.local:
            partition.take_enqueues()
        self._dispatch()
        for partition in self.local:
            partition.journal.flush()
        # Nobody waits for a settlement as for a message: it is worked on during that write.
        for partition in self.local:
            partition.take_settlements()
            partition.journal.flush()
        for stream, partition in list(self._log_streams.items()):
            stream.pump(partition.coordinator.sequence_committed)
        self._arm_timer()

    async def dispatched(self) -> None:
        """Wait until every ready message was offered to the streams that are open now."""
        waiter = self._loop.create_future()
        self._dispatch_waiters.append(waiter)
        self.wake()
        await waiter

    def _dispatch(self) -> None:
        if self._offer():
            for waiter in self._dispatch_waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._dispatch_waiters.clear()

    def _offer(self) -> bool:
        """Lease ready messages to streams with credit; False if that has to wait for a write."""
        if not all(p.coordinator.serving for p in self.local):
            return False
        if self.config.paused or not self._streams:
            return True
        if not any(p.heap.ready or p.heap.delayed for p in self.local):
            return True
        leases_max = self.config.consumer_leases_max
        hungry = [s for s in self._streams.values() if s.room(leases_max) > 0]
        if self._better_later(sum(s.room(leases_max) for s in hungry)):
            return False
        now_ms = self._clock.now_ms()
        budget = min(LEASES_PER_TURN, self.config.inflight_max - self.leased)
        while hungry and budget > 0:
            for stream in hungry:
                # Alone, it gets many at once; several take turns, a delivery each.
                share = LEASE_MAX if len(hungry) == 1 else stream.batch_max
                wanted = min(stream.room(leases_max), share, budget)
                picked = self._pick(wanted, now_ms) if wanted > 0 else []
                if not picked:
                    return True
                taken = sum(self._lease(stream, p, messages) for p, messages in picked)
                if taken < wanted:
                    return True  # that was all
                budget -= taken
            hungry = [s for s in hungry if s.room(leases_max) > 0]
            self._rotate_streams()
        if hungry and self.config.inflight_max > self.leased:
            self.wake()  # the rest in the next turn, so that others get theirs
        return True

    def _better_later(self, wanted: int) -> bool:
        """Whether to wait for the writes under way, since there is little to lease.

        The lease could hardly be durable sooner, what is enqueued until then may be better, and
        credit that comes back in crumbs would be leased out in crumbs for ever after.
        """
        ready = sum(p.heap.ready for p in self.local)
        if min(wanted, ready) < COALESCE_ENTRIES:
            if self._awaited is None:
                journals = (p.journal for p in self.local)
                self._awaited = [(j, j.writes) for j in journals if j.writing]
            if any(journal.writes == writes for journal, writes in self._awaited):
                return True
        self._awaited = None
        return False

    def _rotate_streams(self) -> None:
        """Who was served first goes last next time."""
        if len(self._streams) > 1:
            consumer = next(iter(self._streams))
            self._streams[consumer] = self._streams.pop(consumer)

    def _pick(self, wanted: int, now_ms: int) -> list[tuple[Partition, NDArray[np.uint64]]]:
        """The best ready messages over all partitions, by the spine's rank bound."""
        if len(self.local) == 1:
            messages = self.local[0].heap.select(wanted, now_ms)
            picked = [(self.local[0], messages)] if len(messages) else []
        else:
            heaps = [p.heap for p in self.local]
            picked = [
                (self.local[at], messages)
                for at, messages in self._spine.pick(heaps, wanted, now_ms)
            ]
        self._picks += 1
        if picked and self._picks % RANK_SAMPLE == 0:
            self._sample_rank(picked, now_ms)
        return [(p, m) for p, m in picked if p.journal.has_room_to_lease(len(m))]

    def _sample_rank(self, picked: list[tuple[Partition, NDArray[np.uint64]]], now_ms: int) -> None:
        heaps = [p.heap for p in self.local]
        by_place = [(self.local.index(p), m) for p, m in picked]
        error = self._spine.rank_error(heaps, by_place, now_ms)
        self.rank_error_max = max(self.rank_error_max, error)
        self.metrics.rank_error(self.config.name, error)

    def _lease(
        self, stream: LeaseStream, partition: Partition, messages: NDArray[np.uint64]
    ) -> int:
        visibility_ms = stream.visibility_ms or self.config.visibility_ms
        return self._deliveries.lease(stream, partition, messages, visibility_ms=visibility_ms)

    # --- time ---

    def _arm_timer(self) -> None:
        due = [w for p in self.local if (w := p.heap.next_wakeup()) is not None]
        if not due:
            return
        when_ms = max(min(due), self._clock.now_ms() + 1)
        if self._timer is not None:
            if self._timer_ms <= when_ms:
                return
            self._timer.cancel()
        self._timer_ms = when_ms
        self._timer = self._clock.call_at(when_ms, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now_ms = self._clock.now_ms()
        for partition in self.local:
            partition.expire(now_ms)
        self.wake()

    def close(self) -> None:
        self.closed = True
        self._router.remove(self, self.config.id)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for waiter in self._dispatch_waiters:
            if not waiter.done():
                waiter.set_exception(topic_not_found(self.config.name))
        for partition in self.local:
            partition.reader.forget()


def reject_delta_topic(name: str) -> InvalidArgument:
    return InvalidArgument(f"{name} is a delta topic: read it with deltas()", field="topic")


def topic_not_found(name: str) -> NotFound:
    return NotFound(f"no topic {name}", topic=name)
