"""A topic on this node: its partitions, its consumers, and the turn that serves them.

A turn runs at most once per loop iteration: every partition turns what has gathered into batches,
ready messages are leased to the streams that have credit, and all of it goes out in one write per
partition. An enqueue and the lease that follows from it thus share one fsync.

Enqueues of a delta topic pass a gate: bounded, the most urgent first. As long as its log keeps up,
a partition takes deltas as they come, and nothing there costs more than a comparison. Once as many
are on their way into the log as a turn takes, or the live path has no room, what comes waits in the
topic's queue. There classes decide, and what does not fit is refused with the time after which it
is worth trying again: a producer that is told so still has everything.

The live path says how much more may be written by `ServedTopic.live_room`. While there is no room
the queue stands still: that is how a live path that lags is felt by producers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

import numpy as np

from penstock.errors import (
    Backpressure,
    InvalidArgument,
    NotFound,
    PenstockError,
    Unavailable,
    WrongEpoch,
)
from penstock.heap.state import Applied
from penstock.model.delta import PriorityClass
from penstock.model.topic import TopicConfig
from penstock.node.clock import Alarm, Clock
from penstock.node.observe.metrics import Metrics
from penstock.node.route import Key, PartitionPort, RemotePartition, Router
from penstock.node.serve.dispatch import Deliveries, Demand, Dispatch
from penstock.node.serve.partition import Partition
from penstock.node.serve.rounds import Rounds
from penstock.node.serve.streams import ConsumerStream, LogSource, ReaderStream
from penstock.node.write import EnqueuePart
from penstock.propagation.flow.lanes import IngestQueue
from penstock.propagation.options import LiveOptions

TURN_ENTRIES: Final = 8192  # of a partition on their way into its log; from there on they wait
LOOK_AGAIN_MS: Final = 5  # at a live path that had no room
_PRIORITY_AT: Final = 2  # in a delta's payload
_VECTOR_AT: Final = slice(64, 80)
Placed = list[tuple[PartitionPort, EnqueuePart]]


class AtomicPort(Protocol):
    """A topic's atomic batches, which are driven outside of its turns."""

    def enqueue(self, parts: Sequence[tuple[PartitionPort, EnqueuePart]]) -> None: ...

    def prepare(
        self, partition: Partition, part: EnqueuePart, *, transaction: bytes, home: int
    ) -> None:
        """Prepare a part of a batch that another node drives."""

    def arm(self) -> None:
        """Something was appended that may wait for a decision, or for a confirmation."""

    def close(self) -> None: ...


class LivePath(Protocol):
    def room(self) -> int:
        """How many more deltas may be written before it lags too much."""

    def serve(self, index: int) -> None: ...

    def unserve(self, index: int) -> None: ...

    def close(self) -> None: ...


