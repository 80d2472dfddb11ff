"""Enqueues of one partition: many small ones become one batch, a large one goes in as it came.

A request has a part for each partition that it goes to, and is answered once all of them are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidArgument, PenstockError, SequenceConflict, from_wire
from penstock.log import crash
from penstock.model.batch import Codec, Kind, compress
from penstock.model.columns import RUNS_MAX, Binary, Buffer, Columns, Domain, Value
from penstock.model.entries import ENQ
from penstock.node.write.journal import COALESCE_ENTRIES, Journal, Reply
from penstock.wire.messages import Duplicate, Enqueued, Placed

COALESCE_BYTES: Final = 1 << 20  # parts are not merged into more than this
MERGE_BYTES: Final = 64  # what an entry may grow by: columns that only its new neighbours had
_APART_BYTES: Final = 256  # what a second batch costs besides its entries
COMPRESS_BYTES_MIN: Final = 512
_ENTRY_FIXED: Final = tuple(
    c.name
    for c in ENQ.columns
    if c.domain is Domain.ENTRY and not c.binary and c.name != "sequence"
)
_ENTRY_BINARY: Final = tuple(c.name for c in ENQ.columns if c.domain is Domain.ENTRY and c.binary)


def as_one(errors: Sequence[PenstockError], parts: int) -> PenstockError:
    """The first of what some parts of a request failed with, as the answer to all of it. It says
    `elsewhere`, which means that nothing was done, only if every part does."""
    first = errors[0]
    undone = [error for error in errors if error.details.get("elsewhere")]
    if "elsewhere" not in first.details or len(undone) == parts:
        return first
    return from_wire({n: value for n, value in first.to_wire().items() if n != "elsewhere"})


class Gathered:
    """The results of a request's parts, which come in any order. Once all are here, `whole` makes
    one answer of them, in the order of the parts."""

    __slots__ = ("_remaining", "_reply", "_results", "_whole")

    def __init__(self, parts: int, whole: Callable[[list[object]], object], reply: Reply) -> None:
        self._results: list[object] = [None] * parts
        self._remaining, self._whole, self._reply = parts, whole, reply

    def part(self, index: int) -> Reply:

        def done(result: object) -> None:
            self._results[index] = result
            self._remaining -= 1
            if not self._remaining:
                self._reply(self._whole(self._results))

        return done


class EnqueueRequest:
    """A producer's request: answered once all of its parts are, which are made before any of them
    is handed on."""

    __slots__ = (
        "_duplicates", "_ended", "_errors", "_placed", "parts", "reply", "started", "topic",
    )  # fmt: skip

    def __init__(self, topic: int, reply: Reply) -> None:
        self.topic, self.reply = topic, reply
        self.started = time.perf_counter()
        self.parts = self._ended = 0
        self._placed: list[Placed] = []
        self._duplicates: list[Duplicate] = []
        self._errors: list[PenstockError] = []

    def part_placed(self, placed: Sequence[Placed], duplicates: Sequence[Duplicate] = ()) -> None:
        self._placed.extend(placed)
        self._duplicates.extend(duplicates)
        self._ended += 1
        if self._ended < self.parts:
            return
        if self._errors:
            self.reply(as_one(self._errors, self.parts))
        else:
            self._duplicates.sort(key=lambda known: known.index)  # parts end in any order
            self.reply(Enqueued(self.topic, self._placed, self._duplicates))

    def part_failed(self, error: PenstockError) -> None:
        self._errors.append(error)
        self.part_placed(())


class EnqueuePart:
    """One partition's share. `indices` are its entries' places in the request."""

    __slots__ = (
        "body", "codec", "columns", "count", "expected_sequence", "indices", "known", "request",
    )  # fmt: skip

    def __init__(
        self,
        request: EnqueueRequest,
        columns: Columns,
        *,
        indices: NDArray[np.int64] | range,
        body: Buffer,
        codec: int = 0,
        expected_sequence: int | None = None,
    ) -> None:
        request.parts += 1
        self.request, self.columns, self.count = request, columns, columns.count
        self.indices = indices
        self.body, self.codec = body, codec  # as received, compressed or not
        self.expected_sequence = expected_sequence
        self.known: list[Duplicate] = []

    def leave_out(self, duplicates: list[tuple[int, int, int]], partition: int) -> None:
        """Entries were written before: they are answered as they were then, and only the others are
        written now. `duplicates` are their places here, sequences and times."""
        indices = np.asarray(self.indices, np.int64)
        self.known = [
            Duplicate(int(indices[i]), partition, sequence, time_ms)
            for i, sequence, time_ms in duplicates
        ]
        fresh = np.delete(np.arange(self.count), [i for i, _, _ in duplicates])
        self.indices, self.count = indices[fresh], len(fresh)
        if self.count:
            self.body, self.codec = subset(self.columns, fresh), 0
            self.columns = ENQ.decode(self.body, self.count)

    def placed(self, partition: int, first: int, time_ms: int) -> list[Placed]:
        """Where the entries went when they were all written from sequence `first` on."""
        if isinstance(self.indices, range):
            return [Placed(self.indices.start, self.count, partition, first, time_ms)]
        return stretches(self.indices, np.arange(first, first + self.count), partition, time_ms)


def stretches(
    indices: NDArray[np.int64], sequences: NDArray[np.int64], partition: int, time_ms: int
) -> list[Placed]:
    """Describe entries by the stretches in which index and sequence run on together."""
    breaks = np.flatnonzero((np.diff(indices) != 1) | (np.diff(sequences) != 1)) + 1
    starts = np.concatenate([[0], breaks]).astype(np.int64)
    counts = np.diff(np.append(starts, len(indices)))
    return [
        Placed(i, n, partition, s, time_ms)
        for i, n, s in zip(
            indices[starts].tolist(), counts.tolist(), sequences[starts].tolist(), strict=True
        )
    ]


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
        wanted = Codec[self._heap.config.compression.name]
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
            journal.live.on_enqueued([(part.request.started, part.count) for part in group])

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


# --- bodies ---


def merge(bodies: Sequence[Columns]) -> bytes:
    """One body with the entries of all, in order: what many small enqueues become in the log."""
    values: dict[str, Value | None] = {}
    for name in _ENTRY_FIXED:
        if any(name in c.views for c in bodies):
            values[name] = np.concatenate([c.fixed(name) for c in bodies])
    for name in _ENTRY_BINARY:
        if any(name in c.views for c in bodies):
            values[name] = _concat([(c.binary(name), c.count) for c in bodies])
    runs = 0
    if any(c.runs for c in bodies):
        runs = sum(c.runs or 1 for c in bodies)
        values["run_count"] = np.concatenate(
            [c.fixed("run_count") if c.runs else np.array([c.count], np.uint32) for c in bodies]
        )
        for name in ("run_epoch", "run_sequence"):
            values[name] = np.concatenate(
                [c.fixed(name) if c.runs else np.zeros(1, np.uint64) for c in bodies]
            )
        values["run_producer"] = _concat([(c.binary("run_producer"), c.runs or 1) for c in bodies])
    return ENQ.encode(sum(c.count for c in bodies), values, runs=runs)


def _concat(cells: Sequence[tuple[Binary | None, int]]) -> Binary:
    sizes = [np.zeros(n, np.int32) if c is None else np.diff(c.offsets) for c, n in cells]
    offsets = np.zeros(sum(map(len, sizes)) + 1, np.int32)
    np.cumsum(np.concatenate(sizes), out=offsets[1:])
    return Binary(offsets, b"".join(c.blob for c, _ in cells if c is not None))


def subset(columns: Columns, indices: NDArray[np.int64]) -> bytes:
    """The body with only the entries at `indices` (ascending)."""
    values: dict[str, Value | None] = {
        name: columns.fixed(name)[indices] for name in _ENTRY_FIXED if name in columns.views
    }
    for name in _ENTRY_BINARY:
        cell = columns.binary(name)
        if cell is not None:
            values[name] = cell.take(indices)
    if columns.runs:
        values |= _run_subset(columns, indices)
    runs = values.get("run_count")
    return ENQ.encode(len(indices), values, runs=0 if runs is None else len(runs))


def _run_subset(columns: Columns, indices: NDArray[np.int64]) -> dict[str, Any]:
    """Runs of the chosen entries: a run stays one only where its entries stay neighbours."""
    producer, sequence, run = producer_entries(columns)
    chosen_run, chosen_sequence = run[indices], sequence[indices]
    breaks = np.flatnonzero((np.diff(chosen_run) != 0) | (np.diff(chosen_sequence) != 1)) + 1
    starts = np.concatenate([[0], breaks])
    if len(starts) > RUNS_MAX:
        raise InvalidArgument("too many producer runs", field="run_count", limit=RUNS_MAX)
    first_run = chosen_run[starts]
    return {
        "run_count": np.diff(np.append(starts, len(indices))),
        "run_epoch": columns.fixed("run_epoch")[first_run],
        "run_sequence": chosen_sequence[starts],
        "run_producer": [producer[i] for i in first_run.tolist()],
    }


def producer_entries(
    columns: Columns,
) -> tuple[list[bytes], NDArray[np.int64], NDArray[np.int64]]:
    """Producer ids by run, and for each entry its producer sequence and its run."""
    counts = columns.fixed("run_count").astype(np.int64)
    run = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    sequence = columns.fixed("run_sequence").astype(np.int64)[run] + (
        np.arange(columns.count) - starts[run]
    )
    producers = columns.binary("run_producer")
    return ([] if producers is None else list(producers)), sequence, run
