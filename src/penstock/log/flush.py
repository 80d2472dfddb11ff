"""From a staged batch to a durable one: where it will lie, and how it gets there.

Where the next batches will lie is decided on the event loop, before anything is written. Space is
promised by the file system before it is used (`posix_fallocate`), so that a write of staged batches
cannot run out of disk. A *spare* is a preallocated file that will become the next segment. The loop
stages into the newest segment or takes the first spare; the writer thread extends both by `grow`.
The two threads share `Segment.allocated`, `Spare.allocated` and the spare itself: the writer
provides and raises them, the loop consumes, and either sees at worst an older, smaller promise.

What is staged is taken as one flush, which the writer thread writes and syncs. Until then the
batches stay in the cache, for a sender that need not wait for the disk.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple

from penstock.errors import DiskFull
from penstock.log import crash
from penstock.log.crash import crash_armed, crash_point
from penstock.log.files import (
    FOOTER_SIZE,
    FULL,
    HEADER_SIZE,
    MARK_SIZE,
    TOO_MANY,
    Handle,
    Mark,
    SegmentHeader,
    padded,
    sync_folder,
)
from penstock.log.recovery import Floor
from penstock.log.segment import OpenedSegment, Segment, seal, segment_path
from penstock.log.walk import BatchIndex
from penstock.model import batch as batches
from penstock.model.batch import Batch
from penstock.model.columns import Buffer

_PADDING: Final = tuple(bytes(n) for n in range(8))
FULL_RETRY_S: Final = 1.0
_log = logging.getLogger(__name__)
_OVERHEAD: Final = 512  # bytes that the objects round a body take


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


class Flush(NamedTuple):
    pieces: list[FlushPiece]
    bytes: int


class Stager:
    """The loop's view of the log's end, ahead of what is written."""

    def __init__(self, folder: Path, options: LogOptions) -> None:
        self.folder, self.options = folder, options
        self.segment: Segment | None = None
        self.spare: Spare | None = None
        self._spares_made = 0
        half = min(options.allocate_bytes, options.segment_bytes) // 2
        self._ahead_bytes = half - options.reserve_bytes  # room that is kept for enqueues
        self._ahead_due = 0.0  # a full disk is not asked for space again before this time
        self.pieces: list[FlushPiece] = []  # what is staged and not taken yet

    def restart(self, newest: Segment | None) -> None:
        """Go on behind `newest`; what was staged and not taken is dropped."""
        for piece in self.pieces:
            if piece.spare is not None:
                piece.spare.unlink()
        self.pieces = []
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
        """Give `batch` its place; returns the segment that it begins, if it begins one, with the
        header that `header` makes. Raises `DiskFull`, with nothing changed, when there is no room
        for it."""
        length = batches.HEADER_SIZE + len(batch.body)
        size = (length + 7) & ~7
        begun: Segment | None = None
        segment, piece = self.segment, self.pieces[-1] if self.pieces else None
        mark = MARK_SIZE if piece is None else 0
        if segment is None or segment.end + mark + size + FOOTER_SIZE > segment.allocated:
            piece = self._roll(size, header())
            segment = begun = piece.segment
        elif piece is None:
            piece = FlushPiece(segment, batch.first, None)
            self.pieces.append(piece)
            segment.end += MARK_SIZE
        index = segment.newest.index
        # A reader on another thread looks into `firsts`: the offset must be there before.
        index.offsets.append(segment.end)
        index.firsts.append(batch.first)
        piece.buffers += (batch.header, batch.body, _PADDING[size - length])
        segment.end += size
        segment.batches += 1
        segment.last, segment.chain, segment.epoch = batch.last, batch.chain, batch.epoch
        segment.time_ms = batch.time_ms
        piece.last = batch.last
        piece.size += size
        piece.batches += 1
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
        self.pieces.append(piece)
        return piece

    def grow(self, size: int, *, enqueue: bool = True) -> None:
        """Make `room(enqueue)` at least `size`, by the writer thread; raises `DiskFull`. What is no
        enqueue is content with less: it may use the reserve, so none is set aside behind it."""
        need = padded(size) + MARK_SIZE + FOOTER_SIZE
        if enqueue:
            need += self.options.reserve_bytes
        while self.room(enqueue=enqueue) < size:
            segment = self.segment
            if segment is not None and segment.end + need <= self.options.segment_bytes:
                least = segment.end + need
                wanted = segment.allocated + self.options.allocate_bytes
                wanted = max(least, min(wanted, self.options.segment_bytes))
                segment.allocated = _allocate(
                    segment.newest.handle, have=segment.allocated, wanted=wanted, least=least
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

    def grow_ahead(self) -> None:
        """Set space aside before it is asked for; a full disk is the asker's to hear of."""
        if self.is_grown_ahead():
            return
        try:
            self.grow(max(self._ahead_bytes, 8))
        except DiskFull as error:
            self._ahead_due = time.monotonic() + FULL_RETRY_S
            _log.warning("%s: no space can be set aside: %s", self.folder, error.message)

    def is_grown_ahead(self) -> bool:
        """Whether enough space is set aside, or a full disk said lately that there is none."""
        if self.room(enqueue=True) >= self._ahead_bytes:
            return True
        return time.monotonic() < self._ahead_due

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


