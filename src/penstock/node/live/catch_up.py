"""Reading on from the log: what a subscriber gets that is behind, or that starts in the past.

A slice of the log is read and put in the order of release with the partition's `Releases`; nothing
is folded again. Deltas that were released later than their place are fetched from where they stand.
At most one slice is held at a time, and none is read before the last one is sent, so a subscriber
costs a slice and its credit, however far behind it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import Unavailable
from penstock.log.partition import PartitionLog
from penstock.model.batch import Batch
from penstock.model.delta_batch import DeltaBatch, deltas_of, sixteens
from penstock.node.clock import NextTurn
from penstock.node.serve.streams import gone
from penstock.node.storage.log_io import SliceReader
from penstock.propagation.flow.route import Routes, wanted
from penstock.propagation.fold.releases import ReleasedRows, Releases

SLICE_BYTES: Final = 256 << 10  # of log, put in order in one step of the loop
OLDEST: Final = -1  # as a start: whatever the log still has
SEARCH_BYTES: Final = 4 << 20  # of log read at once in search of parents
SLICES_PER_TURN: Final = 2
LATE_MAX: Final = 64  # deltas looked up in one step of the loop; more than these by a thread
Sequences = NDArray[np.uint64]
T = TypeVar("T")


class ReleaseSource(Protocol):
    """A partition whose log is folded up to `sequence`."""

    log: PartitionLog
    releases: Releases
    sequence: int

    @property
    def sequence_committed(self) -> int: ...

    @property
    def fold_idle(self) -> bool: ...


@dataclass(eq=False)
class CatchUp:
    """Rows from position `next` on. `held` were read and are not sent yet: they come before it."""

    source: ReleaseSource
    _: KW_ONLY
    next: int
    routes: Routes
    sent: dict[bytes, int]  # by vector, the last ordinal that was sent before, out of turn
    errand: SliceReader
    held: ReleasedRows | None = None
    _at: int = 0  # rows of `held` that were taken
    _batches: list[Batch] | None = None  # read, and waiting for what was late

    def __post_init__(self) -> None:
        self._sent_last = max(self.sent.values(), default=0)

    @property
    def settled(self) -> int:
        """Everything up to here has been taken out of `held`."""
        return self.next - 1 if self.held is None else int(self.held.positions[self._at]) - 1

    @property
    def left(self) -> int:
        return 0 if self.held is None else len(self.held) - self._at

    @property
    def done(self) -> bool:
        return self.held is None and not self.errand.busy and self.next > self.source.sequence

    def take(self, entries: int, size: int) -> ReleasedRows:
        """The next rows of `held` that fit so many bytes, one at least."""
        held, at = self.held, self._at
        assert held is not None
        ends = held.batch.sizes[at : at + entries].cumsum()
        end = at + max(1, int(ends.searchsorted(size, side="right")))
        self._at = end
        if end == len(held):
            self.held = None
        return held.cut(at, end)

    def fill(self) -> bool:
        """Read the next slice; False if a thread does. `held` may stay None: nothing is wanted."""
        if self.errand.busy:
            return False
        if self.next < self.source.log.sequence_first:
            raise gone(self.next, sequence_first=oldest_position(self.source))
        if self._batches is None:
            self._batches = self.errand.read(
                self.next, through=self.source.sequence_committed, bytes_max=SLICE_BYTES,
                then=self._keep,
            )  # fmt: skip
            if self._batches is None:
                return False
        return self._order(self._batches)

    def _keep(self, batches: list[Batch]) -> None:
        self._batches = batches

    def _order(self, batches: list[Batch]) -> bool:
        """Put what was read in the order of release; False if something late is to be fetched."""
        if not batches:
            raise Unavailable(f"sequence {self.next} is committed and cannot be read")
        first, last = self.next, min(batches[-1].last, self.source.sequence)
        log, late = self.source.log, self.source.releases.late_sequences(first, last)
        if len(late) and int(late[0]) < log.sequence_first:
            raise gone(first, sequence_first=oldest_position(self.source))
        found = deltas_at(log, late, nowait=True) if len(late) <= LATE_MAX else None
        if found is None:
            self.errand.run(
                lambda: deltas_at(log, late, nowait=False),
                lambda found: self._hold(batches, last, found or DeltaBatch.empty()),
            )
            return False
        self._hold(batches, last, found)
        return True

    def _hold(self, batches: list[Batch], last: int, late: DeltaBatch) -> None:
        releases = self.source.releases
        rows = releases.rows(deltas_of(batches), self.next, last, late)
        rows = wanted(rows, self.routes)
        if self.sent:
            rows = self._unsent(rows)
            if releases.ordinal_at(last) >= self._sent_last:
                self.sent = {}
        self._batches, self.next = None, last + 1
        self.held, self._at = rows if len(rows) else None, 0

    def _unsent(self, rows: ReleasedRows) -> ReleasedRows:
        vectors, ordinals = sixteens(rows.batch.vector), rows.ordinals.tolist()
        pairs = zip(vectors, ordinals, strict=True)
        return rows.take(np.array([n > self.sent.get(v, 0) for v, n in pairs], np.bool_))


def oldest_position(source: ReleaseSource) -> int:
    """From where on the log has all that was released. That may be a little behind its first
    sequence: what was released there had perhaps waited since before."""
    return source.releases.whole_from(source.log.sequence_first)


def deltas_at(log: PartitionLog, sequences: Sequences, *, nowait: bool) -> DeltaBatch | None:
    """The deltas at these places of the log; None if the page cache misses."""
    found: list[DeltaBatch] = []
    at = 0
    while at < len(sequences):
        batch = log.reader.read(int(sequences[at]), nowait=nowait)
        if batch is None:
            return None
        end = int(np.searchsorted(sequences, np.uint64(batch.last), side="right"))
        deltas = deltas_of([batch])
        found.append(deltas.take(np.isin(deltas.sequences, sequences[at:end])))
        at = max(end, at + 1)
    return DeltaBatch.concat(found)


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
        """Those before `horizon`. What is neither wanted nor `waiting` is forgotten. Blocks."""
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
            batches = self._log.reader.read_slice(
                at, through=horizon - 1, bytes_max=SEARCH_BYTES, nowait=False, staged=True
            )
            if not batches:
                break
            self._found |= known.intersection(deltas_of(batches).delta_ids())
            at = batches[-1].last + 1
        return at


class ReadTurns:
    """Which of a node's subscribers reads on from its log next.

    A subscriber that is behind reads a slice of the log, puts it in order and sends it in one step
    of the loop. However many of them there are, no more than a few have a step in one turn of the
    loop, in rotation, so that writers and live subscribers wait for these few and not for all.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._next = NextTurn(self._take)

    def add(self, step: Callable[[], None]) -> None:
        """Have a step done, when those who came before had theirs."""
        self._waiting.append(step)
        self._next.ask()

    def _take(self) -> None:
        try:
            for _ in range(min(SLICES_PER_TURN, len(self._waiting))):
                self._waiting.popleft()()
        finally:
            if self._waiting:
                self._next.ask()
