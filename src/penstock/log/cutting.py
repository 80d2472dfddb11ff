"""Ending a log earlier than it ends, or beginning it anew, so that a crash leaves one or the other.

Zeroing batches or deleting files step by step would look like rot if it stopped half-way. So the
floor is written first, with what is going to happen. From then on it will happen: whoever opens
the log finishes it, and every step can be done twice. The floor is written again when it is done,
in both of its slots, so that damage to one cannot bring the intent back.

Only what lies behind the cut is touched, but for one flush mark: that of the group that the cut
goes through is made shorter. A power cut may tear it; `reach` gets past it then.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from penstock.errors import Corruption
from penstock.log.crash import crash_point
from penstock.log.files import Handle, sync_folder
from penstock.log.floor import Floor
from penstock.log.index import Index, Opened, sidecar
from penstock.log.layout import FloorFlag, SegmentHeader, padded
from penstock.log.segment import Segment, read_footer, read_header, seal
from penstock.log.tail import clear_tail
from penstock.log.walk import Walk, damaged, last_nonzero
from penstock.model import batch as batches

_log = logging.getLogger(__name__)


def cut_after(sequence: int, *, floor: Floor, segments: list[Segment]) -> list[Segment]:
    """Durably forget everything behind `sequence`, a batch's last; returns what is left."""
    kept = [segment for segment in segments if segment.first <= sequence]
    slot = floor.slot
    changes = {"first": slot.first, "chain": slot.chain, "epoch": slot.epoch}
    if not kept and segments:
        header = segments[0].header
        changes = {
            "first": header.first, "chain": header.chain_before, "epoch": header.epoch_before
        }  # fmt: skip
    crash_point("log.truncate.before")
    floor.change(
        slot._replace(
            sequence=min(slot.sequence, sequence), tail=kept[-1].first if kept else 0,
            flags=slot.flags | FloorFlag.CUT, cut=sequence, **changes,
        )
    )  # fmt: skip
    crash_point("log.truncate.intended")
    newest = kept[-1] if kept else segments[0]
    known = newest.opened.index if newest.opened is not None else None
    header = newest.header
    folder = newest.path.parent
    cut = _finish_cut(folder, floor, topic=header.topic, partition=header.partition, known=known)
    return [*kept[:-1], cut] if cut is not None else kept


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
    """On opening: do what the floor says was under way. Raises `Corruption` below a cut."""
    flags = floor.slot.flags
    if flags & FloorFlag.RESET:
        _log.warning("%s: finishing a reset", folder)
        _finish_reset(folder, floor)
    if flags & FloorFlag.CUT:
        _log.warning("%s: finishing a cut after sequence %d", folder, floor.slot.cut)
        _finish_cut(folder, floor, topic=topic, partition=partition, known=None)


def _finish_reset(folder: Path, floor: Floor) -> None:
    for pattern in ("*.seg", "*.idx", "*.snap"):
        _remove(folder.glob(pattern), point="log.reset.between")
    sync_folder(folder)
    crash_point("log.reset.removed")
    floor.settle(floor.slot._replace(flags=floor.slot.flags & ~FloorFlag.RESET))
    crash_point("log.reset.after")


def _finish_cut(
    folder: Path, floor: Floor, *, topic: int, partition: int, known: Index | None
) -> Segment | None:
    slot, cut = floor.slot, None
    firsts = sorted(int(path.stem, 16) for path in folder.glob("*.seg"))
    gone = [first for first in reversed(firsts) if first > slot.cut]
    kept = [first for first in firsts if slot.first <= first <= slot.cut]
    paths = [folder / f"{first:016x}.seg" for first in gone]
    _remove([*map(sidecar, paths), *paths], point="log.truncate.between")
    if gone:
        sync_folder(folder)
    crash_point("log.truncate.removed")
    if kept:
        path = folder / f"{kept[-1]:016x}.seg"
        cut = _cut_segment(path, slot.cut, topic=topic, partition=partition, known=known)
    crash_point("log.truncate.cut")
    floor.settle(slot._replace(flags=slot.flags & ~FloorFlag.CUT, cut=0))
    crash_point("log.truncate.after")
    return cut


def _remove(paths: Iterable[Path], *, point: str) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
        crash_point(point)


def _cut_segment(
    path: Path, sequence: int, *, topic: int, partition: int, known: Index | None
) -> Segment | None:
    """Make the segment end after `sequence`, open for more; None if it is sealed there already."""
    handle = Handle(path, os.O_RDWR)
    header = read_header(handle, path, topic=topic, partition=partition)
    if _sealed_at(handle, path, header) == sequence:
        return None
    walk, index = Walk(handle, path, header=header, end=handle.size), Index()
    if known is not None:
        _skip(walk, index, sequence=sequence, known=known)
    reach(walk, index, sequence)
    sidecar(path).unlink(missing_ok=True)
    clear_tail(handle, walk, last_nonzero(handle, walk.offset, walk.end))
    segment = Segment(path, header)
    segment.reached(walk)
    segment.opened, segment.allocated = Opened(handle, index), handle.size
    if header.compacted:  # nothing may be appended to a rewritten segment
        seal(segment)
    return segment


def _sealed_at(handle: Handle, path: Path, header: SegmentHeader) -> int | None:
    try:
        return read_footer(handle, path, header).last
    except Corruption:
        return None  # the newest segment, or one that was being cut


def _skip(walk: Walk, index: Index, *, sequence: int, known: Index) -> None:
    """Begin the walk at the group that the cut goes through: what is before it is not touched."""
    position = known.find(sequence)
    while position > 0:
        before, length = batches.decode_header(
            walk.handle.read(batches.HEADER_SIZE, known.offsets[position - 1])
        )
        end = known.offsets[position - 1] + padded(before.size + length)
        if end != known.offsets[position]:  # a flush mark stands between the two
            walk.resume(end, before, batches_before=position)
            index.firsts, index.offsets = known.firsts[:position], known.offsets[:position]
            return
        position -= 1


def reach(walk: Walk, index: Index, sequence: int) -> None:
    """Walk to the end of the batch that ends at `sequence`."""
    try:
        _advance(walk, index, sequence)
    except Corruption:
        # A first attempt at this cut may have torn the mark of the last group. Its batches are as
        # they were; if they lead to the cut, they are what it stood for.
        if not walk.at_mark:
            raise
        walk.pass_mark()
        _advance(walk, index, sequence)
    if walk.sequence != sequence:
        raise damaged(
            f"no batch ends at {sequence}, where the log is to be cut",
            path=walk.path, offset=walk.offset, header=walk.header, sequence=sequence,
        )  # fmt: skip


def _advance(walk: Walk, index: Index, sequence: int) -> None:
    if walk.sequence >= sequence:
        return
    for offset, batch in walk:
        index.add(batch.first, offset)
        if batch.last >= sequence:
            return
