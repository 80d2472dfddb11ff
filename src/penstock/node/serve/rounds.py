"""Pops of a topic whose partitions are served by several nodes.

A **round** asks every other node that serves partitions of the topic for its best keys, merges them
with the heaps of this node by the spine's rule, and leases what was picked: here at once, elsewhere
with an order that names how many of each partition and a bound. The other node leases its best ones
at that moment, none worse than the bound: one that somebody else has got is not replaced by a worse
one, and what has arrived in between goes first as far as the rank bound allows (see `heap.spine`).

A round that ends early, since a list was used up, is followed by another with longer lists. Rounds
go on while streams have room and somebody has something to lease; then nothing is sent until a
stream gets room, or a node says that it has something again. What little credit comes back within
`PACE_S` of a round waits for the end of that time, so that under load rounds are large. After a
round that found little, what comes within `LULL_S` waits as well: a lease costs a sync on every
replica, however few messages it is for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import Corruption, PenstockError
from penstock.model.columns import Buffer
from penstock.model.topic import TopicConfig
from penstock.node.observe.logs import get_logger
from penstock.node.route import PeerPort
from penstock.node.serve.dispatch import STRETCH, Dispatch, TopicView
from penstock.node.serve.partition import COALESCE_ENTRIES
from penstock.node.serve.streams import ConsumerStream
from penstock.node.write import unused
from penstock.wire.frame import FrameType
from penstock.wire.messages import (
    Ask,
    Delivery,
    Heads,
    LeaseAt,
    LeasesHeld,
    Lent,
    OpenSupply,
    Order,
    Ready,
    Supplied,
    SupplyHead,
    Taken,
    pack,
    unpack,
)

LEASES_PER_ROUND: Final = 5000
RANK_SAMPLE: Final = 64  # one round in so many has its rank error measured
PACE_S: Final = 0.003  # between rounds, unless one is worth it before
LULL_S: Final = 0.015  # the same after one that found little, though there was room for more
LIST_WIDTH_MAX: Final = 64  # times as long a list as an even share
ANSWER_S: Final = 3.0  # a node that does not answer for so long is left out
STALL_S: Final = 0.05  # before the next round after one that could lease nothing
REOPEN_S: Final = 0.2  # until a node is tried again that could not be reached
LINGER_S: Final = 30.0  # supplies stay open for so long after the last consumer
log = get_logger(__name__)


class _Round:
    """Supplies are awaited for their lists, and in some rounds for the rank error of the pick."""

    def __init__(self, number: int, awaited: set[Supply], started: float) -> None:
        self.number, self.awaited, self.started = number, awaited, started
        self.better = 0  # messages that are better than the worst that was picked, so far


class Rounds:
    def __init__(self, topic: TopicView, dispatch: Dispatch) -> None:
        self._topic, self._dispatch, self._router = topic, dispatch, topic.router
        self.wake = topic.wake
        self._loop = asyncio.get_running_loop()
        self.supplies: dict[str, Supply] = {}
        self._round: _Round | None = None
        self._number = 0
        self._began = 0.0  # the last round
        self._sparse = False  # it found little
        self._stalled_until = 0.0
        self._fresh = False  # ask once, whatever we believe
        self._look = True  # for nodes that serve partitions
        self._width = 2  # times an even share that lists are asked for
        self._samples: dict[int, _Round] = {}  # rounds whose rank error is being measured
        self._unreached: dict[str, float] = {}  # nodes, and when they are tried again
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._watching = False

    def renew(self) -> None:
        """Somebody new wants messages, or wants to know for sure that there are none."""
        self._fresh = self._look = True

    def forget(self, consumer: bytes) -> None:
        for supply in self.supplies.values():
            supply.held.pop(consumer, None)  # it is no credit of anybody any more

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        for supply in list(self.supplies.values()):
            supply.close()
        self.supplies.clear()

    # --- in the topic's turn ---

    def offer(self) -> bool:
        """Begin or conclude a round; True when there is nothing to do."""
        if not self._dispatch.streams:
            self._let_linger()
            return True
        self._keep_open()
        if self._round is not None:
            if self._still_awaited(self._round):
                return False
            self._conclude(self._round)
        rooms = [room for _, room in self._dispatch.hungry()]
        if self._topic.config.paused or not rooms:
            return True
        if not (self._fresh or self._anything_ready()):
            return True
        if self._loop.time() < self._stalled_until:
            self._call_in(self.wake, self._stalled_until - self._loop.time())
            return True
        if not self._may_begin(sum(rooms)):
            return False
        self._begin(sum(rooms))
        return False

    def _anything_ready(self) -> bool:
        return any(s.ready for s in self.supplies.values()) or any(
            p.heap.ready for p in self._topic.local
        )

    def _may_begin(self, wanted: int) -> bool:
        """Whether a round is worth it now, or gathers some more first."""
        window = sum(s.window for s in self._dispatch.streams.values())
        worth = wanted >= COALESCE_ENTRIES and 2 * wanted >= min(window, LEASES_PER_ROUND)
        worth = worth and not self._sparse
        wait_s = self._began + (LULL_S if self._sparse else PACE_S) - self._loop.time()
        if worth or wait_s <= 0 or self._fresh:
            return True
        self._call_in(self.wake, wait_s)
        return False

    def _begin(self, wanted: int) -> None:
        self._number += 1
        self._fresh = False
        self._began = self._loop.time()
        supplies = set(self.supplies.values())
        self._round = _Round(self._number, supplies, self._began)
        count = len(self._topic.partitions)
        wanted = min(wanted, LEASES_PER_ROUND)
        share = max(self._dispatch.spine.fan_out, STRETCH, -(-wanted // count))
        for supply in supplies:
            supply.ask(self._number, min(wanted, share * self._width))
        if supplies:
            self._call_in(self.wake, ANSWER_S)
        else:
            self.wake()

    def _still_awaited(self, round: _Round) -> bool:
        if round.awaited and self._loop.time() - round.started < ANSWER_S:
            return True
        for supply in list(round.awaited):
            log.warning("a node does not answer, pops go on without it", peer=supply.node)
            self._leave_out(supply)
            supply.close()
        return False

    # --- picking ---

    def _conclude(self, round: _Round) -> None:
        """All lists are here: pick by the spine, lease here, and order there."""
        self._round = None
        topic, dispatch, now_ms = self._topic, self._dispatch, self._topic.clock.now_ms()
        local = topic.local
        lists = [listed for supply in self.supplies.values() for listed in supply.lists]
        orders: dict[Supply, dict[ConsumerStream, Order]] = {}
        leased = topic.leased + sum(s.leased for s in self.supplies.values())
        budget = min(LEASES_PER_ROUND, topic.config.inflight_max - leased)
        short, found, here = False, 0, 0
        for stream, wanted in dispatch.shares(budget):
            picked = dispatch.spine.pick([*local, *lists], wanted, now_ms)
            for at, messages in picked:
                if at < len(local):
                    here += dispatch.lease(stream, local[at], messages)
                else:
                    self._order(orders, stream, lists[at - len(local)], len(messages))
            count = sum(len(messages) for _, messages in picked)
            found += count
            if count < wanted:
                short = True
                break
        self._sparse = short and found < COALESCE_ENTRIES
        self._send_orders(round, orders, now_ms)
        if not (orders or here) and self._anything_ready():
            self._stall()
        # After a pick that ended early: longer lists, at once; after others: shorter ones.
        if short and any(listed.cut for listed in lists):
            self._width = min(2 * self._width, LIST_WIDTH_MAX)
            self._fresh = True
        else:
            self._width = max(2, self._width // 2)

    def _order(
        self,
        orders: dict[Supply, dict[ConsumerStream, Order]],
        stream: ConsumerStream,
        listed: Listed,
        count: int,
    ) -> None:
        stream.on_away(count)
        bound = listed.take(count)
        mine = orders.setdefault(listed.supply, {})
        if stream not in mine:
            visibility_ms = stream.visibility_ms or self._topic.config.visibility_ms
            mine[stream] = Order(stream.consumer, visibility_ms, stream.batch_max, [], [], [], [])
        order = mine[stream]
        if listed.partition not in order.partitions:
            order.partitions.append(listed.partition)
            order.counts.append(0)
            order.bounds.append(bound)
            order.lasts.append(listed.last)
        at = order.partitions.index(listed.partition)
        order.counts[at] += count
        order.bounds[at] = bound

    def _send_orders(
        self, round: _Round, orders: dict[Supply, dict[ConsumerStream, Order]], now_ms: int
    ) -> None:
        worst = None
        if orders and round.number % RANK_SAMPLE == 1:
            worst = max(max(o.bounds) for mine in orders.values() for o in mine.values())
            round.better = sum(p.rank(worst, 0, now_ms) for p in self._topic.local)
            round.awaited = set(orders)
            self._samples[round.number] = round
        for supply, mine in orders.items():
            supply.lease(LeaseAt(round.number, list(mine.values()), worst))

    def _stall(self) -> None:
        """Something is ready and cannot be leased now: too much is leased, or a disk is full."""
        self._stalled_until = self._loop.time() + STALL_S

    # --- supplies ---

    def _keep_open(self) -> None:
        linger = self._timers.pop(self._close_unused, None)
        if linger is not None:
            linger.cancel()
        if not self._look:
            return
        self._look = False
        needed = {
            node
            for index in range(len(self._topic.partitions))
            if self._topic.served(index) is None
            and (node := self._router.coordinator(self._topic.key(index)))
        }
        for node in needed - self.supplies.keys():
            self._open(node)
        if not self._watching:
            self._watching = True
            self._router.spawn(self._watch(), name="supply-watch")

    def _open(self, node: str) -> None:
        now = self._loop.time()
        if self._unreached.get(node, 0.0) > now:
            self._call_in(self._look_again, self._unreached[node] - now)
            return
        peer = self._router.cluster.live(node)
        if peer is None:
            self._unreached[node] = now + REOPEN_S
            self._call_in(self._look_again, REOPEN_S)
            return
        self._unreached.pop(node, None)
        self.supplies[node] = Supply(
            node, peer, topic=self._topic.config, consumers=self._router.consumers, rounds=self
        )
        self._fresh = True

    def _leave_out(self, supply: Supply) -> None:
        if self.supplies.get(supply.node) is supply:
            del self.supplies[supply.node]
        self._unreached[supply.node] = self._loop.time() + REOPEN_S
        if self._round is not None:
            self._round.awaited.discard(supply)
        for number, sample in list(self._samples.items()):
            if supply in sample.awaited:
                del self._samples[number]
        self._call_in(self._look_again, REOPEN_S)

    def _let_linger(self) -> None:
        if self.supplies:
            self._call_in(self._close_unused, LINGER_S)
        self._round = None

    def _close_unused(self) -> None:
        if not self._dispatch.streams:
            supplies, self.supplies = self.supplies, {}
            for supply in supplies.values():
                supply.close()

    async def _watch(self) -> None:
        """While there are streams: look again when a partition moves."""
        try:
            while self._dispatch.streams and not self._topic.closed:
                keys = [self._topic.key(index) for index in range(len(self._topic.partitions))]
                if await self._router.changed(*keys, within_s=LINGER_S):
                    self.renew()
                    self.wake()
        finally:
            self._watching = False

    # --- what supplies say ---

    def on_heads(self, supply: Supply, heads: Heads) -> None:
        if self._round is not None and heads.round == self._round.number:
            self._round.awaited.discard(supply)
            if not self._round.awaited:
                self.wake()

    def on_taken(self, supply: Supply, taken: Taken) -> None:
        sample = self._samples.get(taken.round)
        if sample is not None and taken.better is not None:
            sample.better += taken.better
            sample.awaited.discard(supply)
            if not sample.awaited:
                del self._samples[taken.round]
                self._dispatch.on_ranked(sample.better)
        if not taken.leased and taken.more:
            self._stall()
        self.wake()

    def on_lent(self, consumer: bytes, delivery: Delivery, body: Buffer) -> None:
        stream = self._dispatch.streams.get(consumer)
        if stream is not None and stream.open:
            stream.send(delivery, body)
            return
        tokens = range(delivery.token_first, delivery.token_first + delivery.count)
        self._topic.partitions[delivery.partition].settle(unused(tokens))

    def on_away(self, consumer: bytes, change: int) -> None:
        stream = self._dispatch.streams.get(consumer)
        if stream is not None and change:
            stream.on_away(change)
            if change < 0:
                self.wake()

    def on_lost(self, supply: Supply) -> None:
        self._leave_out(supply)
        self.wake()

    def _look_again(self) -> None:
        self._look = True
        self.wake()

    def _call_in(self, action: Callable[[], None], seconds: float) -> None:
        # uvloop turns less than half a millisecond into a call that has no time to compare with.
        now, seconds = self._loop.time(), max(seconds, 0.001)
        timer = self._timers.get(action)
        if timer is not None:
            if not timer.cancelled() and now < timer.when() <= now + seconds:
                return
            timer.cancel()
        self._timers[action] = self._loop.call_later(seconds, action)


class Listed:
    """A remote partition's best messages, as it told them: a source for the spine."""

    def __init__(self, supply: Supply, head: SupplyHead, keys: NDArray[np.int64]) -> None:
        self.supply = supply
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


