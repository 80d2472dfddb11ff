"""Reading a log: by sequence for delivery, by slice for streams, by scan for recovery.

A message that was just enqueued is delivered from a cache of batches in memory, without touching
the disk. A batch is readable when it is durable, or committed by others, and to those who ask for
staged ones. What blocks says so.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from penstock.errors import Corruption, NotFound
from penstock.log.files import Handle
from penstock.log.flush import BatchCache, FlushWriter
from penstock.log.segment import LocatedSegment, Segment, SegmentTable, verify_ends, verify_sealed
from penstock.log.walk import damaged
from penstock.model.batch import Batch

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
        found = self._table.at_hand(sequence)
        return None if found is None else found.index.firsts[found.index.find(sequence)]

    def read(self, sequence: int, *, nowait: bool) -> Batch | None:
        """The batch that covers `sequence`, durable here or committed by others; None when `nowait`
        and the disk is needed."""
        ahead = self._ahead(sequence)
        if ahead is not None:
            return ahead
        self._check_held(sequence)
        with self.watched():
            found = self._table.at_hand(sequence) if nowait else self._table.locate(sequence)
            if found is None:
                return None
            position = found.index.find(sequence)
            batch = self._cache.get(found.index.firsts[position])
            if batch is not None and batch.first <= sequence <= batch.last:
                return batch
            read = found.read(position, position, nowait=nowait)
            if read is None:
                return None
            self._cache.put(read[0])
            return read[0]

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
        found = self._table.at_hand(sequence)
        if found is None:
            return None
        wanted = _slice_of(found, sequence, through=through, bytes_max=bytes_max)
        return found.size_of(wanted[0], wanted[-1]) if wanted else 0

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
            cached = self._cached(sequence, through=last, bytes_max=bytes_max)
            if cached:
                return cached  # if nothing is here, it has just become durable, or never was
        through = min(through, self._writer.durable)
        if sequence > through:
            return []
        self._check_held(sequence)
        with self.watched():
            found = self._table.at_hand(sequence) if nowait else self._table.locate(sequence)
            if found is None:
                return None
            through = min(through, found.segment.last)
            cached = self._cached(sequence, through=through, bytes_max=bytes_max)
            if cached:
                return cached
            wanted = _slice_of(found, sequence, through=through, bytes_max=bytes_max)
            return found.read(wanted[0], wanted[-1], nowait=nowait) if wanted else []

    def find_time(self, time_ms: int, *, through: int) -> int:
        """Where the first batch begins that is not from before `time_ms`, else `through + 1`.
        Batches are in order of time, so halving finds it. Blocks."""
        through = min(through, self._writer.durable)
        if through < self._table.first:
            return self._table.first
        with self.watched():
            segments = self._table.segments()
            place = bisect_left(segments, time_ms, key=lambda segment: segment.time_ms)
            if place == len(segments) or segments[place].first > through:
                return through + 1
            found = self._table.locate(segments[place].first)
            positions = range(found.index.find(through) + 1)
            position = bisect_left(positions, time_ms, key=lambda i: found.head(i).time_ms)
            if position == len(found.index.firsts):
                return through + 1
            # The batch may be staged meanwhile.
            return min(found.index.firsts[position], through + 1)

    def extent(
        self, sequence: int, *, through: int, entries_max: int, bytes_max: int
    ) -> tuple[int, int]:
        """As far as whole batches from `sequence` on fit both bounds, but one at least: the last
        sequence, the bytes. The one that covers `through` counts up to there. Blocks."""
        through = min(through, self._writer.durable)
        if sequence > through:
            return sequence - 1, 0
        self._check_held(sequence)
        with self.watched():
            last, size = sequence - 1, 0
            limit = min(through, last + entries_max)
            while last < limit:
                found = self._table.locate(last + 1)
                position = found.index.find(last + 1)
                until = found.fitting(
                    position, limit=limit, room=bytes_max - size, covering=limit == through
                )
                if until < position:
                    if size:
                        break
                    until = position
                size += found.size_of(position, until)
                last = found.last_of(until)
                if until + 1 < len(found.index.firsts):
                    break
            return min(last, through), size

    def epoch_runs(self, sequence: int) -> list[tuple[int, int]]:
        """(epoch, first sequence) of each run of one epoch from `sequence` on, durable ones. The
        first begins at `sequence`, or where the log does. Blocks."""
        sequence, through = max(sequence, self._table.first), self._writer.durable
        runs: list[tuple[int, int]] = []
        with self.watched():
            while sequence <= through:
                found = self._table.locate(sequence)
                index, last = found.index, min(through, found.segment.last)
                for epoch, position in found.epoch_runs(index.find(sequence), index.find(last)):
                    if not runs or runs[-1][0] != epoch:
                        runs.append((epoch, max(index.firsts[position], sequence)))
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
                    found = self._table.locate(segment.first)
                    for position in reversed(range(found.index.find(through) + 1)):
                        head = found.head(position)
                        if head.compacted:
                            return head.last + 1
            return self._table.first

    def _cached(self, sequence: int, *, through: int, bytes_max: int) -> list[Batch]:
        """Batches in memory from the one that covers `sequence`, as far as there is no gap.
        `through` is a sequence that the log has."""
        found: list[Batch] = []
        while sequence <= through:
            located = self._table.at_hand(sequence)
            if located is None:
                break
            firsts = located.index.firsts
            for position in range(located.index.find(sequence), len(firsts)):
                batch = self._cache.get(firsts[position])
                last = located.last_of(position)
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
        Bodies are views into read chunks of some MiB: copy what is to be kept."""
        sequence, through = max(sequence, self._table.first), self._writer.durable
        with self.watched():
            while sequence <= through:
                found = self._table.locate(sequence)
                walk, index = found.segment.walk(found.handle), found.index
                if found.segment.last > through:  # what is behind it is perhaps not written yet
                    walk.end = found.written_end(index.find(through))
                position = index.find(sequence)
                if position > 0:
                    walk.start_at(index.offsets[position], found.head(position - 1))
                for _, batch in walk:
                    yield batch
                if walk.sequence < sequence:
                    reason = "the segment ends early"
                    raise damaged(found.segment, reason, offset=walk.offset, sequence=sequence)
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


def _slice_of(found: LocatedSegment, sequence: int, *, through: int, bytes_max: int) -> range:
    """The batches of a slice, by their positions: at least one, if that ends by `through`."""
    position = found.index.find(sequence)
    if found.last_of(position) > through:
        return range(0)
    until = found.fitting(position, limit=through, room=bytes_max)
    return range(position, max(position, until) + 1)
