"""Who gets the ready messages, best first, and how a lease becomes a delivery.

`Dispatch` is for a topic of which this node serves all partitions: a message is chosen and leased
in one step. Otherwise what other nodes have comes in rounds (`rounds`).

A `Demand` is the other end of such rounds: messages of this node for consumers of another, which
asks for them. Questions and orders are dealt with in the topic's turn, in the order in which they
came: a question behind an order sees what the order left. A lease for such a consumer is an entry
of the log as any other; only its delivery takes another way. Each answer says whether there is
something left to lease, and when it was last told that nothing is, `Ready` tells that this has
changed. So an idle consumer costs nothing, wherever it is.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidArgument, PenstockError
from penstock.heap.spine import Spine, bounded
from penstock.log.crash import crash_point
from penstock.model.batch import Batch, DeadReason
from penstock.model.columns import Buffer
from penstock.model.topic import TopicConfig
from penstock.node.clock import Clock
from penstock.node.observe.logs import get_logger
from penstock.node.observe.metrics import Metrics
from penstock.node.route import Key, PartitionPort, Router
from penstock.node.serve.message_reader import MessageRows
from penstock.node.serve.partition import COALESCE_ENTRIES, Partition
from penstock.node.serve.streams import ConsumerStream
from penstock.node.storage.log_io import Flusher
from penstock.node.write import ReturnRequest, ignore, unused
from penstock.wire.messages import (
    ANSWER_BYTES_MAX,
    Ask,
    Asked,
    Delivery,
    Heads,
    LeaseAt,
    LeasesHeld,
    Lent,
    Order,
    Ready,
    SupplyHead,
    Taken,
    pack,
)

UNREADABLE_MS: Final = 5_000  # until a message whose bytes are damaged is tried once more
SEQUENCES_TOLD: Final = 10  # of unreadable messages in one line of the log
STRETCH: Final = 100  # messages of equal keys that are taken of one partition, then of the next
LEASES_PER_TURN: Final = 5000
LEASE_MAX: Final = 1000  # messages leased by one record
RANK_SAMPLE: Final = 64  # one pick in so many has its rank error measured exactly
COUNT_MAX: Final = 10_000  # messages of one partition that are asked for, or ordered, at once
log = get_logger(__name__)


class TopicView(Protocol):
    """What those may ask a topic that lease its messages, here and to other nodes."""

    config: TopicConfig
    clock: Clock
    metrics: Metrics
    router: Router
    closed: bool

    @property
    def partitions(self) -> Sequence[PartitionPort]: ...

    @property
    def local(self) -> Sequence[Partition]: ...

    @property
    def leased(self) -> int: ...

    def key(self, index: int) -> Key: ...

    def served(self, index: int) -> Partition | None: ...

    def wake(self) -> None: ...


class LeasedPart(NamedTuple):
    partition: Partition
    batch: Batch
    token_first: int
    messages: NDArray[np.uint64]
    visibility_ms: int

    def part(self, start: int, end: int) -> LeasedPart:
        return self._replace(
            token_first=self.token_first + start, messages=self.messages[start:end]
        )


@dataclass(slots=True, eq=False)
class Deliveries:
    """Leases messages of one topic to streams and sends them once that is committed."""

    topic: str
    _: KW_ONLY
    metrics: Metrics
    on_damage: Callable[[PenstockError], None]
    on_fatal: Callable[[BaseException], None]

    def lease(
        self,
        stream: ConsumerStream,
        partition: Partition,
        messages: NDArray[np.uint64],
        *,
        visibility_ms: int,
    ) -> int:
        started = time.perf_counter()
        batch = partition.lease(messages, consumer=stream.consumer, visibility_ms=visibility_ms)
        stream.on_leased(len(messages))

        def committed() -> None:
            for at in range(0, len(messages), stream.batch_max):
                part = messages[at : at + stream.batch_max]
                lease = LeasedPart(partition, batch, batch.first + at, part, visibility_ms)
                self._deliver(stream, lease)
            seconds = time.perf_counter() - started
            self.metrics.pop_seconds.observe((self.topic,), seconds, len(messages))

        partition.when_committed(batch.last, committed)
        return len(messages)

    def _deliver(
        self, stream: ConsumerStream, lease: LeasedPart, rows: MessageRows | None = None
    ) -> None:
        partition, messages = lease.partition, lease.messages
        if not stream.open:
            _give_back(lease, delay_ms=0)
            return
        crash_point("node.lease.undelivered")
        sequences: list[int] = messages.tolist()
        try:
            rows = rows or partition.reader.gather(sequences)
            if rows is None:
                loading = asyncio.get_running_loop().run_in_executor(
                    None, partition.reader.load, sequences, ANSWER_BYTES_MAX
                )
                loading.add_done_callback(lambda done: self._on_loaded(done, stream, lease))
                return
            if len(sequences) > 1 and rows.exceed(ANSWER_BYTES_MAX):
                self._deliver_halves(stream, lease)
                return
            faults = rows.faults()
            body = b"" if faults else rows.encode(partition.heap.attempts(messages))
        except Exception as error:  # noqa: BLE001 - nothing that is stored may end the node
            self._on_error(stream, lease, error)
            return
        if faults:
            self._deliver_readable(stream, lease, faults)
            return
        delivery = Delivery(
            partition.index, lease.batch.epoch, lease.token_first, len(messages),
            lease.batch.time_ms - partition.ahead_ms + lease.visibility_ms, lease.visibility_ms,
            lease.batch.topic,
        )  # fmt: skip
        stream.send(delivery, body)

    def _on_error(self, stream: ConsumerStream, lease: LeasedPart, error: BaseException) -> None:
        """Something of it cannot be read. Its halves are tried by themselves, until it is known
        which messages those are: their neighbours are delivered."""
        if not isinstance(error, Exception) or isinstance(error, OSError):
            self.on_fatal(error)
        elif len(lease.messages) > 1:
            self._deliver_halves(stream, lease)
        elif isinstance(error, MemoryError):  # which is the node's trouble, and may pass
            _give_back(lease, delay_ms=UNREADABLE_MS)
        elif isinstance(error, PenstockError):
            # A damaged message goes back, and no try is counted: it is no fault of the message, and
            # another replica may have it whole.
            self.on_damage(error)
            _give_back(lease, delay_ms=UNREADABLE_MS)
            if stream.fail is not None:
                stream.fail(error)
        else:
            self._deliver_readable(stream, lease, {0: f"{type(error).__name__}: {error}"})

    def _deliver_readable(
        self, stream: ConsumerStream, lease: LeasedPart, faults: dict[int, str]
    ) -> None:
        stream.unreadable += len(faults)
        for why in sorted(set(faults.values())):
            rows = np.array([row for row, fault in faults.items() if fault == why])
            self._reject(lease, rows, why)
        sound = np.array([row for row in range(len(lease.messages)) if row not in faults], int)
        for some in np.split(sound, np.flatnonzero(np.diff(sound) != 1) + 1):
            if len(some):
                self._deliver(stream, lease.part(int(some[0]), int(some[-1]) + 1))

    def _reject(self, lease: LeasedPart, rows: NDArray[np.int64], why: str) -> None:
        tokens = (rows + lease.token_first).astype(np.uint64)
        lease.partition.settle(
            ReturnRequest(
                tokens, ignore, reject=True, reason=why.encode(), cause=DeadReason.UNREADABLE
            )
        )
        log.error(
            "messages cannot be read",
            topic=self.topic,
            partition=lease.partition.index,
            sequences=lease.messages[rows[:SEQUENCES_TOLD]].tolist(),
            count=len(rows),
            why=why,
        )

    def _deliver_halves(self, stream: ConsumerStream, lease: LeasedPart) -> None:
        """What cannot go as one delivery goes as two, each of which may be halved again."""
        half = len(lease.messages) // 2
        self._deliver(stream, lease.part(0, half))
        self._deliver(stream, lease.part(half, len(lease.messages)))

    def _on_loaded(
        self, done: asyncio.Future[MessageRows | None], stream: ConsumerStream, lease: LeasedPart
    ) -> None:
        error = done.exception()
        if error is None and (rows := done.result()) is None:
            self._deliver_halves(stream, lease)
        elif error is None:
            self._deliver(stream, lease, rows)
        else:
            self._on_error(stream, lease, error)


def _give_back(lease: LeasedPart, *, delay_ms: int) -> None:
    tokens = range(lease.token_first, lease.token_first + len(lease.messages))
    lease.partition.settle(unused(tokens, delay_ms=delay_ms))


class Dispatch:
    def __init__(self, topic: TopicView, deliveries: Deliveries) -> None:
        self._topic, self._deliveries = topic, deliveries
        self.streams: dict[bytes, ConsumerStream] = {}
        self.rank_error_max = 0
        self.spine = Spine(topic.config.k, topic.config.partitions, stretch=STRETCH)
        self._picks = 0
        self._awaited: list[tuple[Flusher, int]] | None = None  # writes that a small lease awaits

    def reconfigure(self) -> None:
        config = self._topic.config
        self.spine = Spine(config.k, config.partitions, stretch=STRETCH)

    @property
    def unused_credit(self) -> int:
        return sum(max(0, s.window - s.out - s.away) for s in self.streams.values())

    def offer(self) -> bool:
        """Lease ready messages to streams with credit; False if that has to wait for something."""
        topic = self._topic
        waiting = any(p.heap.ready or p.heap.delayed for p in topic.local)
        if topic.config.paused or not self.streams or not waiting:
            return True
        hungry = self.hungry()
        if not hungry:
            return True
        if self._better_later(sum([room for _, room in hungry])):
            return False
        now_ms = topic.clock.now_ms()
        budget = min(LEASES_PER_TURN, topic.config.inflight_max - topic.leased)
        for stream, wanted in self.shares(budget):
            picked = self._pick(wanted, now_ms)
            if sum(self.lease(stream, p, messages) for p, messages in picked) < wanted:
                return True  # that was all
        if self.hungry() and topic.config.inflight_max > topic.leased:
            topic.wake()  # the rest in the next turn, so that others get theirs
        return True

    def hungry(self) -> list[tuple[ConsumerStream, int]]:
        leases_max = self._topic.config.consumer_leases_max
        rooms = [(s, s.room(leases_max)) for s in self.streams.values()]
        return [(stream, room) for stream, room in rooms if room > 0]

    def shares(self, budget: int) -> Iterator[tuple[ConsumerStream, int]]:
        """Who gets how many next: alone many at once, several a delivery each, in turn."""
        hungry = self.hungry()
        while hungry and budget > 0:
            for stream, room in hungry:
                share = LEASE_MAX if len(hungry) == 1 else stream.batch_max
                wanted = min(room, share, budget)
                if wanted <= 0:
                    return
                yield stream, wanted
                budget -= wanted
            hungry = self.hungry()
            self._rotate_streams()

    def lease(
        self, stream: ConsumerStream, partition: Partition, messages: NDArray[np.uint64]
    ) -> int:
        """Lease ready messages, if there is room for that; returns how many."""
        if not partition.has_room_to_lease(len(messages)):
            return 0
        visibility_ms = stream.visibility_ms or self._topic.config.visibility_ms
        return self._deliveries.lease(stream, partition, messages, visibility_ms=visibility_ms)

    def on_ranked(self, error: int) -> None:
        self.rank_error_max = max(self.rank_error_max, error)
        self._topic.metrics.rank_error.observe((self._topic.config.name,), error)

    def _better_later(self, wanted: int) -> bool:
        """Whether to wait for the writes under way, since there is little to lease.

        The lease could hardly be durable sooner, what is enqueued until then may be better, and
        credit that comes back in crumbs would be leased out in crumbs for ever after.
        """
        local = self._topic.local
        if min(wanted, sum(p.heap.ready for p in local)) < COALESCE_ENTRIES:
            if self._awaited is None:
                flushers = (p.flusher for p in local)
                self._awaited = [(f, f.writes) for f in flushers if f.writing]
            if any(flusher.writes == writes for flusher, writes in self._awaited):
                return True
        self._awaited = None
        return False

    def _rotate_streams(self) -> None:
        """Who was served first goes last next time."""
        if len(self.streams) > 1:
            consumer = next(iter(self.streams))
            self.streams[consumer] = self.streams.pop(consumer)

    def _pick(self, wanted: int, now_ms: int) -> list[tuple[Partition, NDArray[np.uint64]]]:
        """The best ready messages over all partitions, by the spine's rank bound."""
        local = self._topic.local
        if len(local) == 1:
            messages = local[0].select(wanted, now_ms)
            picked = [(local[0], messages)] if len(messages) else []
        else:
            picked = [(local[at], m) for at, m in self.spine.pick(local, wanted, now_ms)]
        self._picks += 1
        if picked and self._picks % RANK_SAMPLE == 0:
            by_place = [(local.index(p), m) for p, m in picked]
            self.on_ranked(self.spine.rank_error(local, by_place, now_ms))
        return picked