class Supply:
    """Our end of a stream from another node. What it counts per consumer is how many of that
    consumer's leases the other node has (`held`, as it last said), and how many were asked for and
    not yet answered; both together are the credit that is out there. The other node always tells
    whole numbers, so whatever gets lost with a stream is right again with the next one."""

    def __init__(
        self, node: str, peer: PeerPort, *, topic: TopicConfig, consumers: bytes, rounds: Rounds
    ) -> None:
        self.node = node
        self._peer, self._rounds = peer, rounds
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

    def _send(self, message: Any) -> None:
        self._peer.send(FrameType.ACK, self._number, pack(message))

    def _forget_all(self) -> None:
        self.open = False
        self.lists = []
        held, self.held = self.held, {}
        asked, self._asked = self._asked, deque()
        for counts in (held, *asked):
            for consumer, count in counts.items():
                self._rounds.on_away(consumer, -count)

    # --- what it says ---

    def on_answer(self, payload: memoryview) -> None:
        """Nothing was waiting for it."""

    def on_batch(self, payload: memoryview) -> None:
        if not self.open:
            return
        message: Any
        message, data = unpack(payload, Supplied)  # type: ignore[arg-type]
        if not self._is_sound(message, data):
            raise Corruption(f"node {self.node} tells of messages what cannot be")
        match message:
            case Heads():
                self._on_heads(message, np.frombuffer(data, "<i8"))
            case Taken():
                self._on_taken(message)
            case LeasesHeld(consumers, counts):
                for consumer, count in zip(consumers, counts, strict=True):
                    self._count(consumer, count)
            case Lent(consumer, delivery):
                self._rounds.on_lent(consumer, delivery, data)
            case Ready():
                self.ready = True
                self._rounds.wake()

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
            self._rounds.on_lost(self)

    def _on_heads(self, heads: Heads, keys: NDArray[np.int64]) -> None:
        at = 0
        self.lists = []
        for head in heads.heads:
            self.lists.append(Listed(self, head, keys[at : at + head.count]))
            at += head.count
        self.leased = heads.leased
        self.ready = any(listed.left for listed in self.lists)
        self._rounds.on_heads(self, heads)

    def _on_taken(self, taken: Taken) -> None:
        asked = self._asked.popleft()
        self.ready = taken.more
        for (consumer, count), held in zip(asked.items(), taken.held, strict=True):
            self._rounds.on_away(consumer, -count)
            self._count(consumer, held)
        self._rounds.on_taken(self, taken)

    def _count(self, consumer: bytes, count: int) -> None:
        change = count - self.held.get(consumer, 0)
        if count:
            self.held[consumer] = count
        else:
            self.held.pop(consumer, None)
        self._rounds.on_away(consumer, change)
