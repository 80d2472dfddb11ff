"""Where the next batches will lie: decided on the event loop, before anything is written.

Space is promised by the file system before it is used (`posix_fallocate`), so that a write of
staged batches cannot run out of disk. A *spare* is a preallocated file that will become the next
segment. The loop stages into the newest segment or takes the first spare; the writer thread
extends both by `grow`. The two threads share `Segment.allocated`, `Spare.allocated` and the spare
itself: the writer provides and raises them, the loop consumes, and either sees at worst an older,
smaller promise.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.errors import DiskFull
from penstock.log.crash import crash_point
from penstock.log.files import FULL, Handle
from penstock.log.index import Index, Opened
from penstock.log.layout import FOOTER_SIZE, HEADER_SIZE, MARK_SIZE, SegmentHeader, padded
from penstock.log.segment import Segment, segment_path
from penstock.model.batch import Batch
from penstock.model.columns import Buffer

_PADDING: Final = tuple(bytes(n) for n in range(8))


@dataclass(frozen=True)
class LogOptions:
    segment_bytes: int = 64 << 20  # a segment is sealed when the next batch would exceed this
    allocate_bytes: int = 4 << 20  # preallocation grows by this much
    reserve_bytes: int = 256 << 10  # kept free of enqueues, so that a full disk can be settled
    cache_bytes: int = 8 << 20  # batches kept in memory
    index_bytes: int = 16 << 20  # indexes of sealed segments kept in memory
    floor_s: float = 1.0  # how often the acknowledged floor is persisted under load


class Spare:
    """A preallocated file without a name in the log yet."""

    __slots__ = ("allocated", "handle", "path")

    def __init__(self, path: Path) -> None:
        self.path, self.allocated = path, 0
        self.handle = Handle(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    @property
    def room(self) -> int:
        return self.allocated - HEADER_SIZE - MARK_SIZE - FOOTER_SIZE


class Piece:
    """Consecutive batches of one flush in one segment: one write."""

    __slots__ = ("batches", "buffers", "first", "last", "offset", "segment", "size", "spare")

    def __init__(self, segment: Segment, first: int, spare: Path | None) -> None:
        self.segment, self.first, self.spare = segment, first, spare
        self.last = first - 1
        self.offset = segment.end
        self.size, self.batches = MARK_SIZE, 0
        self.buffers: list[Buffer] = [b""]  # the mark's place: it is made when it is written


@dataclass(frozen=True, slots=True)
class Flush:
    """Batches that are written and made durable together."""

    pieces: list[Piece]

    @property
    def first(self) -> int:
        return self.pieces[0].first

    @property
    def last(self) -> int:
        return self.pieces[-1].last

    @property
    def bytes(self) -> int:
        return sum(piece.size for piece in self.pieces)


class Staging:
    """The loop's view of the log's end, ahead of what is written."""

    def __init__(self, folder: Path, options: LogOptions) -> None:
        self.folder, self.options = folder, options
        self.segment: Segment | None = None
        self.spare: Spare | None = None
        self._spares_made = 0
        self._pieces: list[Piece] = []

    def restart(self, newest: Segment | None) -> None:
        """Go on behind `newest`; what was staged and not taken is dropped."""
        for piece in self._pieces:
            if piece.spare is not None:
                piece.spare.unlink()
        self._pieces = []
        self.segment = newest if newest is not None and not newest.sealed else None

    def room(self, *, enqueue: bool) -> int:
        """Any one batch of at most so many bytes can be staged now."""
        spare, segment = self.spare, self.segment
        room = 0 if spare is None else spare.room
        if segment is not None:
            room = max(room, segment.allocated - segment.end - MARK_SIZE - FOOTER_SIZE)
        if enqueue:
            room -= self.options.reserve_bytes
        return max(room, 0) & ~7

    def add(self, batch: Batch, *, header: Callable[[], SegmentHeader]) -> Segment | None:
        """Give `batch` its place; returns the segment that it begins, if it begins one.

        `header` makes that of such a segment. Raises `DiskFull`, with nothing changed, when there
        is no room for it.
        """
        size = padded(batch.size)
        begun: Segment | None = None
        segment, piece = self.segment, self._pieces[-1] if self._pieces else None
        mark = MARK_SIZE if piece is None else 0
        if segment is None or segment.end + mark + size + FOOTER_SIZE > segment.allocated:
            piece = self._roll(size, header())
            segment = begun = piece.segment
        elif piece is None:
            piece = Piece(segment, batch.first, None)
            self._pieces.append(piece)
            segment.end += MARK_SIZE
        self._put(batch, size, piece)
        return begun

    def _roll(self, size: int, header: SegmentHeader) -> Piece:
        spare = self.spare
        if spare is None or spare.room < size:
            raise DiskFull("no space is set aside for this batch", bytes=size)
        self.spare = None
        segment = Segment(segment_path(self.folder, header.first), header)
        segment.allocated = spare.allocated
        segment.opened = Opened(spare.handle, Index())
        piece = Piece(segment, header.first, spare.path)
        segment.end += MARK_SIZE
        self.segment = segment
        self._pieces.append(piece)
        return piece

    @staticmethod
    def _put(batch: Batch, size: int, piece: Piece) -> None:
        segment, buffers = piece.segment, piece.buffers
        assert segment.opened is not None
        segment.opened.index.add(batch.first, segment.end)
        buffers.append(batch.header())
        buffers.append(batch.body)
        if size != batch.size:
            buffers.append(_PADDING[size - batch.size])
        segment.end += size
        segment.batches += 1
        segment.last, segment.chain, segment.epoch = batch.last, batch.chain, batch.epoch
        segment.time_ms = batch.time_ms
        piece.last = batch.last
        piece.size += size
        piece.batches += 1

    def take(self) -> Flush | None:
        if not self._pieces:
            return None
        flush = Flush(self._pieces)
        self._pieces = []
        return flush

    def grow(self, size: int) -> None:
        """Make `room(enqueue=True)` at least `size`, by the writer thread; raises `DiskFull`."""
        need = padded(size) + MARK_SIZE + FOOTER_SIZE + self.options.reserve_bytes
        while self.room(enqueue=True) < size:
            segment = self.segment
            if segment is not None and segment.end + need <= self.options.segment_bytes:
                assert segment.opened is not None
                least = segment.end + need
                wanted = segment.allocated + self.options.allocate_bytes
                wanted = max(least, min(wanted, self.options.segment_bytes))
                segment.allocated = _allocate(
                    segment.opened.handle, have=segment.allocated, wanted=wanted, least=least
                )
            else:
                self._grow_spare(HEADER_SIZE + need)
        crash_point("log.grow.after")

    def _grow_spare(self, least: int) -> None:
        wanted = max(least, min(self.options.allocate_bytes, self.options.segment_bytes))
        spare = self.spare
        if spare is not None:
            spare.allocated = _allocate(
                spare.handle, have=spare.allocated, wanted=wanted, least=least
            )
            return
        self._spares_made += 1
        spare = Spare(self.folder / f"spare{self._spares_made}.tmp")
        try:
            spare.allocated = _allocate(spare.handle, have=0, wanted=wanted, least=least)
        except DiskFull:
            spare.path.unlink()
            raise
        self.spare = spare

    def close(self) -> None:
        if self.spare is not None:
            self.spare.path.unlink(missing_ok=True)
            self.spare = None


def _allocate(handle: Handle, *, have: int, wanted: int, least: int) -> int:
    """Extend the file's promised space to `wanted`, or on a nearly full disk to `least`."""
    for target in (wanted, least):
        try:
            if target > have:
                os.posix_fallocate(handle.fd, have, target - have)
            return max(target, have)
        except OSError as error:
            if error.errno not in FULL:
                raise
            os.ftruncate(handle.fd, have)  # give back what a half-done allocation took
    raise DiskFull("the disk is full", bytes=least - have)