class Demand:
    def __init__(
        self,
        topic: TopicView,
        deliveries: Deliveries,
        *,
        consumers: bytes,
        send: Callable[..., None],
    ) -> None:
        self._topic, self._deliveries = topic, deliveries
        self._prefix, self._send = consumers, send
        self._inbox: deque[Asked] = deque()
        self._streams: dict[bytes, ConsumerStream] = {}  # of consumers that hold something here
        self._changed: set[bytes] = set()  # consumers whose count must be told
        self._told_empty = False
        self.open = True
        self.blocked = False  # the connection's send buffer is full
        self.recount(topic.local)

    def on_message(self, message: Asked) -> None:
        if not _makes_sense(message):
            raise InvalidArgument("a question or an order makes no sense", field="control")
        self._inbox.append(message)
        self._topic.wake()

    def close(self) -> None:
        self.open = False
        self._inbox.clear()
        for stream in self._streams.values():
            stream.open = False  # what is not delivered yet is given back

    # --- credit ---

    def on_released(self, consumer: bytes) -> bool:
        """Leases ended; False if they were not of this node's consumers."""
        if not consumer.startswith(self._prefix):
            return False
        self._changed.add(consumer)
        return True

    def recount(self, partitions: Iterable[Partition]) -> None:
        """Partitions came or went: tell anew what its consumers hold here."""
        self._changed.update(self._streams)
        for partition in partitions:
            held = partition.heap.leases.by_consumer
            self._changed.update(c for c in held if c.startswith(self._prefix))

    def _held(self, consumer: bytes) -> int:
        return sum(p.heap.leases_of(consumer) for p in self._topic.local)

    # --- the turn ---

    def take_turn(self) -> None:
        while self._inbox and not self.blocked:
            message = self._inbox.popleft()
            if isinstance(message, Ask):
                self._tell_heads(message)
            else:
                self._lease(message)

    def after_turn(self) -> None:
        if self._changed:
            consumers = list(self._changed)
            self._changed.clear()
            counts = [self._held(consumer) for consumer in consumers]
            for consumer, count in zip(consumers, counts, strict=True):
                if not count:
                    self._streams.pop(consumer, None)
            self._say(LeasesHeld(consumers, counts))
        if self._told_empty and self._anything_ready():
            self._told_empty = False
            self._say(Ready())

    def _serving(self) -> list[Partition]:
        if self._topic.config.paused:
            return []
        return [p for p in self._topic.local if p.coordinator.serving]

    def _anything_ready(self) -> bool:
        return any(p.heap.ready for p in self._serving())

    def _tell_heads(self, ask: Ask) -> None:
        now_ms = self._topic.clock.now_ms()
        heads: list[SupplyHead] = []
        data: list[bytes] = []
        for partition in self._serving():
            keys, _ = partition.candidates(ask.count, now_ms)
            more = partition.heap.ready > len(keys)
            heads.append(
                SupplyHead(partition.index, len(keys), more, partition.heap.sequence_applied)
            )
            data.append(keys.astype("<i8", copy=False).tobytes())
        self._told_empty = not any(head.count or head.more for head in heads)
        self._say(Heads(ask.round, self._topic.leased, heads), *data)

    def _lease(self, message: LeaseAt) -> None:
        now_ms = self._topic.clock.now_ms()
        leased = sum(self._carry_out(order, now_ms) for order in message.orders)
        held = [self._held(order.consumer) for order in message.orders]
        better = None
        if message.worst is not None:
            worst = message.worst
            better = sum(p.rank(worst, 0, now_ms) for p in self._serving())
        more = self._anything_ready()
        self._told_empty = not more
        self._say(Taken(message.round, leased, held, more, better))

    def _carry_out(self, order: Order, now_ms: int) -> int:
        leased = 0
        serving = {p.index: p for p in self._serving()}
        config = self._topic.config
        spare = config.k // config.partitions
        wanted = zip(order.partitions, order.counts, order.bounds, order.lasts, strict=True)
        for index, count, bound, last in wanted:
            partition = serving.get(index)
            if partition is None or partition.failed is not None:
                continue
            messages = bounded(partition, count, now_ms, bound=bound, last=last, spare=spare)
            if len(messages) and partition.has_room_to_lease(len(messages)):
                leased += self._deliveries.lease(
                    self._stream(order), partition, messages, visibility_ms=order.visibility_ms
                )
        return leased

    def _stream(self, order: Order) -> ConsumerStream:
        found = self._streams.get(order.consumer)
        if found is None:
            found = self._streams[order.consumer] = ConsumerStream(
                order.consumer,
                window=1,
                batch_max=order.batch_max,
                visibility_ms=order.visibility_ms,
                send=lambda delivery, body: self._say(Lent(order.consumer, delivery), body),
            )
        return found

    def _say(self, message: Any, *data: Buffer) -> None:
        if self.open:
            self._send(pack(message), *data)


def _makes_sense(message: Asked) -> bool:
    if isinstance(message, Ask):
        return 0 < message.count <= COUNT_MAX
    return all(
        len(order.partitions) == len(order.counts) == len(order.bounds) == len(order.lasts)
        and all(0 < count <= COUNT_MAX for count in order.counts)
        and order.batch_max > 0
        and order.visibility_ms > 0
        for order in message.orders
    )
