"""The end of a log that is being written: staging, writing, and reading what is there.

Three parties use a log at once, without waiting for each other:

- the event loop *stages* batches (decides where they lie), *takes* what is staged as one flush, and
  reads durable batches, from memory or the page cache;
- one writer thread *writes* a flush, syncs it, and sets space aside ahead of need;
- upkeep threads scan, snapshot, drop and rewrite sealed segments.

Invariants: sequences have no gap · `sequence_first - 1 <= sequence_durable <= sequence_last` · a
batch is readable only when durable, or committed by others, except to who asks for staged ones ·
the persisted floor is at most `min(sequence_durable, sequence_committed)` · after a failed write
nothing is ever acknowledged again · the list of segments is replaced, never changed, so a reader's
view of it stays whole.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from penstock.errors import DiskFull, NotFound, StorageFailed
from penstock.log.cache import BatchCache
from penstock.log.layout import FloorFlag, SegmentHeader
from penstock.log.pending import Pending
from penstock.log.reader import Reader
from penstock.log.recovery import Recovered
from penstock.log.segment import Segment, SegmentInfo
from penstock.log.staging import Flush, LogOptions, Staging
from penstock.log.table import SegmentTable
from penstock.log.watch import Watch
from penstock.log.writer import Writer
from penstock.model.batch import Batch, verify_chain

FULL_RETRY_S: Final = 1.0
BEGIN_BYTES_MAX: Final = 256 << 10  # copied to the page cache on the loop; more takes a thread
_log = logging.getLogger(__name__)


class AppendLog:
    """See the module. `PartitionLog` is what is opened; this is its hot half."""

    def __init__(
        self, folder: Path, found: Recovered, *, topic: int, partition: int, options: LogOptions
    ) -> None:
        self.folder, self.topic, self.partition, self.options = folder, topic, partition, options
        self._table = SegmentTable(index_bytes=options.index_bytes)
        self._cache = BatchCache(options.cache_bytes)
        self._pending = Pending()
        self._reader = Reader(self._table, self._cache)
        self.watch = Watch()  # over every read of what is stored
        self._staging = Staging(folder, options)
        self._writer = Writer(found.floor, floor_s=options.floor_s)
        self._failure = ""  # why nothing may be acknowledged any more
        self._ahead_due = 0.0  # a full disk is not asked again before
        self._restart(found.segments)

    def _restart(self, segments: list[Segment]) -> None:
        """Take these segments for the whole log, all of it durable, and go on behind them."""
        newest = segments[-1] if segments else None
        slot = self._writer.floor.slot
        self._table.restart(segments, empty_at=slot.empty_at)
        self._staging.restart(newest)
        self._writer.restart(newest)
        self._pending.clear()
        self._cache.forget(self._writer.durable + 1, 1 << 64)
        # The log is being received from another replica; begin again if that was cut short.
        self.seeding = bool(slot.flags & FloorFlag.SEEDING)
        self.sequence_last = self._writer.durable  # staged
        self.epoch_last = newest.epoch if newest else slot.epoch
        self.chain_last = newest.chain if newest else slot.chain
        self.time_ms_last = newest.time_ms if newest else 0

    @property
    def sequence_first(self) -> int:
        return self._table.first

    @property
    def sequence_durable(self) -> int:
        return self._writer.durable

    @property
    def sequence_committed(self) -> int:
        """What is known to be committed: after opening, what the floor says."""
        return self._writer.committed

    @property
    def floor_due(self) -> bool:
        """Whether `persist_floor` was not called for a while."""
        return self._writer.floor_due

    @property
    def bytes_total(self) -> int:
        return self._table.bytes

    # --- the event loop ---

    def room(self, enqueue: bool) -> int:
        """Any one batch of at most so many bytes can be staged now without growing."""
        return 0 if self._failure else self._staging.room(enqueue=enqueue)

    def stage(self, batch: Batch, *, received: bool = False) -> None:
        """Give the next batch its place; beyond `room(False)` raises `DiskFull`, no change.

        One that was `received` from another node is checked against the hash chain first. Only
        while the log is seeding it may be a compacted one.
        """
        self._check_health()
        if batch.first != self.sequence_last + 1 or batch.epoch_previous != self.epoch_last:
            raise ValueError(
                f"batch {batch.first} after epoch {batch.epoch_previous} does not follow"
                f" {self.sequence_last} of epoch {self.epoch_last}"
            )
        if received or batch.compacted:
            self._check_received(batch)
        if type(batch.body) is not bytes:  # a view would keep a whole network buffer alive
            batch = msgspec.structs.replace(batch, body=bytes(batch.body))
        begun = self._staging.add(batch, header=self._next_header)
        if begun is not None:
            self._table.append(begun)
        self._cache.put(batch)
        self._pending.add(batch)
        self.sequence_last, self.epoch_last = batch.last, batch.epoch
        self.chain_last, self.time_ms_last = batch.chain, batch.time_ms

    def advance_commit(self, sequence: int) -> None:
        """Everything up to `sequence` is committed; it is never cut off again. Never goes back."""
        if sequence > self.sequence_last:
            raise ValueError(f"commit at {sequence} is past the end {self.sequence_last}")
        if sequence > self._writer.committed:
            self._writer.committed = sequence

    def take(self) -> Flush | None:
        """What is staged and not handed out yet. Write every flush, in the order taken."""
        return self._staging.take()

    def first_of(self, sequence: int) -> int | None:
        """Where the batch that covers `sequence` begins; None when the disk is needed to tell."""
        ahead = self._ahead(sequence)
        if ahead is not None:
            return ahead.first
        self._check_held(sequence)
        _, opened = self._table.locate(sequence, nowait=True)
        return None if opened is None else opened.index.firsts[opened.index.find(sequence)]

    def read(self, sequence: int, *, nowait: bool) -> Batch | None:
        """The batch that covers `sequence`, durable here or committed by others; None when `nowait`
        and the disk is needed."""
        ahead = self._ahead(sequence)
        if ahead is not None:
            return ahead
        self._check_held(sequence)
        with self.watch:
            return self._reader.read(sequence, nowait=nowait)

    def _ahead(self, sequence: int) -> Batch | None:
        """A batch that was committed without this disk. It is in memory until it is durable."""
        if not self._writer.durable < sequence <= self._writer.committed:
            return None
        found = self._pending.slice(sequence, through=self.sequence_last, bytes_max=0)
        return found[0] if found else None  # else it has become durable just now

    def read_slice(
        self, from_sequence: int, *, through: int, bytes_max: int, nowait: bool,
        staged: bool = False,
    ) -> list[Batch] | None:  # fmt: skip
        """Whole batches from the one that covers `from_sequence`, none that ends past `through`.

        At least one if there is any, whatever its size; it may stop short of both bounds, so go on
        from where it ended. Empty at the end of the log, which with `staged` is `sequence_last`.
        """
        if staged and from_sequence > self.sequence_durable:
            found = self._pending.slice(from_sequence, through=through, bytes_max=bytes_max)
            if found:
                return found  # else it is not there, or has become durable just now
        through = min(through, self.sequence_durable)
        if from_sequence > through:
            return []
        self._check_held(from_sequence)
        with self.watch:
            return self._reader.slice(
                from_sequence, through=through, bytes_max=bytes_max, nowait=nowait
            )

    def begin(self, flush: Flush) -> int | None:
        """Hand a flush to the page cache; returns the descriptor to sync before `finish`.

        None: the writer thread has to `write` it, because it is much, begins a segment, or there
        is upkeep to do with it.
        """
        self._check_health()
        piece = flush.pieces[0]
        if len(flush.pieces) > 1 or piece.spare is not None or piece.size > BEGIN_BYTES_MAX:
            return None
        if not self._is_grown_ahead():
            return None
        try:
            return self._writer.begin(piece)
        except OSError as error:
            self._fail(error)

    def finish(self, flush: Flush, error: OSError | None) -> int:
        """The sync of a flush that was begun has ended; as `write`."""
        if error is not None:
            self._fail(error)
        self._writer.finish(flush.pieces[0])
        self._pending.forget(self._writer.durable)
        return self._writer.durable

    # --- the writer thread ---

    def write(self, flush: Flush) -> int:
        """Make a flush durable; returns the last durable sequence.

        A failure is final: what the disk holds is unknown, and a second sync may lie about it.
        """
        self._check_health()
        try:
            for piece in flush.pieces:
                sealed = self._writer.write(piece)
                if sealed is not None:
                    self._table.touch(sealed)
            self._pending.forget(self._writer.durable)
            self._writer.keep_floor()
            self._grow_ahead()
        except OSError as error:
            self._fail(error)
        return self._writer.durable

    def grow(self, bytes: int) -> None:
        """Make room for a batch of that size; raises `DiskFull`."""
        self._check_health()
        try:
            self._staging.grow(bytes)
        except OSError as error:
            self._fail(error)

    def persist_floor(self) -> None:
        """Persist what is committed now, when that is due, or the log fell idle after a write."""
        self._check_health()
        try:
            self._writer.raise_floor()
        except OSError as error:
            self._fail(error)

    def find_time(self, time_ms: int, *, through: int) -> int:
        """Where the log reached `time_ms`: a batch's first sequence, or `through + 1`. Blocks."""
        through = min(through, self.sequence_durable)
        if through < self.sequence_first:
            return self.sequence_first
        with self.watch:
            return self._reader.find_time(time_ms, through=through)

    def extent(
        self, from_sequence: int, *, through: int, entries_max: int, bytes_max: int
    ) -> tuple[int, int]:
        """The last sequence of the whole batches that fit both bounds, and their bytes. Blocks."""
        through = min(through, self.sequence_durable)
        if from_sequence > through:
            return from_sequence - 1, 0
        self._check_held(from_sequence)
        with self.watch:
            return self._reader.extent(
                from_sequence, through=through, entries_max=entries_max, bytes_max=bytes_max
            )

    def epoch_runs(self, from_sequence: int) -> list[tuple[int, int]]:
        """(epoch, first sequence) of each run of one epoch from `from_sequence` on, durable ones.

        The first begins at `from_sequence`, or where the log does. Reads headers; blocks.
        """
        from_sequence = max(from_sequence, self.sequence_first)
        with self.watch:
            return self._reader.epoch_runs(from_sequence, self.sequence_durable)

    def first_as_written(self) -> int:
        """The sequence from which on no batch is compacted: what a follower may copy. Blocks."""
        with self.watch:
            return self._reader.first_as_written(self.sequence_durable)

    # --- recovery and upkeep ---

    def scan(self, from_sequence: int) -> Iterator[Batch]:
        """Every durable batch from the one that covers `from_sequence`, CRC and chain verified.

        Bodies are views into read chunks of some MiB: copy what is to be kept.
        """
        from_sequence = max(from_sequence, self.sequence_first)
        return self.watch.over(self._reader.scan(from_sequence, self.sequence_durable))

    def scrub(self) -> Iterator[int]:
        """Verify what is sealed, in small steps that yield their bytes; raises `Corruption`."""
        return self.watch.over(self._reader.scrub())

    def segments(self) -> list[SegmentInfo]:
        return [segment.info() for segment in self._table.segments()]

    # --- inside ---

    def _grow_ahead(self) -> None:
        """Set space aside before it is asked for; a full disk is the asker's to hear of."""
        if self._is_grown_ahead():
            return
        try:
            self._staging.grow(max(self._ahead_bytes, 8))
        except DiskFull as error:
            self._ahead_due = time.monotonic() + FULL_RETRY_S
            _log.warning("%s: no space can be set aside: %s", self.folder, error.message)

    @property
    def _ahead_bytes(self) -> int:
        half = min(self.options.allocate_bytes, self.options.segment_bytes) // 2
        return half - self.options.reserve_bytes

    def _is_grown_ahead(self) -> bool:
        """Whether enough space is set aside, or a full disk said lately that there is none."""
        if self._staging.room(enqueue=True) >= self._ahead_bytes:
            return True
        return time.monotonic() < self._ahead_due

    def _check_held(self, sequence: int) -> None:
        if not self._table.first <= sequence <= self._writer.durable:
            held = f"{self.sequence_first} to {self.sequence_durable}"
            raise NotFound(f"sequence {sequence} is not held, only {held}", sequence=sequence)

    def _next_header(self) -> SegmentHeader:
        """Of a segment that would begin behind what is staged."""
        return SegmentHeader(
            self.topic, self.partition, self.sequence_last + 1, self.chain_last, self.epoch_last,
            seeded=self.seeding,
        )  # fmt: skip

    def _check_received(self, batch: Batch) -> None:
        place = (self.topic, self.partition)
        if (batch.topic, batch.partition) != place or batch.epoch < self.epoch_last:
            raise ValueError(f"batch {batch.first} of epoch {batch.epoch} is not for this log")
        if batch.compacted and not self.seeding:
            raise ValueError(f"batch {batch.first} is compacted, and this log is not seeding")
        verify_chain(batch, self.chain_last)

    def _check_health(self) -> None:
        if self._failure:
            raise StorageFailed(f"an earlier write failed: {self._failure}")

    def _fail(self, error: OSError) -> NoReturn:
        self._failure = str(error)
        _log.critical("%s: storage failed: %s", self.folder, self._failure)
        raise StorageFailed(
            f"{self.folder}: {error}", topic=self.topic, partition=self.partition
        ) from error
