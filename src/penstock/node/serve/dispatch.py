"""Who gets the ready messages: a topic's lease streams on this node, best messages first.

This is for a topic of which this node serves all partitions: a message is chosen and leased in one
step. Otherwise what other nodes have comes in rounds (`rounds`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.heap import Spine
from penstock.node.serve.deliveries import Deliveries
from penstock.node.serve.partition import Partition, TopicView
from penstock.node.serve.streams import ConsumerStream
from penstock.node.storage.flusher import Flusher
from penstock.node.write.journal import COALESCE_ENTRIES

STRETCH: Final = 100  # messages of equal keys that are taken of one partition, then of the next
LEASES_PER_TURN: Final = 5000
LEASE_MAX: Final = 1000  # messages leased by one record
RANK_SAMPLE: Final = 64  # one pick in so many has its rank error measured exactly


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
        """Who gets how many next, until nobody has room or the budget is used up.

        Alone, a stream gets many at once; several take turns, a delivery each.
        """
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
        if not partition.journal.has_room_to_lease(len(messages)):
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
                flushers = (p.journal.flusher for p in local)
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
