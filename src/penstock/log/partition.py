"""One partition's durable log: opening it, appending, reading, upkeep, and cutting or seeding it.

Three parties use a log at once, without waiting for each other:

- the event loop *stages* batches (decides where they lie), *takes* what is staged as one flush, and
  reads durable batches, from memory or the page cache;
- one writer thread *writes* a flush, syncs it, and sets space aside ahead of need;
- upkeep threads scan, snapshot, drop and rewrite sealed segments.

Methods that block say so, and run on a thread other than the loop's. `drop_before`, `rewrite` and
snapshots may run beside writes; `truncate`, `reset` and `finish_seeding` may not, nor beside reads
past the commit.

Invariants: sequences have no gap · `sequence_first - 1 <= sequence_durable <= sequence_last` · a
batch is readable only when durable, or committed by others, except to those who ask for staged
ones · the persisted floor is at most `min(sequence_durable, sequence_committed)` · after a failed
write nothing is ever acknowledged again · the list of segments is replaced, never changed, so a
reader's view of it stays whole.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import Corruption, FailedPrecondition, NotFound, StorageFailed, Unavailable
from penstock.log import crash
from penstock.log.compaction import SnapshotFiles, StoredSnapshot, compact
from penstock.log.crash import crash_point
from penstock.log.files import SegmentHeader, make_folder, storage_errors, sync_folder
from penstock.log.flush import BatchCache, Flush, FlushWriter, LogOptions, Stager
from penstock.log.reader import Reader
from penstock.log.recovery import FloorFlag, Recovery, begin_anew, cut_after
from penstock.log.segment import Segment, SegmentTable, save_index, sidecar
from penstock.model.batch import Batch, verify_chain
from penstock.model.columns import Buffer

BEGIN_BYTES_MAX: Final = 256 << 10  # copied to the page cache on the loop; more takes a thread
_log = logging.getLogger(__name__)


class Base(NamedTuple):
    first: int
    chain: int
    epoch: int


class PartitionLog:
    def __init__(
        self, folder: Path, found: Recovery, *, topic: int, partition: int, options: LogOptions
    ) -> None:
        """Use `open`, which recovers what is in the folder."""
        self.folder, self.topic, self.partition, self.options = folder, topic, partition, options
        self._upkeep = Lock()  # one drop, rewrite or cut at a time, and none once it is closed
        self._saving = Lock()  # one snapshot is saved at a time, and none once the log is closed
        self._snapshots = SnapshotFiles(folder, topic=topic, partition=partition)
        self._closed = False
        self._table = SegmentTable(index_bytes=options.index_bytes)
        self._cache = BatchCache(options.cache_bytes)
        self._stager = Stager(folder, options)
        self._writer = FlushWriter(found.floor, floor_s=options.floor_s)
        self.reader = Reader(self._table, self._cache, self._writer)
        self._failure = ""  # why nothing may be acknowledged any more
        self._restart(found.segments)

    @classmethod
    def open(
        cls, folder: Path, *, topic: int, partition: int, options: LogOptions | None = None,
        accept_rot: bool = False,
    ) -> PartitionLog:  # fmt: skip
        """Recover the log in `folder`, made if missing; raises `Corruption` on rot. `accept_rot`
        verifies everything instead, ends the log at the first damage, keeps what it cut off in
        `.rot` files, and says so in the log at the highest level."""
        with storage_errors(folder):
            make_folder(folder)
            found = Recovery(folder, topic=topic, partition=partition, accept_rot=accept_rot)
            found.run()
            options = options or LogOptions()
            log = cls(folder, found, topic=topic, partition=partition, options=options)
            log._stager.grow_ahead()
            return log

    def _restart(self, segments: list[Segment]) -> None:
        """Take these segments for the whole log, all of it durable, and go on behind them."""
        newest = segments[-1] if segments else None
        slot = self._writer.floor.slot
        self._table.restart(segments, empty_at=slot.empty_at)
        self._stager.restart(newest)
        self._writer.restart(newest)
        self._cache.durable = self._writer.durable
        self._cache.forget(self._writer.durable + 1, 1 << 64)
        # The log is being received from another replica; begin again if that was cut short.
        self.seeding = bool(slot.flags & FloorFlag.SEEDING)
        self.sequence_last = self._writer.durable  # of all that is staged
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
        return time.monotonic() >= self._writer.floor_due_at

    @property
    def bytes_total(self) -> int:
        return self._table.bytes

    # --- the event loop ---

    def room(self, enqueue: bool) -> int:
        """Any one batch of at most so many bytes can be staged now without growing."""
        return 0 if self._failure else self._stager.room(enqueue=enqueue)

    def stage(self, batch: Batch, *, received: bool = False) -> None:
        """Give the next batch its place; raises `DiskFull` beyond `room(False)`. One that was
        `received` from another node is checked against the hash chain, and may be compacted only
        while the log is seeding."""
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
        begun = self._stager.add(batch, header=self._next_header)
        if begun is not None:
            self._table.append(begun)
        self._cache.put(batch)
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
        pieces, self._stager.pieces = self._stager.pieces, []
        return Flush(pieces, sum([piece.size for piece in pieces])) if pieces else None

    def begin(self, flush: Flush) -> int | None:
        """Hand a flush to the page cache; returns the descriptor to sync before `finish`, or None
        if the writer thread has to `write` it: it is large, begins a segment, or needs more space
        set aside."""
        self._check_health()
        piece = flush.pieces[0]
        if len(flush.pieces) > 1 or piece.spare is not None or piece.size > BEGIN_BYTES_MAX:
            return None
        if not self._stager.is_grown_ahead():
            return None
        try:
            return self._writer.begin(piece)
        except OSError as error:
            self._fail(error)

    def finish(self, flush: Flush, error: OSError | None) -> int:
        """The sync of a flush that was begun has ended; returns the last durable sequence."""
        if error is not None:
            self._fail(error)
        if crash.armed:
            crash_point("log.sync.after")
        self._writer.durable = self._cache.durable = flush.pieces[0].last
        return self._writer.durable

    # --- the writer thread ---

    def write(self, flush: Flush) -> int:
        """Make a flush durable; returns the last durable sequence. A failure is final: what the
        disk holds is unknown, and a second sync may lie about it."""
        self._check_health()
        try:  # plain, because `_final` takes microseconds and a put waits for this
            for piece in flush.pieces:
                sealed = self._writer.write(piece)
                if sealed is not None:
                    self._table.touch(sealed)
            self._cache.durable = self._writer.durable
            if self.floor_due:  # the floor may lag: it only sharpens the search for rot
                self._writer.raise_floor()
            self._stager.grow_ahead()
        except OSError as error:
            self._fail(error)
        return self._writer.durable

    def grow(self, bytes: int, *, enqueue: bool = True) -> None:
        """Make room for a batch of that size; raises `DiskFull`."""
        with self._final():
            self._stager.grow(bytes, enqueue=enqueue)

    def persist_floor(self) -> None:
        """Persist what is committed now, when that is due, or the log fell idle after a write."""
        with self._final():
            self._writer.raise_floor()

    def segments(self) -> list[Segment]:
        return self._table.segments()

    @property
    def base(self) -> Base:
        segments = self._table.segments()
        if not segments:
            slot = self._writer.floor.slot
            return Base(slot.empty_at, slot.chain, slot.epoch)
        header = segments[0].header
        return Base(header.first, header.chain_before, header.epoch_before)

    # --- upkeep ---

    def drop_before(self, sequence: int) -> int:
        """Delete sealed segments at the head that end before `sequence`; returns bytes freed."""
        with self._upkeep, storage_errors(self.folder):
            self._check_open()
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
        with self._upkeep, storage_errors(self.folder):
            self._check_open()
            old = next((s for s in self._table.segments() if s.first == first), None)
            if old is None:
                raise NotFound(f"no segment begins at sequence {first}", sequence=first)
            if not old.sealed:
                raise FailedPrecondition(f"the segment at sequence {first} is not sealed")
            target = old.path.with_name(old.path.name + ".tmp")
            with self.reader.watched():
                compacted = compact(old, alive(old.first, old.last), target=target)
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

    # --- snapshots ---

    def save_snapshot(
        self, *, sequence: int, chain: int, epoch: int, parts: Sequence[Buffer]
    ) -> int:
        """Persist the state after `sequence`, committed and durable; returns the file's size."""
        reached = min(self.sequence_durable, self.sequence_committed)
        if sequence > reached:
            raise ValueError(f"a snapshot at {sequence} is ahead of {reached}")
        with self._saving, storage_errors(self.folder):
            self._check_open()
            self._writer.raise_floor()
            return self._snapshots.save(sequence=sequence, chain=chain, epoch=epoch, parts=parts)

    def load_snapshot(self) -> StoredSnapshot | None:
        return self._snapshots.load(through=self.sequence_durable)

    def snapshot_sequences(self) -> list[int]:
        """Where the kept snapshots are, oldest first: drop and rewrite only below the oldest."""
        return self._snapshots.sequences()

    # --- cutting and seeding ---

    def truncate(self, sequence: int) -> None:
        """Durably forget everything after `sequence`, a batch's last; never what is committed. What
        is staged is written first, so no flush may be under way. A crash leaves the old end or the
        new one."""
        self._check_health()
        if self.seeding:
            raise ValueError("a log that is seeding is not cut, but reset")
        if not self.sequence_committed <= sequence <= self.sequence_last:
            bounds = f"{self.sequence_committed}, committed, to the end {self.sequence_last}"
            raise ValueError(f"cut after {sequence} is not within {bounds}")
        assert all(s <= sequence for s in self.snapshot_sequences()), "of uncommitted state"
        flush = self.take()
        if flush is not None:
            self.write(flush)
        with self._upkeep:
            self._check_boundary(sequence)
            if sequence == self.sequence_last:
                return
            with self._final():
                kept = cut_after(
                    sequence, floor=self._writer.floor, segments=self._table.segments(),
                    publish=lambda kept: self._table.restart(kept, empty_at=sequence + 1),
                )  # fmt: skip
                self._restart(kept)
                self._stager.grow_ahead()

    def reset(self, *, first: int, chain: int, epoch: int) -> None:
        """Durably forget everything and be an empty log: next comes `first`, after chain and epoch.
        It is `seeding` from now on, until `finish_seeding`. What is staged is dropped."""
        if first < 1:
            raise ValueError(f"a log cannot begin at {first}")
        with self._upkeep, self._final():
            floor = self._writer.floor
            self._table.restart([], empty_at=first)  # it must not name files that go
            begin_anew(self.folder, floor=floor, first=first, chain=chain, epoch=epoch)
            self._writer.committed = first - 1
            self._cache.forget(0, 1 << 64)
            self._restart([])
            self._stager.grow_ahead()

    def install_snapshot(
        self, *, sequence: int, chain: int, epoch: int, parts: Sequence[Buffer]
    ) -> int:
        """Keep a snapshot that was received: the log is about to receive what goes with it."""
        if not self.seeding or sequence < self.sequence_first - 1:
            raise ValueError(f"a snapshot at {sequence} is not expected here")
        with storage_errors(self.folder):
            return self._snapshots.save(sequence=sequence, chain=chain, epoch=epoch, parts=parts)

    def finish_seeding(self) -> None:
        """The log is whole: it reaches its snapshot, which is committed, and agrees with it."""
        self._check_health()
        if not self.seeding or self.sequence_durable != self.sequence_last:
            raise ValueError("the log is not seeding, or not all of it is durable")
        committed = self._check_seed()
        with self._final():
            floor = self._writer.floor
            flags = floor.slot.flags & ~FloorFlag.SEEDING
            sequence = max(floor.slot.sequence, committed)
            crash_point("log.seed.before")
            floor.settle(floor.slot._replace(flags=flags, sequence=sequence))
            crash_point("log.seed.after")
        self.seeding = False
        self.advance_commit(committed)

    def close(self) -> None:
        """Persist the floor and let go of the files; what is staged and not written is lost."""
        with self._upkeep, self._saving, storage_errors(self.folder):
            if not self._failure:
                self._writer.raise_floor()
            self._stager.close()
            self._table.close()
            self._closed = True

    # --- inside ---

    def _check_open(self) -> None:
        """Raise if the folder may be another log's by now."""
        if self._closed:
            raise Unavailable(f"{self.folder} is closed")

    def _check_boundary(self, sequence: int) -> None:
        """Raise unless a batch ends at `sequence`, which is held, or the log begins behind it."""
        if sequence == self.sequence_first - 1:
            return
        batch = self.reader.read(sequence, nowait=False)
        if batch is None or batch.last != sequence:
            raise ValueError(f"no batch ends at {sequence}")

    def _check_seed(self) -> int:
        """The sequence of the snapshot that the log was seeded with; `first - 1` without one."""
        snapshot = self.load_snapshot()
        reached = self.snapshot_sequences()[-1:]
        if snapshot is None or [snapshot.sequence] != reached:
            if reached:
                raise Corruption(f"{self.folder}: the log does not reach its snapshot, {reached}")
            return self.sequence_first - 1
        expected = (snapshot.sequence, snapshot.chain, snapshot.epoch)
        found = (self.sequence_first - 1, self.base.chain, self.base.epoch)
        if snapshot.sequence >= self.sequence_first:
            batch = self.reader.read(snapshot.sequence, nowait=False)
            assert batch is not None
            found = (batch.last, batch.chain, batch.epoch)
        if found != expected:
            raise Corruption(f"{self.folder}: the log at {found} is not what the snapshot is of")
        return snapshot.sequence

    def _next_header(self) -> SegmentHeader:
        """The header of a segment that would begin behind what is staged."""
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

    @contextmanager
    def _final(self) -> Iterator[None]:
        """Do nothing after a failure, and let a failure in here be the last."""
        self._check_health()
        try:
            yield
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> NoReturn:
        self._failure = str(error)
        _log.critical("%s: storage failed: %s", self.folder, self._failure)
        raise StorageFailed(
            f"{self.folder}: {error}", topic=self.topic, partition=self.partition
        ) from error
