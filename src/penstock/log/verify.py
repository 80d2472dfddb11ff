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
from penstock.log.compaction import read_snapshot
from penstock.log.files import Handle
from penstock.log.folder import (
    META_FILE,
    found_contents,
    missing_parts,
    partitions_in,
    place,
    read_contents,
    read_format,
    refuse_if_locked,
)
from penstock.log.identity import REPLICA_FILE, read_replica
from penstock.log.recovery import (
    FloorFlag,
    FloorSlot,
    check_end,
    check_follows,
    load_slot,
    reach,
    refuse_rot,
)
from penstock.log.segment import Segment, sealed_segment, segment_file, sidecar, verify_sealed
from penstock.log.walk import BatchIndex, SegmentFile, Walk, last_nonzero
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
    read_format(path)
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
            report.first_bad = report.first_bad or _described(
                damage, folder, topic=topic, partition=partition
            )
    _verify_inventory(path, report)
    if progress is not None:
        progress(total, total)
    del lock
    return report


def _verify_inventory(path: Path, report: Report) -> None:
    """Hold what is there against what must be. What nothing names is noted: a crash may have left
    it while it was made or removed."""
    try:
        contents = read_contents(path)
    except Corruption as damage:
        report.ok = False
        report.first_bad = report.first_bad or {"file": str(path), "reason": damage.message}
        return
    if contents is None:
        report.notes.append(f"{path}: there is no inventory yet")
        contents = found_contents(path)
    for part in missing_parts(path, contents):
        report.ok = False
        report.bad += part != META_FILE
        report.first_bad = report.first_bad or {"file": str(path / part), "reason": "missing"}
    for topic, partition, folder in partitions_in(path):
        if place(topic, partition) not in contents.partitions:
            report.notes.append(f"{folder}: is not in the inventory, and will not be taken over")


def _described(damage: Corruption, folder: Path, *, topic: int, partition: int) -> dict[str, Any]:
    found = {
        "topic": topic, "partition": partition, "sequence": None, "file": str(folder),
        "offset": None, "reason": damage.message,
    }  # fmt: skip
    return found | {name: value for name, value in damage.details.items() if name in found}


class _Partition:
    def __init__(
        self, folder: Path, report: Report, advance: Callable[[int], None], *, topic: int,
        partition: int,
    ) -> None:  # fmt: skip
        self.folder, self.report, self.advance = folder, report, advance
        self.topic, self.partition = topic, partition

    def verify(self) -> None:
        replica = self.folder / REPLICA_FILE
        if replica.exists() and not read_replica(replica)[1]:
            self.report.notes.append(f"{replica}: one of two records is torn or damaged")
        floor = self.floor = self._read_floor()
        self._note_interrupted()
        if floor.flags & FloorFlag.RESET:
            return  # the next start removes all that is here
        paths = sorted(self.folder.glob("*.seg"))
        paths = [path for path in paths if int(path.stem, 16) >= floor.first]
        if floor.flags & FloorFlag.CUT:
            paths = [path for path in paths if int(path.stem, 16) <= floor.cut]
        before: Segment | None = None
        for path in paths:
            before = self._segment(path, before, newest=path is paths[-1])
        check_end(self.folder, floor, newest=before, topic=self.topic, partition=self.partition)
        for path in sorted(self.folder.glob("*.snap")):
            read_snapshot(path, topic=self.topic, partition=self.partition)

    def _read_floor(self) -> FloorSlot:
        path = self.folder / "floor"
        slot, whole = load_slot(path)
        if not whole:
            self.report.notes.append(f"{path}: a slot is torn or damaged")
        return slot

    def _note_interrupted(self) -> None:
        floor = self.floor
        found = {
            FloorFlag.CUT: f"a cut after sequence {floor.cut} is to be finished",
            FloorFlag.RESET: "a reset is to be finished",
            FloorFlag.SEEDING: "the log was being received and is not whole",
        }
        notes = [f"{self.folder}: {text}" for flag, text in found.items() if floor.flags & flag]
        self.report.notes.extend(notes)

    def _segment(self, path: Path, before: Segment | None, *, newest: bool) -> Segment:
        file = segment_file(Handle(path), path, topic=self.topic, partition=self.partition)
        check_follows(file, before=before, oldest=self.floor.first)
        self.report.segments += 1
        cut = newest and bool(self.floor.flags & FloorFlag.CUT)
        try:
            segment = sealed_segment(file)
        except Corruption:
            if not newest or file.header.first < self.floor.tail:
                raise
            return self._to_be_cut(file) if cut else self._newest(file)
        if cut and segment.last > self.floor.cut:
            return self._to_be_cut(file)
        walk = segment.walk(file.handle)
        self._finish(walk)
        verify_sealed(segment, walk)
        self._check_sidecar(segment, walk.index)
        return segment

    def _finish(self, walk: Walk) -> None:
        report, done = self.report, 0
        for offset, batch in walk:
            report.batches += 1
            report.bytes += batch.size
            if batch.kind in _MESSAGES:
                report.messages += batch.entries
            if offset - done >= _PROGRESS_BYTES:
                self.advance(offset - done)
                done = offset
        self.advance(walk.offset - done)

    def _newest(self, file: SegmentFile) -> Segment:
        walk = Walk(file, end=file.handle.size)
        try:
            self._finish(walk)
        except Corruption as stop:
            refuse_rot(walk, stop, floor=self.floor.sequence)
            torn = last_nonzero(walk) - walk.offset
            if torn:
                self.report.notes.append(f"{file.path}: {torn} bytes of a torn write at the end")
        return Segment.walked(walk)

    def _to_be_cut(self, file: SegmentFile) -> Segment:
        """The segment that a cut goes through: only what is before the cut counts."""
        walk = Walk(file, end=file.handle.size)
        reach(walk, self.floor.cut)
        self.report.batches += walk.batches
        return Segment.walked(walk)

    def _check_sidecar(self, segment: Segment, index: BatchIndex) -> None:
        path = sidecar(segment.path)
        try:
            found = BatchIndex.load(path, first=segment.first, last=segment.last, end=segment.end)
        except (FileNotFoundError, Corruption) as error:
            self.report.notes.append(f"{path}: to be rebuilt: {error}")
            return
        if (found.firsts, found.offsets) != (index.firsts, index.offsets):
            self.report.notes.append(f"{path}: does not match its segment")
