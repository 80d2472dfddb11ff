"""The fold of one log partition: admit, order and merge, one feed at a time.

`feed` takes the deltas of a stretch of the log and returns what that stretch released, changed and
refused. All of it is a function of the log: cutting the log into other feeds gives the same
releases with the same positions and ordinals, the same refusals and the same states.

A fold may *pause* inside a feed: deltas have waited too long and only the log can say whether their
parents were ever released. Then `missing()` names those parents, `resolve(found)` goes on with the
rest of the feed, and `sequence` stands still until that is through:

    outcomes = [propagator.feed(deltas, through=last)]
    while ids := propagator.missing():
        outcomes.append(propagator.resolve(looked_up(ids)))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from operator import lt
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import FailedPrecondition, InvalidArgument
from penstock.model.delta import DIMENSIONS_MAX
from penstock.model.delta_batch import DeltaBatch
from penstock.model.delta_checks import sound_rows
from penstock.propagation.fold.ledger import INVALID, LATE, SWEEP_MIN, Ledger, Verdicts, Waitlist
from penstock.propagation.fold.merge import Merge, VectorStates
from penstock.propagation.fold.order import (
    NOTHING,
    DeltaOrder,
    FeedTally,
    RefusedDeltas,
    ReleasedDeltas,
    refused_of,
    released_of,
)
from penstock.propagation.fold.row_fold import ROWS_MAX, RowFold
from penstock.propagation.fold.table import MEMORY, Space
from penstock.propagation.options import PropagationOptions

STRETCH_MIN: Final = 4096  # rows looked at after a stop, and twice as many each time
STRETCH_MAX: Final = 1 << 20  # that there is none
_NONE: Final = np.empty(0, np.uint64)


class FeedOutcome(msgspec.Struct, frozen=True, eq=False):
    released: DeltaBatch  # in causal order
    positions: NDArray[np.uint64]  # the sequence whose arrival released each
    ordinals: NDArray[np.uint64]  # 1, 2, 3 … over the whole life of the partition
    quarantined: DeltaBatch
    reasons: list[str]
    missing: list[bytes]  # the parent each quarantined delta lacks, or zeros
    # read, duplicates, released and quarantined in this feed; pending at its end, and how long the
    # eldest of those has waited by then in log time (pending_oldest_ms)
    counts: dict[str, int]


class Propagator:
    def __init__(
        self,
        dimensions: int,
        options: PropagationOptions | None = None,
        *,
        space: Space = MEMORY,
    ) -> None:
        """`space` is where the columns of its state lie, see `table`."""
        if not 1 <= dimensions <= DIMENSIONS_MAX:
            raise InvalidArgument(
                f"dimensions is {dimensions}, must be from 1 to {DIMENSIONS_MAX}",
                field="dimensions",
                limit=DIMENSIONS_MAX,
            )
        self.dimensions, self.space = dimensions, space
        self.options = (options or PropagationOptions()).validate()
        self.sequence = 0  # folded up to here
        self.ordinal = 0  # deltas released so far
        self.saved = 0  # the sequence of the snapshot since which changes are noted; 0: none
        self.ledger = Ledger(self.options.dedup_ms, self.options.pending_ms, space)
        self.waitlist = Waitlist(
            self.ledger, pending_max=self.options.pending_max, pending_ms=self.options.pending_ms
        )
        self.order = DeltaOrder(self.ledger, self.waitlist)
        self.merge = Merge(self.ledger, dimensions, self.options, space)
        self.row_fold = RowFold(self.ledger, self.waitlist, self.merge)
        self.rows_few = ROWS_MAX  # a feed of more goes by columns alone
        self._rest: DeltaBatch | None = None  # what a paused feed has still to look at
        self._through = 0
        self._position = 0  # the sequence at which the fold paused
        self._stretch = STRETCH_MAX

    # --- folding ---

    def feed(self, deltas: DeltaBatch, *, through: int, states: bool = False) -> FeedOutcome:
        """Fold deltas, in log order and behind `sequence`; `through` is the last sequence read.

        With `states` the vectors that it changes, and those that `resolve` changes after it, are
        noted for `take_touched`.
        """
        if self._rest is not None:
            raise FailedPrecondition("the fold is paused: resolve what is missing first")
        self._check_range(deltas, through)
        count = len(deltas)
        tally = FeedTally(read=count)
        self._through = through
        self.merge.noting = states
        stop = self._take_rows(deltas, tally) if count <= self.rows_few else 0
        if stop < count:
            rest = deltas.take(np.arange(stop, count)) if stop else deltas
            self._rest = self._admissible(rest, tally)
            self.row_fold.left = 0
        return self._advance(tally)

    def _take_rows(self, deltas: DeltaBatch, tally: FeedTally) -> int:
        """Fold what is plainly in order, and return where that ends."""
        times_ms = deltas.log_times_ms.tolist()
        raised = list(accumulate(times_ms, max, initial=self.ledger.time_ms))[1:]
        stop, released = self.row_fold.take(deltas, deltas.sequences.tolist(), raised)
        tally.duplicates = stop - len(released)
        if released:
            if raised != times_ms:
                deltas = replace(deltas, log_times_ms=np.array(raised, np.int64))
            if len(released) < len(raised):
                deltas = deltas.take(np.array(released))
            tally.released.append((deltas, deltas.sequences))
        return stop

    def _check_range(self, deltas: DeltaBatch, through: int) -> None:
        sequences, least = deltas.sequences, self.sequence
        if len(sequences):
            least = int(sequences[-1])
            if len(sequences) <= ROWS_MAX:
                few = sequences.tolist()
                rising = all(map(lt, few, few[1:]))
            else:
                rising = bool((sequences[1:] > sequences[:-1]).all())
            if not rising or int(sequences[0]) <= self.sequence:
                raise InvalidArgument(
                    f"deltas must ascend from behind sequence {self.sequence}", field="deltas"
                )
        if through < least:
            raise InvalidArgument(
                f"through is {through}, must be at least {least}", field="through", limit=least
            )

    def _admissible(self, deltas: DeltaBatch, tally: FeedTally) -> DeltaBatch:
        """The rows that are deltas at all, with log times that never step back."""
        sound = sound_rows(deltas, dimensions=self.dimensions)
        times_ms = np.maximum.accumulate(np.maximum(deltas.log_times_ms, self.ledger.time_ms))
        deltas = replace(deltas, log_times_ms=times_ms)
        if sound.all():
            return deltas
        bad = deltas.take(~sound)
        tally.refuse(bad, bad.sequences, INVALID)
        return deltas.take(sound)

    def missing(self) -> list[bytes]:
        """Ids of parents that are to be looked up in the log before the fold can go on."""
        asked = self.waitlist.asked
        return list(dict.fromkeys(w.parent for w in asked if w.parent is not None))

    def resolve(self, found: Iterable[bytes]) -> FeedOutcome:
        """Go on after a pause. `found`: those of the missing that the log has, below the pause."""
        if self._rest is None:
            raise FailedPrecondition("nothing is missing")
        tally = FeedTally()
        self._settle(self.waitlist.answer({bytes(id_) for id_ in found}), tally)
        return self._advance(tally)

    def _advance(self, tally: FeedTally) -> FeedOutcome:
        """Fold until the feed is through, or until a question is open."""
        while self._rest is not None and not self.waitlist.asked:
            rest = self._rest
            piece = rest.take(np.arange(self._stretch)) if len(rest) > self._stretch else rest
            stop, released = self.order.step(piece, tally)
            self._merge(released, tally)
            self._rest = self._after(rest, piece, stop, tally)
        if self._rest is None:
            self.sequence = self._through
            if self.ledger.ids.table.count >= SWEEP_MIN and self.ledger.sweep():
                self.row_fold.left = 0
        return self._outcome(tally)

    def _after(
        self, rest: DeltaBatch, piece: DeltaBatch, stop: int, tally: FeedTally
    ) -> DeltaBatch | None:
        """What is left of a feed after a step, having turned out what has waited too long."""
        crowded = len(self.waitlist) > self.options.pending_max
        if crowded or stop < len(piece):
            at = stop - 1 if crowded else stop
            self._position = int(piece.sequences[at])
            self._settle(self.waitlist.turn_out(int(piece.log_times_ms[at])), tally)
            self._stretch = STRETCH_MIN
        else:
            self._stretch = min(2 * self._stretch, STRETCH_MAX)
        if stop < len(rest) or self.waitlist.asked:
            return rest.take(np.arange(stop, len(rest)))
        return None

    def _settle(self, verdicts: Verdicts, tally: FeedTally) -> None:
        tally.refused.append(refused_of(DeltaBatch.empty(), verdicts, self._position))
        self._merge(released_of(verdicts, self._position), tally)

    def _merge(self, released: ReleasedDeltas, tally: FeedTally) -> None:
        if not len(released.batch):
            return
        merged = self.merge.merge(released)
        if not merged.all():
            late = released.take(~merged)
            tally.refuse(late.batch, late.positions, LATE)
            released = released.take(merged)
        tally.released.append((released.batch, released.positions))

    def _outcome(self, tally: FeedTally) -> FeedOutcome:
        if len(tally.released) == 1:
            ((batch, positions),) = tally.released
        else:
            batch = DeltaBatch.concat([batch for batch, _ in tally.released])
            positions = np.concatenate([_NONE, *(positions for _, positions in tally.released)])
        released, first = len(batch), self.ordinal + 1
        ordinals = np.arange(first, first + released, dtype=np.uint64)
        self.ordinal += released
        refused = RefusedDeltas.join(tally.refused) if tally.refused else NOTHING
        eldest = self.waitlist.eldest() if self.waitlist.by_id else None
        oldest_ms = 0 if eldest is None else self.ledger.time_ms - eldest.log_time_ms
        counts = {
            "read": tally.read,
            "duplicates": tally.duplicates,
            "released": released,
            "quarantined": len(refused.reasons),
            "pending": len(self.waitlist.by_id),
            "pending_oldest_ms": oldest_ms,
        }
        return FeedOutcome(
            batch, positions, ordinals, refused.batch, refused.reasons, refused.missing, counts
        )

    def take_touched(self) -> VectorStates:
        """The vectors that were noted since this was last called, each once and as it is now, in
        the most urgent lane of its changes."""
        return self.merge.take_touched()

    def living(self) -> NDArray[np.bool_]:
        """Which vectors are there and not deleted, by number. Vectors that come later have higher
        numbers."""
        return self.merge.living()

    def states(self, rows: NDArray[Any] | None = None) -> VectorStates:
        """All vectors, deleted ones too, ascending by their newest sequence."""
        return self.merge.states(rows)

    def on_saved(self) -> None:
        """Note changes from here on, as a snapshot has what was before."""
        self.ledger.on_saved()
        self.saved = self.sequence

    @property
    def nbytes(self) -> int:
        """What the state takes, without room that was never used, and what waits."""
        return self.ledger.nbytes + self.merge.nbytes

    @property
    def paused(self) -> bool:
        """Whether `resolve` has to be called before anything else."""
        return self._rest is not None

    def validate(self) -> None:
        self.ledger.validate()
        self.waitlist.validate()
        self.merge.validate()
