"""Opening a partition's folder: find the end of the log, and tell a torn tail from rot.

Sealed segments are taken at their footers' word here; whoever replays them verifies every batch.
The newest segment is walked in full. Where its walk stops, the bytes behind are either zeros (the
preallocated rest), a *torn tail* (a write that was never acknowledged: zeroed away), or *rot*:
acknowledged data that is gone, which only an operator may accept.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from penstock.errors import Corruption
from penstock.log.files import FloorFlag, FloorSlot, Handle, sync_folder
from penstock.log.floor import Floor, finish_interrupted
from penstock.log.identity import REPLICA_FILE
from penstock.log.segment import (
    Segment,
    seal,
    sealed_segment,
    segment_file,
    sidecar,
    verify_sealed,
)
from penstock.log.walk import SegmentFile, Walk, clear_tail, damaged, last_nonzero, proof_of_rot

_log = logging.getLogger(__name__)


class Recovery:
    """One opening of one partition's folder: `run` finds its `segments`, and its `floor` holds."""

    def __init__(self, folder: Path, *, topic: int, partition: int, accept_rot: bool) -> None:
        self.folder, self.topic, self.partition = folder, topic, partition
        self.accept_rot = accept_rot
        orphans = [p for p in folder.glob("*.idx") if not p.with_suffix(".seg").exists()]
        for stale in (*folder.glob("*.tmp"), *orphans):
            if stale.name != f"{REPLICA_FILE}.tmp":  # it may be being written at this moment
                stale.unlink()
        self.floor = Floor(folder / "floor", accept_rot=accept_rot)
        self.segments: list[Segment] = []

    def run(self) -> None:
        self._finish_interrupted()
        paths = self._drop_leftovers(sorted(self.folder.glob("*.seg")))
        for position, path in enumerate(paths):
            try:
                self.segments.append(self._segment(path, newest=position == len(paths) - 1))
            except Corruption as damage:
                if not self.accept_rot:
                    raise
                self._amputate(damage, paths[position:])
                break
        self._check_end()

    def _finish_interrupted(self) -> None:
        try:
            finish_interrupted(self.folder, self.floor, topic=self.topic, partition=self.partition)
        except Corruption:
            if not self.accept_rot:
                raise
            # Without the intent, the damage is met again below, and accepted there.
            slot = self.floor.slot
            self.floor.settle(slot._replace(flags=slot.flags & FloorFlag.SEEDING, cut=0))

    def _drop_leftovers(self, paths: list[Path]) -> list[Path]:
        """Finish a drop that a crash cut short: the floor names the oldest segment to keep."""
        keep = [path for path in paths if int(path.stem, 16) >= self.floor.slot.first]
        for path in set(paths) - set(keep):
            path.unlink()
            sidecar(path).unlink(missing_ok=True)
        return keep

    def _segment(self, path: Path, *, newest: bool) -> Segment:
        file = self._open(path)
        try:
            segment = sealed_segment(file)
        except Corruption:
            if not newest or file.header.first < self.floor.slot.tail:
                raise
            return self._newest(Walk(file, end=file.handle.size))
        if self.accept_rot:
            walk = segment.walk(file.handle)
            walk.finish()
            verify_sealed(segment, walk)
        return segment

    def _open(self, path: Path) -> SegmentFile:
        """Open the segment that has to follow those which were found."""
        handle = Handle(path, os.O_RDWR)
        file = segment_file(handle, path, topic=self.topic, partition=self.partition)
        before = self.segments[-1] if self.segments else None
        check_follows(file, before=before, oldest=self.floor.slot.first)
        return file

    def _newest(self, walk: Walk) -> Segment:
        """Walk the newest segment to its end and clear what a torn write left behind."""
        try:
            walk.finish()
        except Corruption as stop:
            used = last_nonzero(walk)
            refuse_rot(walk, stop, floor=self.floor.slot.sequence)
            if used > walk.offset:
                torn = used - walk.offset
                _log.warning("cleared a torn tail of %d bytes: %s", torn, stop.message)
        else:
            used = walk.offset
        clear_tail(walk, used)
        return Segment.walked(walk)

    def _check_end(self) -> None:
        try:
            newest = self.segments[-1] if self.segments else None
            check_end(
                self.folder, self.floor.slot, newest=newest, topic=self.topic,
                partition=self.partition,
            )  # fmt: skip
        except Corruption as damage:
            if not self.accept_rot:
                raise
            self._settle_for(damage)

    def _amputate(self, damage: Corruption, paths: list[Path]) -> None:
        """End the log at the first damage, keep the cut-off files beside it, and say so."""
        for path in paths:
            shutil.copy2(path, path.with_name(path.name + ".rot"))
        for path in paths[1:]:
            path.unlink()
        try:
            self.segments.append(self._cut(paths[0]))
        except Corruption:
            paths[0].unlink()  # not even its header can be trusted
        sync_folder(self.folder)
        self._settle_for(damage)

    def _cut(self, path: Path) -> Segment:
        file = self._open(path)
        walk = Walk(file, end=file.handle.size)
        try:
            walk.finish()
        except Corruption as stop:
            if file.header.compacted and not walk.batches:
                raise
            clear_tail(walk, walk.end)
            _log.critical("cut off the rest of a segment: %s", stop.message)
        sidecar(path).unlink(missing_ok=True)
        segment = Segment.walked(walk)
        if file.header.compacted:  # nothing may be appended to a rewritten segment
            seal(segment)
        return segment

    def _settle_for(self, damage: Corruption) -> None:
        last = self.segments[-1].last if self.segments else 0
        first = self.segments[0].first if self.segments else 0
        lost = self.floor.slot.sequence - last
        tail = self.segments[-1].first if self.segments else 0
        flags = self.floor.slot.flags & FloorFlag.SEEDING
        self.floor.change(FloorSlot(0, last, first, tail, flags))
        for snapshot in self.folder.glob("*.snap"):
            if int(snapshot.stem, 16) > last:
                snapshot.rename(snapshot.with_name(snapshot.name + ".rot"))
        _log.critical(
            "ROT ACCEPTED: the log ends at sequence %d now, at least %d acknowledged sequences are"
            " lost: %s",
            last,
            lost,
            damage.message,
        )


