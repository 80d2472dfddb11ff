"""Walk a segment front to back and verify everything on the way.

The walk holds one chunk of the file at a time. A batch's body is a view into its chunk: it stays
valid as long as it is referenced, but it keeps the whole chunk in memory, so copy what is to be
kept.

Invariants checked per batch: CRC, topic and partition, `first` follows the batch before, the
previous epoch is the one before, epochs do not fall, the hash chain, and zero padding. A
compacted batch's chain cannot be recomputed; it is proven by the next batch or by the footer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn

import numpy as np

from penstock.errors import Corruption
from penstock.log.files import Handle
from penstock.log.layout import HEADER_SIZE, MARK_MAGIC, MARK_SIZE, Mark, SegmentHeader, padded
from penstock.model import batch as batches
from penstock.model.batch import Batch

CHUNK_BYTES: Final = 4 << 20
_MAGIC: Final = struct.Struct("<I")
_ZEROS: Final = bytes(8)


class Walk:
    """A verifying pass over the records in `[offset, end)`; its fields say how far it came."""

    def __init__(self, handle: Handle, path: Path, *, header: SegmentHeader, end: int) -> None:
        self.handle, self.path, self.header, self.end = handle, path, header, end
        self.offset = HEADER_SIZE  # the first byte not verified yet
        self.sequence = header.first - 1  # the last one verified
        self.chain, self.epoch, self.time_ms = header.chain_before, header.epoch_before, 0
        self.batches = 0
        # Where the current group of batches ends; None where there are no marks to tell.
        self.flush_end = None if header.compacted else HEADER_SIZE
        self.mark_at: tuple[int, Mark, int] | None = None  # the last mark, batches before it

    def start_at(self, offset: int, previous: Batch) -> None:
        """Begin behind `previous`, inside a group of batches, instead of at the segment's head."""
        self.offset, self.flush_end = offset, None
        self.sequence, self.chain, self.epoch = previous.last, previous.chain, previous.epoch

    def resume(self, offset: int, previous: Batch, *, batches_before: int) -> None:
        """Begin at the flush mark behind `previous`."""
        self.start_at(offset, previous)
        self.flush_end, self.batches = offset, batches_before

    @property
    def at_mark(self) -> bool:
        """Whether the next record has to be a flush mark."""
        return self.flush_end == self.offset

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
            mark = Mark.decode(
                data, at, Mark.place(self.header.topic, self.header.partition, self.offset)
            )
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
        self.offset += size
        self.sequence, self.chain, self.epoch = batch.last, batch.chain, batch.epoch
        self.time_ms = batch.time_ms
        self.batches += 1

    def _fail(self, reason: str) -> NoReturn:
        raise damaged(
            reason,
            path=self.path,
            offset=self.offset,
            header=self.header,
            sequence=self.sequence + 1,
        )


def damaged(
    reason: str, *, path: Path, offset: int, header: SegmentHeader, sequence: int
) -> Corruption:
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
        place = Mark.place(walk.header.topic, walk.header.partition, offset)
        return Mark.decode(walk.handle.read(MARK_SIZE, offset), 0, place)
    head, length = batches.decode_header(walk.handle.read(batches.HEADER_SIZE, offset))
    if head.topic != walk.header.topic or head.partition != walk.header.partition:
        raise Corruption("another partition's batch, as payload")
    return batches.decode(walk.handle.read(batches.HEADER_SIZE + length, offset))


def last_nonzero(handle: Handle, start: int, end: int) -> int:
    """The offset behind the last byte in `[start, end)` that is not zero; `start` if all are."""
    found = start
    for base in range(start, end, CHUNK_BYTES):
        data = np.frombuffer(handle.read(min(CHUNK_BYTES, end - base), base), np.uint8)
        used = np.flatnonzero(data)
        if len(used):
            found = base + int(used[-1]) + 1
    return found