class BatchCache:
    """Recently written and read batches, least recently used first out; keyed by first sequence.

    What is not durable yet stays, whatever the bound: staging has one of its own. The event loop
    and reader threads ask it alike, hence the lock, which is only held for dictionary steps.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self.durable = 0  # a batch that begins behind this is staged only
        self._lock = Lock()
        self._batches: OrderedDict[int, Batch] = OrderedDict()

    def get(self, first: int) -> Batch | None:
        with self._lock:
            batch = self._batches.get(first)
            if batch is not None:
                self._batches.move_to_end(first)
            return batch

    def put(self, batch: Batch) -> None:
        with self._lock:
            old = self._batches.pop(batch.first, None)
            if old is not None:
                self.bytes -= len(old.body) + _OVERHEAD
            self._batches[batch.first] = batch
            self.bytes += len(batch.body) + _OVERHEAD
            while self.bytes > self.bytes_max and next(iter(self._batches)) <= self.durable:
                _, out = self._batches.popitem(last=False)
                self.bytes -= len(out.body) + _OVERHEAD

    def forget(self, first: int, last: int) -> None:
        with self._lock:
            for key in [key for key in self._batches if first <= key <= last]:
                self.bytes -= len(self._batches.pop(key).body) + _OVERHEAD


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
        self.floor_due_at = 0.0

    def restart(self, newest: Segment | None) -> None:
        """Go on behind `newest`, the end of what is durable."""
        slot = self.floor.slot
        self.tail = newest if newest is not None and not newest.sealed else None
        self.durable = newest.last if newest is not None else slot.empty_at - 1
        self.committed = max(self.committed, slot.sequence)

    def write(self, piece: FlushPiece) -> Segment | None:
        """Make one piece durable; returns the segment that it sealed, if it began a new one."""
        before = self.tail
        if piece.spare is not None:
            self._roll(piece)
        else:
            self._put(piece, piece.offset)
            self._sync(piece)
        self.durable = piece.last
        return before if before is not self.tail else None

    def begin(self, piece: FlushPiece) -> int:
        """Write a piece that begins no segment, without the sync; returns what is to be synced."""
        self._put(piece, piece.offset)
        return piece.segment.newest.handle.fd

    def raise_floor(self) -> None:
        """Persist what must never be missing: durable here, and committed. What is durable here
        alone may still have to be cut off, for another coordinator's sake."""
        self.floor.raise_to(sequence=min(self.durable, self.committed))
        self.floor_due_at = time.monotonic() + self.floor_s

    def _roll(self, piece: FlushPiece) -> None:
        assert piece.spare is not None
        segment = piece.segment
        if self.tail is not None:
            seal(self.tail)
        self._put(piece, 0, segment.header.encode())
        self._sync(piece)
        crash_point("log.roll.synced")
        piece.spare.rename(segment.path)
        crash_point("log.roll.renamed")
        sync_folder(segment.path.parent)
        self.tail = segment
        acknowledged = min(self.durable, self.committed)
        self.floor.raise_to(sequence=acknowledged, first=1, tail=segment.first)
        crash_point("log.roll.after")

    def _put(self, piece: FlushPiece, offset: int, header: bytes = b"") -> None:
        """Write a piece behind its flush mark, and behind the header if it begins a segment."""
        segment = piece.segment
        handle = segment.newest.handle
        mark = Mark(piece.size, self.durable, piece.first, piece.batches)
        piece.buffers[0] = header + mark.encode(segment.header, piece.offset)
        if crash.armed:
            crash_point("log.write.before")
            if crash_armed("log.write.torn"):
                whole = b"".join(piece.buffers)
                handle.write([whole[: len(whole) // 2]], offset)
            crash_point("log.write.torn")
        handle.write(piece.buffers, offset)
        if crash.armed:
            crash_point("log.write.after")

    @staticmethod
    def _sync(piece: FlushPiece) -> None:
        os.fdatasync(piece.segment.newest.handle.fd)
        crash_point("log.sync.after")
