"""The acknowledged floor: what a log must still hold when it is opened again, and how a log is cut.

Two slots in two disk sectors are written in turn, so a torn write spoils the older promise at
most. A floor that is behind the log is normal, a log that is behind its floor has rot; so it only
ever rises, unless the log is cut, reset or repaired on purpose.

To cut a log is to end it earlier, to reset it is to begin it anew; a crash leaves the old log or
the new one. Zeroing batches or deleting files step by step would look like rot if it stopped
half-way. So the floor is written first, with what is going to happen. From then on it will happen:
whoever opens the log finishes it, and every step can be done twice. The floor is written again
when it is done, in both of its slots, so that damage to one cannot bring the intent back.

Only what lies behind the cut is touched, but for one flush mark: that of the group that the cut
goes through is made shorter. A power cut may tear it; `reach` gets past it then.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Lock
from typing import Final

from penstock.errors import Corruption
from penstock.log.crash import crash_point
from penstock.log.files import FLOOR, FloorFlag, FloorSlot, Handle, padded, sync_folder
from penstock.log.segment import (
    OpenedSegment,
    Segment,
    read_footer,
    seal,
    segment_file,
    segment_path,
    sidecar,
)
from penstock.log.walk import BatchIndex, SegmentFile, Walk, clear_tail, damaged, last_nonzero
from penstock.model import batch as batches

SLOT_STRIDE: Final = 512
FILE_BYTES: Final = 2 * SLOT_STRIDE
_log = logging.getLogger(__name__)


class Floor:
    """The floor file of one partition; `raise_to` may be called from any thread."""

    def __init__(self, path: Path, *, accept_rot: bool = False) -> None:
        self.path = path
        self._lock = Lock()
        self.slot = load_slot(path, accept_rot=accept_rot)
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


def read_slots(data: bytes) -> list[FloorSlot]:
    """The valid slots in a floor file's bytes, best first."""
    found = []
    for at in (0, SLOT_STRIDE):
        try:
            found.append(FloorSlot.decode(data[at : at + FLOOR.size]))
        except Corruption:
            continue  # never written, or torn: the other slot holds
    return sorted(found, reverse=True)


def used_slots(data: bytes) -> int:
    """How many slots were ever written to, whole or not."""
    return sum(any(data[at : at + FLOOR.size]) for at in (0, SLOT_STRIDE))


def load_slot(path: Path, *, accept_rot: bool = False) -> FloorSlot:
    """The slot that counts; raises `Corruption` if there should be one and none can be read."""
    slots = read_slots(path.read_bytes()) if path.exists() else []
    if slots:
        return slots[0]
    if any(path.parent.glob("*.seg")) and not accept_rot:
        raise Corruption(f"{path} has no valid slot", file=str(path), reason="no valid floor")
    return FloorSlot(0, 0, 0, 0)


def cut_after(
    sequence: int, *, floor: Floor, segments: list[Segment],
    publish: Callable[[list[Segment]], None],
) -> list[Segment]:  # fmt: skip
    """Durably forget everything behind `sequence`, a batch's last; returns what is left.

    It is given to `publish` before anything that is there is touched, so that who reads below the
    cut meanwhile needs none of it.
    """
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
            walk.resume(end, before, batches_before=position)
            walk.index.firsts = known.firsts[:position]
            walk.index.offsets = known.offsets[:position]
            return
        position -= 1


def reach(walk: Walk, sequence: int) -> None:
    """Walk to the end of the batch that ends at `sequence`."""
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
