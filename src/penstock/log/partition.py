"""One partition's durable log: opening it, upkeep, snapshots, and cutting or seeding a replica.

`penstock.log.appending` has the half that runs all the time. What is here blocks, and runs on a
thread other than the loop's. `drop_before`, `rewrite` and snapshots may run beside writes;
`truncate`, `reset` and `finish_seeding` may not, nor beside reads past the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import Corruption, FailedPrecondition, NotFound, Unavailable
from penstock.log.appending import AppendLog
from penstock.log.compaction import compact
from penstock.log.crash import crash_point
from penstock.log.cutting import begin_anew, cut_after
from penstock.log.files import make_folder, storage_errors, sync_folder
from penstock.log.index import sidecar
from penstock.log.layout import FloorFlag
from penstock.log.recovery import Recovered, Recovery
from penstock.log.segment import Segment, SegmentInfo, save_index
from penstock.log.snapshots import Snapshot, Snapshots
from penstock.log.staging import Flush, LogOptions
from penstock.model.columns import Buffer

__all__ = ["Base", "Flush", "LogOptions", "PartitionLog", "SegmentInfo", "Snapshot"]


class Base(NamedTuple):
    """Where a log begins, and what the log was before that."""

    first: int
    chain: int
    epoch: int


class PartitionLog(AppendLog):
    """See the module. Build it with `open`, which recovers and blocks."""

    def __init__(
        self, folder: Path, found: Recovered, *, topic: int, partition: int, options: LogOptions
    ) -> None:
        self._upkeep = Lock()  # one drop, rewrite or cut at a time, and none once it is closed
        self._saving = Lock()  # the same of snapshots
        self._snapshots = Snapshots(folder, topic=topic, partition=partition)
        self._closed = False
        super().__init__(folder, found, topic=topic, partition=partition, options=options)

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
        """Compact the sealed segment that begins at `first`; returns the bytes saved."""
        with self._upkeep, storage_errors(self.folder):
            self._check_open()
            old = next((s for s in self._table.segments() if s.first == first), None)
            if old is None:
                raise NotFound(f"no segment begins at sequence {first}", sequence=first)
            if not old.sealed:
                raise FailedPrecondition(f"the segment at sequence {first} is not sealed")
            target = old.path.with_name(old.path.name + ".tmp")
            with self.watch:
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

    def load_snapshot(self) -> Snapshot | None:
        return self._snapshots.load(through=self.sequence_durable)

    def snapshot_sequences(self) -> list[int]:
        """Of the snapshots kept, oldest first: drop and rewrite only below the oldest."""
        return self._snapshots.sequences()

    # --- cutting and seeding ---

    def truncate(self, sequence: int) -> None:
        """Durably forget everything after `sequence`, a batch's last; never what is committed.

        What is staged is written first, so no flush may be under way. A crash leaves the old end
        or the new one.
        """
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
            try:
                kept = cut_after(
                    sequence, floor=self._writer.floor, segments=self._table.segments(),
                    publish=lambda kept: self._table.restart(kept, empty_at=sequence + 1),
                )  # fmt: skip
                self._restart(kept)
                self._grow_ahead()
            except OSError as error:
                self._fail(error)

    def reset(self, *, first: int, chain: int, epoch: int) -> None:
        """Durably forget everything and be an empty log: next comes `first`, after chain and epoch.

        It is `seeding` from now on, until `finish_seeding`. What is staged is dropped.
        """
        self._check_health()
        if first < 1:
            raise ValueError(f"a log cannot begin at {first}")
        with self._upkeep:
            try:
                floor = self._writer.floor
                self._table.restart([], empty_at=first)  # before files go that it names
                begin_anew(self.folder, floor=floor, first=first, chain=chain, epoch=epoch)
                self._writer.committed = first - 1
                self._cache.forget(0, 1 << 64)
                self._restart([])
                self._grow_ahead()
            except OSError as error:
                self._fail(error)

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
        try:
            floor = self._writer.floor
            flags = floor.slot.flags & ~FloorFlag.SEEDING
            sequence = max(floor.slot.sequence, committed)
            crash_point("log.seed.before")
            floor.settle(floor.slot._replace(flags=flags, sequence=sequence))
            crash_point("log.seed.after")
        except OSError as error:
            self._fail(error)
        self.seeding = False
        self.advance_commit(committed)

    def close(self) -> None:
        """Persist the floor and let go of the files; what is staged and not written is lost."""
        with self._upkeep, self._saving, storage_errors(self.folder):
            if not self._failure:
                self._writer.raise_floor()
            self._staging.close()
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
        self._check_held(sequence)
        batch = self.read(sequence, nowait=False)
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
            batch = self.read(snapshot.sequence, nowait=False)
            assert batch is not None
            found = (batch.last, batch.chain, batch.epoch)
        if found != expected:
            raise Corruption(f"{self.folder}: the log at {found} is not what the snapshot is of")
        return snapshot.sequence
