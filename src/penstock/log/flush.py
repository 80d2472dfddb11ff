"""From a staged batch to a durable one: where it will lie, and how it gets there.

Where the next batches will lie is decided on the event loop, before anything is written. Space is
promised by the file system before it is used (`posix_fallocate`), so that a write of staged
batches cannot run out of disk. A *spare* is a preallocated file that will become the next segment.
The loop stages into the newest segment or takes the first spare; the writer thread extends both by
`grow`. The two threads share `Segment.allocated`, `Spare.allocated` and the spare itself: the
writer provides and raises them, the loop consumes, and either sees at worst an older, smaller
promise.

What is staged is taken as one flush, which the writer thread writes and syncs. Until then the
batches stay in memory, for a sender that need not wait for the disk.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.errors import DiskFull
from penstock.log.crash import crash_armed, crash_point
from penstock.log.files import FULL, TOO_MANY, Handle, sync_folder
from penstock.log.floor import Floor
from penstock.log.layout import FOOTER_SIZE, HEADER_SIZE, MARK_SIZE, Mark, SegmentHeader, padded
from penstock.log.segment import OpenedSegment, Segment, seal, segment_path
from penstock.log.walk import BatchIndex
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


class FlushPiece:
    """Consecutive batches of one flush in one segment: one write."""

    __slots__ = ("batches", "buffers", "first", "last", "offset", "segment", "size", "spare")

    def __init__(self, segment: Segment, first: int, spare: Path | None) -> None:
        self.segment, self.first, self.spare = segment, first, spare
        self.last = first - 1
        self.offset = segment.end
        self.size, self.batches = MARK_SIZE, 0
        self.buffers: list[Buffer] = [b""]  # the first is the flush mark, which the writer makes


@dataclass(frozen=True, slots=True)
class Flush:
    """Batches that are written and made durable together."""

    pieces: list[FlushPiece]

    @property
    def first(self) -> int:
        return self.pieces[0].first

    @property
    def last(self) -> int:
        return self.pieces[-1].last

    @property
    def bytes(self) -> int:
        return sum(piece.size for piece in self.pieces)


class Stager:
    """The loop's view of the log's end, ahead of what is written."""

    def __init__(self, folder: Path, options: LogOptions) -> None:
        self.folder, self.options = folder, options
        self.segment: Segment | None = None
        self.spare: Spare | None = None
        self._spares_made = 0
        self._pieces: list[FlushPiece] = []

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
            piece = FlushPiece(segment, batch.first, None)
            self._pieces.append(piece)
            segment.end += MARK_SIZE
        self._put(batch, size, piece)
        return begun

    def _roll(self, size: int, header: SegmentHeader) -> FlushPiece:
        spare = self.spare
        if spare is None or spare.room < size:
            raise DiskFull("no space is set aside for this batch", bytes=size)
        self.spare = None
        segment = Segment(segment_path(self.folder, header.first), header)
        segment.allocated = spare.allocated
        segment.opened = OpenedSegment(spare.handle, BatchIndex())
        piece = FlushPiece(segment, header.first, spare.path)
        segment.end += MARK_SIZE
        self.segment = segment
        self._pieces.append(piece)
        return piece

    @staticmethod
    def _put(batch: Batch, size: int, piece: FlushPiece) -> None:
        segment, buffers = piece.segment, piece.buffers
        assert segment.opened is not None
        segment.opened.index.add(batch.first, segment.end)
        buffers.append(batch.header)
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

    def grow(self, size: int, *, enqueue: bool = True) -> None:
        """Make `room(enqueue)` at least `size`, by the writer thread; raises `DiskFull`. What is no
        enqueue is content with less: it may use the reserve, so none is set aside behind it."""
        need = padded(size) + MARK_SIZE + FOOTER_SIZE
        if enqueue:
            need += self.options.reserve_bytes
        while self.room(enqueue=enqueue) < size:
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
        try:
            spare = Spare(self.folder / f"spare{self._spares_made}.tmp")
        except OSError as error:
            if error.errno not in TOO_MANY:
                raise
            # The log need not stop: enqueues are refused for now, as on a full disk.
            raise DiskFull(f"no file can be opened: {error.strerror}") from error
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


class StagedBatches:
    """The batches that are staged and not durable yet, in order of sequence.

    Nothing else is in here, so it needs no bound of its own: staging has one. The loop adds and
    looks; whoever made batches durable lets them go, perhaps on the writer thread. Every step is
    one operation on the deque, which needs no lock.
    """

    __slots__ = ("_batches", "add")

    def __init__(self) -> None:
        self._batches: deque[Batch] = deque()
        self.add = self._batches.append

    def __len__(self) -> int:
        return len(self._batches)

    def forget(self, through: int) -> None:
        """Let go of what is durable: everything up to `through`."""
        batches = self._batches
        while batches and batches[0].first <= through:  # a batch becomes durable as a whole
            batches.popleft()

    def clear(self) -> None:
        self._batches.clear()

    def slice(self, from_sequence: int, *, through: int, bytes_max: int) -> list[Batch]:
        """Batches from the one that covers `from_sequence`; none if that one is not here."""
        found: list[Batch] = []
        for batch in list(self._batches):  # a copy: the writer thread may let go meanwhile
            if batch.last < from_sequence:
                continue
            if not found and batch.first > from_sequence:
                break
            bytes_max -= batch.size
            if batch.last > through or (found and bytes_max < 0):
                break
            found.append(batch)
        return found


class FlushWriter:
    """Writes pieces in the order in which they were staged.

    A piece that begins a segment first seals the one before. The new file gets its name only
    after its first batches are durable; a crash before that leaves a spare, which is swept away
    on opening.
    """

    def __init__(self, floor: Floor, *, floor_s: float) -> None:
        self.floor, self.floor_s = floor, floor_s
        self.tail: Segment | None = None
        self.durable = 0
        self.committed = 0  # as far as this node knows; it may be ahead of what is durable here
        self._floor_due = 0.0

    def restart(self, newest: Segment | None) -> None:
        """Go on behind `newest`, the end of what is durable."""
        slot = self.floor.slot
        self.tail = newest if newest is not None and not newest.sealed else None
        self.durable = newest.last if newest is not None else slot.empty_at - 1
        self.committed = max(self.committed, slot.sequence)

    def write(self, piece: FlushPiece) -> Segment | None:
        """Make one piece durable; returns the segment that it sealed, if it began a new one."""
        before = self.tail
        self._mark(piece)
        if piece.spare is not None:
            self._roll(piece)
        else:
            self._sync(piece, piece.buffers, piece.offset)
        self.durable = piece.last
        return before if before is not self.tail else None

    def begin(self, piece: FlushPiece) -> int:
        """Write a piece that begins no segment, without the sync; returns what is to be synced."""
        self._mark(piece)
        self._put(piece, piece.buffers, piece.offset)
        assert piece.segment.opened is not None
        return piece.segment.opened.handle.fd

    def finish(self, piece: FlushPiece) -> None:
        """The piece that was begun is synced."""
        crash_point("log.sync.after")
        self.durable = piece.last

    @property
    def floor_due(self) -> bool:
        return time.monotonic() >= self._floor_due

    def _mark(self, piece: FlushPiece) -> None:
        mark = Mark(piece.size, self.durable, piece.first, piece.batches)
        header = piece.segment.header
        piece.buffers[0] = mark.encode(Mark.place(header.topic, header.partition, piece.offset))

    def raise_floor(self) -> None:
        """Persist what must never be missing: durable here, and committed.

        What is durable here alone may still have to be cut off, for another coordinator's sake.
        """
        self.floor.raise_to(sequence=min(self.durable, self.committed))
        self._floor_due = time.monotonic() + self.floor_s

    def _roll(self, piece: FlushPiece) -> None:
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

    def _sync(self, piece: FlushPiece, buffers: list[Buffer], offset: int) -> None:
        self._put(piece, buffers, offset)
        assert piece.segment.opened is not None
        os.fdatasync(piece.segment.opened.handle.fd)
        crash_point("log.sync.after")

    @staticmethod
    def _put(piece: FlushPiece, buffers: list[Buffer], offset: int) -> None:
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
