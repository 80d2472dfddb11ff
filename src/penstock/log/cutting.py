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
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.errors import Corruption
from penstock.log.crash import crash_point
from penstock.log.files import Handle, sync_folder
from penstock.log.floor import Floor
from penstock.log.index import Index, Opened, sidecar
from penstock.log.layout import FloorFlag, SegmentHeader, padded
from penstock.log.segment import Segment, read_footer, read_header, seal, segment_path
from penstock.log.tail import clear_tail
from penstock.log.walk import Walk, damaged, last_nonzero
from penstock.model import batch as batches

_log = logging.getLogger(__name__)


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
        cut = _Cut(kept[-1].path, kept[-1].header, sequence, known=kept[-1].opened)
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
    _finish_cut(segments[0].path.parent, floor, lambda _: cut)
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
            lambda path: _begun(path, floor.slot.cut, topic=topic, partition=partition),
        )


def _finish_reset(folder: Path, floor: Floor) -> None:
    for pattern in ("*.seg", "*.idx", "*.snap"):
        _remove(folder.glob(pattern), point="log.reset.between")
    sync_folder(folder)
    crash_point("log.reset.removed")
    floor.settle(floor.slot._replace(flags=floor.slot.flags & ~FloorFlag.RESET))
    crash_point("log.reset.after")


def _finish_cut(folder: Path, floor: Floor, cut_of: Callable[[Path], _Cut | None]) -> None:
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
        self, path: Path, header: SegmentHeader, sequence: int, *, known: Opened | None = None
    ) -> None:
        handle = Handle(path, os.O_RDWR)
        self.walk, index = Walk(handle, path, header=header, end=handle.size), Index()
        if known is not None:
            _skip(self.walk, index, sequence=sequence, known=known.index)
        reach(self.walk, index, sequence)
        self.segment = Segment(path, header)
        self.segment.reached(self.walk)
        self.segment.opened, self.segment.allocated = Opened(handle, index), handle.size

    def perform(self) -> None:
        walk = self.walk
        sidecar(walk.path).unlink(missing_ok=True)
        clear_tail(walk.handle, walk, last_nonzero(walk.handle, walk.offset, walk.end))
        if walk.header.compacted:  # nothing may be appended to a rewritten segment
            seal(self.segment)


def _begun(path: Path, sequence: int, *, topic: int, partition: int) -> _Cut | None:
    """What is left to do of a cut through a segment; None if it is sealed there already."""
    handle = Handle(path)
    header = read_header(handle, path, topic=topic, partition=partition)
    if _sealed_at(handle, path, header) == sequence:
        return None
    return _Cut(path, header, sequence)


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
