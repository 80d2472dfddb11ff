"""Messages of one node for consumers of another: both ends of a supply stream.

`Supply` is the end of a node that wants messages. What it counts per consumer is how many of that
consumer's leases the other node has (`held`, as it last said), and how many were asked for and not
yet answered; both together are the credit that is out there. The other node always tells whole
numbers, so whatever gets lost with a stream is right again with the next one.

`Demand` is the serving end. Questions and orders are dealt with in the topic's turn, in the order
in which they came: a question behind an order sees what the order left. A lease for such a consumer
is an entry of the log as any other; only its delivery takes another way. Each answer says whether
there is something left to lease, and when it was last told that nothing is, `Ready` tells that this
has changed. So an idle consumer costs nothing, wherever it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import Corruption, InvalidArgument, PenstockError
from penstock.heap.spine import bounded
from penstock.model.columns import Buffer
from penstock.model.topic import TopicConfig
from penstock.node.clock import Clock
from penstock.node.route.ports import PeerPort
from penstock.node.serve.deliveries import Deliveries
from penstock.node.serve.partition import Partition
from penstock.node.serve.streams import ConsumerStream
from penstock.wire.frame import FrameType
from penstock.wire.messages import Delivery, pack, unpack
from penstock.wire.supply import (
    Ask,
    Asked,
    Heads,
    LeaseAt,
    LeasesHeld,
    Lent,
    OpenSupply,
    Order,
    Ready,
    SupplyHead,
    Taken,
    Told,
)

if TYPE_CHECKING:
    from penstock.node.serve.topic import Topic

COUNT_MAX: Final = 10_000  # messages of one partition that are asked for, or ordered, at once


class Listed:
    """A remote partition's best messages, as it told them: a source for the spine."""

    def __init__(self, head: SupplyHead, keys: NDArray[np.int64]) -> None:
        self.partition, self.cut, self.last = head.partition, head.more, head.last
        self._keys = keys  # those that are not taken yet

    def candidates(self, n: int, now: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        keys = self._keys[:n]
        return keys, np.arange(len(keys), dtype=np.uint64)

    def rank(self, key: int, sequence: int, now: int) -> int:
        return int(self._keys.searchsorted(key))

    def take(self, count: int) -> int:
        """Take the best `count`; returns the key of the last."""
        bound = int(self._keys[count - 1])
        self._keys = self._keys[count:]
        return bound

    @property
    def left(self) -> bool:
        return self.cut or len(self._keys) > 0


class Customer(Protocol):
    """Who is told what a supply says."""

    def on_heads(self, supply: Supply, heads: Heads) -> None: ...

    def on_taken(self, supply: Supply, taken: Taken) -> None: ...

    def on_lent(self, consumer: bytes, delivery: Delivery, body: Buffer) -> None: ...

    def on_ready(self) -> None: ...

    def on_away(self, consumer: bytes, change: int) -> None:
        """A consumer's credit out there changed."""

    def on_lost(self, supply: Supply, error: PenstockError | None) -> None: ...


class Supply:
    def __init__(
        self,
        node: str,
        peer: PeerPort,
        *,
        topic: TopicConfig,
        consumers: bytes,
        customer: Customer,
    ) -> None:
        self.node = node
        self._peer, self._customer = peer, customer
        self.ready = True  # as far as we know, it has something to lease
        self.leased = 0  # messages of the topic that are leased there, to whomever
        self.lists: list[Listed] = []  # of the round under way
        self.held: dict[bytes, int] = {}
        self._asked: deque[dict[bytes, int]] = deque()  # LeaseAts not answered yet, in order
        self.open = True
        self._number = peer.open(OpenSupply(topic.name, consumers, topic.id), self)

    # --- asking ---

    def ask(self, round: int, count: int) -> None:
        self.lists = []
        self._send(Ask(round, count))

    def lease(self, order: LeaseAt) -> None:
        """Send an order, one per consumer. Its messages count as out there already."""
        self._asked.append({one.consumer: sum(one.counts) for one in order.orders})
        self.ready = any(listed.left for listed in self.lists)  # until it says so itself
        self._send(order)

    def close(self) -> None:
        """We want nothing any more; what is on its way is given back over there."""
        if self.open:
            self._forget_all()
            self._peer.close_stream(self._number)

    def forget(self, consumer: bytes) -> None:
        """A consumer is gone: what it holds there is no credit of anybody."""
        self.held.pop(consumer, None)

    def _send(self, message: Any) -> None:
        self._peer.send(FrameType.ACK, self._number, pack(message))

    def _forget_all(self) -> None:
        self.open = False
        self.lists = []
        held, self.held = self.held, {}
        asked, self._asked = self._asked, deque()
        for counts in (held, *asked):
            for consumer, count in counts.items():
                self._customer.on_away(consumer, -count)

    # --- what it says ---

    def on_answer(self, payload: memoryview) -> None:
        """Nothing was waiting for it."""

    def on_batch(self, payload: memoryview) -> None:
        if not self.open:
            return
        message: Any
        message, data = unpack(payload, Told)  # type: ignore[arg-type]
        if not self._is_sound(message, data):
            raise Corruption(f"node {self.node} tells of messages what cannot be")
        self._HANDLERS[type(message)](self, message, data)

    def _is_sound(self, message: Any, data: memoryview) -> bool:
        """Whether lists that belong together fit, and an answer its question."""
        if isinstance(message, Heads):
            counts = [head.count for head in message.heads]
            return min(counts, default=0) >= 0 and 8 * sum(counts) == len(data)
        if isinstance(message, Taken):
            return bool(self._asked) and len(message.held) == len(self._asked[0])
        if isinstance(message, LeasesHeld):
            return len(message.consumers) == len(message.counts)
        return True

    def on_end(self, error: PenstockError | None) -> None:
        if self.open:
            self._forget_all()
            self._customer.on_lost(self, error)

    def _on_heads(self, heads: Heads, data: memoryview) -> None:
        keys = np.frombuffer(data, "<i8")
        at = 0
        self.lists = []
        for head in heads.heads:
            mine = keys[at : at + head.count]
            self.lists.append(Listed(head, mine))
            at += head.count
        self.leased = heads.leased
        self.ready = any(listed.left for listed in self.lists)
        self._customer.on_heads(self, heads)

    def _on_taken(self, taken: Taken, _: memoryview) -> None:
        asked = self._asked.popleft()
        self.ready = taken.more
        for (consumer, count), held in zip(asked.items(), taken.held, strict=True):
            self._customer.on_away(consumer, -count)
            self._count(consumer, held)
        self._customer.on_taken(self, taken)

    def _on_held(self, held: LeasesHeld, _: memoryview) -> None:
        for consumer, count in zip(held.consumers, held.counts, strict=True):
            self._count(consumer, count)

    def _count(self, consumer: bytes, count: int) -> None:
        change = count - self.held.get(consumer, 0)
        if count:
            self.held[consumer] = count
        else:
            self.held.pop(consumer, None)
        self._customer.on_away(consumer, change)

    def _on_lent(self, lent: Lent, body: memoryview) -> None:
        self._customer.on_lent(lent.consumer, lent.delivery, body)

    def _on_ready(self, _: Ready, __: memoryview) -> None:
        self.ready = True
        self._customer.on_ready()

    _HANDLERS: Final[dict[type[msgspec.Struct], Callable[[Any, Any, memoryview], None]]] = {
        Heads: _on_heads,
        Taken: _on_taken,
        LeasesHeld: _on_held,
        Lent: _on_lent,
        Ready: _on_ready,
    }


class Demand:
    def __init__(
        self,
        topic: Topic,
        deliveries: Deliveries,
        *,
        consumers: bytes,
        clock: Clock,
        send: Callable[..., None],
    ) -> None:
        self._topic, self._deliveries, self._clock = topic, deliveries, clock
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
        """Tell what this turn has changed."""
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
        now_ms = self._clock.now_ms()
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
        now_ms = self._clock.now_ms()
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
