"""Reading a log: by sequence for delivery, by slice for streams, by scan for recovery.

A message that was just enqueued is delivered from a cache of batches in memory, without touching
the disk. A batch is readable when it is durable, or committed by others, and to those who ask for
staged ones. What blocks says so.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from penstock.errors import Corruption, NotFound
from penstock.log.files import Handle, padded
from penstock.log.flush import BatchCache, FlushWriter
from penstock.log.segment import OpenedSegment, Segment, SegmentTable, verify_ends, verify_sealed
from penstock.log.walk import SegmentFile, Walk, damaged
from penstock.model import batch as batches
from penstock.model.batch import Batch
from penstock.model.columns import Buffer

SCRUB_STEP_BYTES: Final = 1 << 20


class Reader:
    """All reads of one log. Every batch that leaves it has passed its CRC."""

    def __init__(self, table: SegmentTable, cache: BatchCache, writer: FlushWriter) -> None:
        self._table, self._cache, self._writer = table, cache, writer
        # Told of damage that a read meets, on the thread that reads. It is raised all the same.
        self.on_damage: Callable[[Corruption], None] | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        try:
            yield
        except Corruption as error:
            if self.on_damage is not None:
                self.on_damage(error)
            raise

    def _check_held(self, sequence: int) -> None:
        first, durable = self._table.first, self._writer.durable
        if not first <= sequence <= durable:
            held = f"{first} to {durable}"
            raise NotFound(f"sequence {sequence} is not held, only {held}", sequence=sequence)

    def first_of(self, sequence: int) -> int | None:
        """Where the batch that covers `sequence` begins; None when the disk is needed to tell."""
        ahead = self._ahead(sequence)
        if ahead is not None:
            return ahead.first
        self._check_held(sequence)
        _, opened = self._table.locate(sequence, nowait=True)
        return None if opened is None else opened.index.firsts[opened.index.find(sequence)]

    def read(self, sequence: int, *, nowait: bool) -> Batch | None:
        """The batch that covers `sequence`, durable here or committed by others; None when `nowait`
        and the disk is needed."""
        ahead = self._ahead(sequence)
        if ahead is not None:
            return ahead
        self._check_held(sequence)
        with self.watched():
            segment, opened = self._table.locate(sequence, nowait=nowait)
            if opened is None:
                return None
            index = opened.index
            position = index.find(sequence)
            batch = self._cache.get(index.firsts[position])
            if batch is not None and batch.first <= sequence <= batch.last:
                return batch
            offset, end = _extent(segment, opened, position, position)
            data = _fetch(opened, offset, end, nowait=nowait)
            if data is None:
                return None
            batch = _decode(segment, data, at=0, offset=offset, sequence=index.firsts[position])
            self._cache.put(batch)
            return batch

    def _ahead(self, sequence: int) -> Batch | None:
        """A batch that was committed without this disk. It is in memory until it is durable."""
        if not self._writer.durable < sequence <= self._writer.committed:
            return None
        found = self._cached(sequence, through=self._table.segments()[-1].last, bytes_max=0)
        return found[0] if found else None  # a batch that is not here has just become durable

    def slice_size(self, sequence: int, *, through: int, bytes_max: int) -> int | None:
        """The bytes that `read_slice` would read; None when the disk is needed to tell."""
        through = min(through, self._writer.durable)
        if sequence > through:
            return 0
        self._check_held(sequence)
        segment, opened = self._table.locate(sequence, nowait=True)
        if opened is None:
            return None
        position = opened.index.find(sequence)
        through = min(through, segment.last)
        until = _until(segment, opened, position, through=through, bytes_max=bytes_max)
        if until < position:
            return 0
        offset, end = _extent(segment, opened, position, until)
        return end - offset

    def read_slice(
        self, sequence: int, *, through: int, bytes_max: int, nowait: bool, staged: bool = False
    ) -> list[Batch] | None:
        """Whole batches from the one that covers `sequence`, none that ends past `through`.

        At least one if there is any, whatever its size; it may stop short of both bounds, so go on
        from where it ended. Empty at the end of the log, which with `staged` is that of all that is
        staged. None when `nowait` and the disk is needed.
        """
        segments = self._table.segments()
        if staged and segments and sequence > self._writer.durable:
            last = min(through, segments[-1].last)
            found = self._cached(sequence, through=last, bytes_max=bytes_max)
            if found:
                return found  # if nothing is here, it has just become durable, or never was
        through = min(through, self._writer.durable)
        if sequence > through:
            return []
        self._check_held(sequence)
        with self.watched():
            segment, opened = self._table.locate(sequence, nowait=nowait)
            if opened is None:
                return None
            through = min(through, segment.last)
            found = self._cached(sequence, through=through, bytes_max=bytes_max)
            if found:
                return found
            position = opened.index.find(sequence)
            until = _until(segment, opened, position, through=through, bytes_max=bytes_max)
            if until < position:
                return []
            offset, end = _extent(segment, opened, position, until)
            data = _fetch(opened, offset, end, nowait=nowait)
            if data is None:
                return None
            index = opened.index
            return [
                _decode(
                    segment, data, at=index.offsets[i] - offset, offset=index.offsets[i],
                    sequence=index.firsts[i],
                )
                for i in range(position, until + 1)
            ]  # fmt: skip

    def find_time(self, time_ms: int, *, through: int) -> int:
        """Where the first batch begins that is not from before `time_ms`, else `through + 1`.

        Batches are in order of time, so halving finds it. Blocks.
        """
        through = min(through, self._writer.durable)
        if through < self._table.first:
            return self._table.first
        with self.watched():
            segments = self._table.segments()
            place = bisect_left(segments, time_ms, key=lambda segment: segment.time_ms)
            if place == len(segments) or segments[place].first > through:
                return through + 1
            segment, opened = self._table.locate(segments[place].first, nowait=False)
            assert opened is not None
            index = opened.index
            position = bisect_left(
                range(index.find(through) + 1),
                time_ms,
                key=lambda i: _decode_head(segment, opened, index.offsets[i]).time_ms,
            )
            if position == len(index.firsts):
                return through + 1
            return min(index.firsts[position], through + 1)  # the batch may be staged meanwhile

    def extent(
        self, sequence: int, *, through: int, entries_max: int, bytes_max: int
    ) -> tuple[int, int]:
        """As far as whole batches from `sequence` on fit both bounds: the last sequence, the bytes.

        At least one batch, whatever its size; the one that covers `through` counts up to there.
        Blocks.
        """
        through = min(through, self._writer.durable)
        if sequence > through:
            return sequence - 1, 0
        self._check_held(sequence)
        with self.watched():
            last, size = sequence - 1, 0
            limit = min(through, last + entries_max)
            while last < limit:
                segment, opened = self._table.locate(last + 1, nowait=False)
                assert opened is not None
                position = opened.index.find(last + 1)
                room = bytes_max - size
                until = _fitting(segment, opened, position, limit=limit, through=through, room=room)
                if until < position:
                    if size:
                        break
                    until = position
                offset, end = _extent(segment, opened, position, until)
                size += end - offset
                last = _last_of(segment, opened, until)
                if until + 1 < len(opened.index.firsts):
                    break
            return min(last, through), size

    def epoch_runs(self, sequence: int) -> list[tuple[int, int]]:
        """(epoch, first sequence) of each run of one epoch from `sequence` on, durable ones.

        The first begins at `sequence`, or where the log does. Epochs never fall, so a run's end is
        found by halving. Blocks.
        """
        sequence, through = max(sequence, self._table.first), self._writer.durable
        with self.watched():
            runs: list[tuple[int, int]] = []
            while sequence <= through:
                segment, opened = self._table.locate(sequence, nowait=False)
                assert opened is not None
                index, last = opened.index, min(through, segment.last)
                position, until = index.find(sequence), index.find(last)

                def epoch_at(
                    position: int, segment: Segment = segment, opened: OpenedSegment = opened
                ) -> int:
                    return _decode_head(segment, opened, opened.index.offsets[position]).epoch

                while position <= until:
                    epoch = epoch_at(position)
                    if not runs or runs[-1][0] != epoch:
                        runs.append((epoch, max(index.firsts[position], sequence)))
                    if epoch_at(until) == epoch:
                        break
                    position = bisect_right(range(until), epoch, position + 1, key=epoch_at)
                sequence = last + 1
            return runs

    def first_as_written(self) -> int:
        """The sequence from which on no batch is compacted: what a follower may copy. Blocks."""
        through = self._writer.durable
        with self.watched():
            for segment in reversed(self._table.segments()):
                if segment.header.compacted:
                    return segment.last + 1
                if segment.header.seeded and segment.first <= through:
                    segment, opened = self._table.locate(segment.first, nowait=False)
                    assert opened is not None
                    for position in reversed(range(opened.index.find(through) + 1)):
                        head = _decode_head(segment, opened, opened.index.offsets[position])
                        if head.compacted:
                            return head.last + 1
            return self._table.first

    def _cached(self, sequence: int, *, through: int, bytes_max: int) -> list[Batch]:
        """Batches in memory from the one that covers `sequence`, as far as there is no gap.

        `through` is a sequence that the log has.
        """
        found: list[Batch] = []
        while sequence <= through:
            segment, opened = self._table.locate(sequence, nowait=True)
            if opened is None:
                break
            firsts = opened.index.firsts
            for position in range(opened.index.find(sequence), len(firsts)):
                batch = self._cache.get(firsts[position])
                last = _last_of(segment, opened, position)
                # A cached batch of another range is from before a rewrite, or from after it.
                if batch is None or batch.last != last or last > through:
                    return found
                bytes_max -= batch.size
                if found and bytes_max < 0:
                    return found
                found.append(batch)
                sequence = last + 1
        return found

    def scrub(self) -> Iterator[int]:
        """Verify every sealed segment from the file, in small steps that yield their bytes."""
        with self.watched():
            for segment in self._table.segments():
                handle = self._table.open_file(segment) if segment.sealed else None
                if handle is None:
                    continue  # it is the newest one, or was dropped, cut or rewritten since
                try:
                    yield from _scrub_segment(segment, handle)
                except Corruption:
                    if segment in self._table.segments():
                        raise  # a segment that is not listed any more was cut meanwhile

    def scan(self, sequence: int) -> Iterator[Batch]:
        """Every durable batch from the one that covers `sequence`, CRC and chain verified. Blocks.

        Bodies are views into read chunks of some MiB: copy what is to be kept.
        """
        sequence, through = max(sequence, self._table.first), self._writer.durable
        with self.watched():
            while sequence <= through:
                segment, opened = self._table.locate(sequence, nowait=False)
                assert opened is not None
                whole = segment.last <= through
                end = segment.end if whole else _extent_of(segment, opened, through)
                walk = Walk(SegmentFile(opened.handle, segment.path, segment.header), end=end)
                position = opened.index.find(sequence)
                if position > 0:
                    offset, _ = _extent(segment, opened, position - 1, position - 1)
                    before = _decode_head(segment, opened, offset)
                    walk.start_at(opened.index.offsets[position], before)
                for _, batch in walk:
                    yield batch
                if walk.sequence < sequence:
                    reason = "the segment ends early"
                    raise damaged(segment, reason, offset=walk.offset, sequence=sequence)
                sequence = walk.sequence + 1


def _scrub_segment(segment: Segment, handle: Handle) -> Iterator[int]:
    walk = segment.walk(handle)
    done = 0
    for offset, _ in walk:
        if offset - done >= SCRUB_STEP_BYTES:
            yield offset - done
            done = offset
    verify_sealed(segment, walk)
    verify_ends(segment, handle)
    yield segment.bytes - done


def _extent(segment: Segment, opened: OpenedSegment, position: int, until: int) -> tuple[int, int]:
    """Bytes from a batch to the end of another, perhaps with a flush mark behind it."""
    offsets = opened.index.offsets
    end = segment.end  # read before the length, because a batch staged meanwhile raises both
    if until + 1 < len(offsets):
        end = offsets[until + 1]
    return offsets[position], end


def _last_of(segment: Segment, opened: OpenedSegment, position: int) -> int:
    """The last sequence of a batch, as the index has it."""
    last = segment.last  # read before the length, as in `_extent`
    firsts = opened.index.firsts
    return firsts[position + 1] - 1 if position + 1 < len(firsts) else last


def _extent_of(segment: Segment, opened: OpenedSegment, sequence: int) -> int:
    position = opened.index.find(sequence)
    offset, _ = _extent(segment, opened, position, position)
    head, length = batches.decode_header(opened.handle.read(batches.HEADER_SIZE, offset))
    return offset + padded(head.size + length)


def _until(
    segment: Segment, opened: OpenedSegment, position: int, *, through: int, bytes_max: int
) -> int:
    """The last batch to read: within `bytes_max`, and ending at or before `through`."""
    until = opened.index.find(through)
    if _last_of(segment, opened, until) > through:
        until -= 1
    offset = opened.index.offsets[position]
    while until > position and _extent(segment, opened, position, until)[1] - offset > bytes_max:
        until = position + (until - position) // 2
    return until


def _fitting(
    segment: Segment, opened: OpenedSegment, position: int, *, limit: int, through: int, room: int
) -> int:
    """The last batch of a segment that fits: it ends by `limit`, or covers `through`."""
    index = opened.index
    until = index.find(limit)
    last = _last_of(segment, opened, until)
    if last > limit and not (limit == through and index.firsts[until] <= through <= last):
        until -= 1
    if until < position or _extent(segment, opened, position, until)[1] <= (
        bound := index.offsets[position] + room
    ):
        return until
    return bisect_right(index.offsets, bound, position + 1, until + 1) - 2


def _fetch(opened: OpenedSegment, offset: int, end: int, *, nowait: bool) -> Buffer | None:
    if nowait:
        return opened.handle.read_nowait(end - offset, offset)
    return opened.handle.read(end - offset, offset)


def _decode(segment: Segment, data: Buffer, *, at: int, offset: int, sequence: int) -> Batch:
    try:
        batch = batches.decode(data, at)
        if (batch.first, batch.topic, batch.partition) != (
            sequence, segment.header.topic, segment.header.partition,
        ):  # fmt: skip
            raise Corruption(f"the batch of sequence {sequence} is not at its place")
    except Corruption as error:
        raise damaged(segment, error.message, offset=offset, sequence=sequence) from error
    return batch


def _decode_head(segment: Segment, opened: OpenedSegment, offset: int) -> Batch:
    try:
        head, _ = batches.decode_header(opened.handle.read(batches.HEADER_SIZE, offset))
    except Corruption as error:
        raise damaged(segment, error.message, offset=offset, sequence=0) from error
    return head
