"""Released deltas (`ReleasedRows`), and in which order a log was released without folding it again.

Most deltas are released by their own arrival: for those the order of release is the log's order,
and nothing is kept. What `Releases` keeps are the exceptions:

- a *turn* is a position at which something else happened: its own delta was not released there (it
  waits, is a duplicate, was refused), or others were released with it. A turn lists the sequences
  released at its position, in order; usually one, often none;
- a *run* is a stretch of the log without other records between its deltas. Runs give the number of
  deltas before a position, and so, together with the turns, the ordinal of every release.

With this, someone who reads a slice of the log puts its deltas into the order of release (`rows`),
and has to fetch only those that had waited since before the slice (`late_sequences`).

The number of releases before a position p is the number of deltas that arrived before p, plus, for
each turn before p, what it released less one (`net`, summed up).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FailedPrecondition, InvalidArgument
from penstock.model.columns import Binary
from penstock.model.delta_batch import DeltaBatch
from penstock.propagation.fold.propagator import FeedOutcome
from penstock.propagation.fold.table import Numbers, Table, places_within

Sequences = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Merged:
    """Of rows that may each stand for several deltas, what they stand for."""

    firsts: Sequences  # the position of the first of them
    folded: NDArray[np.int64]  # how many there are besides the row itself

    def take(self, rows: NDArray[Any]) -> Merged:
        return Merged(self.firsts[rows], self.folded[rows])

    @staticmethod
    def concat(parts: Sequence[Merged]) -> Merged:
        return Merged(
            np.concatenate([part.firsts for part in parts]),
            np.concatenate([part.folded for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class ReleasedRows:
    """What a subscriber is sent: deltas, and for each its position and its ordinal."""

    batch: DeltaBatch
    positions: Sequences  # the log sequence whose arrival released each
    ordinals: Sequences  # 1, 2, 3 … over all releases of the partition
    merged: Merged | None = None  # None: each stands for itself alone

    @staticmethod
    def empty() -> ReleasedRows:
        none = np.empty(0, np.uint64)
        return ReleasedRows(DeltaBatch.empty(), none, none)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def folded(self) -> int:
        return 0 if self.merged is None else int(self.merged.folded.sum())

    @property
    def first_position(self) -> int:
        """Of the first delta that they stand for; there must be one."""
        return int(self.positions[0] if self.merged is None else self.merged.firsts.min())

    def spans(self) -> Merged:
        """What each row stands for, if only for itself."""
        return self.merged or Merged(self.positions, np.zeros(len(self), np.int64))

    def take(self, rows: NDArray[Any]) -> ReleasedRows:
        """These rows (numbers or a mask) in that order; payloads are not copied."""
        merged = None if self.merged is None else self.merged.take(rows)
        return ReleasedRows(
            self.batch.take(rows), self.positions[rows], self.ordinals[rows], merged
        )

    def cut(self, first: int, end: int) -> ReleasedRows:
        if first <= 0 and end >= len(self):
            return self
        return self.take(np.arange(max(first, 0), min(end, len(self))))

    def packed(self) -> ReleasedRows:
        """The same, holding on to no buffer that is much larger than it needs."""
        if len(self.batch.blob) <= 2 * int(self.batch.sizes.sum()):
            return self
        return ReleasedRows.joined([(self, np.arange(len(self)))])

    @staticmethod
    def gathered(parts: Sequence[tuple[ReleasedRows, Numbers]]) -> ReleasedRows:
        """Rows by their numbers out of several; many small parts are as cheap as a large one."""
        if len(parts) == 1:
            rows, numbers = parts[0]
            return rows if len(numbers) == len(rows) else rows.take(numbers)
        return ReleasedRows.joined(parts)

    @staticmethod
    def joined(parts: Sequence[tuple[ReleasedRows, Numbers]]) -> ReleasedRows:
        """The same with payloads copied into a buffer of their own."""
        batches = [(rows.batch, numbers) for rows, numbers in parts]
        headers = merged = None
        if any(batch.headers is not None for batch, _ in batches):
            headers = Binary.of([h for batch, some in batches for h in batch.headers_of(some)])
        if any(rows.merged is not None for rows, _ in parts):
            merged = Merged.concat([rows.spans().take(numbers) for rows, numbers in parts])
        return ReleasedRows(
            DeltaBatch.joined(
                [piece for batch, numbers in batches for piece in batch.pieces(numbers)],
                sequences=np.concatenate([batch.sequences[some] for batch, some in batches]),
                log_times_ms=np.concatenate([batch.log_times_ms[some] for batch, some in batches]),
                headers=headers,
            ),
            np.concatenate([rows.positions[numbers] for rows, numbers in parts]),
            np.concatenate([rows.ordinals[numbers] for rows, numbers in parts]),
            merged,
        )

    @staticmethod
    def concat(parts: Sequence[ReleasedRows]) -> ReleasedRows:
        full = [(part, np.arange(len(part))) for part in parts if len(part)]
        return ReleasedRows.gathered(full) if full else ReleasedRows.empty()


class Releases:
    """`through` is the last sequence fed; positions up to `trimmed` are no longer known."""

    def __init__(self) -> None:
        self.through = self.trimmed = 0
        self._deltas = 0  # that arrived
        self._net = self._net_trimmed = 0
        self._late_trimmed = 0  # late sequences that are no longer kept
        self._runs = Table({"first": np.uint64, "before": np.int64})
        # `end` counts late sequences, `net` releases less arrivals, both up to and with the turn
        self._turns = Table({"at": np.uint64, "end": np.int64, "net": np.int64})
        self._late = Table({"sequence": np.uint64})

    @property
    def ordinal(self) -> int:
        return self._deltas + self._net

    # --- what a feed did ---

    def on_feed(self, sequences: Sequences, *outcomes: FeedOutcome) -> None:
        """Enter a feed that is through: what was fed, and the outcome, or outcomes if it paused."""
        count = len(sequences)
        if not count:
            return
        first, last = int(sequences[0]), int(sequences[-1])
        if first <= self.through:
            raise InvalidArgument(
                f"sequence {first} was fed before, through is {self.through}", field="sequences"
            )
        self._add_runs(sequences, first, last)
        own = sequences.tobytes()
        plain = len(outcomes) == 1 and (
            outcomes[0].positions.tobytes() == own
            and outcomes[0].released.sequences.tobytes() == own
        )
        if not plain:
            self._add_turns(sequences, outcomes)

    def _add_runs(self, sequences: Sequences, first: int, last: int) -> None:
        runs, count = self._runs, len(sequences)
        if first != self.through + 1 or not runs.count:
            row = runs.extend(1)
            runs["first"][row], runs["before"][row] = first, self._deltas
        if last - first + 1 != count:
            breaks = np.flatnonzero(sequences[1:] != sequences[:-1] + np.uint64(1)) + 1
            row = runs.extend(len(breaks))
            runs["first"][row : runs.count] = sequences[breaks]
            runs["before"][row : runs.count] = self._deltas + breaks
        self._deltas += count
        self.through = last

    def _add_turns(self, sequences: Sequences, outcomes: Sequence[FeedOutcome]) -> None:
        none = np.empty(0, np.uint64)
        at = np.concatenate([none, *(outcome.positions for outcome in outcomes)])
        released = np.concatenate([none, *(outcome.released.sequences for outcome in outcomes)])
        # Positions ascend, so those of a position are neighbours.
        begin, end = np.searchsorted(at, sequences), np.searchsorted(at, sequences, side="right")
        count = end - begin
        odd = count != 1
        odd[~odd] = released[begin[~odd]] != sequences[~odd]
        listed = np.zeros(len(at), np.bool_)
        listed[np.isin(at, sequences[odd])] = True
        turns, late = self._turns, self._late
        row = late.extend(int(listed.sum()))
        late["sequence"][row : late.count] = released[listed]
        counts = count[odd]
        row = turns.extend(len(counts))
        turns["at"][row : turns.count] = sequences[odd]
        ends = self._late_trimmed + late.count - int(counts.sum()) + np.cumsum(counts)
        turns["end"][row : turns.count] = ends
        turns["net"][row : turns.count] = self._net + np.cumsum(counts - 1)
        self._net += int((counts - 1).sum())

    # --- questions ---

    def ordinal_at(self, position: int) -> int:
        """How many deltas were released at or before a position."""
        self._check_known(position + 1)
        return int(self._before(np.array([position + 1], np.uint64))[0])

    def late_sequences(self, first: int, last: int) -> Sequences:
        """Sequences below `first`, ascending, that were released at positions first … last."""
        self._check_known(first)
        a, b = self._turns_within(first, last)
        found = self._released_in(a, b)
        return np.unique(found[found < first])

    def whole_from(self, first: int) -> int:
        """The first position from which on nothing was released of the log before `first`."""
        lost = np.flatnonzero(self._late.rows("sequence") < first)
        if not len(lost):
            return first
        last = lost[-1] + self._late_trimmed
        turn = np.searchsorted(self._turns.rows("end"), last, side="right")
        return max(first, int(self._turns["at"][turn]) + 1)

    def rows(self, deltas: DeltaBatch, first: int, last: int, late: DeltaBatch) -> ReleasedRows:
        """What positions first … last released, in order.

        `deltas` are those of the log from `first` to `last` at least, as they lie there, and `late`
        those that `late_sequences` names, ascending.
        """
        self._check_known(first)
        own = deltas.sequences
        a, b = own.searchsorted(np.array([first, last + 1], np.uint64)).tolist()
        if a or b < len(own):
            deltas = deltas.take(np.arange(a, b))
            own = deltas.sequences
        a, b = self._turns_within(first, last)
        if a == b:
            return ReleasedRows(deltas, own, self._before(own) + np.uint64(1))
        turns = self._turns
        released = self._released_in(a, b)
        ends = turns["end"]
        counts = np.diff(ends[a:b], prepend=int(ends[a - 1]) if a else self._late_trimmed)
        at = np.repeat(turns["at"][a:b], counts)
        plain = ~np.isin(own, turns["at"][a:b])
        positions = np.concatenate([own[plain], at])
        order = np.argsort(positions, kind="stable")
        base, places = self._located(deltas, released, late)
        earlier = len(base) - len(deltas)
        places = np.concatenate([np.flatnonzero(plain) + earlier, places])[order]
        positions = positions[order]
        place, _ = places_within(positions)
        ordinals = self._before(positions) + place.view(np.uint64) + np.uint64(1)
        return ReleasedRows(base.take(places), positions, ordinals)

    def _located(
        self, deltas: DeltaBatch, released: Sequences, late: DeltaBatch
    ) -> tuple[DeltaBatch, Numbers]:
        """The late ones followed by the deltas, and where each of the sequences is in that."""
        base = DeltaBatch.concat([late, deltas])
        if not len(released):
            return base, np.empty(0, np.int64)
        places = np.minimum(np.searchsorted(base.sequences, released), max(len(base) - 1, 0))
        if not len(base) or not (base.sequences[places] == released).all():
            raise FailedPrecondition("the log no longer holds deltas that were released late")
        return base, places

    def _turns_within(self, first: int, last: int) -> tuple[int, int]:
        at = self._turns.rows("at")
        a, b = np.searchsorted(at, np.array([first, last + 1], np.uint64)).tolist()
        return a, b

    def _released_in(self, a: int, b: int) -> NDArray[np.uint64]:
        if a == b:
            return np.empty(0, np.uint64)
        ends, skipped = self._turns["end"], self._late_trimmed
        start = int(ends[a - 1]) - skipped if a else 0
        found: Sequences = self._late["sequence"][start : int(ends[b - 1]) - skipped]
        return found

    def _before(self, positions: Sequences) -> Sequences:
        runs, turns = self._runs, self._turns
        if not runs.count:
            return np.full(len(positions), self.ordinal, np.uint64)
        first, before = runs.rows("first"), runs.rows("before")
        run = np.searchsorted(first, positions, side="right") - 1
        inside = (positions - first[run]).astype(np.int64) + before[run]
        following = np.minimum(run + 1, runs.count - 1)
        limit = np.where(run + 1 < runs.count, before[following], self._deltas)
        arrived = np.minimum(inside, limit)
        arrived[run < 0] = before[0]
        turn = np.searchsorted(turns.rows("at"), positions) - 1
        net = turns["net"][turn]
        net[turn < 0] = self._net_trimmed
        found: Sequences = (arrived + net).view(np.uint64)
        return found

    def _check_known(self, first: int) -> None:
        if first <= self.trimmed:
            raise FailedPrecondition(
                f"the order of release is known from position {self.trimmed + 1} on, not {first}"
            )

    # --- forgetting ---

    def trim(self, below: int) -> None:
        if below <= self.trimmed + 1:
            return
        below = min(below, self.through + 1)
        self.trimmed = below - 1
        run = int(np.searchsorted(self._runs.rows("first"), np.uint64(below), side="right")) - 1
        if run > 0:
            self._runs.keep(np.arange(run, self._runs.count))
        turns = self._turns
        gone = int(np.searchsorted(turns.rows("at"), np.uint64(below)))
        if gone:
            end, self._net_trimmed = int(turns["end"][gone - 1]), int(turns["net"][gone - 1])
            self._late.keep(np.arange(end - self._late_trimmed, self._late.count))
            self._late_trimmed = end
            turns.keep(np.arange(gone, turns.count))

    def validate(self) -> None:
        assert self.trimmed <= self.through
        first, at = self._runs.rows("first"), self._turns.rows("at")
        assert (first[1:] > first[:-1]).all()
        assert (at[1:] > at[:-1]).all()
        assert (np.diff(self._turns.rows("end")) >= 0).all()
        ends = self._turns.rows("end")
        kept = int(ends[-1]) - self._late_trimmed if len(ends) else 0
        assert kept == self._late.count, "late sequences and turns disagree"
