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
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PenstockError
from penstock.heap import Spine
from penstock.model.columns import Buffer
from penstock.node.clock import Clock
from penstock.node.observe.logs import get_logger
from penstock.node.route.router import Router
from penstock.node.serve.partition import Partition
from penstock.node.serve.streams import ConsumerStream
from penstock.node.serve.supply import Listed, Supply
from penstock.node.write.journal import COALESCE_ENTRIES
from penstock.node.write.requests import unused
from penstock.wire.messages import Delivery
from penstock.wire.supply import Heads, LeaseAt, Order, Taken

if TYPE_CHECKING:
    from penstock.node.serve.dispatch import Dispatch
    from penstock.node.serve.topic import Topic

LEASES_PER_ROUND: Final = 5000
STRETCH: Final = 100  # messages of equal keys that are taken of one partition, then of the next
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
    def __init__(self, number: int, awaited: set[Supply], started: float) -> None:
        self.number, self.awaited, self.started = number, awaited, started


class _Sample:
    """A rank error that is being measured: `better` so far, and who has not answered yet."""

    def __init__(self, better: int, awaited: set[Supply]) -> None:
        self.better, self.awaited = better, awaited


class Rounds:
    def __init__(self, topic: Topic, dispatch: Dispatch, *, clock: Clock, router: Router) -> None:
        self._topic, self._dispatch, self._clock, self._router = topic, dispatch, clock, router
        self._loop = asyncio.get_running_loop()
        self.supplies: dict[str, Supply] = {}
        self._spine = Spine(topic.config.k, topic.config.partitions, stretch=STRETCH)
        self._round: _Round | None = None
        self._number = 0
        self._began = 0.0  # the last round
        self._sparse = False  # it found little
        self._stalled_until = 0.0
        self._fresh = False  # ask once, whatever we believe
        self._look = True  # for nodes that serve partitions
        self._width = 2  # times an even share that lists are asked for
        self._samples: dict[int, _Sample] = {}
        self._unreached: dict[str, float] = {}  # nodes, and when they are tried again
        self._timer: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._watching = False

    def reconfigure(self) -> None:
        config = self._topic.config
        self._spine = Spine(config.k, config.partitions, stretch=STRETCH)

    def renew(self) -> None:
        """Somebody new wants messages, or wants to know for sure that there are none."""
        self._fresh = self._look = True

    def forget(self, consumer: bytes) -> None:
        """A stream is gone."""
        for supply in self.supplies.values():
            supply.forget(consumer)

    def close(self) -> None:
        for timer in (self._timer, self._linger, self._looking):
            if timer is not None:
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
            self._wake_in(self._stalled_until - self._loop.time())
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
        self._wake_in(wait_s)
        return False

    def _begin(self, wanted: int) -> None:
        self._number += 1
        self._fresh = False
        self._began = self._loop.time()
        supplies = set(self.supplies.values())
        self._round = _Round(self._number, supplies, self._began)
        count = len(self._topic.partitions)
        wanted = min(wanted, LEASES_PER_ROUND)
        share = max(self._spine.fan_out, STRETCH, -(-wanted // count))
        for supply in supplies:
            supply.ask(self._number, min(wanted, share * self._width))
        if supplies:
            self._wake_in(ANSWER_S)
        else:
            self._topic.wake()

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
        now_ms = self._clock.now_ms()
        owners: list[Partition | Supply] = []
        sources: list[Partition | Listed] = []
        for partition in self._topic.local:
            owners.append(partition)
            sources.append(partition)
        for supply in self.supplies.values():
            owners += [supply] * len(supply.lists)
            sources += supply.lists
        picking = _Picking(self._dispatch, owners, sources)
        leased = self._topic.leased + sum(s.leased for s in self.supplies.values())
        budget = min(LEASES_PER_ROUND, self._topic.config.inflight_max - leased)
        short, found = False, 0
        for stream, wanted in self._dispatch.shares(budget):
            picked = self._spine.pick(sources, wanted, now_ms)
            picking.take(stream, picked)
            count = sum(len(messages) for _, messages in picked)
            found += count
            if count < wanted:
                short = True
                break
        self._sparse = short and found < COALESCE_ENTRIES
        self._send_orders(round, picking, now_ms)
        self._adapt(sources, short=short)

    def _adapt(self, sources: list[Partition | Listed], *, short: bool) -> None:
        """After a pick that ended early: longer lists, at once; after others: shorter ones."""
        if short and any(isinstance(s, Listed) and s.cut for s in sources):
            self._width = min(2 * self._width, LIST_WIDTH_MAX)
            self._fresh = True
        else:
            self._width = max(2, self._width // 2)

    def _send_orders(self, round: _Round, picking: _Picking, now_ms: int) -> None:
        worst = None
        orders = picking.orders(self._topic.config.visibility_ms)
        if orders and picking.worst is not None and round.number % RANK_SAMPLE == 1:
            worst = picking.worst
            better = sum(p.rank(worst, 0, now_ms) for p in self._topic.local)
            asked = {supply for supply, _ in orders}
            self._samples[round.number] = _Sample(better, asked)
        for supply, mine in orders:
            supply.lease(LeaseAt(round.number, mine, worst))
        if not (orders or picking.leased) and self._anything_ready():
            self._stall()

    def _stall(self) -> None:
        """Something is ready and cannot be leased now: too much is leased, or a disk is full."""
        self._stalled_until = self._loop.time() + STALL_S

    # --- supplies ---

    def _keep_open(self) -> None:
        """One supply to each other node that serves partitions of the topic."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
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
            self._look_in(self._unreached[node] - now)
            return
        peer = self._router.cluster.live(node)
        if peer is None:
            self._unreached[node] = now + REOPEN_S
            self._look_in(REOPEN_S)
            return
        self._unreached.pop(node, None)
        self.supplies[node] = Supply(
            node,
            peer,
            topic=self._topic.config,
            consumers=self._router.consumers,
            customer=self,
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
        self._look_in(REOPEN_S)

    def _let_linger(self) -> None:
        if self.supplies and self._linger is None:
            self._linger = self._loop.call_later(LINGER_S, self._close_unused)
        self._round = None

    def _close_unused(self) -> None:
        self._linger = None
        if not self._dispatch.streams:
            supplies, self.supplies = self.supplies, {}
            for supply in supplies.values():
                supply.close()

    async def _watch(self) -> None:
        """While there are streams: look again when a partition moves."""
        topic_id = self._topic.config.id
        try:
            while self._dispatch.streams and not self._topic.closed:
                keys = [(topic_id, index) for index in range(len(self._topic.partitions))]
                changes = [asyncio.ensure_future(self._router.cluster.changed(key)) for key in keys]
                try:
                    done, _ = await asyncio.wait(
                        changes, timeout=LINGER_S, return_when=asyncio.FIRST_COMPLETED
                    )
                finally:
                    for change in changes:
                        change.cancel()
                if done:
                    self._fresh = self._look = True
                    self._topic.wake()
        finally:
            self._watching = False

    # --- what supplies say ---

    def on_heads(self, supply: Supply, heads: Heads) -> None:
        if self._round is not None and heads.round == self._round.number:
            self._round.awaited.discard(supply)
            if not self._round.awaited:
                self._topic.wake()

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
        self._topic.wake()

    def on_lent(self, consumer: bytes, delivery: Delivery, body: Buffer) -> None:
        stream = self._dispatch.streams.get(consumer)
        if stream is not None and stream.open:
            stream.send(delivery, body)
            return
        first = delivery.token_first
        tokens = np.arange(first, first + delivery.count, dtype=np.uint64)
        self._topic.partitions[delivery.partition].settle(unused(tokens))

    def on_ready(self) -> None:
        self._topic.wake()

    def on_away(self, consumer: bytes, change: int) -> None:
        stream = self._dispatch.streams.get(consumer)
        if stream is not None and change:
            stream.on_away(change)
            if change < 0:
                self._topic.wake()

    def on_lost(self, supply: Supply, error: PenstockError | None) -> None:
        self._leave_out(supply)
        self._topic.wake()

    def _look_in(self, seconds: float) -> None:
        def look() -> None:
            self._looking = None
            self._look = True
            self._topic.wake()

        if self._looking is None:
            self._looking = self._loop.call_later(seconds + 0.001, look)

    def _wake_in(self, seconds: float) -> None:
        # uvloop turns less than half a millisecond into a call that has no time to compare with.
        seconds = max(seconds, 0.001)
        when = self._loop.time() + seconds
        if self._timer is not None:
            if not self._timer.cancelled() and self._loop.time() < self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._topic.wake)


class _Share(NamedTuple):
    """What is wanted of one partition."""

    size: int
    bound: int
    last: int


_Shares = dict[int, _Share]  # by partition


class _Picking:
    """What a round picks: leased here at once, gathered into orders for other nodes."""

    def __init__(
        self,
        dispatch: Dispatch,
        owners: list[Partition | Supply],
        sources: list[Partition | Listed],
    ) -> None:
        self._dispatch, self._owners, self._sources = dispatch, owners, sources
        self.worst: int | None = None  # key of all that were ordered
        self.leased = 0  # here
        self._wanted: dict[Supply, dict[ConsumerStream, _Shares]] = {}

    def take(self, stream: ConsumerStream, picked: list[tuple[int, NDArray[np.uint64]]]) -> None:
        for at, messages in picked:
            owner, source = self._owners[at], self._sources[at]
            if isinstance(owner, Partition):
                if owner.journal.has_room_to_lease(len(messages)):
                    self.leased += self._dispatch.lease(stream, owner, messages)
                continue
            assert isinstance(source, Listed)
            stream.on_away(len(messages))
            bound = source.take(len(messages))
            self.worst = bound if self.worst is None else max(self.worst, bound)
            mine = self._wanted.setdefault(owner, {}).setdefault(stream, {})
            before = mine.get(source.partition)
            count = len(messages) + (before.size if before else 0)
            mine[source.partition] = _Share(count, bound, source.last)

    def orders(self, visibility_ms: int) -> list[tuple[Supply, list[Order]]]:
        return [(supply, list(self._of(mine, visibility_ms))) for supply, mine in
                self._wanted.items()]  # fmt: skip

    def _of(self, streams: dict[ConsumerStream, _Shares], visibility_ms: int) -> Iterator[Order]:
        for stream, wanted in streams.items():
            yield Order(
                stream.consumer,
                stream.visibility_ms or visibility_ms,
                stream.batch_max,
                list(wanted),
                [share.size for share in wanted.values()],
                [share.bound for share in wanted.values()],
                [share.last for share in wanted.values()],
            )
