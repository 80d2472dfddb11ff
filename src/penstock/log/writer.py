"""The writer thread's half of the log: one flush at a time, durable before it returns."""

from __future__ import annotations

import os
import time

from penstock.log.crash import crash_armed, crash_point
from penstock.log.files import Handle, sync_folder
from penstock.log.floor import Floor
from penstock.log.layout import Mark
from penstock.log.segment import Segment, seal
from penstock.log.staging import Piece
from penstock.model.columns import Buffer


class Writer:
    """Writes pieces in the order in which they were staged.

    A piece that begins a segment first seals the one before. The new file gets its name only
    after its first batches are durable; a crash before that leaves a spare, which is swept away
    on opening.
    """

    def __init__(self, floor: Floor, *, floor_s: float) -> None:
        self.floor, self.floor_s = floor, floor_s
        self.tail: Segment | None = None
        self.durable = 0
        self.committed = 0  # as far as it is known here; perhaps ahead of what is durable here
        self._floor_due = 0.0

    def restart(self, newest: Segment | None) -> None:
        """Go on behind `newest`, the end of what is durable."""
        slot = self.floor.slot
        self.tail = newest if newest is not None and not newest.sealed else None
        self.durable = newest.last if newest is not None else slot.empty_at - 1
        self.committed = max(self.committed, slot.sequence)

    def write(self, piece: Piece) -> Segment | None:
        """Make one piece durable; returns the segment that it sealed, if it began a new one."""
        before = self.tail
        self._mark(piece)
        if piece.spare is not None:
            self._roll(piece)
        else:
            self._sync(piece, piece.buffers, piece.offset)
        self.durable = piece.last
        return before if before is not self.tail else None

    def begin(self, piece: Piece) -> int:
        """Write a piece that begins no segment, without the sync; returns what is to be synced."""
        self._mark(piece)
        self._put(piece, piece.buffers, piece.offset)
        assert piece.segment.opened is not None
        return piece.segment.opened.handle.fd

    def finish(self, piece: Piece) -> None:
        """The piece that was begun is synced."""
        crash_point("log.sync.after")
        self.durable = piece.last

    @property
    def floor_due(self) -> bool:
        return time.monotonic() >= self._floor_due

    def _mark(self, piece: Piece) -> None:
        mark = Mark(piece.size, self.durable, piece.first, piece.batches)
        header = piece.segment.header
        piece.buffers[0] = mark.encode(Mark.place(header.topic, header.partition, piece.offset))

    def keep_floor(self) -> None:
        """Persist the floor when it is due; it may lag, for it only sharpens the search for rot."""
        if self.floor_due:
            self.raise_floor()

    def raise_floor(self) -> None:
        """Persist what must never be missing: durable here, and committed.

        What is durable here alone may still have to be cut off, for another coordinator's sake.
        """
        self.floor.raise_to(sequence=min(self.durable, self.committed))
        self._floor_due = time.monotonic() + self.floor_s

    def _roll(self, piece: Piece) -> None:
        assert piece.spare is not None
        segment = piece.segment
        if self.tail is not None:
            seal(self.tail)
        self._sync(piece, [segment.header.encode(), *piece.buffers], 0)
        crash_point("log.roll.synced")
        piece.spare.rename(segment.path)
        crash_point("log.roll.renamed")
        sync_folder(segment.path.parent)
        self.tail = segment
        acknowledged = min(self.durable, self.committed)
        self.floor.raise_to(sequence=acknowledged, first=1, tail=segment.first)
        crash_point("log.roll.after")

    def _sync(self, piece: Piece, buffers: list[Buffer], offset: int) -> None:
        self._put(piece, buffers, offset)
        assert piece.segment.opened is not None
        os.fdatasync(piece.segment.opened.handle.fd)
        crash_point("log.sync.after")

    @staticmethod
    def _put(piece: Piece, buffers: list[Buffer], offset: int) -> None:
        assert piece.segment.opened is not None
        handle = piece.segment.opened.handle
        crash_point("log.write.before")
        if crash_armed("log.write.torn"):
            _write_half(handle, buffers, offset)
        crash_point("log.write.torn")
        handle.write(buffers, offset)
        crash_point("log.write.after")


def _write_half(handle: Handle, buffers: list[Buffer], offset: int) -> None:
    whole = b"".join(buffers)
    handle.write([whole[: len(whole) // 2]], offset)
