"""Reading on from the log: what a subscriber gets that is behind, or that starts in the past.

A slice of the log is read and put in the order of release with the partition's `Releases`; nothing
is folded again. Deltas that were released later than their place are fetched from where they stand.
At most one slice is held at a time, and none is read before the last one is sent, so a subscriber
costs a slice and its credit, however far behind it is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidArgument, Unavailable
from penstock.log.partition import PartitionLog
from penstock.model.batch import Batch
from penstock.model.delta_batch import DeltaBatch, deltas_of, sixteens
from penstock.node.live.cursors import LiveCursor
from penstock.node.live.released_columns import Routes, wanted
from penstock.node.serve.streams import gone
from penstock.propagation.fold.releases import ReleasedRows, Releases

if TYPE_CHECKING:
    from penstock.node.live.partition import LivePartition

SLICE_BYTES: Final = 256 << 10  # of log, put in order in one step of the loop
OLDEST: Final = -1  # as a start: whatever the log still has
SLICES_PER_TURN: Final = 2
LATE_MAX: Final = 64  # deltas looked up in one step of the loop; more than these by a thread
Sequences = NDArray[np.uint64]
T = TypeVar("T")


class ReleaseSource(Protocol):
    """A partition whose log is folded up to `sequence`."""

    @property
    def log(self) -> PartitionLog: ...

    @property
    def releases(self) -> Releases: ...

    @property
    def sequence(self) -> int: ...

    @property
    def sequence_committed(self) -> int: ...

    @property
    def fold_idle(self) -> bool: ...


class CatchUp:
    """Rows from position `next` on. `held` were read and are not sent yet: they come before it."""

    def __init__(
        self,
        source: ReleaseSource,
        *,
        first: int,
        routes: Routes,
        sent: dict[bytes, int],
        wake: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._source, self._routes = source, routes
        self._sent = sent  # by vector, the last ordinal that was sent before, out of turn
        self._sent_last = max(sent.values(), default=0)
        self._wake, self._fail = wake, fail
        self.next = first
        self.held: ReleasedRows | None = None
        self._at = 0  # rows of `held` that were taken
        self._batches: list[Batch] | None = None  # read, and waiting for what was late
        self._reading = False
        self.closed = False

    @property
    def settled(self) -> int:
        """Everything up to here has been taken out of `held`."""
        return self.next - 1 if self.held is None else int(self.held.positions[self._at]) - 1

    @property
    def left(self) -> int:
        """Rows of `held` that are not taken."""
        return 0 if self.held is None else len(self.held) - self._at

    @property
    def busy(self) -> bool:
        """Whether a thread reads."""
        return self._reading

    @property
    def done(self) -> bool:
        """Whether all that the partition has released so far was taken."""
        return self.held is None and not self._reading and self.next > self._source.sequence

    def take(self, entries: int, size: int) -> ReleasedRows:
        """The next rows of `held` that fit so many bytes, one at least."""
        held, at = self.held, self._at
        assert held is not None
        ends = np.cumsum(held.batch.sizes[at : at + entries])
        end = at + max(1, int(np.searchsorted(ends, size, side="right")))
        self._at = end
        if end == len(held):
            self.held = None
        return held.cut(at, end)

    def fill(self) -> bool:
        """Read the next slice; False if a thread reads it, which will wake whoever waits.

        `held` stays None if there is nothing for this subscriber in it.
        """
        if self._reading:
            return False
        if self.next < self._source.log.sequence_first:
            raise gone(self.next, sequence_first=oldest_position(self._source))
        if self._batches is None:
            batches = self._read(nowait=True)
            if batches is None:
                self._in_thread(lambda: self._read(nowait=False), self._on_batches)
                return False
            self._batches = batches
        return self._order(self._batches)

    def _read(self, *, nowait: bool) -> list[Batch] | None:
        source = self._source
        return source.log.read_slice(
            self.next, through=source.sequence_committed, bytes_max=SLICE_BYTES, nowait=nowait,
            staged=True,
        )  # fmt: skip

    def _on_batches(self, batches: list[Batch] | None) -> None:
        self._batches = batches or []
        self._wake()

    def _order(self, batches: list[Batch]) -> bool:
        """Put what was read in the order of release; False if something late is to be fetched."""
        if not batches:
            raise Unavailable(f"sequence {self.next} is committed and cannot be read")
        first, last = self.next, min(batches[-1].last, self._source.sequence)
        late = self._source.releases.late_sequences(first, last)
        if not len(late):
            self._hold(batches, last, DeltaBatch.empty())
            return True
        if int(late[0]) < self._source.log.sequence_first:
            raise gone(first, sequence_first=oldest_position(self._source))
        found = None
        if len(late) <= LATE_MAX:
            found = deltas_at(self._source.log, late, nowait=True)
        if found is None:
            self._in_thread(
                lambda: deltas_at(self._source.log, late, nowait=False),
                lambda found: self._on_late(batches, last, found),
            )
            return False
        self._hold(batches, last, found)
        return True

    def _on_late(self, batches: list[Batch], last: int, late: DeltaBatch | None) -> None:
        self._hold(batches, last, late or DeltaBatch.empty())
        self._wake()

    def _hold(self, batches: list[Batch], last: int, late: DeltaBatch) -> None:
        releases = self._source.releases
        rows = releases.rows(deltas_of(batches), self.next, last, lambda _: late)
        rows = wanted(rows, self._routes)
        if self._sent:
            rows = self._unsent(rows)
            if releases.ordinal_at(last) >= self._sent_last:
                self._sent = {}
        self._batches, self.next = None, last + 1
        self.held, self._at = rows if len(rows) else None, 0

    def _unsent(self, rows: ReleasedRows) -> ReleasedRows:
        vectors, ordinals = sixteens(rows.batch.vector), rows.ordinals.tolist()
        pairs = zip(vectors, ordinals, strict=True)
        return rows.take(np.array([n > self._sent.get(v, 0) for v, n in pairs], np.bool_))

    def _in_thread(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        self._reading = True
        future = asyncio.get_running_loop().run_in_executor(None, work)

        def done(future: asyncio.Future[T]) -> None:
            self._reading = False
            if self.closed or future.cancelled():
                return
            error = future.exception()
            if error is not None:
                self._fail(error)
            else:
                then(future.result())

        future.add_done_callback(done)


def oldest_position(source: ReleaseSource) -> int:
    """From where on the log has all that was released. That may be a little behind its first
    sequence: what was released there had perhaps waited since before."""
    log, releases = source.log, source.releases
    first = log.sequence_first
    if first == 1:
        return first  # nothing was ever dropped
    low, high = first, max(source.sequence, first - 1) + 1
    while low < high:
        middle = (low + high) // 2
        late = releases.late_sequences(middle, source.sequence)
        if len(late) and int(late[0]) < first:
            low = middle + 1
        else:
            high = middle
    return low


def deltas_at(log: PartitionLog, sequences: Sequences, *, nowait: bool) -> DeltaBatch | None:
    """The deltas at these places of the log; None if the page cache misses."""
    found: list[DeltaBatch] = []
    at = 0
    while at < len(sequences):
        batch = log.read(int(sequences[at]), nowait=nowait)
        if batch is None:
            return None
        end = int(np.searchsorted(sequences, np.uint64(batch.last), side="right"))
        deltas = deltas_of([batch])
        found.append(deltas.take(np.isin(deltas.sequences, sequences[at:end])))
        at = max(end, at + 1)
    return DeltaBatch.concat(found)


async def position_of(
    live: LivePartition, *, start: str, at: int, stored: LiveCursor | None, committed: int
) -> int:
    """The first position that is wanted. `committed` is from when the request came."""
    if start == "now":
        return committed + 1
    if start == "time":
        found = await asyncio.to_thread(live.log.find_time, at, through=committed)
        return max(found, oldest_position(live))
    if start == "cursor":
        if stored is not None:
            at = stored.position + 1
        elif not at:
            return committed + 1
    elif start != "sequence":
        raise InvalidArgument("start must be one of now, sequence, time, cursor", field="start")
    oldest = oldest_position(live)
    if at <= 0:
        return oldest
    if at < oldest:
        raise gone(at, sequence_first=oldest)
    return at


def opened_at(live: LivePartition, first: int) -> dict[str, int]:
    """What a subscriber is told of where it starts."""
    releases = live.releases
    ordinal = releases.ordinal_at(first - 1) if first <= live.sequence else releases.ordinal
    return {
        "position": first - 1,
        "ordinal": ordinal,
        "epoch": live.partition.coordinator.epoch,
        "sequence_committed": live.sequence_committed,
        "topic": live.partition.heap.config.id,
    }


class ReadTurns:
    """Which of a node's subscribers reads on from its log next.

    A subscriber that is behind reads a slice of the log, puts it in order and sends it in one step
    of the loop. However many of them there are, no more than a few have a step in one turn of the
    loop, in rotation, so that writers and live subscribers wait for these few and not for all.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._due = False

    def add(self, step: Callable[[], None]) -> None:
        """Have a step done, when those who came before had theirs."""
        self._waiting.append(step)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._take)

    def _take(self) -> None:
        self._due = False
        try:
            for _ in range(min(SLICES_PER_TURN, len(self._waiting))):
                self._waiting.popleft()()
        finally:
            self._schedule()
