"""A partition that somebody subscribes to: its fold, and all who are sent what that releases.

The fold is the pipeline's own (`propagation.fold.propagator`), so what it releases, where and in
which order is a function of the log. First it takes what the log holds already, in a thread; then
it *follows*: the partition hands over every batch when it is staged, and tells of the commit.

    staged ──► fold ahead, while the disk syncs ──► commit ──► deliver
       └──► commit ──► fold on the loop ──► deliver
               └──► much, cold, or a parent is to be looked up: in a thread ──► deliver

What is folded ahead is told to nobody before it is committed. If that never happens the tenure is
over, and the fold with it; so the fold may run ahead as the heap does. Only states may not be
looked at meanwhile: while somebody needs them nothing is folded ahead, and they wait until the
fold is idle.

Subscriptions hear of whole feeds only: `sequence` is how far everything that the log has released
is told. A fold that fails ends the partition; the hub makes another, which folds the log anew.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PenstockError, Unavailable
from penstock.log.partition import PartitionLog
from penstock.model.batch import Batch, Kind
from penstock.model.columns import Columns
from penstock.model.delta_batch import DeltaBatch, deltas_in, deltas_of
from penstock.model.topic import TopicConfig
from penstock.node.clock import Clock, NextTurn
from penstock.node.live.catch_up import ParentSearch, oldest_position
from penstock.node.live.cursors import LiveCursor
from penstock.node.live.subscription import Outgoing, Subscription, SubscriptionTerms
from penstock.node.live.telemetry import Commits, Quarantine, Stretch, Timings
from penstock.node.observe.logs import get_logger
from penstock.node.observe.metrics import Metrics
from penstock.node.serve.partition import Partition
from penstock.node.serve.streams import gone
from penstock.node.storage.log_io import ThreadErrand
from penstock.propagation.fold.propagator import FeedOutcome, Propagator
from penstock.propagation.fold.releases import ReleasedRows, Releases

INLINE_ROWS: Final = 256  # folded in the very step of the loop that commits them, or before it
LOOP_ROWS: Final = 2048  # … in a step of their own; more than these by a thread
SLICE_BYTES: Final = 1 << 20  # of log read at once where it was not handed over
COLD_BYTES: Final = 4 << 20  # … by a thread
STAGED_BYTES_MAX: Final = 16 << 20  # kept until they are taken; more is read from the log
AHEAD_FEEDS_MAX: Final = 64  # folded and not committed yet
log = get_logger(__name__)


class FoldedFeed(NamedTuple):
    """A stretch of the log that is through the fold, up to `last`."""

    deltas: DeltaBatch
    last: int
    outcomes: list[FeedOutcome]
    seconds: float  # that it took


class LivePartition:
    """From its activation to the end of the tenure, or until nobody has used it for a while."""

    def __init__(
        self, partition: Partition, *, topic: TopicConfig, clock: Clock, metrics: Metrics
    ) -> None:
        self.partition, self.log, self._clock = partition, partition.log, clock
        self._topic, self._metrics, self._loop = topic, metrics, asyncio.get_running_loop()
        self.quarantine = Quarantine(topic.name, partition.index, metrics)
        self.fold = Propagator(topic.dimensions)
        self.releases = Releases()
        self._parents = ParentSearch(self.log)
        self.subscriptions: list[Subscription] = []
        self._readers: list[Subscription] = []  # that have left while a thread read for them
        self.active: asyncio.Future[None] = self._loop.create_future()
        self.used_ms = clock.now_ms()  # somebody wanted it last
        self.sequence = 0  # everything that the log released up to here is delivered
        self._target = 0  # committed up to here
        self._staged = StagedDeltas()
        self._ahead = True  # whether it may be folded before it is committed
        # Ahead, behind `sequence`; the last may have paused.
        self._folded: deque[FoldedFeed] = deque()
        self._folding_at = 0.0  # when that began, if the loop has not looked at the disk since
        self._next_ahead, self._next = NextTurn(self._run_ahead), NextTurn(self._run)
        # While it is busy, a thread has the fold.
        self._thread = ThreadErrand(self._fail_fold, go_on=self._run)
        self.following = False
        self.closed = False
        self.released = 0  # since it was activated
        self._commits = Commits()  # behind `sequence`
        self.delivered: list[Stretch] = []  # by the last delivery
        # From a request's arrival until its deltas are staged, the fold, from its end and the
        # commit until all were offered it, and all from the commit.
        stages = ("order", "route", "sent", "staged")
        self.timings = {stage: Timings() for stage in stages}

    # --- the beginning and the end ---

    async def activate(self) -> None:
        try:
            await self._fold_log()
        except PenstockError as error:
            self.fail(error)
        finally:
            if not self.active.done():  # cancelled, or something unforeseen
                self.fail(Unavailable("the log could not be folded"))

    async def _fold_log(self) -> None:
        more, looked_at = True, time.perf_counter()
        while more and not self.closed:
            looked_at = time.perf_counter()
            work = partial(self._fold_slice, self.sequence_committed)
            # Who is cancelled does not stop the thread, which has the fold until it is through.
            more = await asyncio.shield(self._thread.begin(work))
        if self.closed:
            raise Unavailable("the partition moved while its log was folded")
        self.following = True
        self.partition.listen(self)
        self._target = self.sequence_committed
        self._commits.add(self._target, looked_at)
        self._run()
        if not self.active.done():
            self.used_ms = self._clock.now_ms()  # whoever waited for it comes only now
            self.active.set_result(None)

    def _fold_slice(self, through: int) -> bool:
        """Fold the next piece of the log; False at its end. Nobody else has the fold yet."""
        first = max(self.fold.sequence + 1, self.log.sequence_first)
        if first > through or self.closed:
            return False
        folded = self._fold_cold(first, through)
        self.releases.on_feed(folded.deltas.sequences, *folded.outcomes)
        for outcome in folded.outcomes:
            self.quarantine.counts.update(outcome.reasons)
        self.sequence = folded.last
        return True

    def close(self) -> None:
        self.closed = self._thread.closed = True
        self._staged.clear()
        self._folded.clear()
        self.partition.unlisten(self)

    def fail(self, error: PenstockError) -> None:
        """Nobody is served from here any more; all are told why."""
        self.close()
        if not self.active.done():
            self.active.set_exception(error)
            self.active.exception()  # seen, also where nobody waits
        for subscription in self.subscriptions.copy():
            subscription.fail(error)

    def _fail_fold(self, error: BaseException) -> None:
        """The log and its writers go on whatever becomes of the fold."""
        if not isinstance(error, PenstockError):
            log.error("the live fold failed", partition=self.partition.index, exc_info=error)
            error = Unavailable("the live fold failed")
        self.fail(error)

    # --- for the hub and its subscriptions ---

    @property
    def sequence_committed(self) -> int:
        return self.partition.coordinator.sequence_committed

    @property
    def fold_idle(self) -> bool:
        """Whether the fold may be looked at: it holds what is committed, and no thread has it."""
        return not (self._thread.busy or self._folded)

    @property
    def quiet(self) -> bool:
        self._readers = [s for s in self._readers if s.reading]
        return not self._thread.busy and not self._readers

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
            self._count(subscription)
            if subscription.reading:
                self._readers.append(subscription)
            self.used_ms = self._clock.now_ms()
            self._look_for_states()

    def _look_for_states(self) -> None:
        """Who looks at states must not see any that are not committed."""
        self._ahead = not any(s.terms.needs_fold for s in self.subscriptions)

    async def position_of(
        self, terms: SubscriptionTerms, stored: LiveCursor | None, *, committed: int
    ) -> int:
        """The first position that is wanted. `committed` is from when the request came."""
        oldest, at = oldest_position(self), terms.at
        if terms.start == "now" or (terms.start == "cursor" and stored is None and not at):
            return committed + 1
        if terms.start == "time":
            found = await asyncio.to_thread(self.log.reader.find_time, at, through=committed)
            return max(found, oldest_position(self))
        if terms.start == "cursor" and stored is not None:
            held = stored.position if terms.held is None else terms.held
            at = min(stored.position, held) + 1
        if 0 < at < oldest:
            raise gone(at, sequence_first=oldest)
        return at if at > 0 else oldest

    def opened_at(self, first: int) -> dict[str, int]:
        releases = self.releases
        ordinal = releases.ordinal_at(first - 1) if first <= self.sequence else releases.ordinal
        return {
            "position": first - 1,
            "ordinal": ordinal,
            "epoch": self.partition.coordinator.epoch,
            "sequence_committed": self.sequence_committed,
            "topic": self.partition.heap.config.id,
        }

    # --- from the partition ---

    def on_staged(self, batch: Batch, columns: Columns) -> None:
        """A batch is on its way to disk. What is not kept is read back once it is committed."""
        if self._staged.add(batch, columns) and not self.partition.flusher.writing:
            self._plan_ahead()

    def on_enqueued(self, arrivals: Sequence[tuple[float, int]]) -> None:
        now = time.perf_counter()
        for started, count in arrivals:
            self.timings["staged"].record(now - started, count)

    def _plan_ahead(self) -> None:
        """Fold what is staged in a step of its own: this one goes on to have it written. What is
        staged during a write is folded with all that goes into the next one."""
        if self._ahead and self._staged.rows <= INLINE_ROWS:
            self._next_ahead.ask()

    def on_commit(self, sequence: int) -> None:
        self._target = sequence
        # What is heard of right behind a fold may have been durable since that began.
        self._commits.add(sequence, self._folding_at or time.perf_counter())
        if self._thread.busy or self._next.due:
            return
        if self._staged.rows > INLINE_ROWS:
            self._next.ask()
            return
        self._run()
        if self._staged.rows:
            self._plan_ahead()

    # --- folding ---

    def _run(self) -> None:
        self._take_step(self._advance)

    def _run_ahead(self) -> None:
        if self._ahead and not self._next.due:
            self._take_step(self._fold_ahead)

    def _take_step(self, step: Callable[[], None]) -> None:
        if self._thread.busy or self.closed:
            return
        try:
            step()
        except Exception as error:  # noqa: BLE001 - it ends the fold, and is logged
            self._fail_fold(error)

    def _fold_ahead(self) -> None:
        """Fold a little that is staged, for its commit; as one, for it is written so."""
        if self.fold.paused or self._staged.rows > INLINE_ROWS:
            return
        if len(self._folded) >= AHEAD_FEEDS_MAX:
            return
        behind = self._folded[-1].last if self._folded else self.sequence
        batches = self._staged.take(
            behind + 1, through=self.log.sequence_last, rows_max=INLINE_ROWS
        )
        if not batches:
            return
        self._folding_at = time.perf_counter()
        self._folded.append(self._fold(_deltas(batches, behind + 1), batches[-1][0].last))
        self._loop.call_soon(self._loop.call_soon, self._looked)

    def _looked(self) -> None:
        """The loop has looked for completed writes since the fold ahead ended."""
        self._folding_at = 0.0

    def _fold(self, deltas: DeltaBatch, last: int) -> FoldedFeed:
        began = time.perf_counter()
        outcome = self.fold.feed(deltas, through=last, states=False)
        return FoldedFeed(deltas, last, [outcome], time.perf_counter() - began)

    def _deliver_folded(self) -> None:
        folded = self._folded
        ready: list[FoldedFeed] = []
        while folded and folded[0].last <= self._target:
            ready.append(folded.popleft())
        if ready and self.fold.paused and not folded:
            paused = ready.pop()
            self._thread.run(lambda: self._resolved(paused), self._finish)
        if ready:
            self._finish(*ready)

    def _advance(self) -> None:
        if self._folded:
            self._deliver_folded()
        if self.sequence >= self._target or self._thread.busy or self._folded:
            return
        batches = self._staged.take(self.sequence + 1, through=self._target, rows_max=LOOP_ROWS)
        if batches is None:
            found = _read(self.log, self.sequence + 1, through=self._target, nowait=True)
            if found is None:
                work = partial(self._fold_cold, self.sequence + 1, self._target)
                self._thread.run(work, self._finish)
                return
            batches = [(batch, batch.columns()) for batch in found]
        if not batches:
            return
        deltas, last = _deltas(batches, self.sequence + 1), batches[-1][0].last
        if len(deltas) > LOOP_ROWS:
            self._thread.run(lambda: self._resolved(self._fold(deltas, last)), self._finish)
            return
        folded = self._fold(deltas, last)
        if self.fold.paused:
            self._thread.run(lambda: self._resolved(folded), self._finish)
            return
        self._finish(folded)
        if self.sequence < self._target:
            self._next.ask()

    def _finish(self, *ready: FoldedFeed) -> None:
        ready_at = time.perf_counter()
        for folded in ready:
            self.releases.on_feed(folded.deltas.sequences, *folded.outcomes)
            for outcome in folded.outcomes:
                if outcome.reasons:
                    self.quarantine.add(outcome)
        self.sequence = ready[-1].last
        self.delivered = self._commits.take(self.sequence)
        outcomes = [outcome for folded in ready for outcome in folded.outcomes]
        parts = [ReleasedRows(o.released, o.positions, o.ordinals) for o in outcomes]
        rows = parts[0] if len(parts) == 1 else ReleasedRows.concat(parts)
        now_ms, outgoing = self._clock.now_ms(), Outgoing(rows, self.sequence)
        for subscription in self.subscriptions.copy():
            subscription.offer(outgoing, now_ms)
        count = len(rows.positions)
        if count:
            self.released += count
            self.timings["order"].record(sum(folded.seconds for folded in ready), count)
            self._time(rows.positions, ready_at)

    def _time(self, positions: NDArray[np.uint64], ready_at: float) -> None:
        now, stretches, ends = time.perf_counter(), self.delivered, [len(positions)]
        self.timings["route"].record(now - ready_at, len(positions))
        if len(stretches) > 1:  # the fold lagged: each counts from its own commit
            last = np.array([sequence for sequence, _ in stretches], np.uint64)
            ends = np.searchsorted(positions, last, side="right").tolist()
        before = 0
        for (_, since), end in zip(stretches, ends, strict=False):
            if end > before:
                self.timings["sent"].record(now - since, end - before)
                labels = (self._topic.name,)
                self._metrics.live_push_seconds.observe(labels, now - since, end - before)
            before = end

    # --- in a thread ---

    def _fold_cold(self, first: int, through: int) -> FoldedFeed:
        batches = _read(self.log, first, through=through, nowait=False)
        if not batches:
            raise Unavailable(f"sequence {first} is committed and cannot be read")
        deltas = _clipped(deltas_of(batches), first)
        return self._resolved(self._fold(deltas, batches[-1].last))

    def _resolved(self, folded: FoldedFeed) -> FoldedFeed:
        """The rest of a feed that may have paused, as every reader of the log resolves it."""
        outcomes, began = list(folded.outcomes), time.perf_counter()
        while ids := self.fold.missing():
            outcomes.append(self.fold.resolve(self._find(set(ids))))
        seconds = folded.seconds + time.perf_counter() - began
        return folded._replace(outcomes=outcomes, seconds=seconds)

    def _find(self, wanted: set[bytes]) -> set[bytes]:
        """Those of the wanted deltas that the log has from before the fold's memory of ids."""
        fold = self.fold
        forgotten_ms = fold.ledger.time_ms - fold.options.dedup_ms
        horizon = self.log.reader.find_time(forgotten_ms, through=self.sequence_committed)
        waiting = {delta.parent for delta in fold.waitlist.by_id.values() if delta.parent}
        return self._parents.find(wanted, waiting=waiting, horizon=horizon)

    # --- how things are ---

    def tick(self, now_ms: int) -> None:
        first = self.log.sequence_first
        if self.following and first > self.releases.trimmed + 1:
            self.releases.trim(first)  # what retention has dropped nobody can read any more
        for subscription in self.subscriptions.copy():
            subscription.tick(now_ms)
            self._count(subscription)

    def _count(self, subscription: Subscription) -> None:
        delivered, switches = subscription.take_counts()
        if delivered:
            self._metrics.live_delivered.add((self._topic.name,), delivered)
        if switches:
            self._metrics.live_switches.add((self._topic.name,), switches)

    def status(self) -> dict[str, Any]:
        committed, busy = self.sequence_committed, self._thread.busy
        return {
            "partition": self.partition.index,
            "state": "live" if self.following else "activating",
            "position": self.sequence,
            "ordinal": None if busy else self.releases.ordinal,
            "sequence_committed": committed,
            "lag_entries": committed - self.sequence,
            "released": self.released,
            "timings": {stage: timings.summary() for stage, timings in self.timings.items()},
            "quarantined": dict(self.quarantine.counts),
            "pending": None if busy else len(self.fold.waitlist),
        }


