"""Opening a partition's folder: find the end of the log, and tell a torn tail from rot.

Sealed segments are taken at their footers' word here; whoever replays them verifies every batch.
The newest segment is walked in full. Where its walk stops, the bytes behind are either zeros (the
preallocated rest), a *torn tail* (a write that was never acknowledged: zeroed away), or *rot*:
acknowledged data that is gone, which only an operator may accept.

The *acknowledged floor* is what a log must still hold when it is opened again. Two slots in two
disk sectors are written in turn, so a torn write spoils the older promise at most. A floor that is
behind the log is normal, a log that is behind its floor has rot; so it only ever rises, unless the
log is cut, reset or repaired on purpose.

To cut a log is to end it earlier, to reset it is to begin it anew; a crash leaves the old log or
the new one. Zeroing batches or deleting files step by step would look like rot if it stopped
half-way. So the floor is written first, with what is going to happen. From then on it will happen:
whoever opens the log finishes it, and every step can be done twice. The floor is written again when
it is done, in both of its slots, so that damage to one cannot bring the intent back.

Only what lies behind the cut is touched, but for one flush mark: that of the group that the cut
goes through is made shorter. A power cut may tear it; `reach` gets past it then.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import IntFlag
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple

from penstock.errors import Corruption
from penstock.log.crash import crash_point
from penstock.log.files import Form, Handle, padded, sync_folder
from penstock.log.identity import REPLICA_FILE
from penstock.log.segment import (
    OpenedSegment,
    Segment,
    read_footer,
    seal,
    sealed_segment,
    segment_file,
    segment_path,
    sidecar,
    verify_sealed,
)
from penstock.log.walk import (
    BatchIndex,
    SegmentFile,
    Walk,
    clear_tail,
    damaged,
    last_nonzero,
    proof_of_rot,
)
from penstock.model import batch as batches
from penstock.model.columns import Buffer

SLOT_STRIDE: Final = 512
FILE_BYTES: Final = 2 * SLOT_STRIDE
_log = logging.getLogger(__name__)


FLOOR: Final = Form("floor", b"PSL1", "QQQQQQI", version_max=2)


class FloorFlag(IntFlag):
    """What was under way when the floor was written; opening the log ends it."""

    NONE = 0
    CUT = 1  # everything after `cut` goes
    RESET = 2  # every segment and snapshot goes
    SEEDING = 4  # the log is being received from another replica and is not whole yet


class FloorSlot(NamedTuple):
    """Version 1 has neither flags nor the fields behind `tail`, and is written where it will do."""

    generation: int  # the slot with the greater one counts
    sequence: int  # everything up to here was committed: a log that ends below it has lost data
    first: int  # the oldest sequence held; files before it may be left over from a drop
    tail: int  # first sequence of the newest segment: every segment before it is sealed
    flags: FloorFlag = FloorFlag.NONE
    cut: int = 0  # where the log is to end
    chain: int = 0  # of the log before `first`, while there is no segment to say so
    epoch: int = 0  # of the log before `first`, as `chain`

    def encode(self) -> bytes:
        generation, sequence, first, tail, flags, *rest = self
        version = 2 if flags or any(rest) else 1
        numbers = (generation, sequence, first, tail, *rest)
        return FLOOR.pack(*numbers, flags=flags, version=version)

    @staticmethod
    def decode(data: Buffer) -> FloorSlot:
        flags, generation, sequence, first, tail, *rest = FLOOR.unpack(data)
        return FloorSlot(generation, sequence, first, tail, FloorFlag(flags), *rest)

    @property
    def empty_at(self) -> int:
        """Where a log without any segment begins."""
        return max(self.first, 1)


class Floor:
    """The floor file of one partition; `raise_to` may be called from any thread."""

    def __init__(self, path: Path, *, accept_rot: bool = False) -> None:
        self.path = path
        self._lock = Lock()
        self.slot, _ = load_slot(path, accept_rot=accept_rot)
        self._handle = Handle(path, os.O_RDWR | os.O_CREAT)
        if self.slot.generation == 0:
            os.ftruncate(self._handle.fd, FILE_BYTES)
            self._write(self.slot)
            sync_folder(path.parent)

    def raise_to(self, *, sequence: int = 0, first: int = 0, tail: int = 0) -> None:
        """Persist the greater of the old and the given values, if that changes anything."""
        with self._lock:
            old = self.slot
            new = old._replace(
                sequence=max(old.sequence, sequence),
                first=max(old.first, first),
                tail=max(old.tail, tail),
            )
            if new.first != old.first:
                new = new._replace(chain=0, epoch=0)  # they belong to the old `first`
            if new != old:
                self._write(new)

    def change(self, slot: FloorSlot) -> None:
        """Persist exactly this; only a repair, a cut or a reset may lower a value."""
        with self._lock:
            self._write(slot)

    def settle(self, slot: FloorSlot) -> None:
        """As `change`, in both slots: nothing older can come back."""
        with self._lock:
            self._write(slot)
            self._write(slot)

    def _write(self, slot: FloorSlot) -> None:
        slot = slot._replace(generation=self.slot.generation + 1)
        crash_point("log.floor.before")
        self._handle.write([slot.encode()], slot.generation % 2 * SLOT_STRIDE)
        crash_point("log.floor.written")
        os.fdatasync(self._handle.fd)
        self.slot = slot


def load_slot(path: Path, *, accept_rot: bool = False) -> tuple[FloorSlot, bool]:
    """The slot that counts, and whether each that was ever written to is whole; raises `Corruption`
    if there should be one and none can be read."""
    data = path.read_bytes() if path.exists() else b""
    written = [slot for at in (0, SLOT_STRIDE) if any(slot := data[at : at + FLOOR.size])]
    found: list[FloorSlot] = []
    for slot in written:
        with suppress(Corruption):  # a torn one: the other holds
            found.append(FloorSlot.decode(slot))
    if not found and any(path.parent.glob("*.seg")) and not accept_rot:
        raise Corruption(f"{path} has no valid slot", file=str(path), reason="no valid floor")
    return max(found, default=FloorSlot(0, 0, 0, 0)), len(found) == len(written)


def cut_after(
    sequence: int, *, floor: Floor, segments: list[Segment],
    publish: Callable[[list[Segment]], None],
) -> list[Segment]:  # fmt: skip
    """Durably forget everything behind `sequence`, a batch's last. What is left is returned, and
    given to `publish` before anything is touched, so that who reads below the cut meanwhile needs
    none of the rest."""
    kept = [segment for segment in segments if segment.first <= sequence]
    cut = None
    if kept and kept[-1].last > sequence:
        cut = _Cut(kept[-1], sequence, known=kept[-1].opened)
        kept[-1] = cut.segment
    slot, header = floor.slot, segments[0].header
    if not kept:
        slot = slot._replace(
            first=header.first, chain=header.chain_before, epoch=header.epoch_before
        )
    crash_point("log.truncate.before")
    floor.change(
        slot._replace(
            sequence=min(slot.sequence, sequence), tail=kept[-1].first if kept else 0,
            flags=slot.flags | FloorFlag.CUT, cut=sequence,
        )
    )  # fmt: skip
    crash_point("log.truncate.intended")
    publish(kept)
    _finish_cut(segments[0].path.parent, floor, cut_of=lambda _: cut)
    return kept


def begin_anew(folder: Path, *, floor: Floor, first: int, chain: int, epoch: int) -> None:
    """Durably forget everything; the log is empty, about to receive `first`, and marked so."""
    crash_point("log.reset.before")
    floor.change(
        floor.slot._replace(
            sequence=first - 1, first=first, tail=0, cut=0, chain=chain, epoch=epoch,
            flags=FloorFlag.RESET | FloorFlag.SEEDING,
        )
    )  # fmt: skip
    crash_point("log.reset.intended")
    _finish_reset(folder, floor)


def finish_interrupted(folder: Path, floor: Floor, *, topic: int, partition: int) -> None:
    """On opening: do what the floor says was under way; `Corruption` if it cannot be done."""
    flags = floor.slot.flags
    if flags & FloorFlag.RESET:
        _log.warning("%s: finishing a reset", folder)
        _finish_reset(folder, floor)
    if flags & FloorFlag.CUT:
        _log.warning("%s: finishing a cut after sequence %d", folder, floor.slot.cut)
        _finish_cut(
            folder,
            floor,
            cut_of=lambda path: _begun(path, floor.slot.cut, topic=topic, partition=partition),
        )


def _finish_reset(folder: Path, floor: Floor) -> None:
    for pattern in ("*.seg", "*.idx", "*.snap"):
        _remove(folder.glob(pattern), point="log.reset.between")
    sync_folder(folder)
    crash_point("log.reset.removed")
    floor.settle(floor.slot._replace(flags=floor.slot.flags & ~FloorFlag.RESET))
    crash_point("log.reset.after")


def _finish_cut(folder: Path, floor: Floor, *, cut_of: Callable[[Path], _Cut | None]) -> None:
    slot = floor.slot
    firsts = sorted(int(path.stem, 16) for path in folder.glob("*.seg"))
    gone = [segment_path(folder, first) for first in reversed(firsts) if first > slot.cut]
    kept = [first for first in firsts if slot.first <= first <= slot.cut]
    _remove([*map(sidecar, gone), *gone], point="log.truncate.between")
    if gone:
        sync_folder(folder)
    crash_point("log.truncate.removed")
    cut = cut_of(segment_path(folder, kept[-1])) if kept else None
    if cut is not None:
        cut.perform()
    crash_point("log.truncate.cut")
    floor.settle(slot._replace(flags=slot.flags & ~FloorFlag.CUT, cut=0))
    crash_point("log.truncate.after")


def _remove(paths: Iterable[Path], *, point: str) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
        crash_point(point)


class _Cut:
    """The segment that a cut goes through, and what it is to be: open for more behind the cut."""

    def __init__(
        self, segment: Segment | SegmentFile, sequence: int, *, known: OpenedSegment | None = None
    ) -> None:
        handle = Handle(segment.path, os.O_RDWR)
        self.walk = Walk(SegmentFile(handle, segment.path, segment.header), end=handle.size)
        if known is not None:
            _skip(self.walk, sequence=sequence, known=known.index)
        reach(self.walk, sequence)
        self.segment = Segment.walked(self.walk)

    def perform(self) -> None:
        walk = self.walk
        sidecar(walk.path).unlink(missing_ok=True)
        clear_tail(walk, last_nonzero(walk))
        if walk.header.compacted:  # nothing may be appended to a rewritten segment
            seal(self.segment)


def _begun(path: Path, sequence: int, *, topic: int, partition: int) -> _Cut | None:
    """What is left to do of a cut through a segment; None if it is sealed there already."""
    file = segment_file(Handle(path), path, topic=topic, partition=partition)
    try:
        if read_footer(file).last == sequence:
            return None
    except Corruption:
        pass  # the newest segment has no footer, nor has one that was being cut
    return _Cut(file, sequence)


def _skip(walk: Walk, *, sequence: int, known: BatchIndex) -> None:
    """Begin the walk at the group that the cut goes through: what is before it is not touched."""
    position = known.find(sequence)
    while position > 0:
        before, length = batches.decode_header(
            walk.handle.read(batches.HEADER_SIZE, known.offsets[position - 1])
        )
        end = known.offsets[position - 1] + padded(before.size + length)
        if end != known.offsets[position]:  # a flush mark stands between the two
            walk.start_at(end, before)
            walk.flush_end, walk.batches = end, position
            walk.index.firsts = known.firsts[:position]
            walk.index.offsets = known.offsets[:position]
            return
        position -= 1


def reach(walk: Walk, sequence: int) -> None:
    try:
        _advance(walk, sequence)
    except Corruption:
        # A first attempt at this cut may have torn the mark of the last group. Its batches are as
        # they were; if they lead to the cut, they are what it stood for.
        if walk.flush_end != walk.offset:
            raise
        walk.pass_mark()
        _advance(walk, sequence)
    if walk.sequence != sequence:
        reason = f"no batch ends at {sequence}, where the log is to be cut"
        raise damaged(walk, reason, offset=walk.offset, sequence=sequence)


def _advance(walk: Walk, sequence: int) -> None:
    if walk.sequence >= sequence:
        return
    for _, batch in walk:
        if batch.last >= sequence:
            return


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
