"""Enqueues of one partition: many small ones become one batch, a large one goes in as it came."""

from __future__ import annotations

from typing import Final

import numpy as np

from penstock.errors import PenstockError, SequenceConflict
from penstock.log.crash import crash_point
from penstock.model.batch import Batch, Codec, Kind, compress
from penstock.model.columns import Buffer, Columns
from penstock.model.entries import ENQ
from penstock.model.topic import Compression
from penstock.node.write.bodies import merge, subset
from penstock.node.write.journal import COALESCE_ENTRIES, Journal
from penstock.node.write.requests import EnqueuePart
from penstock.wire.messages import Duplicate

COALESCE_BYTES: Final = 1 << 20  # parts are not merged into more than this
MERGE_BYTES: Final = 64  # what an entry may grow by: columns that only its new neighbours had
_APART_BYTES: Final = 256  # what a second batch costs besides its entries
COMPRESS_BYTES_MIN: Final = 512
_CODECS: Final = {
    Compression.NONE: Codec.NONE,
    Compression.ZSTD: Codec.ZSTD,
    Compression.LZ4: Codec.LZ4,
}


class Enqueuer:
    def __init__(self, journal: Journal, index: int) -> None:
        self._journal, self._heap, self._index = journal, journal.heap, index
        self._parts: list[EnqueuePart] = []
        self.gathered = 0  # entries in `_parts`
        self._taken_during = -1  # the write during which a little was taken last

    def enqueue(self, part: EnqueuePart) -> None:
        if self._journal.failed is not None:
            part.request.part_failed(self._journal.failed)
            return
        self._parts.append(part)
        self.gathered += part.count
        self._journal.wake()

    def fail(self, error: PenstockError) -> None:
        """Answer everybody who waits with `error`."""
        parts, self._parts, self.gathered = self._parts, [], 0
        for part in parts:
            part.request.part_failed(error)

    def take_turn(self) -> None:
        """Turn the enqueues that have gathered into batches.

        While a write is under way a little is taken once, so that the work is done when the write
        is; after that it waits, and becomes one batch with what else comes.
        """
        journal = self._journal
        if not journal.takes(self.fail):
            return
        if journal.flusher.writing and self.gathered < COALESCE_ENTRIES:
            if self._taken_during == journal.flusher.writes:
                return
            self._taken_during = journal.flusher.writes
        self._process()

    def _process(self) -> None:
        parts, self._parts, self.gathered = self._parts, [], 0
        group: list[EnqueuePart] = []
        size = 0  # bytes that the group will take
        producers: set[bytes] = set()
        for at, part in enumerate(parts):
            own = len(part.columns.body) + MERGE_BYTES * part.count
            names = part.columns.binary("run_producer") if len(parts) > 1 else None
            mine = set() if names is None else set(names)
            alone = part.expected_sequence is not None or not producers.isdisjoint(mine)
            if group and (alone or size + own > COALESCE_BYTES):
                self._write_group(group)
                group, size, producers = [], 0, set()
            if not self._journal.has_room(size + own + _APART_BYTES, enqueue=True):
                self._write_group(group)
                self._wait_for_room(parts[at:])
                return
            if self._write_if_special(part):
                continue
            group.append(part)
            size += own
            producers |= mine
            if part.count >= COALESCE_ENTRIES:
                self._write_group(group)
                group, size, producers = [], 0, set()
        self._write_group(group)

    def _write_if_special(self, part: EnqueuePart) -> bool:
        """Deal with a part that is not simply appended: a conflict, or entries written before.

        A request that was written is answered as before whatever it expects: its own entries are
        what has moved the partition.
        """
        try:
            duplicates = self._heap.admit(part.columns)
        except PenstockError as error:
            part.request.part_failed(error)
            return True
        if len(duplicates) < part.count and self._conflicts(part):
            return True
        if not duplicates:
            return False
        self._write_without(part, duplicates)
        return True

    def _conflicts(self, part: EnqueuePart) -> bool:
        """Whether the partition is not where it was expected. That is told once it is final: what
        is not committed may come to nothing, and another attempt succeed."""
        at = self._heap.sequence_enqueued
        if part.expected_sequence in (None, at):
            return False
        conflict = SequenceConflict(
            f"partition {self._index} is at {at}, not at {part.expected_sequence}", sequence=at
        )
        self._journal.when_committed(
            at, lambda: part.request.part_failed(conflict), unknown=part.request.part_failed
        )
        return True

    def _write_without(self, part: EnqueuePart, duplicates: list[tuple[int, int, int]]) -> None:
        indices = np.asarray(part.indices, np.int64)
        known = [
            Duplicate(int(indices[i]), self._index, sequence, time_ms)
            for i, sequence, time_ms in duplicates
        ]
        fresh = np.ones(part.count, np.bool_)
        fresh[[i for i, _, _ in duplicates]] = False
        left = np.flatnonzero(fresh)
        last = max(sequence for _, sequence, _ in duplicates)
        if not len(left):
            self._journal.when_committed(
                last,
                lambda: part.request.part_placed([], known),
                unknown=part.request.part_failed,
            )
            return
        body = subset(part.columns, left)
        rest = EnqueuePart(
            part.request, ENQ.decode(body, len(left)), indices=indices[left], body=body
        )
        batch = self._append_enqueue(rest.body, rest.columns)
        placed = rest.placed(self._index, batch.first, batch.time_ms)
        self._journal.when_committed(
            batch.last,
            lambda: part.request.part_placed(placed, known),
            unknown=part.request.part_failed,
        )

    def _write_group(self, group: list[EnqueuePart]) -> None:
        """Append the group as one batch: verbatim if it is one part, merged otherwise."""
        if not group:
            return
        if len(group) == 1:
            part = group[0]
            batch = self._append_enqueue(part.body, part.columns, codec=part.codec)
        else:
            body = merge([part.columns for part in group])
            count = sum(part.count for part in group)
            batch = self._append_enqueue(body, ENQ.decode(body, count))

        crash_point("node.enqueue.staged")
        if self._journal.live is not None:
            self._journal.live.on_enqueued(group)

        def answer() -> None:
            first = batch.first
            for part in group:
                part.request.part_placed(part.placed(self._index, first, batch.time_ms))
                first += part.count

        def unknown(error: PenstockError) -> None:
            for part in group:
                part.request.part_failed(error)

        self._journal.when_committed(batch.last, answer, unknown=unknown)

    def _append_enqueue(self, body: Buffer, columns: Columns, *, codec: int = 0) -> Batch:
        raw_length = len(columns.body)
        wanted = _CODECS[self._heap.config.compression]
        if not codec and wanted and raw_length >= COMPRESS_BYTES_MIN:
            body, codec = compress(wanted, body), wanted
        return self._journal.append(
            Kind.ENQ,
            body,
            columns.count,
            columns=columns,
            codec=Codec(codec),
            raw_length=raw_length,
        )

    def _wait_for_room(self, parts: list[EnqueuePart]) -> None:
        """The disk has to give more first; if it just said that it cannot, refuse."""
        full = self._journal.flusher.disk_full()
        if full is not None:
            for part in parts:
                part.request.part_failed(full)
            return
        self._parts = parts + self._parts
        self.gathered = sum(part.count for part in self._parts)
        first = parts[0]
        need = len(first.columns.body) + MERGE_BYTES * first.count
        self._journal.grow(need + _APART_BYTES)
