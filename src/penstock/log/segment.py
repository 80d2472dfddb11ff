"""The segments of a log: one file each, and which of the files are open.

A file gets its `.seg` name only after its header and first batches are durable, and loses its
preallocated space when it is sealed. So a named segment always has a valid header, and every
segment but the newest has a valid footer.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Final

import msgspec

from penstock.errors import Corruption, NotFound
from penstock.log.crash import crash_point
from penstock.log.files import (
    FOOTER,
    FOOTER_SIZE,
    FULL,
    HEADER_SIZE,
    Footer,
    Handle,
    SegmentHeader,
    padded,
)
from penstock.log.walk import BatchIndex, SegmentFile, Walk, damaged
from penstock.model import batch as batches
from penstock.model.batch import Batch
from penstock.model.columns import Buffer

_log = logging.getLogger(__name__)
OPEN_MAX: Final = 16  # sealed segments of one log whose files are open


def sidecar(segment: Path) -> Path:
    return segment.with_suffix(".idx")


class OpenedSegment(msgspec.Struct, frozen=True):
    """A segment's file and index, taken together so that a rewrite cannot part them."""

    handle: Handle
    index: BatchIndex


class Segment:
    """What is known of one segment without reading its batches.

    The newest one is staged into on the event loop and written by the writer thread; a sealed one
    is never changed, only replaced by another object when it is rewritten.
    """

    __slots__ = (
        "allocated", "batches", "chain", "end", "epoch", "header", "last", "opened", "path",
        "sealed", "time_ms",
    )  # fmt: skip

    def __init__(self, path: Path, header: SegmentHeader) -> None:
        self.path, self.header = path, header
        self.last = header.first - 1
        self.chain, self.epoch = header.chain_before, header.epoch_before
        self.time_ms = self.batches = 0
        self.end = HEADER_SIZE  # behind the last batch, staged ones included
        self.allocated = 0  # bytes that the file system has promised; `end` plus a footer must fit
        self.sealed = False
        # Always there until it is sealed, then an evictable cache.
        self.opened: OpenedSegment | None = None

    @property
    def first(self) -> int:
        return self.header.first

    @property
    def bytes(self) -> int:
        return self.end + FOOTER_SIZE if self.sealed else self.end

    @property
    def compacted(self) -> bool:
        return self.header.compacted

    @property
    def newest(self) -> OpenedSegment:
        """Its file and index, which are always there until it is sealed."""
        assert self.opened is not None
        return self.opened

    def walk(self, handle: Handle) -> Walk:
        return Walk(SegmentFile(handle, self.path, self.header), end=self.end)

    @classmethod
    def walked(cls, walk: Walk) -> Segment:
        """The segment as far as a verifying pass came, open for more behind that."""
        found = cls(walk.path, walk.header)
        found.adopt(walk.footer())
        found.opened, found.allocated = OpenedSegment(walk.handle, walk.index), walk.handle.size
        return found

    def footer(self) -> Footer:
        return Footer(
            self.first, self.last, self.chain, self.time_ms, self.end, self.batches, self.epoch
        )

    def adopt(self, footer: Footer) -> None:
        _, self.last, self.chain, self.time_ms, self.end, self.batches, self.epoch = footer


class LocatedSegment(msgspec.Struct, frozen=True):
    """A segment that was looked up for a sequence, with its file and index. The newest one grows
    meanwhile: its end is read before the length of its index, because staging raises both."""

    segment: Segment
    handle: Handle
    index: BatchIndex

    def last_of(self, position: int) -> int:
        last, firsts = self.segment.last, self.index.firsts
        return firsts[position + 1] - 1 if position + 1 < len(firsts) else last

    def size_of(self, position: int, until: int) -> int:
        """The bytes from one batch to the end of another, perhaps with a flush mark behind it."""
        end, offsets = self.segment.end, self.index.offsets
        return (offsets[until + 1] if until + 1 < len(offsets) else end) - offsets[position]

    def fitting(self, position: int, *, limit: int, room: int, covering: bool = False) -> int:
        """The last batch from `position` on of those that end by `limit` within `room` bytes. If it
        is `covering`, the one that covers `limit` may end behind it."""
        offsets = self.index.offsets
        until = self.index.find(limit)
        if self.last_of(until) > limit and not covering:
            until -= 1
        if until < position or self.size_of(position, until) <= room:
            return until
        return bisect_right(offsets, offsets[position] + room, position + 1, until + 1) - 2

    def read(self, position: int, until: int, *, nowait: bool) -> list[Batch] | None:
        """These batches from the file; None when `nowait` and the disk is needed."""
        offset, size = self.index.offsets[position], self.size_of(position, until)
        read = self.handle.read_nowait if nowait else self.handle.read
        data = read(size, offset)
        if data is None:
            return None
        return [self._decode(data, i, before=offset) for i in range(position, until + 1)]

    def _decode(self, data: Buffer, position: int, *, before: int) -> Batch:
        offset, sequence = self.index.offsets[position], self.index.firsts[position]
        header = self.segment.header
        try:
            batch = batches.decode(data, offset - before)
            place = (batch.first, batch.topic, batch.partition)
            if place != (sequence, header.topic, header.partition):
                raise Corruption(f"the batch of sequence {sequence} is not at its place")
        except Corruption as error:
            raise damaged(self.segment, error.message, offset=offset, sequence=sequence) from error
        return batch

    def head(self, position: int) -> Batch:
        return self._head(position)[0]

    def written_end(self, position: int) -> int:
        """Where a batch ends, whatever is behind it."""
        head, length = self._head(position)
        return self.index.offsets[position] + padded(head.size + length)

    def _head(self, position: int) -> tuple[Batch, int]:
        offset = self.index.offsets[position]
        try:
            return batches.decode_header(self.handle.read(batches.HEADER_SIZE, offset))
        except Corruption as error:
            raise damaged(self.segment, error.message, offset=offset, sequence=0) from error

    def epoch_of(self, position: int) -> int:
        return self.head(position).epoch

    def epoch_runs(self, position: int, until: int) -> Iterator[tuple[int, int]]:
        """(epoch, position) where each run of one epoch begins. Epochs never fall, so a run's end
        is found by halving."""
        while position <= until:
            epoch = self.epoch_of(position)
            yield epoch, position
            if self.epoch_of(until) == epoch:
                return
            position = bisect_right(range(until), epoch, position + 1, key=self.epoch_of)


