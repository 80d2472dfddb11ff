"""Walk a segment front to back, verify everything on the way, and note where batches lie.

The walk holds one chunk of the file at a time. A batch's body is a view into its chunk: it stays
valid as long as it is referenced, but it keeps the whole chunk in memory, so copy what is to be
kept.

Invariants checked per batch: CRC, topic and partition, `first` follows the batch before, the
previous epoch is the one before, epochs do not fall, the hash chain, and zero padding. A
compacted batch's chain cannot be recomputed; it is proven by the next batch or by the footer.
"""

from __future__ import annotations

import os
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from threading import get_ident
from typing import Final, NamedTuple, NoReturn, Protocol

import numpy as np
from crc32c import crc32c

from penstock.errors import Corruption
from penstock.log.crash import crash_point
from penstock.log.files import (
    HEADER_SIZE,
    MARK_MAGIC,
    MARK_SIZE,
    Footer,
    Form,
    Handle,
    Mark,
    SegmentHeader,
    padded,
)
from penstock.model import batch as batches
from penstock.model.batch import Batch

CHUNK_BYTES: Final = 4 << 20
_MAGIC: Final = struct.Struct("<I")
_ZEROS: Final = bytes(8)


INDEX: Final = Form("index header", b"PSI1", "QQQII20x")


class IndexHeader(NamedTuple):
    first: int
    last: int
    end: int  # with `first` and `last` it binds the sidecar to one version of its segment
    batches: int
    crc: int  # of the two arrays that follow