class IngestGate:
    def __init__(self, topic: ServedTopic, options: LiveOptions) -> None:
        self._topic, self._clock, self._metrics = topic, topic.clock, topic.metrics
        self.queue: IngestQueue[EnqueuePart] = IngestQueue(
            options.ingest_max, options.ingest_high_water, options.ageing_ms
        )
        self._again = Alarm(topic.clock, topic.wake)
        self._turns = 0

    # --- arrival ---

    def enqueue(self, parts: Placed) -> None:
        """Hand the parts of a request to their partitions, let them wait, or refuse all of them."""
        if self._free(parts):
            for partition, part in parts:
                partition.enqueue(part)
            return
        queue = self.queue
        waiting = [part.count for p, part in parts if self._topic.served(p.index) is not None]
        if waiting and not queue.fits(sum(waiting)):
            self._refuse(parts)
            return
        crossings, now_ms = queue.crossings, self._clock.now_ms()
        for partition, part in parts:
            if self._topic.served(partition.index) is not None:
                queue.put(
                    part, priority=_most_urgent(part), count=part.count, now_ms=now_ms,
                    group=partition.index, keys=partial(_vectors, part),
                )  # fmt: skip
            else:
                partition.enqueue(part)
        if queue.crossings != crossings:
            self._metrics.ingest_crossings.add((self._topic.config.name,))
        self._topic.wake()

    def _free(self, parts: Placed) -> bool:
        room, waiting = self._topic.live_room, self.queue.depths
        if room is not None and room() <= 0:
            return False
        for port, _ in parts:
            partition = self._topic.served(port.index)
            if partition is not None and (
                port.index in waiting or _under_way(partition) >= TURN_ENTRIES
            ):
                return False
        return True

    def _refuse(self, parts: Placed) -> None:
        queue, name = self.queue, self._topic.config.name
        refusal = Backpressure(
            f"{queue.depth} deltas wait to be written to {name}",
            retry_after_s=round(queue.retry_after_s(self._clock.now_ms()), 3),
            limit=queue.capacity,
        )
        self._metrics.ingest_rejected.add((name,), sum(part.count for _, part in parts))
        for _, part in parts:
            part.request.part_failed(refusal)

    # --- the turn ---

    def drain(self) -> None:
        """Hand on what the partitions and the live path have room for."""
        queue, topic, left = self.queue, self._topic, self._live_room()
        now_ms = self._clock.now_ms()
        self._turns += 1
        groups = list(queue.depths)
        first = self._turns % len(groups) if groups else 0  # so that none is always the last
        for index in groups[first:] + groups[:first]:
            partition = topic.served(index)
            if partition is None:
                continue
            refused = partition.refusal() is not None
            # What cannot be written now is not kept waiting: the partition will say so.
            room = queue.depths[index] if refused else TURN_ENTRIES - _under_way(partition)
            if left is not None and not refused:
                room = min(room, left)
            for part in queue.take(room, now_ms, group=index):
                partition.enqueue(part)
                left = None if left is None else left - part.count
        if queue.depth and left is not None and left <= 0:
            self._again.set(now_ms + LOOK_AGAIN_MS)  # nobody may tell us that it has moved on

    def _live_room(self) -> int | None:
        room = self._topic.live_room
        return None if room is None else room()

    def fail(self, index: int, error: PenstockError) -> None:
        """A partition is no longer served here: what waits for it was surely not written."""
        for part in self.queue.remove(index):
            part.request.part_failed(error)

    def close(self, error: PenstockError) -> None:
        self._again.cancel()
        for index in list(self.queue.depths):
            self.fail(index, error)

    def status(self) -> dict[str, Any]:
        queue = self.queue
        return {
            "depth": queue.depth,
            "depth_by_class": {c.name.lower(): queue.depth_by_class[c] for c in PriorityClass},
            "capacity": queue.capacity,
            "high": queue.high,
            "high_water": queue.mark,
            "crossings": queue.crossings,
            "rejected": queue.rejected,
            "drain_rate": round(queue.drain_rate(self._clock.now_ms())),
            "live_room": self._live_room(),
        }


def _under_way(partition: Partition) -> int:
    staged = partition.log.sequence_last - partition.coordinator.sequence_committed
    return partition.enqueuer.gathered + staged


def _most_urgent(part: EnqueuePart) -> int:
    payloads = part.columns.binary("payload")
    assert payloads is not None, "checked when it came"
    blob = np.frombuffer(payloads.blob, np.uint8)
    return int(blob[payloads.offsets[:-1] + _PRIORITY_AT].min())


def _vectors(part: EnqueuePart) -> set[bytes]:
    payloads = part.columns.binary("payload")
    assert payloads is not None, "checked when it came"
    return {payload[_VECTOR_AT] for payload in payloads}


