"""What is released and not yet sent to one subscriber: bounded, in four lanes, with ageing.

While a subscriber keeps up, what is added is taken at once and as a whole, and none of the rest of
this module happens. Only what is left behind is sorted into lanes, by the class of each delta.

Deltas of one vector never overtake each other. As a lane is served in order and ageing never puts a
later delta of a lesser class first, this can only go wrong where a more urgent delta is added while
others of its vector wait in lesser lanes: then those move into its lane, in front of it. They are
found through an index of who waits where, which is made when it is needed for the first time, so
that a subscriber whose deltas are all of one class never pays for it.

Rows are kept as they were added (a *chunk*), and lanes name rows of chunks (a *piece*): moving
between lanes copies nothing. A row that moved is in several pieces, and counts only in that of
its present lane. What a chunk holds on to is packed when most of it has gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

import numpy as np

from penstock.errors import InvalidArgument
from penstock.model.delta_batch import sixteens
from penstock.propagation.flow.lanes import AGEING_MS, LANES, TAKEN, KeyIndex, Lanes
from penstock.propagation.fold.releases import ReleasedRows
from penstock.propagation.fold.table import Numbers

FEW: Final = 32  # sizes that are summed up one by one
LOOK_AHEAD: Final = 64  # rows of a piece that are looked at in any case
_NUMBERS: Final = np.arange(1024)
HELD_SLACK: Final = 64 << 10  # bytes that may be held on to without need


class _Chunk:
    """Rows as they were added."""

    __slots__ = ("bytes_left", "entered_ms", "first", "held", "lanes", "left", "rows", "sizes")

    def __init__(self, rows: ReleasedRows, entered_ms: float) -> None:
        self.rows, self.entered_ms = rows, entered_ms
        self.sizes = sizes_of(rows)
        self.lanes = rows.batch.priority.copy()  # the present lane of each
        self.left = len(rows)
        self.bytes_left = self.held = _total(self.sizes)
        self.first = 0  # no row before this one is left

    def leave(self, rows: Numbers, bytes_: int) -> None:
        self.lanes[rows] = TAKEN
        self.left -= len(rows)
        self.bytes_left -= bytes_

    def position(self) -> int:
        """Of the first delta that is left; rows that were merged stand for earlier ones too."""
        if self.rows.merged is not None:
            return int(self.rows.merged.firsts[self.lanes != TAKEN].min())
        self.first += int(np.argmax(self.lanes[self.first :] != TAKEN))
        return int(self.rows.positions[self.first])


class _Piece:
    """Rows of a chunk in one lane, ascending."""

    __slots__ = ("at", "chunk", "index", "since_ms")

    def __init__(self, chunk: _Chunk, index: Numbers, since_ms: float) -> None:
        self.chunk, self.index, self.since_ms = chunk, index, since_ms
        self.at = 0

    def left(self, lane: int, count_max: int) -> Numbers:
        """The next ones that are still there and belong to the lane, among so many."""
        index = self.index[self.at : self.at + count_max]
        found: Numbers = index[self.chunk.lanes[index] == lane]
        return found


Place = tuple[_Chunk, int]  # a chunk and the number of a row in it


class DeltaOutbox:
    """`entries` and `bytes` are what waits. Times are those that the caller gives."""

    def __init__(self, entries_max: int, bytes_max: int, ageing_ms: int = AGEING_MS) -> None:
        if entries_max < 1 or bytes_max < 1:
            raise InvalidArgument("an outbox must have room", field="entries_max", limit=1)
        self.entries_max, self.bytes_max = entries_max, bytes_max
        self.held_slack = HELD_SLACK
        self._order = Lanes(ageing_ms=ageing_ms)
        self._index: KeyIndex[_Chunk, Place] = KeyIndex(_places)  # of vectors
        self.entries = self.bytes = 0
        self._position = 0  # the last one added
        self._fresh: tuple[ReleasedRows, float] | None = None  # added last, and not in lanes yet
        self._empty()

    def _empty(self) -> None:
        self._lanes: list[deque[_Piece]] = [deque() for _ in range(LANES)]
        self._chunks: deque[_Chunk] = deque()  # in the order in which they came
        self._held = 0  # bytes that chunks hold on to, those of rows that have gone too
        self._last_ms = 0.0
        self._index.clear()

    # --- adding ---

    def add(self, rows: ReleasedRows, now_ms: float) -> bool:
        """Let rows wait; False: they do not fit, and none was added.

        They come in the order of release, and all of a position at once. What was merged into them
        was released behind all that was added before.
        """
        count = len(rows)
        if not count:
            return True
        size = bytes_of(rows)
        if self.entries + count > self.entries_max or self.bytes + size > self.bytes_max:
            return False
        self._sort_in()
        self._fresh = rows, now_ms
        self.entries += count
        self.bytes += size
        self._position = max(self._position, int(rows.positions[-1]))
        return True

    def _sort_in(self) -> None:
        """Put what was added last into lanes."""
        if self._fresh is None:
            return
        rows, now_ms = self._fresh
        self._fresh = None
        self._last_ms = since_ms = max(now_ms, self._last_ms)
        chunk = _Chunk(rows.packed(), since_ms)
        lanes = _lifted(chunk)
        if any(self._lanes[lanes[0] + 1 :]):
            self._move_up(chunk, since_ms)
        for lane in lanes:
            index = np.flatnonzero(chunk.lanes == lane) if len(lanes) > 1 else _first(chunk.left)
            self._lanes[lane].append(_Piece(chunk, index, since_ms))
        self._chunks.append(chunk)
        self._index.late.append(chunk)
        self._held += chunk.held
        if self._held > 2 * self.bytes + self.held_slack:
            self._pack()

    # --- a more urgent delta takes those in front of it along ---

    def _move_up(self, chunk: _Chunk, since_ms: float) -> None:
        """Of the vectors of a chunk, move what waits in lesser lanes than their own."""
        by_vector = self._index.refresh(self.entries, lambda: self._chunks)
        urgent = np.flatnonzero(chunk.lanes < LANES - 1)
        vectors = sixteens(chunk.rows.batch.vector[urgent])
        wanted: dict[bytes, int] = {}
        for vector, lane in zip(vectors, chunk.lanes[urgent].tolist(), strict=True):
            if vector in by_vector and lane < wanted.get(vector, LANES):
                wanted[vector] = lane
        moves: dict[int, list[Place]] = {}
        for vector, lane in wanted.items():
            for other, row in by_vector[vector]:
                if lane < other.lanes[row] < TAKEN:
                    moves.setdefault(lane, []).append((other, row))
        for lane, places in moves.items():
            self._move(lane, places, since_ms)

    def _move(self, lane: int, places: list[Place], since_ms: float) -> None:
        """Put rows, in order, at the end of a lane."""
        by_chunk: dict[int, tuple[_Chunk, list[int]]] = {}
        for chunk, row in places:
            by_chunk.setdefault(id(chunk), (chunk, []))[1].append(row)
        for chunk, rows in sorted(by_chunk.values(), key=lambda pair: pair[0].rows.ordinals[0]):
            index = np.array(sorted(rows), np.int64)
            chunk.lanes[index] = lane
            self._lanes[lane].append(_Piece(chunk, index, since_ms))

    # --- taking ---

    def take(self, entries_max: int, bytes_max: int) -> ReleasedRows | None:
        """What goes next, at most this much; None: nothing waits, or may go.

        All that waits goes as it was added if it fits. A first row goes even if it is larger than
        `bytes_max`, unless that is nothing.
        """
        if not self.entries or entries_max < 1 or bytes_max < 1:
            return None
        fits = self.entries <= entries_max and self.bytes <= bytes_max
        if fits and self._fresh is not None and not self._chunks:
            rows = self._fresh[0]
            self.clear()
            return rows
        self._sort_in()
        if fits:
            rests = [(chunk.rows, np.flatnonzero(chunk.lanes != TAKEN)) for chunk in self._chunks]
            rows = ReleasedRows.gathered(rests)
            self.clear()
            return rows
        return self._take_by_lanes(entries_max, bytes_max)

    def _take_by_lanes(self, entries_max: int, bytes_max: int) -> ReleasedRows:
        parts: list[tuple[ReleasedRows, Numbers]] = []
        while entries_max > 0 and bytes_max > 0 and self.entries:
            lane = self._next_lane()
            piece = self._lanes[lane][0]
            chunk = piece.chunk
            looked_at = entries_max + LOOK_AHEAD
            rows = piece.left(lane, looked_at)
            count, size = _fitting(chunk.sizes[rows], entries_max, bytes_max)
            if not count and len(rows):
                if parts:
                    break
                count, size = 1, int(chunk.sizes[rows[0]])
            if count < len(rows):
                piece.at += int(np.searchsorted(piece.index[piece.at :], rows[count]))
            else:
                piece.at += looked_at
                if piece.at >= len(piece.index):
                    self._lanes[lane].popleft()
            if count:
                rows = rows[:count]
                parts.append((chunk.rows, rows))
                self._leave(chunk, rows, size)
                entries_max -= count
                bytes_max -= size
        return ReleasedRows.gathered(parts)

    def _next_lane(self) -> int:
        due, lanes = self._order.due, self._lanes
        full = [due(lane, pieces[0].since_ms) for lane, pieces in enumerate(lanes) if pieces]
        return min(full)[1]

    def _leave(self, chunk: _Chunk, rows: Numbers, size: int) -> None:
        chunk.leave(rows, size)
        self.entries -= len(rows)
        self.bytes -= size
        while self._chunks and not self._chunks[0].left:
            self._held -= self._chunks.popleft().held
        if not self.entries:
            self._empty()
        elif self._held > 2 * self.bytes + self.held_slack:
            self._pack()

    def _pack(self) -> None:
        """Let go of what was taken out of chunks of which something is left."""
        packed_chunks: dict[int, tuple[_Chunk, Numbers]] = {}
        for old in self._chunks:
            left = old.lanes != TAKEN
            if not left.all():
                new = _Chunk(old.rows.take(left).packed(), old.entered_ms)
                new.lanes = old.lanes[left]
                packed_chunks[id(old)] = new, np.cumsum(left) - 1
        for lane, pieces in enumerate(self._lanes):
            for piece in pieces:
                if id(piece.chunk) in packed_chunks:
                    rows = piece.left(lane, len(piece.index))
                    piece.chunk, numbers = packed_chunks[id(piece.chunk)]
                    piece.index, piece.at = numbers[rows], 0
            self._lanes[lane] = deque(piece for piece in pieces if len(piece.index))
        changed = (packed_chunks.get(id(old), (old, None))[0] for old in self._chunks)
        self._chunks = deque(chunk for chunk in changed if len(chunk.lanes))
        self._held = sum(chunk.held for chunk in self._chunks)
        self._index.clear(self._chunks)

    # --- how things are ---

    @property
    def oldest_ms(self) -> float | None:
        """When what has waited longest was added; None: nothing waits."""
        if self._chunks:
            return self._chunks[0].entered_ms
        return None if self._fresh is None else self._fresh[1]

    @property
    def settled_position(self) -> int:
        """Everything that was added at or before this position has been taken, and with it all
        that was merged into it."""
        if self._chunks:
            return self._chunks[0].position() - 1
        return self._position if self._fresh is None else self._fresh[0].first_position - 1

    def clear(self) -> None:
        """Drop all that waits."""
        self.entries = self.bytes = 0
        self._fresh = None
        if self._chunks:
            self._empty()

    def validate(self) -> None:
        left = sum(chunk.left for chunk in self._chunks)
        size = sum(chunk.bytes_left for chunk in self._chunks)
        if self._fresh is not None:
            left, size = left + len(self._fresh[0]), size + bytes_of(self._fresh[0])
        assert (left, size) == (self.entries, self.bytes)
        assert left <= self.entries_max
        assert size <= self.bytes_max
        assert self._held <= 2 * self.bytes_max + self.held_slack
        for chunk in self._chunks:
            assert chunk.left == int((chunk.lanes != TAKEN).sum())
        listed = [
            len(piece.left(lane, len(piece.index)))
            for lane in range(LANES)
            for piece in self._lanes[lane]
        ]
        assert sum(listed) == sum(chunk.left for chunk in self._chunks)


def sizes_of(rows: ReleasedRows) -> Numbers:
    """Bytes of each row: its payload and its headers."""
    headers = rows.batch.headers
    if headers is None:
        return rows.batch.sizes
    return rows.batch.sizes + np.diff(headers.offsets)


def bytes_of(rows: ReleasedRows) -> int:
    return _total(sizes_of(rows))


def _lifted(chunk: _Chunk) -> list[int]:
    """The lanes of a chunk, where rows in front of a more urgent one of their vector share its."""
    if chunk.left == 1:
        return [int(chunk.lanes[0])]
    lanes = chunk.lanes.tolist()
    found = sorted(set(lanes))
    if len(found) == 1:
        return found
    least: dict[bytes, int] = {}
    vectors = sixteens(chunk.rows.batch.vector)
    for row in range(len(vectors) - 1, -1, -1):
        lanes[row] = least[vectors[row]] = min(lanes[row], least.get(vectors[row], LANES))
    chunk.lanes[:] = lanes
    return sorted(set(lanes))


def _places(chunk: _Chunk) -> Iterator[tuple[bytes, Place]]:
    """The vectors of what is left of a chunk, and where they are."""
    rows = np.flatnonzero(chunk.lanes != TAKEN)
    vectors = sixteens(chunk.rows.batch.vector[rows])
    return ((vector, (chunk, row)) for vector, row in zip(vectors, rows.tolist(), strict=True))


def _first(count: int) -> Numbers:
    return _NUMBERS[:count] if count <= len(_NUMBERS) else np.arange(count)


def _total(sizes: Numbers) -> int:
    return sum(sizes.tolist()) if len(sizes) <= FEW else int(sizes.sum())


def _fitting(sizes: Numbers, entries_max: int, bytes_max: int) -> tuple[int, int]:
    """How many of the first rows are within the limits, and their bytes."""
    if len(sizes) == 1:
        size = int(sizes[0])
        return (1, size) if size <= bytes_max else (0, 0)
    totals = np.cumsum(sizes[:entries_max])
    count = int(np.searchsorted(totals, bytes_max, side="right"))
    return count, int(totals[count - 1]) if count else 0