def check_follows(file: SegmentFile, *, before: Segment | None, oldest: int) -> None:
    """Raise unless the segment continues `before`, or is the `oldest` (0: any) of the log."""
    header = file.header
    if before is not None:
        expected = (before.last + 1, before.chain, before.epoch)
    else:
        expected = (oldest or header.first, header.chain_before, header.epoch_before)
    if (header.first, header.chain_before, header.epoch_before) != expected:
        reason = "the segment does not follow the one before it"
        raise damaged(file, reason, offset=0, sequence=expected[0])


def check_end(
    folder: Path, slot: FloorSlot, *, newest: Segment | None, topic: int, partition: int
) -> None:
    """Raise unless the log, whose last segment is `newest`, reaches as far as its floor says."""
    last, first = (newest.last, newest.first) if newest is not None else (slot.empty_at - 1, 0)
    if last < slot.sequence or first < slot.tail:
        raise Corruption(
            f"{folder} ends at sequence {last} but {slot.sequence} was acknowledged",
            topic=topic, partition=partition, sequence=last + 1, file=str(folder), offset=0,
            reason="segments are missing",
        )  # fmt: skip


def refuse_rot(walk: Walk, stop: Corruption, *, floor: int) -> None:
    """Raise if what stopped a walk of the newest segment cannot be a torn tail."""
    if walk.sequence < floor:
        proof: str | None = f"sequence {floor} was acknowledged"
    else:
        proof = proof_of_rot(walk)
    if proof:
        reason = f"{stop.details['reason']}; {proof}"
        raise damaged(walk, reason, offset=walk.offset, sequence=walk.sequence + 1) from stop