class ServedTopic:
    def __init__(
        self,
        config: TopicConfig,
        *,
        clock: Clock,
        metrics: Metrics,
        on_damage: Callable[[PenstockError], None],
        on_fatal: Callable[[BaseException], None],
        router: Router,
        atomic: Callable[[ServedTopic], AtomicPort],
        live: LiveOptions | None = None,
    ) -> None:
        """`live`: how deltas are taken in; None: the topic is a queue."""
        self.config, self.router = config, router
        self.partitions: list[PartitionPort] = []  # all, wherever they are served
        self.local: list[Partition] = []  # those that this node serves, by index
        self._served: dict[int, Partition] = {}  # the same, by their indices
        self._add_ports()
        self.metrics, self.clock, self._on_fatal = metrics, clock, on_fatal
        self._deliveries = Deliveries(
            config.name, metrics=metrics, on_damage=on_damage, on_fatal=on_fatal
        )
        self.dispatch = Dispatch(self, self._deliveries)
        self.rounds = Rounds(self, self.dispatch)  # while others serve some of the partitions
        self._demands: list[Demand] = []  # other nodes whose consumers want our messages
        self.log_streams: list[ReaderStream] = []
        self._loop = asyncio.get_running_loop()
        self._due: asyncio.Handle | None = None  # the next turn
        self._offered = asyncio.Event()  # set for a moment when all that is ready was offered
        self._alarm = Alarm(clock, self._on_timer)
        self.atomic = atomic(self)
        self._armed_for: list[int] = []  # where the logs ended when the timers were set
        self.rotation = 0  # the partition that keyless messages go to next
        self.live: LivePath | None = None  # of a delta topic, once somebody subscribed
        self.ingest: IngestGate | None = None  # of a delta topic
        if live is not None:
            self.ingest = IngestGate(self, live)
        # How many more deltas may be written before the live path lags too much; None: any.
        self.live_room: Callable[[], int] | None = None
        self.message_bytes = 0  # of messages in answers, on average; 0: there was none yet
        self.closed = False

    def reconfigure(self, config: TopicConfig) -> None:
        self.config = config
        self._add_ports()
        self.dispatch.reconfigure()

    def _add_ports(self) -> None:
        """A port for each partition that has none; until it is served here, it is elsewhere."""
        for index in range(len(self.partitions), self.config.partitions):
            self.partitions.append(self._elsewhere(index))

    def _elsewhere(self, index: int) -> PartitionPort:
        return RemotePartition(
            self.config.name,
            self.key(index),
            served=partial(self.served, index),
            send=self.router.send,
        )

    # --- which partitions this node serves ---

    def serve(self, partition: Partition) -> None:
        index = partition.index
        self.partitions[index] = self._served[index] = partition
        self._place_local()
        self.router.on_served(self.key(index))
        if self.live is not None:
            self.live.serve(index)
        self._recount()
        self.wake()

    def unserve(self, index: int) -> None:
        """A tenure ended. What had gathered for it has surely not happened."""
        gone = self._served.pop(index, None)
        if gone is None:
            return
        self.partitions[index] = self._elsewhere(index)
        self._place_local()
        moved = self._moved(index)
        if self.ingest is not None:
            self.ingest.fail(index, moved)
        gone.enqueuer.fail(moved)
        gone.settler.fail(moved)
        self.end_readers(gone)
        if self.live is not None:
            self.live.unserve(index)
        self._recount()
        self.rounds.renew()
        self.wake()

    def end_readers(self, source: LogSource) -> None:
        """A log is not to be read here any more: whoever does looks for it elsewhere."""
        for stream in tuple(self.log_streams):
            if stream.source is source:
                stream.fail(self._moved(stream.partition))

    def _moved(self, index: int) -> Unavailable:
        return Unavailable(f"partition {index} of {self.config.name} moved", partition=index)

    def reached(self, index: int | None = None) -> bool:
        """Whether a partition, or each of them, can be served: here, or by a node that we reach."""
        indices = range(len(self.partitions)) if index is None else (index,)
        return all(self._reaches(i) for i in indices)

    def _reaches(self, index: int) -> bool:
        served = self._served.get(index)
        if served is not None:
            return served.may_commit
        node = self.router.coordinator(self.key(index))
        return bool(node) and self.router.cluster.live(node) is not None

    def end_pops(self, error: PenstockError) -> None:
        """Answer the pops that wait and have leased nothing."""
        for stream in list(self.dispatch.streams.values()):
            if stream.fail is not None and not (stream.out or stream.away):
                stream.fail(error)

    def doubt(self, partition: Partition, error: PenstockError) -> int:
        """Nobody knows whether a partition's last leases will be: pops, which are counted, do not
        wait for them. Streams do, and get them should they be committed."""
        pops = [
            stream
            for stream in self.dispatch.streams.values()
            if stream.fail is not None and partition.leased_to(stream.consumer)
        ]
        for stream in pops:
            assert stream.fail is not None
            stream.fail(error)
        return len(pops)

    def _recount(self) -> None:
        for stream in self.dispatch.streams.values():
            stream.recount(sum(p.leased_to(stream.consumer) for p in self.local))
        for demand in self._demands:
            demand.recount(self.local)

    def _place_local(self) -> None:
        self.local = [self._served[index] for index in sorted(self._served)]
        self._armed_for = []

    def key(self, index: int) -> Key:
        return (self.config.id, index)

    def served(self, index: int) -> Partition | None:
        return None if self.closed else self._served.get(index)

    def here(self, index: int) -> Partition:
        """A partition that this node must serve."""
        found = self._served.get(self.partition(index).index)
        if found is None:
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

    def follow(self, live: LivePath) -> None:
        self.live, self.live_room = live, live.room

    def partition(self, index: int) -> PartitionPort:
        if not 0 <= index < len(self.partitions):
            raise InvalidArgument(
                f"topic {self.config.name} has partitions 0 to {len(self.partitions) - 1}",
                field="partition",
                limit=len(self.partitions) - 1,
            )
        return self.partitions[index]

    def add_stream(self, stream: ConsumerStream) -> None:
        self.dispatch.streams[stream.consumer] = stream
        self.rounds.renew()
        self.wake()

    def remove_stream(self, stream: ConsumerStream) -> None:
        stream.open = False
        if self.dispatch.streams.pop(stream.consumer, None) is not None:
            self.rounds.forget(stream.consumer)
        self.wake()

    def streams_of(self, key_id: str | None) -> int:
        return sum(1 for s in self.dispatch.streams.values() if s.key_id == key_id)

    def add_demand(self, consumers: bytes, send: Callable[..., None]) -> Demand:
        """Consumers of another node, whose names begin so, may lease our messages."""
        demand = Demand(self, self._deliveries, consumers=consumers, send=send)
        self._demands.append(demand)
        self.wake()
        return demand

    def remove_demand(self, demand: Demand) -> None:
        demand.close()
        if demand in self._demands:
            self._demands.remove(demand)

    def add_log_stream(self, stream: ReaderStream) -> None:
        self.log_streams.append(stream)
        self.wake()

    def on_readable(self) -> None:
        """A replica of this node that does not serve its partition may show more of its log."""
        if self.log_streams:
            self.wake()

    def remove_log_stream(self, stream: ReaderStream) -> None:
        stream.open = False
        if stream in self.log_streams:
            self.log_streams.remove(stream)

    def wake(self) -> None:
        if self._due is None and not self.closed:
            self._due = self._loop.call_soon(self.turn)

    def observe(self, applied: Applied, reason: str) -> None:
        """A batch is committed: return credits, count what happened."""
        for consumer, count in applied.released.items():
            stream = self.dispatch.streams.get(consumer)
            if stream is not None:
                stream.on_released(count)
            else:
                any(demand.on_released(consumer) for demand in self._demands)
        name, metrics = self.config.name, self.metrics
        if applied.acked:
            metrics.acked.add((name,), applied.acked)
        if applied.retried:
            metrics.retried.add((name,), applied.retried)
        if applied.expired:
            metrics.leases_expired.add((name,), applied.expired)
        if applied.replayed:
            metrics.replayed.add((name,), applied.replayed)
        if applied.dead:
            metrics.dead_lettered.add((name, reason), applied.dead)

    @property
    def leased(self) -> int:
        return sum(p.heap.leased for p in self.local)

    # --- the turn ---

    def turn(self) -> None:
        """Take a turn now, and not the one that is due."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self.closed:
            return
        try:
            if self.ingest is not None and self.ingest.queue.depth:
                self.ingest.drain()
            for partition in self.local:
                if partition.enqueuer.gathered:
                    partition.enqueuer.take_turn()
            for demand in self._demands:
                demand.take_turn()
            if self._offer():
                self._offered.set()
                self._offered.clear()
            for partition in self.local:
                partition.flush()
            # Nobody waits for a settlement as for a message: it is worked on during that write.
            for partition in self.local:
                if partition.settler.gathered:
                    partition.settler.take_turn()
                    partition.flush()
            for stream in tuple(self.log_streams):
                stream.pump()
            for demand in self._demands:
                demand.after_turn()
            ends = [p.log.sequence_last for p in self.local]
            if ends != self._armed_for:  # else nothing was appended that could change the timers
                self._armed_for = ends
                self._arm()
        except Exception as error:  # noqa: BLE001 - state and log may differ now: stop the node
            self._on_fatal(error)

    def _offer(self) -> bool:
        """Offer what is ready to consumers; False if that has to wait for something."""
        if not all(partition.coordinator.serving for partition in self.local):
            return False
        all_here = len(self.local) == len(self.partitions)
        return self.dispatch.offer() if all_here else self.rounds.offer()

    async def dispatched(self) -> None:
        """Wait until every ready message was offered to the streams that are open now."""
        self.rounds.renew()
        self.wake()
        await self._offered.wait()
        if self.closed:
            raise topic_not_found(self.config.name)

    # --- time ---

    def _arm(self) -> None:
        due = [when - p.ahead_ms for p in self.local if (when := p.heap.next_wakeup()) is not None]
        if due:
            self._alarm.set(max(min(due), self.clock.now_ms() + 1))
        batches = [p.heap.transactions for p in self.local]
        if any(b.prepared or b.unconfirmed for b in batches):
            self.atomic.arm()

    def rearm(self) -> None:
        self._armed_for = []
        self.wake()

    def _on_timer(self) -> None:
        for partition in self.local:
            partition.expire()
        self.rearm()

    def close(self) -> None:
        self.closed = True
        if self.live is not None:
            self.live.close()
        if self.ingest is not None:
            self.ingest.close(topic_not_found(self.config.name))
        self._alarm.cancel()
        self.atomic.close()
        self._offered.set()
        self.rounds.close()
        for partition in self.local:
            partition.reader.forget()


def reject_delta_topic(name: str) -> InvalidArgument:
    return InvalidArgument(f"{name} is a delta topic: read it with deltas()", field="topic")


def topic_not_found(name: str) -> NotFound:
    return NotFound(f"no topic {name}", topic=name)


def has_id(topic: ServedTopic, topic_id: int) -> bool:
    """Whether an id is the topic's; False: an earlier topic of the same name had it. Ids rise, so a
    greater one is of a successor that this node has not heard of yet: that raises."""
    if topic_id == topic.config.id:
        return True
    if topic_id > topic.config.id and not topic.router.cluster.alone:
        raise Unavailable(
            f"this node does not know yet that {topic.config.name} was made again", elsewhere=True
        )
    return False


def check_id(topic: ServedTopic, topic_id: int) -> None:
    """Refuse what was meant for an earlier topic of the same name; 0: for any topic of it."""
    if topic_id and not has_id(topic, topic_id):
        name = topic.config.name
        raise NotFound(
            f"topic {name} was deleted and made again", topic=name, topic_id=topic.config.id
        )
