"""From a commit to what it releases: the fold of one partition, fed as its log grows.

The fold is the pipeline's own (`propagation.fold.propagator`), so what it releases, where and in
which order is a function of the log. A feed first folds what the log holds already, in a thread;
then it *follows*: the journal hands it every batch when it is staged, and tells of the commit.

    staged ──► fold ahead, while the disk syncs ──► commit ──► deliver
       └──► commit ──► fold on the loop ──► deliver
               └──► much, cold, or a parent is to be looked up: in a thread ──► deliver

What is folded ahead is told to nobody before it is committed. If that never happens the tenure is
over, and the fold with it; so the fold may run ahead as the heap does. Only states may not be
looked at meanwhile: whoever needs them says so by `ahead`, and waits until the fold is `idle`.

Whoever is delivered to hears of whole feeds only: `sequence` is how far everything that the log has
released is told. A feed that fails is over; its owner makes another, which folds the log anew.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from penstock.errors import PenstockError, Unavailable
from penstock.log.partition import PartitionLog
from penstock.model.batch import Batch, Kind
from penstock.model.columns import Columns
from penstock.model.delta_batch import DeltaBatch, deltas_in, deltas_of
from penstock.node.live.quarantine import Quarantine
from penstock.node.live.timings import Commits, Stretch, Timings
from penstock.node.observe.logs import get_logger
from penstock.node.serve.partition import Partition
from penstock.node.write.requests import EnqueuePart
from penstock.propagation.fold.propagator import FeedOutcome, Propagator
from penstock.propagation.fold.releases import ReleasedRows, Releases

INLINE_ROWS: Final = 256  # folded in the very step of the loop that commits them, or before it
LOOP_ROWS: Final = 2048  # … in a step of their own; more than these by a thread
SLICE_BYTES: Final = 1 << 20  # of log read at once where it was not handed over
COLD_BYTES: Final = 4 << 20  # … by a thread
SEARCH_BYTES: Final = 4 << 20  # of log read at once in search of parents
STAGED_BYTES_MAX: Final = 16 << 20  # kept until they are taken; more is read from the log
AHEAD_FEEDS_MAX: Final = 64  # folded and not committed yet
log = get_logger(__name__)

Deliver = Callable[[ReleasedRows, int], None]


class FoldedFeed(NamedTuple):
    """A stretch of the log that is through the fold, up to `last`."""

    deltas: DeltaBatch
    last: int
    outcomes: list[FeedOutcome]
    seconds: float  # that it took


class Feed:
    def __init__(
        self,
        partition: Partition,
        *,
        dimensions: int,
        quarantine: Quarantine,
        deliver: Deliver,
        fail: Callable[[PenstockError], None],
    ) -> None:
        self._partition, self._log = partition, partition.log
        self._deliver, self._fail, self._quarantine = deliver, fail, quarantine
        self._loop = asyncio.get_running_loop()
        self.fold = Propagator(dimensions)
        self.releases = Releases()
        self._parents = ParentSearch(self._log)
        self.sequence = 0  # everything that the log released up to here is delivered
        self._target = 0  # committed up to here
        self._commits = Commits()  # behind `sequence`
        self.arrivals = Timings()  # of deltas, from their requests' arrival until they are staged
        self.delivered: list[Stretch] = []  # by the last delivery
        self.ready_at = 0.0  # when what is delivered was committed, and through the fold
        self.fold_s = 0.0  # how long it took there
        self._staged = StagedDeltas()
        self.ahead = True  # whether it may be folded before it is committed
        self._folded: deque[FoldedFeed] = (
            deque()
        )  # ahead, behind `sequence`; the last may have paused
        self._folding_at = 0.0  # when that began, if the loop has not looked at the disk since
        self._ahead_due = False
        self._busy = False  # a thread has the fold
        self._due = False  # a step of its own is scheduled
        self.following = False
        self.closed = False

    # --- the beginning and the end ---

    async def activate(self) -> None:
        """Fold what the log holds, then follow it. Raises what the log raises."""
        more, looked_at = True, time.perf_counter()
        while more and not self.closed:
            looked_at, through = time.perf_counter(), self._partition.sequence_readable
            self._busy = True
            # Who is cancelled does not stop the thread, which has the fold until it is through.
            work = self._loop.run_in_executor(None, self._fold_slice, through)
            more = await asyncio.shield(work)
        if self.closed:
            raise Unavailable("the partition moved while its log was folded")
        self.following = True
        self._partition.journal.live = self
        self._target = self._partition.sequence_readable
        self._commits.add(self._target, looked_at)
        self._run()

    def _fold_slice(self, through: int) -> bool:
        """Fold the next piece of the log; False at its end. Nobody else has the fold yet."""
        try:
            return self._fold_next(through)
        finally:
            self._busy = False

    def _fold_next(self, through: int) -> bool:
        first = max(self.fold.sequence + 1, self._log.sequence_first)
        if first > through or self.closed:
            return False
        batches = _read(self._log, first, through=through, nowait=False) or []
        if not batches:
            return False
        deltas, last = _clipped(deltas_of(batches), first), batches[-1].last
        outcomes = self._fold_whole(deltas, last).outcomes
        self.releases.on_feed(deltas.sequences, *outcomes)
        for outcome in outcomes:
            self._quarantine.count(outcome)
        self.sequence = last
        return True

    def close(self) -> None:
        self.closed = True
        self._staged.clear()
        self._folded.clear()
        if self._partition.journal.live is self:
            self._partition.journal.live = None

    # --- from the journal ---

    def on_staged(self, batch: Batch, columns: Columns) -> None:
        """A batch is on its way to disk. What is not kept is read back once it is committed."""
        if self._staged.add(batch, columns) and not self._partition.journal.flusher.writing:
            self._plan_ahead()

    def on_enqueued(self, parts: Sequence[EnqueuePart]) -> None:
        now = time.perf_counter()
        for part in parts:
            self.arrivals.record(now - part.request.started, part.count)

    def _plan_ahead(self) -> None:
        """Fold what is staged in a step of its own: this one goes on to have it written. What is
        staged during a write is folded with all that goes into the next one."""
        if self.ahead and not self._ahead_due and self._staged.rows <= INLINE_ROWS:
            self._ahead_due = True
            self._loop.call_soon(self._run_ahead)

    def on_commit(self, sequence: int) -> None:
        self._target = sequence
        # What is heard of right behind a fold may have been durable since that began.
        self._commits.add(sequence, self._folding_at or time.perf_counter())
        if self._busy or self._due:
            return
        if self._staged.rows > INLINE_ROWS:
            self._due = True
            self._loop.call_soon(self._run)
            return
        self._run()
        if self._staged:
            self._plan_ahead()

    # --- folding ---

    @property
    def idle(self) -> bool:
        """Whether the fold may be looked at: it holds what is committed, and no thread has it."""
        return not (self._busy or self._folded)

    @property
    def quiet(self) -> bool:
        """Whether no thread has the fold."""
        return not self._busy

    def _run(self) -> None:
        """Fold what is committed."""
        self._due = False
        self._attempt(self._advance)

    def _run_ahead(self) -> None:
        """Fold what is being written."""
        self._ahead_due = False
        if self.ahead and not self._due:
            self._attempt(self._fold_ahead)

    def _attempt(self, step: Callable[[], None]) -> None:
        """The log and its writers go on whatever becomes of it."""
        if self._busy or self.closed:
            return
        try:
            step()
        except PenstockError as error:
            self._give_up(error)
        except Exception:
            log.exception("the live fold failed", partition=self._partition.index)
            self._give_up(Unavailable("the live fold failed"))

    def _fold_ahead(self) -> None:
        """Fold a little that is staged, for its commit; as one, for it is written so."""
        if self.fold.paused or self._staged.rows > INLINE_ROWS:
            return
        if len(self._folded) >= AHEAD_FEEDS_MAX:
            return
        behind = self._folded[-1].last if self._folded else self.sequence
        batches = self._staged.take(
            behind + 1, through=self._log.sequence_last, rows_max=INLINE_ROWS
        )
        if not batches:
            return
        self._folding_at = began = time.perf_counter()
        deltas, last = self._deltas(batches, behind + 1), batches[-1][0].last
        outcome = self.fold.feed(deltas, through=last, states=False)
        self._folded.append(FoldedFeed(deltas, last, [outcome], time.perf_counter() - began))
        self._loop.call_soon(self._loop.call_soon, self._looked)

    def _looked(self) -> None:
        """The loop has looked for completed writes since the fold ahead ended."""
        self._folding_at = 0.0

    def _deliver_folded(self) -> None:
        """Tell of what was folded ahead and is committed by now."""
        folded = self._folded
        ready: list[FoldedFeed] = []
        while folded and folded[0].last <= self._target:
            ready.append(folded.popleft())
        if ready and self.fold.paused and not folded:
            paused = ready.pop()
            self._in_thread(lambda: self._resolved(paused))
        if ready:
            self._finish(*ready)

    def _advance(self) -> None:
        if self._folded:
            self._deliver_folded()
        if self.sequence >= self._target or self._busy or self._folded:
            return
        batches = self._staged.take(self.sequence + 1, through=self._target, rows_max=LOOP_ROWS)
        if batches is None:
            found = _read(self._log, self.sequence + 1, through=self._target, nowait=True)
            if found is None:
                self._in_thread(self._fold_cold)
                return
            batches = [(batch, batch.columns()) for batch in found]
        if not batches:
            return
        began = time.perf_counter()
        deltas = self._deltas(batches, self.sequence + 1)
        last = batches[-1][0].last
        if len(deltas) > LOOP_ROWS:
            self._in_thread(lambda: self._fold_whole(deltas, last))
            return
        outcome = self.fold.feed(deltas, through=last, states=False)
        folded = FoldedFeed(deltas, last, [outcome], time.perf_counter() - began)
        if self.fold.paused:
            self._in_thread(lambda: self._resolved(folded))
            return
        self._finish(folded)
        if self.sequence < self._target and not self._due:
            self._due = True
            self._loop.call_soon(self._run)

    def _deltas(self, batches: list[tuple[Batch, Columns]], first: int) -> DeltaBatch:
        if len(batches) == 1:
            batch, columns = batches[0]
            if batch.kind is not Kind.ENQ:
                return DeltaBatch.empty()
            return _clipped(deltas_in(batch, columns), first)
        found = [deltas_in(*pair) for pair in batches if pair[0].kind is Kind.ENQ]
        return _clipped(DeltaBatch.concat(found), first)

    def _finish(self, *ready: FoldedFeed) -> None:
        """Tell of what is folded and committed."""
        self.ready_at = time.perf_counter()
        self.fold_s = sum(folded.seconds for folded in ready)
        for folded in ready:
            self.releases.on_feed(folded.deltas.sequences, *folded.outcomes)
            for outcome in folded.outcomes:
                self._quarantine.add(outcome)
        self.sequence = ready[-1].last
        self.delivered = self._commits.take(self.sequence)
        rows = [ReleasedRows.of(outcome) for folded in ready for outcome in folded.outcomes]
        self._deliver(rows[0] if len(rows) == 1 else ReleasedRows.concat(rows), self.sequence)

    # --- in a thread ---

    def _in_thread(self, work: Callable[[], FoldedFeed]) -> None:
        self._busy = True
        future = self._loop.run_in_executor(None, work)
        future.add_done_callback(self._done)

    def _done(self, future: asyncio.Future[FoldedFeed]) -> None:
        self._busy = False
        if self.closed or future.cancelled():
            return
        error = future.exception()
        if error is not None:
            known = error if isinstance(error, PenstockError) else None
            if known is None:
                log.error("the live fold failed", partition=self._partition.index, exc_info=error)
            self._give_up(known or Unavailable("the live fold failed"))
            return
        self._finish(future.result())
        self._run()

    def _fold_cold(self) -> FoldedFeed:
        first = self.sequence + 1
        batches = _read(self._log, first, through=self._target, nowait=False)
        if not batches:
            raise Unavailable(f"sequence {first} is committed and cannot be read")
        return self._fold_whole(_clipped(deltas_of(batches), first), batches[-1].last)

    def _fold_whole(self, deltas: DeltaBatch, last: int) -> FoldedFeed:
        began = time.perf_counter()
        outcome = self.fold.feed(deltas, through=last, states=False)
        return self._resolved(FoldedFeed(deltas, last, [outcome], time.perf_counter() - began))

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
        horizon = self._log.find_time(forgotten_ms, through=self._partition.sequence_readable)
        waiting = {delta.parent for delta in fold.waitlist.by_id.values() if delta.parent}
        return self._parents.find(wanted, waiting=waiting, horizon=horizon)

    def _give_up(self, error: PenstockError) -> None:
        self.close()
        self._fail(error)


def _read(log_: PartitionLog, first: int, *, through: int, nowait: bool) -> list[Batch] | None:
    """The batches from `first` on; from memory where the disk does not have them yet."""
    size = SLICE_BYTES if nowait else COLD_BYTES
    return log_.read_slice(first, through=through, bytes_max=size, nowait=nowait, staged=True)


def _clipped(deltas: DeltaBatch, first: int) -> DeltaBatch:
    """Without what a batch holds from before: a slice begins with the batch that covers `first`."""
    if len(deltas) and int(deltas.sequences[0]) < first:
        return deltas.take(deltas.sequences >= first)
    return deltas


class ParentSearch:
    """Whether the log has a parent from before the fold's memory of ids.

    The fold asks when a delta has waited too long for its parent, and stands still until it is
    answered; all that the log holds from before this memory may have to be read for that. So the
    parents of all that wait are looked for along with those that are asked for, and nobody's parent
    is looked for twice in the same place: however many are missing, the log is read about once in
    the time that a delta may wait.
    """

    def __init__(self, log: PartitionLog) -> None:
        self._log = log
        self._found: set[bytes] = set()
        self._looked: dict[bytes, int] = {}  # by id: the log before this sequence was looked at

    def find(self, wanted: set[bytes], *, waiting: set[bytes], horizon: int) -> set[bytes]:
        """Those of the wanted that the log has before `horizon`; `waiting` may be wanted soon.

        What is neither is forgotten. Blocks.
        """
        known, first = wanted | waiting, self._log.sequence_first
        self._looked = {id_: max(first, self._looked.get(id_, 0)) for id_ in known}
        self._found &= known
        left = wanted - self._found
        begin = min((self._looked[id_] for id_ in left), default=horizon)
        end = self._read(left, known, begin, horizon)
        for id_, looked in self._looked.items():
            if begin <= looked < end:
                self._looked[id_] = end
        return wanted & self._found

    def _read(self, left: set[bytes], known: set[bytes], at: int, horizon: int) -> int:
        """Look until those that are left are found; returns how far that was."""
        while at < horizon and not left <= self._found:
            batches = self._log.read_slice(
                at, through=horizon - 1, bytes_max=SEARCH_BYTES, nowait=False, staged=True
            )
            if not batches:
                break
            self._found |= known.intersection(deltas_of(batches).delta_ids())
            at = batches[-1].last + 1
        return at


Pair = tuple[Batch, Columns]


class StagedDeltas:
    """Batches on their way to disk, in the order of the log: a feed need not read them back."""

    __slots__ = ("_batches", "_bytes", "rows")

    def __init__(self) -> None:
        self._batches: deque[Pair] = deque()
        self._bytes = self.rows = 0

    def __len__(self) -> int:
        return len(self._batches)

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