class BatchIndex:
    """Where a segment's batches lie: their first sequences and offsets, ascending. That of a sealed
    segment is kept beside it in a sidecar file, bound to it by range and size and covered by a CRC.
    It is rebuilt whenever it is missing, damaged, or belongs to an older version of the segment."""

    __slots__ = ("firsts", "offsets")

    def __init__(self) -> None:
        self.firsts = array("Q")
        self.offsets = array("Q")

    def add(self, first: int, offset: int) -> None:
        # A reader on another thread looks into `firsts`: the offset must be there before.
        self.offsets.append(offset)
        self.firsts.append(first)

    def find(self, sequence: int) -> int:
        """The position of the batch that covers `sequence`, if the segment does."""
        return bisect_right(self.firsts, sequence) - 1

    @property
    def bytes(self) -> int:
        return 16 * len(self.firsts)

    def save(self, path: Path, *, last: int, end: int) -> None:
        """Write the sidecar; it is not synced, because it can be rebuilt."""
        body = self.firsts.tobytes() + self.offsets.tobytes()
        header = IndexHeader(self.firsts[0], last, end, len(self.firsts), crc32c(body))
        # Two readers may rebuild the same index at once.
        new = path.with_name(f"{path.name}.{get_ident()}.tmp")
        Handle(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC).write([INDEX.pack(*header), body], 0)
        new.rename(path)

    @staticmethod
    def load(path: Path, *, first: int, last: int, end: int) -> BatchIndex:
        """Read the sidecar of the segment so described; raises `Corruption` if it is not that."""
        data = path.read_bytes()
        header = IndexHeader(*INDEX.unpack(data[: INDEX.size])[1:])
        body = data[INDEX.size :]
        if (header.first, header.last, header.end) != (first, last, end):
            raise Corruption("the index belongs to another version of its segment")
        if len(body) != 16 * header.batches or crc32c(body) != header.crc:
            raise Corruption("CRC mismatch in an index")
        index = BatchIndex()
        index.firsts.frombytes(body[: len(body) // 2])
        index.offsets.frombytes(body[len(body) // 2 :])
        return index


class SegmentFile(NamedTuple):
    handle: Handle
    path: Path
    header: SegmentHeader


class Walk:
    """A verifying pass over the records in `[offset, end)`; its fields say how far it came."""

    def __init__(self, file: SegmentFile, *, end: int) -> None:
        self.handle, self.path, header = file
        self.header, self.end = header, end
        self.index = BatchIndex()  # of the batches verified
        self.offset = HEADER_SIZE  # the first byte not verified yet
        self.sequence = header.first - 1  # the last one verified
        self.chain, self.epoch, self.time_ms = header.chain_before, header.epoch_before, 0
        self.batches = 0
        # Where the current group of batches ends; None where there are no marks to tell.
        self.flush_end = None if header.compacted else HEADER_SIZE
        # Where the last mark stands, the mark, and how many batches came before it.
        self.mark_at: tuple[int, Mark, int] | None = None

    def start_at(self, offset: int, previous: Batch) -> None:
        """Begin behind `previous`, inside a group of batches, instead of at the segment's head."""
        self.offset, self.flush_end = offset, None
        self.sequence, self.chain, self.epoch = previous.last, previous.chain, previous.epoch

    def pass_mark(self) -> None:
        """Take it on trust that a group begins here, whatever its mark says."""
        mark = Mark(0, self.sequence, self.sequence + 1, 0)
        self.mark_at, self.flush_end = (self.offset, mark, self.batches), None
        self.offset += MARK_SIZE

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        """Yield (offset, batch); raises `Corruption` with file, offset and sequence."""
        want = CHUNK_BYTES
        while self.offset < self.end:
            base = self.offset
            length = min(want, self.end - base)
            data = self.handle.read(length, base)
            if len(data) < length:
                self._fail("the file is shorter than its segment")
            while self.offset < self.end:
                at = self.offset - base
                size = self._measure(data, at)
                if at + size > len(data):
                    if self.offset + size > self.end:
                        self._fail("the record is cut short")
                    want = max(CHUNK_BYTES, size)
                    break
                batch = self._verify(data, at, size)
                if batch is not None:
                    offset = self.offset
                    self._pass(batch, size)
                    yield offset, batch

    def footer(self) -> Footer:
        """What the footer of a segment would say that ends where this pass came to."""
        return Footer(
            self.header.first, self.sequence, self.chain, self.time_ms, self.offset, self.batches,
            self.epoch,
        )  # fmt: skip

    def finish(self) -> None:
        """Verify everything up to the end; raises as the walk does."""
        for _ in self:
            pass

    def _measure(self, data: bytes, at: int) -> int:
        """The size of the record at `at`, or of the part that would tell."""
        left = len(data) - at
        if left < MARK_SIZE:
            return MARK_SIZE
        if _MAGIC.unpack_from(data, at)[0] == MARK_MAGIC:
            return MARK_SIZE
        if left < batches.HEADER_SIZE:
            return batches.HEADER_SIZE
        try:
            _, length = batches.decode_header(data, at)
        except Corruption as error:
            self._fail(error.message)
        return padded(batches.HEADER_SIZE + length)

    def _verify(self, data: bytes, at: int, size: int) -> Batch | None:
        if size == MARK_SIZE:
            self._mark(data, at)
            return None
        try:
            batch = batches.decode(data, at)
            batches.verify_chain(batch, self.chain)
        except Corruption as error:
            self._fail(error.message)
        end = at + batch.size
        if data[end : at + size] != _ZEROS[: at + size - end]:
            self._fail("the padding behind a batch is not zero")
        self._check(batch)
        return batch

    def _check(self, batch: Batch) -> None:
        header = self.header
        if batch.topic != header.topic or batch.partition != header.partition:
            self._fail(f"the batch belongs to topic {batch.topic} partition {batch.partition}")
        if batch.first != self.sequence + 1:
            self._fail(f"the batch begins at {batch.first} instead of {self.sequence + 1}")
        if batch.epoch_previous != self.epoch or batch.epoch < self.epoch:
            self._fail(f"the batch's epochs do not follow epoch {self.epoch}")
        if batch.compacted and not (header.compacted or header.seeded):
            self._fail("a compacted batch in a segment that was never rewritten")
        if self.flush_end is not None and self.offset >= self.flush_end:
            self._fail("a batch stands outside of any flush mark's group")

    def _mark(self, data: bytes, at: int) -> None:
        try:
            mark = Mark.decode(data, at, header=self.header, offset=self.offset)
        except Corruption as error:
            self._fail(error.message)
        if mark.first != self.sequence + 1 or mark.durable > self.sequence or self.header.compacted:
            self._fail("a flush mark is out of place")
        if self.flush_end not in (None, self.offset):
            self._fail("a flush mark stands inside the group before it")
        self.flush_end = self.offset + mark.length
        self.mark_at = (self.offset, mark, self.batches)
        self.offset += MARK_SIZE

    def _pass(self, batch: Batch, size: int) -> None:
        self.index.add(batch.first, self.offset)
        self.offset += size
        self.sequence, self.chain, self.epoch = batch.last, batch.chain, batch.epoch
        self.time_ms = batch.time_ms
        self.batches += 1

    def _fail(self, reason: str) -> NoReturn:
        raise damaged(self, reason, offset=self.offset, sequence=self.sequence + 1)


class _Segment(Protocol):
    """What tells where damage is: a segment, its file, or a walk over it."""

    @property
    def path(self) -> Path: ...

    @property
    def header(self) -> SegmentHeader: ...


def damaged(segment: _Segment, reason: str, *, offset: int, sequence: int) -> Corruption:
    path, header = segment.path, segment.header
    return Corruption(
        f"{path} at byte {offset}, sequence {sequence}: {reason}",
        topic=header.topic, partition=header.partition, sequence=sequence, file=str(path),
        offset=offset, reason=reason,
    )  # fmt: skip


def proof_of_rot(walk: Walk) -> str | None:
    """Why the place where `walk` stopped cannot be a torn tail, or None when it can.

    Proof is a later mark that calls the missing sequence durable, or a valid batch behind the end
    of the group that the walk stopped in: groups are written one at a time, each synced before
    the next.
    """
    missing = walk.sequence + 1
    group_end = walk.flush_end if walk.flush_end and walk.flush_end > walk.offset else None
    for offset, record in _valid_records(walk, from_offset=group_end or walk.offset + 8):
        if isinstance(record, Mark):
            if record.durable >= missing:
                return f"a flush mark at byte {offset} says that sequence {missing} was durable"
        elif record.first > missing and group_end is not None:
            return f"a later write at byte {offset} is intact"
    return None


def _valid_records(walk: Walk, *, from_offset: int) -> Iterator[tuple[int, Mark | Batch]]:
    base = from_offset
    while base < walk.end:
        data = walk.handle.read(min(CHUNK_BYTES, walk.end - base), base)
        words = np.frombuffer(data, "<u4", len(data) // 8 * 2)[::2]
        for index in np.flatnonzero((words == MARK_MAGIC) | (words == batches.MAGIC)).tolist():
            offset = base + index * 8
            try:
                yield offset, _record_at(walk, offset, mark=words[index] == MARK_MAGIC)
            except (Corruption, struct.error):
                continue  # bytes that only look like the start of a record
        base += max(len(data) // 8 * 8, 8)


def _record_at(walk: Walk, offset: int, *, mark: bool) -> Mark | Batch:
    if mark:
        data = walk.handle.read(MARK_SIZE, offset)
        return Mark.decode(data, 0, header=walk.header, offset=offset)
    head, length = batches.decode_header(walk.handle.read(batches.HEADER_SIZE, offset))
    if head.topic != walk.header.topic or head.partition != walk.header.partition:
        raise Corruption("another partition's batch, as payload")
    return batches.decode(walk.handle.read(batches.HEADER_SIZE + length, offset))


def last_nonzero(walk: Walk) -> int:
    """The offset behind the last byte that is not zero; where the walk stopped if all are."""
    found = walk.offset
    for base in range(walk.offset, walk.end, CHUNK_BYTES):
        data = np.frombuffer(walk.handle.read(min(CHUNK_BYTES, walk.end - base), base), np.uint8)
        used = np.flatnonzero(data)
        if len(used):
            found = base + int(used[-1]) + 1
    return found


def clear_tail(walk: Walk, used: int) -> None:
    """Zero `[walk.offset, used)`; the last flush mark then covers what is left of its group."""
    repaired: tuple[int, Mark] | None = None
    if walk.mark_at is not None and walk.flush_end != walk.offset:
        at, mark, batches_before = walk.mark_at
        kept = walk.batches - batches_before
        if kept == 0:
            walk.offset = at
        else:
            repaired = at, mark._replace(length=walk.offset - at, batches=kept)
    walk.handle.write(_zeros(used - walk.offset), walk.offset)
    crash_point("log.recover.zeroed")
    if repaired is not None:
        at, mark = repaired
        walk.handle.write([mark.encode(walk.header, at)], at)
    os.fdatasync(walk.handle.fd)


def _zeros(size: int) -> list[bytes]:
    block = bytes(min(max(size, 0), 1 << 20))
    whole = [block] * (size // len(block)) if block else []
    return [*whole, block[: size % len(block)]] if block else []
