"""One partition's durable log.

Three parties use a log at once, without waiting for each other:

- the event loop *stages* batches (decides where they lie), *takes* what is staged as one flush, and
  reads durable batches, from memory or the page cache;
- one writer thread *writes* a flush, syncs it, and sets space aside ahead of need;
- upkeep threads scan, snapshot, drop and rewrite sealed segments.

Invariants: sequences have no gap · `sequence_first - 1 <= sequence_durable <= sequence_last` · a
batch is readable only when durable, except to who asks for staged ones · after a failed write
nothing is ever acknowledged again · the list of segments is replaced, never changed, so a
reader's view of it stays whole.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Final, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import DiskFull, FailedPrecondition, NotFound, StorageFailed
from penstock.log.cache import BatchCache
from penstock.log.compaction import compact
from penstock.log.crash import crash_point
from penstock.log.files import make_folder, storage_errors, sync_folder
from penstock.log.index import sidecar
from penstock.log.layout import SegmentHeader
from penstock.log.pending import Pending
from penstock.log.reader import Reader
from penstock.log.recovery import Recovered, Recovery
from penstock.log.segment import Segment, SegmentInfo, save_index
from penstock.log.snapshots import Snapshot, Snapshots
from penstock.log.staging import Flush, LogOptions, Staging
from penstock.log.table import SegmentTable
from penstock.log.writer import Writer
from penstock.model.batch import Batch
from penstock.model.columns import Buffer

__all__ = ["Flush", "LogOptions", "PartitionLog", "SegmentInfo", "Snapshot"]

FULL_RETRY_S: Final = 1.0
BEGIN_BYTES_MAX: Final = 256 << 10  # copied to the page cache on the loop; more takes a thread
_log = logging.getLogger(__name__)


class PartitionLog:
    """See the module. Build it with `open`, which recovers and blocks."""

    def __init__(
        self, folder: Path, found: Recovered, *, topic: int, partition: int, options: LogOptions
    ) -> None:
        self.folder, self.topic, self.partition, self.options = folder, topic, partition, options
        newest = found.segments[-1] if found.segments else None
        self._table = SegmentTable(found.segments, index_bytes=options.index_bytes)
        self._cache = BatchCache(options.cache_bytes)
        self._pending = Pending()
        self._reader = Reader(self._table, self._cache)
        self._staging = Staging(folder, options, newest)
        self._writer = Writer(newest, found.floor, floor_s=options.floor_s)
        self._snapshots = Snapshots(folder, topic=topic, partition=partition)
        self._upkeep = Lock()  # one drop or rewrite at a time
        self._failure = ""  # why nothing may be acknowledged any more
        self._ahead_due = 0.0  # a full disk is not asked again before
        self.sequence_last = newest.last if newest else 0  # staged
        self.epoch_last = newest.epoch if newest else 0
        self.chain_last = newest.chain if newest else 0
        self.time_ms_last = newest.time_ms if newest else 0

    @classmethod
    def open(
        cls, folder: Path, *, topic: int, partition: int, options: LogOptions | None = None,
        accept_rot: bool = False,
    ) -> PartitionLog:  # fmt: skip
        """Recover the log in `folder`, made if missing. Raises `Corruption` on rot.

        `accept_rot` verifies everything instead, ends the log at the first damage, keeps what it
        cut off in `.rot` files, and says so in the log at the highest level.
        """
        with storage_errors(folder):
            make_folder(folder)
            recovery = Recovery(folder, topic=topic, partition=partition, accept_rot=accept_rot)
            found = recovery.run()
            options = options or LogOptions()
            log = cls(folder, found, topic=topic, partition=partition, options=options)
            log._grow_ahead()
            return log

    @property
    def sequence_first(self) -> int:
        return self._table.first

    @property
    def sequence_durable(self) -> int:
        return self._writer.durable

    @property
    def bytes_total(self) -> int:
        return self._table.bytes

    # --- the event loop ---

    def room(self, enqueue: bool) -> int:
        """Any one batch of at most so many bytes can be staged now without growing."""
        return 0 if self._failure else self._staging.room(enqueue=enqueue)

    def stage(self, batch: Batch) -> None:
        """Give the next batch its place; beyond `room(False)` raises `DiskFull`, no change."""
        self._check_health()
        if batch.first != self.sequence_last + 1 or batch.epoch_previous != self.epoch_last:
            raise ValueError(
                f"batch {batch.first} after epoch {batch.epoch_previous} does not follow"
                f" {self.sequence_last} of epoch {self.epoch_last}"
            )
        if type(batch.body) is not bytes:  # a view would keep a whole network buffer alive
            batch = msgspec.structs.replace(batch, body=bytes(batch.body))
        header = SegmentHeader(
            self.topic, self.partition, batch.first, self.chain_last, self.epoch_last, False
        )
        begun = self._staging.add(batch, header=header)
        if begun is not None:
            self._table.append(begun)
        self._cache.put(batch)
        self._pending.add(batch)
        self.sequence_last, self.epoch_last = batch.last, batch.epoch
        self.chain_last, self.time_ms_last = batch.chain, batch.time_ms

    def take(self) -> Flush | None:
        """What is staged and not handed out yet. Write every flush, in the order taken."""
        return self._staging.take()

    def first_of(self, sequence: int) -> int | None:
        """Where the batch that covers `sequence` begins; None when the disk is needed to tell."""
        self._check_held(sequence)
        _, opened = self._table.locate(sequence, nowait=True)
        return None if opened is None else opened.index.firsts[opened.index.find(sequence)]

    def read(self, sequence: int, *, nowait: bool) -> Batch | None:
        """The durable batch that covers `sequence`; None when `nowait` and the disk is needed."""
        self._check_held(sequence)
        return self._reader.read(sequence, nowait=nowait)

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
        if self._writer.floor_due or not self._is_grown_ahead():
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
        """Persist what is durable now: for a log that fell idle right after a write."""
        self._check_health()
        try:
            self._writer.floor.raise_to(sequence=self.sequence_durable)
        except OSError as error:
            self._fail(error)

    def find_time(self, time_ms: int, *, through: int) -> int:
        """Where the log reached `time_ms`: a batch's first sequence, or `through + 1`. Blocks."""
        through = min(through, self.sequence_durable)
        if through < self.sequence_first:
            return self.sequence_first
        return self._reader.find_time(time_ms, through=through)

    def extent(
        self, from_sequence: int, *, through: int, entries_max: int, bytes_max: int
    ) -> tuple[int, int]:
        """The last sequence of the whole batches that fit both bounds, and their bytes. Blocks."""
        through = min(through, self.sequence_durable)
        if from_sequence > through:
            return from_sequence - 1, 0
        self._check_held(from_sequence)
        return self._reader.extent(
            from_sequence, through=through, entries_max=entries_max, bytes_max=bytes_max
        )

    # --- recovery and upkeep ---

    def scan(self, from_sequence: int) -> Iterator[Batch]:
        """Every durable batch from the one that covers `from_sequence`, CRC and chain verified.

        Bodies are views into read chunks of some MiB: copy what is to be kept.
        """
        from_sequence = max(from_sequence, self.sequence_first)
        return self._reader.scan(from_sequence, self.sequence_durable)

    def scrub(self) -> Iterator[int]:
        """Verify what is sealed, in small steps that yield their bytes; raises `Corruption`."""
        return self._reader.scrub()

    def segments(self) -> list[SegmentInfo]:
        return [segment.info() for segment in self._table.segments()]

    def drop_before(self, sequence: int) -> int:
        """Delete sealed segments at the head that end before `sequence`; returns bytes freed."""
        with self._upkeep, storage_errors(self.folder):
            segments = self._table.segments()
            gone: list[Segment] = []
            for segment in segments[:-1]:
                if not segment.sealed or segment.last >= sequence:
                    break
                gone.append(segment)
            if not gone:
                return 0
            crash_point("log.drop.before")
            self._writer.floor.raise_to(first=gone[-1].last + 1)
            self._table.drop(gone)
            for segment in gone:
                segment.path.unlink()
                crash_point("log.drop.between")
                sidecar(segment.path).unlink(missing_ok=True)
            sync_folder(self.folder)
            return sum(segment.bytes for segment in gone)

    def rewrite(self, first: int, alive: Callable[[int, int], NDArray[np.uint64]]) -> int:
        """Compact the sealed segment that begins at `first`; returns the bytes saved."""
        with self._upkeep, storage_errors(self.folder):
            old = next((s for s in self._table.segments() if s.first == first), None)
            if old is None:
                raise NotFound(f"no segment begins at sequence {first}", sequence=first)
            if not old.sealed:
                raise FailedPrecondition(f"the segment at sequence {first} is not sealed")
            target = old.path.with_name(old.path.name + ".tmp")
            compacted = compact(old, alive(old.first, old.last), target)
            if compacted is None:
                return 0
            new, index = compacted
            self._table.replace(old, new, commit=lambda: target.rename(old.path))
            crash_point("log.rewrite.renamed")
            sync_folder(self.folder)
            self._cache.forget(old.first, old.last)
            save_index(new, index)
            crash_point("log.rewrite.after")
            return old.bytes - new.bytes

    def save_snapshot(
        self, *, sequence: int, chain: int, epoch: int, parts: Sequence[Buffer]
    ) -> int:
        """Persist the state after `sequence`, which must be durable; returns the file's size."""
        if sequence > self.sequence_durable:
            raise ValueError(f"a snapshot at {sequence} is ahead of {self.sequence_durable}")
        with storage_errors(self.folder):
            self._writer.floor.raise_to(sequence=self.sequence_durable)
            return self._snapshots.save(sequence=sequence, chain=chain, epoch=epoch, parts=parts)

    def load_snapshot(self) -> Snapshot | None:
        return self._snapshots.load(through=self.sequence_durable)

    def snapshot_sequences(self) -> list[int]:
        """Of the snapshots kept, oldest first: drop and rewrite only below the oldest."""
        return self._snapshots.sequences()

    def close(self) -> None:
        """Persist the floor and let go of the files; what is staged and not written is lost."""
        with storage_errors(self.folder):
            if not self._failure:
                self._writer.floor.raise_to(sequence=self.sequence_durable)
            self._staging.close()
        self._table.close()

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

    def _check_health(self) -> None:
        if self._failure:
            raise StorageFailed(f"an earlier write failed: {self._failure}")

    def _fail(self, error: OSError) -> NoReturn:
        self._failure = str(error)
        _log.critical("%s: storage failed: %s", self.folder, self._failure)
        raise StorageFailed(
            f"{self.folder}: {error}", topic=self.topic, partition=self.partition
        ) from error
