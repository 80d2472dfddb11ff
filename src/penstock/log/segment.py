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
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Final

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
)
from penstock.log.walk import BatchIndex, SegmentFile, Walk, damaged

_log = logging.getLogger(__name__)
OPEN_MAX: Final = 16  # sealed segments of one log whose files are open


def sidecar(segment: Path) -> Path:
    return segment.with_suffix(".idx")


class OpenedSegment:
    """A segment's file and index, taken together so that a rewrite cannot part them."""

    __slots__ = ("handle", "index")

    def __init__(self, handle: Handle, index: BatchIndex) -> None:
        self.handle, self.index = handle, index


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

    def walk(self, handle: Handle) -> Walk:
        return Walk(SegmentFile(handle, self.path, self.header), end=self.end)

    @classmethod
    def walked(cls, walk: Walk) -> Segment:
        """The segment as far as a verifying pass came, open for more behind that."""
        found = cls(walk.path, walk.header)
        found.last, found.chain, found.epoch = walk.sequence, walk.chain, walk.epoch
        found.time_ms, found.batches, found.end = walk.time_ms, walk.batches, walk.offset
        found.opened, found.allocated = OpenedSegment(walk.handle, walk.index), walk.handle.size
        return found

    def footer(self) -> Footer:
        return Footer(
            self.first, self.last, self.chain, self.time_ms, self.end, self.batches, self.epoch
        )


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
    segment, footer = Segment(file.path, file.header), read_footer(file)
    segment.last, segment.chain, segment.epoch = footer.last, footer.chain, footer.epoch
    segment.time_ms, segment.batches, segment.end = footer.time_ms, footer.batches, footer.end
    segment.sealed = True
    return segment


def verify_sealed(segment: Segment, walk: Walk) -> None:
    """Raise unless a finished pass over a sealed segment ended exactly as its footer says."""
    found = (walk.sequence, walk.chain, walk.epoch, walk.time_ms, walk.batches, walk.offset)
    footer = segment.footer()
    said = (footer.last, footer.chain, footer.epoch, footer.time_ms, footer.batches, footer.end)
    if found != said or walk.flush_end not in (None, walk.offset):
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
    assert segment.opened is not None
    handle = segment.opened.handle
    crash_point("log.seal.before")
    end = handle.write([FOOTER.pack(*segment.footer())], segment.end)
    crash_point("log.seal.footer")
    os.ftruncate(handle.fd, end)
    crash_point("log.seal.trimmed")
    os.fsync(handle.fd)
    crash_point("log.seal.synced")
    save_index(segment, segment.opened.index)
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
        """Have these segments and no others."""
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

    def locate(self, sequence: int, *, nowait: bool) -> tuple[Segment, OpenedSegment | None]:
        """The segment of `sequence` and its file and index: None if `nowait` and not at hand."""
        segment = self.find(sequence)
        opened = segment.opened
        while opened is None and not nowait:
            opened = self._load(segment)
            if opened is None:
                segment = self.find(sequence)
                opened = segment.opened
            else:
                segment.opened = opened
        if segment.sealed and opened is not None:
            self.touch(segment)
        return segment, opened

    def _load(self, segment: Segment) -> OpenedSegment | None:
        """Open exactly this segment; None once it is another one's place."""
        handle = self.open_file(segment)
        if handle is None:
            return None
        try:
            return OpenedSegment(handle, load_index(segment, handle))
        except Corruption:
            if segment in self._view[1]:
                raise
            return None  # the segment was cut meanwhile

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