def segment_path(folder: Path, first: int) -> Path:
    return folder / f"{first:016x}.seg"


def segment_file(handle: Handle, path: Path, *, topic: int, partition: int) -> SegmentFile:
    """Read the header of a file; raises `Corruption` unless it is of this segment."""
    try:
        header = SegmentHeader.decode(handle.read(HEADER_SIZE, 0))
    except Corruption as error:
        first = int(path.stem, 16)
        blank = SegmentHeader(topic, partition, first, 0, 0, False)
        file = SegmentFile(handle, path, blank)
        raise damaged(file, error.message, offset=0, sequence=first) from error
    file = SegmentFile(handle, path, header)
    if (header.topic, header.partition, f"{header.first:016x}") != (topic, partition, path.stem):
        reason = "the header belongs to another segment"
        raise damaged(file, reason, offset=0, sequence=header.first)
    return file


def read_footer(file: SegmentFile) -> Footer:
    """The footer at the file's end; raises `Corruption` if there is none for this segment."""
    at, first = file.handle.size - FOOTER_SIZE, file.header.first
    try:
        footer = Footer(*FOOTER.unpack(file.handle.read(FOOTER_SIZE, max(at, 0)))[1:])
        if footer.end != at or footer.first != first:
            raise Corruption("a footer is not at its place")
    except Corruption as error:
        raise damaged(file, error.message, offset=max(at, 0), sequence=first) from error
    return footer


def sealed_segment(file: SegmentFile) -> Segment:
    """The segment as its footer describes it; raises `Corruption` if it has none."""
    segment = Segment(file.path, file.header)
    segment.adopt(read_footer(file))
    segment.sealed = True
    return segment


def verify_sealed(segment: Segment, walk: Walk) -> None:
    """Raise unless a finished pass over a sealed segment ended exactly as its footer says."""
    if walk.footer() != segment.footer() or walk.flush_end not in (None, walk.offset):
        reason = "the footer does not agree with the batches"
        raise damaged(segment, reason, offset=segment.end, sequence=segment.last)


def verify_ends(segment: Segment, handle: Handle) -> None:
    """Raise unless header and footer on disk are still what they were when it was opened."""
    header = segment.header
    read_footer(segment_file(handle, segment.path, topic=header.topic, partition=header.partition))


def load_index(segment: Segment, handle: Handle) -> BatchIndex:
    """The index of a sealed segment, rebuilt where its sidecar cannot be used."""
    path = sidecar(segment.path)
    try:
        return BatchIndex.load(path, first=segment.first, last=segment.last, end=segment.end)
    except (FileNotFoundError, Corruption) as error:
        _log.info("%s: rebuilt: %s", path, str(error))
    walk = segment.walk(handle)
    walk.finish()
    verify_sealed(segment, walk)
    save_index(segment, walk.index)
    return walk.index


def save_index(segment: Segment, index: BatchIndex) -> None:
    """Write the sidecar, if there is space for it: it saves a walk, nothing depends on it."""
    path = sidecar(segment.path)
    try:
        index.save(path, last=segment.last, end=segment.end)
    except OSError as error:
        if error.errno not in FULL:
            raise
        _log.warning("%s: not saved: %s", path, str(error))


