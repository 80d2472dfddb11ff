"""Offline verification of a data folder: every byte of every log, gapless and chained.

It changes nothing. What a crash leaves and opening repairs (a torn tail, an index to rebuild) is
noted, not held against the folder; what opening would refuse, and any damage in a sealed segment
or a snapshot, is bad.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.errors import Corruption
from penstock.log.cutting import reach
from penstock.log.files import Handle
from penstock.log.floor import read_slots, used_slots
from penstock.log.folder import check_format, partitions_in, refuse_if_locked
from penstock.log.index import Index, sidecar
from penstock.log.layout import FloorFlag, FloorSlot, SegmentHeader
from penstock.log.recovery import check_follows, refuse_rot
from penstock.log.replica import NAME as REPLICA_NAME
from penstock.log.replica import read_replica
from penstock.log.segment import Segment, read_footer, read_header, sealed_segment, verify_sealed
from penstock.log.snapshots import read_snapshot
from penstock.log.walk import Walk, last_nonzero
from penstock.model.batch import Kind

Progress = Callable[[int, int], None]  # bytes done, bytes in all
_MESSAGES: Final = frozenset({Kind.ENQ, Kind.PREPARE})
_PROGRESS_BYTES: Final = 8 << 20


@dataclass
class Report:
    """What was found. `first_bad` has topic, partition, sequence, file, offset and reason."""

    ok: bool = True
    partitions: int = 0
    segments: int = 0
    batches: int = 0
    messages: int = 0  # enqueued or prepared entries seen, whatever became of them
    bytes: int = 0
    bad: int = 0  # partitions with damage
    first_bad: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)  # what the next start will repair

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify_folder(path: Path | str, progress: Progress | None = None) -> Report:
    """Verify all partitions of a folder that no node is using; `Unavailable` if one is."""
    path = Path(path)
    check_format(path)
    lock = refuse_if_locked(path)
    found = list(partitions_in(path))
    total = sum(file.stat().st_size for *_, folder in found for file in folder.glob("*.seg"))
    report, done = Report(), 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(min(done, total), total)

    for topic, partition, folder in found:
        report.partitions += 1
        try:
            _Partition(folder, report, advance, topic=topic, partition=partition).verify()
        except Corruption as damage:
            report.ok = False
            report.bad += 1
            report.first_bad = report.first_bad or _described(damage, topic, partition, folder)
    if progress is not None:
        progress(total, total)
    del lock
    return report


def _described(damage: Corruption, topic: int, partition: int, folder: Path) -> dict[str, Any]:
    found = {
        "topic": topic, "partition": partition, "sequence": None, "file": str(folder),
        "offset": None, "reason": damage.message,
    }  # fmt: skip
    return found | {name: value for name, value in damage.details.items() if name in found}


class _Partition:
    """One pass over one partition's folder."""

    def __init__(
        self, folder: Path, report: Report, advance: Callable[[int], None], *, topic: int,
        partition: int,
    ) -> None:  # fmt: skip
        self.folder, self.report, self.advance = folder, report, advance
        self.topic, self.partition = topic, partition

    def verify(self) -> None:
        self._replica()
        floor = self._floor()
        self._note_interrupted(floor)
        if floor.flags & FloorFlag.RESET:
            return  # nothing that is here counts
        paths = sorted(self.folder.glob("*.seg"))
        paths = [path for path in paths if int(path.stem, 16) >= floor.first]
        if floor.flags & FloorFlag.CUT:
            paths = [path for path in paths if int(path.stem, 16) <= floor.cut]
        before: Segment | None = None
        for path in paths:
            before = self._segment(path, before, floor, newest=path is paths[-1])
        last, newest = (before.last, before.first) if before else (floor.empty_at - 1, 0)
        if last < floor.sequence or newest < floor.tail:
            raise Corruption(
                f"{self.folder} ends at sequence {last} but {floor.sequence} was acknowledged",
                sequence=last + 1, reason="segments are missing",
            )  # fmt: skip
        for path in sorted(self.folder.glob("*.snap")):
            read_snapshot(path, topic=self.topic, partition=self.partition)

    def _replica(self) -> None:
        path = self.folder / REPLICA_NAME
        if path.exists() and not read_replica(path)[1]:
            self.report.notes.append(f"{path}: one of two records is torn or damaged")

    def _floor(self) -> FloorSlot:
        path = self.folder / "floor"
        data = path.read_bytes() if path.exists() else b""
        slots = read_slots(data)
        if len(slots) < used_slots(data):
            self.report.notes.append(f"{path}: a slot is torn or damaged")
        if slots:
            return slots[0]
        if any(self.folder.glob("*.seg")):
            raise Corruption(f"{path} has no valid slot", file=str(path), reason="no valid floor")
        return FloorSlot(0, 0, 0, 0)

    def _note_interrupted(self, floor: FloorSlot) -> None:
        found = {
            FloorFlag.CUT: f"a cut after sequence {floor.cut} is to be finished",
            FloorFlag.RESET: "a reset is to be finished",
            FloorFlag.SEEDING: "the log was being received and is not whole",
        }
        notes = [f"{self.folder}: {text}" for flag, text in found.items() if floor.flags & flag]
        self.report.notes.extend(notes)

    def _segment(
        self, path: Path, before: Segment | None, floor: FloorSlot, *, newest: bool
    ) -> Segment:
        handle = Handle(path)
        header = read_header(handle, path, topic=self.topic, partition=self.partition)
        check_follows(path, header, before=before, oldest=floor.first)
        self.report.segments += 1
        try:
            segment = sealed_segment(path, header, read_footer(handle, path, header))
        except Corruption:
            if not newest or header.first < floor.tail:
                raise
            if floor.flags & FloorFlag.CUT:
                return self._to_be_cut(handle, path, header, floor)
            return self._newest(handle, path, header, floor)
        if newest and floor.flags & FloorFlag.CUT and segment.last > floor.cut:
            return self._to_be_cut(handle, path, header, floor)
        walk = Walk(handle, path, header=header, end=segment.end)
        index = self._walk(walk)
        verify_sealed(segment, walk)
        self._sidecar(segment, index)
        return segment

    def _walk(self, walk: Walk) -> Index:
        report, done, index = self.report, 0, Index()
        for offset, batch in walk:
            index.add(batch.first, offset)
            report.batches += 1
            report.bytes += batch.size
            if batch.kind in _MESSAGES:
                report.messages += batch.entries
            if offset - done >= _PROGRESS_BYTES:
                self.advance(offset - done)
                done = offset
        self.advance(walk.offset - done)
        return index

    def _newest(
        self, handle: Handle, path: Path, header: SegmentHeader, floor: FloorSlot
    ) -> Segment:
        walk = Walk(handle, path, header=header, end=handle.size)
        try:
            self._walk(walk)
        except Corruption as stop:
            refuse_rot(walk, stop, floor=floor.sequence)
            torn = last_nonzero(handle, walk.offset, walk.end) - walk.offset
            if torn:
                self.report.notes.append(f"{path}: {torn} bytes of a torn write at the end")
        segment = Segment(path, header)
        segment.reached(walk)
        return segment

    def _to_be_cut(
        self, handle: Handle, path: Path, header: SegmentHeader, floor: FloorSlot
    ) -> Segment:
        """The segment that a cut goes through: only what is before the cut counts."""
        walk = Walk(handle, path, header=header, end=handle.size)
        reach(walk, Index(), floor.cut)
        self.report.batches += walk.batches
        segment = Segment(path, header)
        segment.reached(walk)
        return segment

    def _sidecar(self, segment: Segment, index: Index) -> None:
        path = sidecar(segment.path)
        try:
            found = Index.load(path, first=segment.first, last=segment.last, end=segment.end)
        except (FileNotFoundError, Corruption) as error:
            self.report.notes.append(f"{path}: to be rebuilt: {error}")
            return
        if (found.firsts, found.offsets) != (index.firsts, index.offsets):
            self.report.notes.append(f"{path}: does not match its segment")
