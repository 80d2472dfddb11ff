"""One file of a partition's log: its place in the log, and how it is read, begun and sealed.

A file gets its `.seg` name only after its header and first batches are durable, and loses its
preallocated space when it is sealed. So a named segment always has a valid header, and every
segment but the newest has a valid footer.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import Corruption
from penstock.log.crash import crash_point
from penstock.log.files import FULL, Handle
from penstock.log.index import Index, Opened, sidecar
from penstock.log.layout import FOOTER_SIZE, HEADER_SIZE, Footer, SegmentHeader
from penstock.log.walk import Walk, damaged

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    first: int
    last: int
    bytes: int
    sealed: bool
    time_ms_last: int
    compacted: bool


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
        self.opened: Opened | None = None  # always there until sealed, then an evictable cache

    @property
    def first(self) -> int:
        return self.header.first

    @property
    def bytes(self) -> int:
        return self.end + FOOTER_SIZE if self.sealed else self.end

    def info(self) -> SegmentInfo:
        return SegmentInfo(
            self.first, self.last, self.bytes, self.sealed, self.time_ms, self.header.compacted
        )

    def reached(self, walk: Walk) -> None:
        """Take over where a verifying pass came to."""
        self.last, self.chain, self.epoch = walk.sequence, walk.chain, walk.epoch
        self.time_ms, self.batches, self.end = walk.time_ms, walk.batches, walk.offset

    def footer(self) -> Footer:
        return Footer(
            self.first, self.last, self.chain, self.time_ms, self.end, self.batches, self.epoch
        )


def segment_path(folder: Path, first: int) -> Path:
    return folder / f"{first:016x}.seg"


def read_header(handle: Handle, path: Path, *, topic: int, partition: int) -> SegmentHeader:
    try:
        header = SegmentHeader.decode(handle.read(HEADER_SIZE, 0))
    except Corruption as error:
        first = int(path.stem, 16)
        blank = SegmentHeader(topic, partition, first, 0, 0, False)
        raise damaged(error.message, path=path, offset=0, header=blank, sequence=first) from error
    if (header.topic, header.partition, f"{header.first:016x}") != (topic, partition, path.stem):
        raise damaged(
            "the header belongs to another segment",
            path=path, offset=0, header=header, sequence=header.first,
        )  # fmt: skip
    return header


def read_footer(handle: Handle, path: Path, header: SegmentHeader) -> Footer:
    """The footer at the file's end; raises `Corruption` if there is none for this segment."""
    at = handle.size - FOOTER_SIZE
    try:
        footer = Footer.decode(handle.read(FOOTER_SIZE, max(at, 0)))
        if footer.end != at or footer.first != header.first:
            raise Corruption("a footer is not at its place")
    except Corruption as error:
        raise damaged(
            error.message, path=path, offset=max(at, 0), header=header, sequence=header.first
        ) from error
    return footer


def sealed_segment(path: Path, header: SegmentHeader, footer: Footer) -> Segment:
    segment = Segment(path, header)
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
        raise damaged(
            "the footer does not agree with the batches",
            path=segment.path, offset=segment.end, header=segment.header, sequence=segment.last,
        )  # fmt: skip


def verify_ends(segment: Segment, handle: Handle) -> None:
    """Raise unless header and footer on disk are still what they were when it was opened."""
    header = segment.header
    read_header(handle, segment.path, topic=header.topic, partition=header.partition)
    read_footer(handle, segment.path, header)


def load_index(segment: Segment, handle: Handle) -> Index:
    """The index of a sealed segment, rebuilt where its sidecar cannot be used."""
    path = sidecar(segment.path)
    try:
        return Index.load(path, first=segment.first, last=segment.last, end=segment.end)
    except (FileNotFoundError, Corruption) as error:
        _log.info("%s: rebuilt: %s", path, str(error))
    index = rebuild_index(segment, handle)
    save_index(segment, index)
    return index


def save_index(segment: Segment, index: Index) -> None:
    """Write the sidecar, if there is space for it: it saves a walk, nothing depends on it."""
    path = sidecar(segment.path)
    try:
        index.save(path, last=segment.last, end=segment.end)
    except OSError as error:
        if error.errno not in FULL:
            raise
        _log.warning("%s: not saved: %s", path, str(error))


def rebuild_index(segment: Segment, handle: Handle) -> Index:
    index = Index()
    walk = Walk(handle, segment.path, header=segment.header, end=segment.end)
    for offset, batch in walk:
        index.add(batch.first, offset)
    verify_sealed(segment, walk)
    return index


def seal(segment: Segment) -> None:
    """Close the newest segment for good: footer, exact size, sync, sidecar."""
    assert segment.opened is not None
    handle = segment.opened.handle
    crash_point("log.seal.before")
    end = handle.write([segment.footer().encode()], segment.end)
    crash_point("log.seal.footer")
    os.ftruncate(handle.fd, end)
    crash_point("log.seal.trimmed")
    os.fsync(handle.fd)
    crash_point("log.seal.synced")
    save_index(segment, segment.opened.index)
    segment.sealed = True