def seal(segment: Segment) -> None:
    """Close the newest segment for good: footer, exact size, sync, sidecar."""
    handle = segment.newest.handle
    crash_point("log.seal.before")
    end = handle.write([FOOTER.pack(*segment.footer())], segment.end)
    crash_point("log.seal.footer")
    os.ftruncate(handle.fd, end)
    crash_point("log.seal.trimmed")
    os.fsync(handle.fd)
    crash_point("log.seal.synced")
    save_index(segment, segment.newest.index)
    segment.sealed = True


class SegmentTable:
    """Segments in order. Changes replace the whole view, so a reader needs no lock.

    Files and indexes of sealed segments are opened on demand and closed least recently used first,
    within `index_bytes` and `OPEN_MAX`.
    """

    def __init__(self, *, index_bytes: int) -> None:
        self._index_bytes = index_bytes
        self._lock = Lock()
        self._closed = False
        self._empty_at = 1  # where the log begins while there is no segment
        self._open: OrderedDict[Segment, None] = OrderedDict()
        self._latest: Segment | None = None  # the last of `_open`
        self._publish([])

    def restart(self, segments: list[Segment], *, empty_at: int) -> None:
        with self._lock:
            self._empty_at = empty_at
            self._publish(segments)
            kept = [segment for segment in self._open if segment in segments]
            self._open = OrderedDict.fromkeys(kept)
            self._latest = None

    def segments(self) -> list[Segment]:
        return self._view[1]

    @property
    def first(self) -> int:
        firsts, _ = self._view
        return firsts[0] if firsts else self._empty_at

    @property
    def bytes(self) -> int:
        _, segments = self._view
        return self._bytes_before + segments[-1].bytes if segments else 0

    def find(self, sequence: int) -> Segment:
        """The segment that covers `sequence`; the caller has checked the log's bounds."""
        firsts, segments = self._view
        position = bisect_right(firsts, sequence) - 1
        if position < 0:
            raise NotFound(f"sequence {sequence} is no longer held", sequence=sequence)
        return segments[position]

    def append(self, segment: Segment) -> None:
        with self._lock:
            self._publish([*self._view[1], segment])

    def replace(self, old: Segment, new: Segment, *, commit: Callable[[], object]) -> None:
        """Put `new` in the place of `old`; `commit` puts its file there, in one step."""
        with self._lock:
            commit()
            self._publish([new if segment is old else segment for segment in self._view[1]])
            self._open.pop(old, None)
            self._admit(new)

    def drop(self, gone: list[Segment]) -> None:
        with self._lock:
            self._publish([segment for segment in self._view[1] if segment not in gone])
            for segment in gone:
                self._open.pop(segment, None)
            self._latest = None

    def at_hand(self, sequence: int) -> LocatedSegment | None:
        """The segment of `sequence`, if its file is open."""
        segment = self.find(sequence)
        opened = segment.opened
        if opened is None:
            return None
        if segment.sealed:
            self.touch(segment)
        return LocatedSegment(segment, opened.handle, opened.index)

    def locate(self, sequence: int) -> LocatedSegment:
        """The segment of `sequence`. Blocks if its file has to be opened."""
        while (found := self.at_hand(sequence)) is None:
            self._load(self.find(sequence))
        return found

    def _load(self, segment: Segment) -> None:
        """Open exactly this segment, unless it is another one's place by now."""
        handle = self.open_file(segment)
        if handle is None:
            return
        try:
            segment.opened = OpenedSegment(handle, load_index(segment, handle))
        except Corruption:
            if segment in self._view[1]:
                raise  # a segment that is not listed any more was cut meanwhile

    def open_file(self, segment: Segment) -> Handle | None:
        """The file of exactly this segment; None once it was dropped, cut or rewritten. Raises
        `NotFound` once the log is closed."""
        with self._lock:  # a rewrite swaps the file under the same lock
            if self._closed:
                raise NotFound("the log is closed")
            return Handle(segment.path) if segment in self._view[1] else None

    def close(self) -> None:
        """No file is opened any more: under the same names there may soon be others."""
        with self._lock:
            self._closed = True
            for segment in self._view[1]:
                segment.opened = None

    def touch(self, segment: Segment) -> None:
        """Note that an open, sealed segment was just used; it may close others."""
        if segment is not self._latest:
            with self._lock:
                self._admit(segment)

    def _admit(self, segment: Segment) -> None:
        self._latest = segment
        self._open[segment] = None
        self._open.move_to_end(segment)
        total = sum(s.opened.index.bytes for s in self._open if s.opened is not None)
        while len(self._open) > 1 and (total > self._index_bytes or len(self._open) > OPEN_MAX):
            oldest, _ = self._open.popitem(last=False)
            if oldest.opened is not None:
                total -= oldest.opened.index.bytes
                oldest.opened = None

    def _publish(self, segments: list[Segment]) -> None:
        self._view = ([segment.first for segment in segments], segments)
        # All but the newest are sealed, or will be as soon as the writer gets there.
        self._bytes_before = sum(segment.end + FOOTER_SIZE for segment in segments[:-1])
