"""A partition that somebody subscribes to: its fold, and all who are sent what that releases."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.errors import PenstockError, Unavailable
from penstock.log.partition import PartitionLog
from penstock.node.clock import Clock
from penstock.node.live.feed import Feed
from penstock.node.live.quarantine import Quarantine
from penstock.node.live.released_columns import Outgoing
from penstock.node.live.subscription import Subscription
from penstock.node.live.timings import Timings
from penstock.node.serve.partition import Partition
from penstock.propagation.fold.releases import ReleasedRows, Releases


class LivePartition:
    """From its activation to the end of the tenure, or until nobody has used it for a while."""

    def __init__(
        self,
        partition: Partition,
        *,
        dimensions: int,
        clock: Clock,
        quarantine: Quarantine,
        released: Callable[[int, float], None],
    ) -> None:
        self.partition, self._clock, self._released = partition, clock, released
        self.quarantine = quarantine
        self.feed = Feed(
            partition, dimensions=dimensions, quarantine=quarantine, deliver=self._deliver,
            fail=self.fail,
        )  # fmt: skip
        self.subscriptions: list[Subscription] = []
        self._readers: list[Subscription] = []  # that have left while a thread read for them
        self.active: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.used_ms = clock.now_ms()  # somebody wanted it last
        self.released = 0  # since it was activated
        # The fold, from its end and the commit until all were offered it, and all from the commit.
        self.timings = {stage: Timings() for stage in ("order", "route", "sent")}
        self.timings["staged"] = self.feed.arrivals

    async def activate(self) -> None:
        try:
            await self.feed.activate()
        except PenstockError as error:
            self.fail(error)
        else:
            if not self.active.done():
                self.used_ms = self._clock.now_ms()  # whoever waited for it comes only now
                self.active.set_result(None)
        finally:
            if not self.active.done():  # cancelled, or something unforeseen
                self.fail(Unavailable("the log could not be folded"))

    # --- for subscriptions ---

    @property
    def log(self) -> PartitionLog:
        return self.partition.log

    @property
    def releases(self) -> Releases:
        return self.feed.releases

    @property
    def sequence(self) -> int:
        return self.feed.sequence

    @property
    def sequence_committed(self) -> int:
        return self.partition.sequence_readable

    @property
    def fold_idle(self) -> bool:
        return self.feed.idle

    @property
    def quiet(self) -> bool:
        """Whether no thread reads the log for it."""
        self._readers = [s for s in self._readers if s.reading]
        return self.feed.quiet and not self._readers

    @property
    def closed(self) -> bool:
        return self.feed.closed

    def idle_ms(self, now_ms: int) -> int:
        """How long nobody has wanted it; somebody does while it is activated, however long."""
        wanted = self.subscriptions or not self.active.done()
        return 0 if wanted else now_ms - self.used_ms

    def add(self, subscription: Subscription) -> None:
        self.subscriptions.append(subscription)
        self._look_for_states()

    def remove(self, subscription: Subscription) -> None:
        if subscription in self.subscriptions:
            self.subscriptions.remove(subscription)
            if subscription.reading:
                self._readers.append(subscription)
            self.used_ms = self._clock.now_ms()
            self._look_for_states()

    def _look_for_states(self) -> None:
        """Who looks at states must not see any that are not committed."""
        self.feed.ahead = not any(s.terms.needs_fold for s in self.subscriptions)

    # --- from the feed ---

    def _deliver(self, rows: ReleasedRows, through: int) -> None:
        now_ms = self._clock.now_ms()
        outgoing = Outgoing(rows, through)
        for subscription in self.subscriptions.copy():
            subscription.offer(outgoing, now_ms)
        if len(rows):
            self.released += len(rows)
            self._time(rows)

    def _time(self, rows: ReleasedRows) -> None:
        feed, now = self.feed, time.perf_counter()
        self.timings["order"].record(feed.fold_s, len(rows))
        self.timings["route"].record(now - feed.ready_at, len(rows))
        stretches, ends = feed.delivered, [len(rows)]
        if len(stretches) > 1:  # the fold lagged: each counts from its own commit
            last = np.array([sequence for sequence, _ in stretches], np.uint64)
            ends = np.searchsorted(rows.positions, last, side="right").tolist()
        before = 0
        for (_, since), end in zip(stretches, ends, strict=False):
            if end > before:
                self.timings["sent"].record(now - since, end - before)
                self._released(end - before, now - since)
            before = end

    def tick(self, now_ms: int) -> None:
        first = self.log.sequence_first
        if self.feed.following and first > self.releases.trimmed + 1:
            self.releases.trim(first)  # what retention has dropped nobody can read any more
        for subscription in self.subscriptions.copy():
            subscription.tick(now_ms)

    def fail(self, error: PenstockError) -> None:
        """Nobody is served from here any more; all are told why."""
        self.feed.close()
        if not self.active.done():
            self.active.set_exception(error)
            self.active.exception()  # seen, also where nobody waits
        for subscription in self.subscriptions.copy():
            subscription.fail(error)

    def status(self) -> dict[str, Any]:
        committed = self.sequence_committed
        return {
            "partition": self.partition.index,
            "state": "live" if self.feed.following else "activating",
            "position": self.sequence,
            "ordinal": self.releases.ordinal if self.feed.quiet else None,
            "sequence_committed": committed,
            "lag_entries": committed - self.sequence,
            "released": self.released,
            "timings": {stage: timings.summary() for stage, timings in self.timings.items()},
            "quarantined": dict(self.quarantine.counts),
            "pending": len(self.feed.fold.waitlist) if self.feed.quiet else None,
        }
