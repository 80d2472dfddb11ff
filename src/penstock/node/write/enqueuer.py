"""Enqueues of one partition: many small ones become one batch, a large one goes in as it came."""

from __future__ import annotations

from typing import Final

from penstock.errors import PenstockError, SequenceConflict
from penstock.log import crash
from penstock.model.batch import Codec, Kind, compress
from penstock.model.entries import ENQ
from penstock.model.topic import Compression
from penstock.node.write.bodies import merge
from penstock.node.write.journal import COALESCE_ENTRIES, Journal
from penstock.node.write.requests import EnqueuePart

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
            if self._is_answered(part):
                continue
            group.append(part)
            size += own
            producers |= mine
            if part.count >= COALESCE_ENTRIES:
                self._write_group(group)
                group, size, producers = [], 0, set()
        self._write_group(group)

    def _is_answered(self, part: EnqueuePart) -> bool:
        """Whether nothing of a part is to be appended: it conflicts, or was all written before.

        A request that was written is answered as before whatever it expects: its own entries are
        what has moved the partition.
        """
        request = part.request
        try:
            duplicates = self._heap.dedup.admit(part.columns)
        except PenstockError as error:
            request.part_failed(error)
            return True
        at = self._heap.sequence_enqueued
        if len(duplicates) < part.count and part.expected_sequence not in (None, at):
            # That is told once it is final: what is not committed may come to nothing, and another
            # attempt succeed.
            conflict = SequenceConflict(
                f"partition {self._index} is at {at}, not at {part.expected_sequence}", sequence=at
            )
            self._journal.when_committed(
                at, lambda: request.part_failed(conflict), unknown=request.part_failed
            )
            return True
        if duplicates:
            part.leave_out(duplicates, self._index)
        if part.count:
            return False
        last = max(sequence for _, sequence, _ in duplicates)
        self._journal.when_committed(
            last, lambda: request.part_placed([], part.known), unknown=request.part_failed
        )
        return True

    def _write_group(self, group: list[EnqueuePart]) -> None:
        """Append the group as one batch: verbatim if it is one part, merged otherwise."""
        if not group:
            return
        journal, first = self._journal, group[0]
        body, columns, codec = first.body, first.columns, first.codec
        if len(group) > 1:
            body, codec = merge([part.columns for part in group]), 0
            columns = ENQ.decode(body, sum(part.count for part in group))
        raw_length = len(columns.body)
        wanted = _CODECS[self._heap.config.compression]
        if not codec and wanted and raw_length >= COMPRESS_BYTES_MIN:
            body, codec = compress(wanted, body), wanted
        batch = journal.append(
            Kind.ENQ,
            body,
            columns.count,
            columns=columns,
            codec=Codec(codec),
            raw_length=raw_length,
        )
        if crash.armed:
            crash.crash_point("node.enqueue.staged")
        if journal.live is not None:
            journal.live.on_enqueued(group)

        def answer() -> None:
            first = batch.first
            for part in group:
                placed = part.placed(self._index, first, batch.time_ms)
                part.request.part_placed(placed, part.known)
                first += part.count

        def unknown(error: PenstockError) -> None:
            for part in group:
                part.request.part_failed(error)

        journal.when_committed(batch.last, answer, unknown=unknown)

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
