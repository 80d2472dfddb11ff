"""Messages of this node for consumers of another, which asks for them in rounds (`rounds`).

Questions and orders are dealt with in the topic's turn, in the order in which they came: a question
behind an order sees what the order left. A lease for such a consumer is an entry of the log as any
other; only its delivery takes another way. Each answer says whether there is something left to
lease, and when it was last told that nothing is, `Ready` tells that this has changed. So an idle
consumer costs nothing, wherever it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from penstock.errors import InvalidArgument
from penstock.heap.spine import bounded
from penstock.model.columns import Buffer
from penstock.node.serve.deliveries import Deliveries
from penstock.node.serve.partition import Partition, TopicView
from penstock.node.serve.streams import ConsumerStream
from penstock.wire.messages import Delivery, pack
from penstock.wire.supply import (
    Ask,
    Asked,
    Heads,
    LeaseAt,
    LeasesHeld,
    Lent,
    Order,
    Ready,
    SupplyHead,
    Taken,
)

COUNT_MAX: Final = 10_000  # messages of one partition that are asked for, or ordered, at once


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
            if partition is None or partition.journal.failed is not None:
                continue
            messages = bounded(partition, count, now_ms, bound=bound, last=last, spare=spare)
            if len(messages) and partition.journal.has_room_to_lease(len(messages)):
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
                send=partial(self._lend, order.consumer),
            )
        return found

    def _lend(self, consumer: bytes, delivery: Delivery, body: Buffer) -> None:
        self._say(Lent(consumer, delivery), body)

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
