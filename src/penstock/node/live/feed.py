"""From a commit to what it releases: the fold of one partition, fed as its log grows.

The fold is the pipeline's own (`penstock.propagation.partition`), so what it releases, where and in
which order is a function of the log. A feed first folds what the log holds already, in a thread;
then it *follows*: the journal hands it every batch when it is staged, and tells of the commit.

    idle ──commit──► fold on the loop ──► deliver ──► idle
      └──► much, cold, or a parent is to be looked up: in a thread ──► deliver ──┘

Whoever is delivered to hears of whole feeds only: `sequence` is how far everything that the log has
released is told. A feed that fails is over; its owner makes another, which folds the log anew.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from penstock.errors import PenstockError, Unavailable
from penstock.log.partition import PartitionLog
from penstock.model.batch import Batch, Kind
from penstock.model.columns import Columns
from penstock.model.delta_batch import DeltaBatch
from penstock.model.delta_log import deltas_in, deltas_of
from penstock.node.logs import get_logger
from penstock.node.partition import Partition
from penstock.propagation.partition import Outcome, Propagator
from penstock.propagation.releases import Releases
from penstock.propagation.rows import Rows

INLINE_ROWS: Final = 256  # folded in the very step of the loop that commits them
LOOP_ROWS: Final = 2048  # … in a step of their own; more than these by a thread
SLICE_BYTES: Final = 1 << 20  # of log read at once where it was not handed over
COLD_BYTES: Final = 4 << 20  # … by a thread
STAGED_BYTES_MAX: Final = 16 << 20  # kept until they are committed; beyond, the log is read
log = get_logger(__name__)

Deliver = Callable[[Rows, int], None]


class Feed:
    def __init__(
        self,
        partition: Partition,
        *,
        dimensions: int,
        deliver: Deliver,
        fail: Callable[[PenstockError], None],
    ) -> None:
        self._partition, self._log = partition, partition.log
        self._deliver, self._fail = deliver, fail
        self._loop = asyncio.get_running_loop()
        self.fold = Propagator(dimensions)
        self.releases = Releases()
        self.sequence = 0  # everything that the log released up to here is delivered
        self._target = 0  # committed up to here
        self.committed_at = 0.0  # when that was heard last, by the performance counter
        self.ordered_at = 0.0  # when the last feed was through the fold
        self._staged: deque[tuple[Batch, Columns]] = deque()
        self._staged_rows = self._staged_bytes = 0
        self._busy = False  # a thread has the fold
        self._due = False  # a step of its own is scheduled
        self.following = False
        self.closed = False

    # --- the beginning and the end ---

    async def activate(self) -> None:
        """Fold what the log holds, then follow it. Raises what the log raises."""
        more = True
        while more and not self.closed:
            through = self._partition.sequence_readable
            self._busy = True
            # Who is cancelled does not stop the thread, which has the fold until it is through.
            work = self._loop.run_in_executor(None, self._fold_slice, through)
            more = await asyncio.shield(work)
        if self.closed:
            raise Unavailable("the partition moved while its log was folded")
        self.following = True
        self._partition.journal.live = self
        self._target = self._partition.sequence_readable
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
        self.releases.on_feed(deltas.sequences, *self._fold_whole(deltas, last))
        self.sequence = last
        return True

    def close(self) -> None:
        self.closed = True
        self._staged.clear()
        if self._partition.journal.live is self:
            self._partition.journal.live = None

    # --- from the journal ---

    def on_staged(self, batch: Batch, columns: Columns) -> None:
        """A batch is on its way to disk. What is not kept is read back once it is committed."""
        if self._staged_bytes < STAGED_BYTES_MAX:
            self._staged.append((batch, columns))
            self._staged_rows += batch.entries
            self._staged_bytes += batch.size

    def on_commit(self, sequence: int) -> None:
        self._target = sequence
        self.committed_at = time.perf_counter()
        if self._busy or self._due:
            return
        if self._staged_rows > INLINE_ROWS:
            self._due = True
            self._loop.call_soon(self._run)
        else:
            self._run()

    # --- folding ---

    @property
    def idle(self) -> bool:
        """Whether the fold may be looked at: no thread has it."""
        return not self._busy

    def _run(self) -> None:
        """Fold what is committed. The log and its writers go on whatever becomes of it."""
        self._due = False
        if self._busy or self.closed:
            return
        try:
            self._advance()
        except PenstockError as error:
            self._give_up(error)
        except Exception:
            log.exception("the live fold failed", partition=self._partition.index)
            self._give_up(Unavailable("the live fold failed"))

    def _advance(self) -> None:
        if self.sequence >= self._target:
            return
        batches = self._take_staged()
        if batches is None:
            found = _read(self._log, self.sequence + 1, through=self._target, nowait=True)
            if found is None:
                self._in_thread(self._fold_cold)
                return
            batches = [(batch, batch.columns()) for batch in found]
        if not batches:
            return
        deltas = self._deltas(batches)
        last = batches[-1][0].last
        if len(deltas) > LOOP_ROWS:
            self._in_thread(lambda: (deltas, last, self._fold_whole(deltas, last)))
            return
        outcome = self.fold.feed(deltas, through=last, states=False)
        if self.fold.paused:
            self._in_thread(lambda: (deltas, last, self._resolved(outcome)))
            return
        self._finish(deltas, last, [outcome])
        if self.sequence < self._target and not self._due:
            self._due = True
            self._loop.call_soon(self._run)

    def _take_staged(self) -> list[tuple[Batch, Columns]] | None:
        """Committed batches that were handed over and come next; None: the log has to be read."""
        staged, following = self._staged, self.sequence + 1
        while staged and staged[0][0].last < following:
            self._drop_staged()
        if not staged or staged[0][0].first != following:
            return None
        found: list[tuple[Batch, Columns]] = []
        rows = 0
        while staged and staged[0][0].last <= self._target and staged[0][0].first == following:
            rows += staged[0][0].entries
            if found and rows > LOOP_ROWS:
                break
            following = staged[0][0].last + 1
            found.append(self._drop_staged())
        return found

    def _drop_staged(self) -> tuple[Batch, Columns]:
        found = self._staged.popleft()
        self._staged_rows -= found[0].entries
        self._staged_bytes -= found[0].size
        return found

    def _deltas(self, batches: list[tuple[Batch, Columns]]) -> DeltaBatch:
        if len(batches) == 1:
            batch, columns = batches[0]
            if batch.kind is not Kind.ENQ:
                return DeltaBatch.empty()
            return _clipped(deltas_in(batch, columns), self.sequence + 1)
        found = [deltas_in(*pair) for pair in batches if pair[0].kind is Kind.ENQ]
        return _clipped(DeltaBatch.concat(found), self.sequence + 1)

    def _finish(self, deltas: DeltaBatch, last: int, outcomes: list[Outcome]) -> None:
        self.releases.on_feed(deltas.sequences, *outcomes)
        self.sequence = last
        self.ordered_at = time.perf_counter()
        self._deliver(Rows.concat([Rows.of(outcome) for outcome in outcomes]), last)

    # --- in a thread ---

    def _in_thread(self, work: Callable[[], tuple[DeltaBatch, int, list[Outcome]]]) -> None:
        self._busy = True
        future = self._loop.run_in_executor(None, work)
        future.add_done_callback(self._done)

    def _done(self, future: asyncio.Future[tuple[DeltaBatch, int, list[Outcome]]]) -> None:
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
        deltas, last, outcomes = future.result()
        self._finish(deltas, last, outcomes)
        self._run()

    def _fold_cold(self) -> tuple[DeltaBatch, int, list[Outcome]]:
        first = self.sequence + 1
        batches = _read(self._log, first, through=self._target, nowait=False)
        if not batches:
            raise Unavailable(f"sequence {first} is committed and cannot be read")
        deltas, last = _clipped(deltas_of(batches), first), batches[-1].last
        return deltas, last, self._fold_whole(deltas, last)

    def _fold_whole(self, deltas: DeltaBatch, last: int) -> list[Outcome]:
        return self._resolved(self.fold.feed(deltas, through=last, states=False))

    def _resolved(self, outcome: Outcome) -> list[Outcome]:
        """The rest of a feed that may have paused, as every reader of the log resolves it."""
        outcomes = [outcome]
        while ids := self.fold.missing():
            outcomes.append(self.fold.resolve(self._find(set(ids))))
        return outcomes

    def _find(self, wanted: set[bytes]) -> set[bytes]:
        """Those of the wanted deltas that the log has from before the fold's memory of ids."""
        fold, found = self.fold, set[bytes]()
        forgotten_ms = fold.ledger.time_ms - fold.options.dedup_ms
        first = self._log.sequence_first
        horizon = self._log.find_time(forgotten_ms, through=self._partition.sequence_readable)
        while first < horizon and found != wanted:
            batches = _read(self._log, first, through=horizon - 1, nowait=False)
            if not batches:
                break
            found |= wanted.intersection(deltas_of(batches).delta_ids())
            first = batches[-1].last + 1
        return found

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
