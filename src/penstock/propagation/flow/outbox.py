"""What is released and not yet sent to one subscriber: bounded, in four lanes, with ageing.

Rows are kept as they were added (a *chunk*). While a subscriber keeps up, what is added is taken at
once and as a whole; and while all that waits is of one class it goes in order. Only where classes
differ and not all may go are rows sorted into lanes: urgent ones go first, but deltas of one vector
never overtake each other (`LaneQueue`, whose keys are the vectors). What a chunk holds on to is
packed when most of it has gone.

A `CoalesceWindow` makes several changes of one vector within a time one, for subscribers who ask
for it. A *run* is a stretch of SPARSE and DENSE deltas of one vector by one origin, with rising
times and no other delta of the vector between them. A run becomes one delta: later components win,
and DENSE makes it DENSE. It has the id, the clock, the time and the headers of the last, the parent
of the first (the last one's own parent is never seen), and the most urgent class. All else is
passed on.

Who applies deltas in the order in which they come ends up with what all of them would have given.
The components of a run are stamped with the time of its last delta. For who compares stamps that
makes a difference only where another origin has changed the vector within the same window.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Final

import numpy as np

from penstock.errors import InvalidArgument
from penstock.model.columns import Binary
from penstock.model.delta import (
    CLOCK,
    HAS_INDICES,
    HAS_METADATA,
    HAS_PARENT,
    HEADER,
    PAYLOAD_BYTES_MAX,
    Op,
)
from penstock.model.delta_batch import DeltaBatch, halves, sixteens
from penstock.propagation.flow.lanes import LaneQueue
from penstock.propagation.fold.releases import Merged, ReleasedRows
from penstock.propagation.fold.table import Numbers
from penstock.propagation.options import AGEING_MS

FEW: Final = 32  # sizes that are summed up one by one
HELD_SLACK: Final = 64 << 10  # bytes that may be held on to without need


class _Chunk:
    """Rows as they were added, by numbers that stay theirs."""

    __slots__ = ("bytes_left", "entered_ms", "held", "left", "places", "rows", "sizes")

    def __init__(self, rows: ReleasedRows, entered_ms: float) -> None:
        self.rows, self.entered_ms = rows, entered_ms
        self.sizes = sizes_of(rows)
        self.bytes_left = self.held = _total(self.sizes)
        self.left = np.ones(len(rows), np.bool_)  # by number: whether it waits
        self.places = np.arange(len(rows))  # by number: where it is in `rows`

    def rest(self) -> tuple[ReleasedRows, Numbers]:
        return self.rows, self.places[self.left]

    def leave(self, numbers: Numbers | list[int], bytes_: int) -> None:
        self.left[numbers] = False
        self.bytes_left -= bytes_

    def pack(self) -> None:
        rows, places = self.rest()
        if len(places) < len(rows):
            rows = rows.take(places)
            self.places[self.left] = np.arange(len(places))
        self.rows, self.held = rows.packed(), self.bytes_left

    @property
    def position(self) -> int:
        """Of the first delta that is left; rows that were merged stand for earlier ones too."""
        rows, places = self.rest()
        return int((rows.positions if rows.merged is None else rows.merged.firsts)[places].min())


class DeltaOutbox:
    """`entries` and `bytes` are what waits. Times are those that the caller gives."""

    def __init__(self, entries_max: int, bytes_max: int, ageing_ms: int = AGEING_MS) -> None:
        if entries_max < 1 or bytes_max < 1:
            raise InvalidArgument("an outbox must have room", field="entries_max", limit=1)
        self.entries_max, self.bytes_max, self._ageing_ms = entries_max, bytes_max, ageing_ms
        self.held_slack = HELD_SLACK
        self._position = 0  # the last one added
        self.clear()

    def clear(self) -> None:
        self.entries = self.bytes = 0
        self._chunks: deque[_Chunk] = deque()  # in the order in which they came
        self._held = 0  # bytes that chunks hold on to, those of rows that have gone too
        self._classes: set[int] = set()
        self._lanes: LaneQueue[tuple[_Chunk, int]] | None = None
        self._unsorted: list[_Chunk] = []  # not in lanes yet

    def add(self, rows: ReleasedRows, now_ms: float) -> bool:
        """Let rows wait; False: they do not fit, and none was added.

        They come in the order of release, and all of a position at once. What was merged into them
        was released behind all that was added before.
        """
        count = len(rows)
        if not count:
            return True
        chunk = _Chunk(rows, now_ms)
        if self.entries + count > self.entries_max or self.bytes + chunk.held > self.bytes_max:
            return False
        if self._chunks:
            self._pack(self._chunks[-1])  # it will not be taken as it was added
        self._chunks.append(chunk)
        self._unsorted.append(chunk)
        self._classes.update(rows.batch.priority.tolist())
        self.entries += count
        self.bytes += chunk.held
        self._held += chunk.held
        self._position = max(self._position, int(rows.positions[-1]))
        return True

    def take(self, entries_max: int, bytes_max: int) -> ReleasedRows | None:
        """What goes next, at most this much; None: nothing waits, or may go.

        All that waits goes as it was added if it fits. A first row goes even if it is larger than
        `bytes_max`, unless that is nothing.
        """
        if not self.entries or entries_max < 1 or bytes_max < 1:
            return None
        if self.entries <= entries_max and self.bytes <= bytes_max:
            parts = [chunk.rest() for chunk in self._chunks]
            self.clear()
        elif len(self._classes) == 1:
            parts = self._take_in_order(entries_max, bytes_max)
        else:
            parts = self._take_by_lanes(entries_max, bytes_max)
        return ReleasedRows.gathered(parts)

    def _take_in_order(
        self, entries_max: int, bytes_max: int
    ) -> list[tuple[ReleasedRows, Numbers]]:
        parts: list[tuple[ReleasedRows, Numbers]] = []
        while entries_max > 0 and bytes_max > 0 and self.entries:
            chunk = self._chunks[0]
            numbers = np.flatnonzero(chunk.left)[:entries_max]
            totals = np.cumsum(chunk.sizes[numbers])
            count = int(np.searchsorted(totals, bytes_max, side="right"))
            if not count and parts:
                break
            numbers, size = numbers[: max(count, 1)], int(totals[max(count, 1) - 1])
            parts.append((chunk.rows, chunk.places[numbers]))
            self._leave(chunk, numbers, size)
            entries_max -= len(numbers)
            bytes_max -= size
        return parts

    def _take_by_lanes(
        self, entries_max: int, bytes_max: int
    ) -> list[tuple[ReleasedRows, Numbers]]:
        lanes = self._sorted()
        taken: list[tuple[_Chunk, list[int]]] = []
        while entries_max > 0 and bytes_max > 0 and lanes.count:
            first = lanes.first()
            chunk, number = first.item
            size = int(chunk.sizes[number])
            if size > bytes_max and taken:
                break
            lanes.leave(first)
            if not taken or taken[-1][0] is not chunk:
                taken.append((chunk, []))
            taken[-1][1].append(number)
            entries_max -= 1
            bytes_max -= size
        parts = [(chunk.rows, chunk.places[numbers]) for chunk, numbers in taken]
        for chunk, numbers in taken:
            self._leave(chunk, numbers, _total(chunk.sizes[numbers]))
        return parts

    def _sorted(self) -> LaneQueue[tuple[_Chunk, int]]:
        if self._lanes is None:
            self._lanes = LaneQueue(ageing_ms=self._ageing_ms)
        put = self._lanes.put
        for chunk in self._unsorted:
            rows, places = chunk.rest()
            classes = rows.batch.priority[places].tolist()
            vectors = sixteens(rows.batch.vector[places])
            numbers = np.flatnonzero(chunk.left).tolist()
            for number, lane, vector in zip(numbers, classes, vectors, strict=True):
                place = chunk, number
                put(place, lane=lane, count=1, now_ms=chunk.entered_ms, keys=(vector,))
        self._unsorted.clear()
        return self._lanes

    def _leave(self, chunk: _Chunk, numbers: Numbers | list[int], size: int) -> None:
        chunk.leave(numbers, size)
        self.entries -= len(numbers)
        self.bytes -= size
        while self._chunks and not self._chunks[0].bytes_left:
            self._held -= self._chunks.popleft().held
        if not self.entries:
            self.clear()
        elif self._held > 2 * self.bytes + self.held_slack:
            for other in self._chunks:
                self._pack(other)

    def _pack(self, chunk: _Chunk) -> None:
        self._held += chunk.bytes_left - chunk.held
        chunk.pack()

    # --- how things are ---

    @property
    def oldest_ms(self) -> float | None:
        """When what has waited longest was added; None: nothing waits."""
        return self._chunks[0].entered_ms if self._chunks else None

    @property
    def settled_position(self) -> int:
        """Everything that was added at or before this position has been taken, and with it all
        that was merged into it."""
        return self._chunks[0].position - 1 if self._chunks else self._position

    def validate(self) -> None:
        assert sum(int(chunk.left.sum()) for chunk in self._chunks) == self.entries
        assert sum(chunk.bytes_left for chunk in self._chunks) == self.bytes
        assert self.entries <= self.entries_max
        assert self.bytes <= self.bytes_max
        assert self._held == sum(chunk.held for chunk in self._chunks)
        assert self._held <= 2 * self.bytes + self.held_slack
        if self._lanes is not None:
            self._lanes.validate()
            chunks = [chunk for chunk in self._chunks if chunk not in self._unsorted]
            assert self._lanes.count == sum(int(chunk.left.sum()) for chunk in chunks)


def sizes_of(rows: ReleasedRows) -> Numbers:
    """Bytes of each row: its payload and its headers."""
    headers = rows.batch.headers
    if headers is None:
        return rows.batch.sizes
    return rows.batch.sizes + np.diff(headers.offsets)


def bytes_of(rows: ReleasedRows) -> int:
    return _total(sizes_of(rows))


def _total(sizes: Numbers) -> int:
    return sum(sizes.tolist()) if len(sizes) <= FEW else int(sizes.sum())


ENTRIES_MAX: Final = 10_000


class CoalesceWindow:
    """It opens with the first rows and is due `ms` later, or when so much waits."""

    __slots__ = ("_bytes", "_opened_ms", "_parts", "bytes_max", "entries", "entries_max", "ms")

    def __init__(
        self, ms: float, *, entries_max: int = ENTRIES_MAX, bytes_max: int = 8 << 20
    ) -> None:
        if not ms > 0 or entries_max < 1:
            raise InvalidArgument("a window has a length and room", field="coalesce_ms", limit=1)
        self.ms, self.entries_max, self.bytes_max = ms, entries_max, bytes_max
        self._opened_ms = 0.0
        self.clear()

    def add(self, rows: ReleasedRows, now_ms: float) -> None:
        if not len(rows):
            return
        if not self._parts:
            self._opened_ms = now_ms
        self._parts.append(rows)
        self.entries += len(rows)
        self._bytes += bytes_of(rows)

    @property
    def due_ms(self) -> float | None:
        """When the window ends; None: it is not open."""
        if not self._parts:
            return None
        full = self.entries >= self.entries_max or self._bytes >= self.bytes_max
        return self._opened_ms + (0 if full else self.ms)

    @property
    def first_position(self) -> int | None:
        """The least position that waits; None: nothing does."""
        return min((int(part.positions.min()) for part in self._parts), default=None)

    def due(self, now_ms: float) -> ReleasedRows | None:
        """What has waited, merged, if the window is over; None: it is not, or nothing waits."""
        due_ms = self.due_ms
        return None if due_ms is None or now_ms < due_ms else self.flush()

    def flush(self) -> ReleasedRows | None:
        """The same without waiting for the end."""
        parts = self._parts
        self.clear()
        return coalesced(ReleasedRows.concat(parts)) if parts else None

    def clear(self) -> None:
        self._parts: list[ReleasedRows] = []
        self.entries = self._bytes = 0


def coalesced(rows: ReleasedRows) -> ReleasedRows:
    """Runs of deltas of a vector as one each, in the place of its last; `merged` says of each row
    where its first was, and how many are gone."""
    if len(rows) < 2:
        return rows
    # Of rows sorted by vector, those that go on from the one before them.
    order, follows = _runs(rows.batch)
    if not follows.any():
        return rows
    keep = np.ones(len(rows), np.bool_)
    spans, merged = rows.spans(), dict[int, bytes]()
    firsts, folded = spans.firsts.copy(), spans.folded.copy()
    ends = np.flatnonzero(follows & ~np.append(follows[1:], False))
    starts = np.flatnonzero(~follows & np.append(follows[1:], False))
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        run = order[start : end + 1]
        payload = _merged(rows.batch, run)
        if len(payload) <= PAYLOAD_BYTES_MAX:
            keep[run[:-1]] = False
            merged[int(run[-1])] = payload
            firsts[run[-1]] = spans.firsts[run].min()
            folded[run[-1]] = spans.folded[run].sum() + len(run) - 1
    found = _replaced(rows, np.flatnonzero(keep), merged)
    return replace(found, merged=Merged(firsts, folded).take(keep))


def _runs(batch: DeltaBatch) -> tuple[Numbers, np.ndarray]:
    low, high = halves(batch.vector)
    order = np.argsort(low, kind="stable")
    op, time, origin = batch.op[order], batch.time[order], batch.origin[order]
    merges = (op == Op.SPARSE) | (op == Op.DENSE)
    follows = np.zeros(len(order), np.bool_)
    follows[1:] = merges[1:] & merges[:-1] & (time[1:] > time[:-1])
    for ids in (low[order], high[order], origin[:, 0], origin[:, 1]):
        follows[1:] &= ids[1:] == ids[:-1]
    return order, follows


def _merged(batch: DeltaBatch, run: Numbers) -> bytes:
    first, last = batch.fixed[run[0]], batch.fixed[run[-1]]
    dense = np.flatnonzero(batch.op[run] == Op.DENSE)
    indices, values = _components(batch, run[dense[-1] :] if len(dense) else run)
    said = run[batch.fixed["metadata_bytes"][run] > 0]
    metadata = batch.metadata(int(said[-1])) if len(said) else b""
    flags = int(first["flags"]) & HAS_PARENT | (0 if len(dense) else HAS_INDICES)
    flags |= HAS_METADATA if metadata else 0
    payload = batch.payload(int(run[-1]))
    ragged = HEADER.size + CLOCK.size * int(last["clocks"])
    names = int(batch.names_at[run[-1]] - batch.starts[run[-1]])
    named = int(last["namespace_bytes"]) + int(last["vector_id_bytes"])
    header = HEADER.pack(
        int(last["version"]), Op.DENSE if len(dense) else Op.SPARSE,
        int(batch.priority[run].min()), int(last["source"]), len(values), int(last["clocks"]),
        flags, last["delta_id"].tobytes(), first["parent"].tobytes(), last["origin"].tobytes(),
        int(last["time"]), last["vector"].tobytes(), int(last["namespace_bytes"]),
        int(last["vector_id_bytes"]), len(metadata),
    )  # fmt: skip
    parts = [header, payload[HEADER.size : ragged]]
    parts.append(b"" if len(dense) else indices.astype("<u2").tobytes())
    parts += [values.astype("<f4").tobytes(), payload[names : names + named], metadata]
    return b"".join(parts)


def _components(batch: DeltaBatch, run: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """Of each component that is named the last value, ascending."""
    offsets, indices, values = batch.components()
    spans = [np.arange(offsets[row], offsets[row + 1]) for row in run.tolist()]
    backwards = np.concatenate(spans)[::-1]
    named, at = np.unique(indices[backwards], return_index=True)
    return named, values[backwards[at]]


def _replaced(rows: ReleasedRows, keep: Numbers, merged: dict[int, bytes]) -> ReleasedRows:
    batch = rows.batch
    kept = zip(keep.tolist(), batch.pieces(keep), strict=True)
    found = DeltaBatch.joined(
        [merged.get(row, piece) for row, piece in kept],
        sequences=batch.sequences[keep],
        log_times_ms=batch.log_times_ms[keep],
        headers=None if batch.headers is None else Binary.of(batch.headers.take(keep)),
    )
    return ReleasedRows(found, rows.positions[keep], rows.ordinals[keep])