def _read(log_: PartitionLog, first: int, *, through: int, nowait: bool) -> list[Batch] | None:
    """The batches from `first` on; from memory where the disk does not have them yet."""
    size = SLICE_BYTES if nowait else COLD_BYTES
    return log_.reader.read_slice(
        first, through=through, bytes_max=size, nowait=nowait, staged=True
    )


def _deltas(batches: list[Pair], first: int) -> DeltaBatch:
    found = [deltas_in(*pair) for pair in batches if pair[0].kind is Kind.ENQ]
    return _clipped(DeltaBatch.concat(found), first)


def _clipped(deltas: DeltaBatch, first: int) -> DeltaBatch:
    """Without what a batch holds from before: a slice begins with the batch that covers `first`."""
    if len(deltas) and int(deltas.sequences[0]) < first:
        return deltas.take(deltas.sequences >= first)
    return deltas


Pair = tuple[Batch, Columns]


@dataclass(slots=True, eq=False)
class StagedDeltas:
    """Batches on their way to disk, in the order of the log: they need not be read back."""

    _batches: deque[Pair] = field(default_factory=deque)
    _bytes: int = 0
    rows: int = 0

    def add(self, batch: Batch, columns: Columns) -> bool:
        """False: there is no room for it."""
        if self._bytes >= STAGED_BYTES_MAX:
            return False
        self._batches.append((batch, columns))
        self.rows += batch.entries
        self._bytes += batch.size
        return True

    def take(self, following: int, *, through: int, rows_max: int) -> list[Pair] | None:
        """Those that come next, up to `through`; None: the log has to be read."""
        batches = self._batches
        while batches and batches[0][0].last < following:
            self._drop()
        if not batches or batches[0][0].first != following:
            return None
        found: list[Pair] = []
        rows = 0
        while batches and batches[0][0].last <= through and batches[0][0].first == following:
            rows += batches[0][0].entries
            if found and rows > rows_max:
                break
            following = batches[0][0].last + 1
            found.append(self._drop())
        return found

    def clear(self) -> None:
        self._batches.clear()
        self._bytes = self.rows = 0

    def _drop(self) -> Pair:
        found = self._batches.popleft()
        self.rows -= found[0].entries
        self._bytes -= found[0].size
        return found
