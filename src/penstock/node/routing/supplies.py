"""A node that serves partitions of a topic, as a source of messages for consumers of this one.

`Supply` is our end of a supply stream. What it counts per consumer is how many of that consumer's
leases the other node has (`held`, as it last said), and how many were asked for and not yet
answered (`pending`); both together are the credit that is out there. The other node always tells
whole numbers, so whatever gets lost with a stream is right again with the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import Corruption, PenstockError
from penstock.model.columns import Buffer
from penstock.node.routing.ports import PeerConnection
from penstock.wire.frame import FrameType
from penstock.wire.messages import Delivery, pack, unpack
from penstock.wire.supply import (
    Ask,
    Head,
    Heads,
    Held,
    LeaseAt,
    Lent,
    OpenSupply,
    Ready,
    Taken,
    Told,
)

_EMPTY: Final = np.empty(0, np.int64)


class Listed:
    """A remote partition's best messages, as it told them: a source for the spine."""

    def __init__(self, head: Head, keys: NDArray[np.int64]) -> None:
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
        self, node: str, peer: PeerConnection, *, topic: str, consumers: bytes, customer: Customer
    ) -> None:
        self.node = node
        self._peer, self._customer = peer, customer
        self.ready = True  # as far as we know, it has something to lease
        self.leased = 0  # messages of the topic that are leased there, to whomever
        self.lists: list[Listed] = []  # of the round under way
        self.held: dict[bytes, int] = {}
        self._asked: deque[dict[bytes, int]] = deque()  # LeaseAts not answered yet, in order
        self.open = True
        self._number = peer.open(OpenSupply(topic, consumers), self)

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
        if isinstance(message, Held):
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

    def _on_held(self, held: Held, _: memoryview) -> None:
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
        Held: _on_held,
        Lent: _on_lent,
        Ready: _on_ready,
    }
