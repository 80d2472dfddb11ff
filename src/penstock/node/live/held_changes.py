"""What a subscriber has asked for, and what is released for it and not sent to it yet."""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.model.delta_batch import sixteens
from penstock.propagation.flow.outbox import DeltaOutbox
from penstock.propagation.flow.route import Routes
from penstock.propagation.flow.window import CoalesceWindow
from penstock.propagation.fold.releases import ReleasedRows

AHEAD_MAX: Final = 100_000  # vectors of rows sent out of turn that are remembered


class HeldChanges:
    """Rows gather in a window if they are to be coalesced, and wait in the outbox; both are
    bounded. What goes out before others that were released earlier is remembered."""

    def __init__(self, terms: SubscriptionTerms) -> None:
        self._terms = terms
        self.outbox = DeltaOutbox(
            entries_max=terms.outbox_entries,
            bytes_max=terms.outbox_bytes,
            ageing_ms=terms.ageing_ms,
        )
        self._window: CoalesceWindow | None = None
        if terms.coalesce_ms:
            self._window = CoalesceWindow(terms.coalesce_ms, bytes_max=terms.outbox_bytes)
        # What was sent while others, released before it, still wait: by vector, the position and
        # the ordinal of the last. Deltas of a vector go in order, so that says all of it.
        self._ahead: dict[bytes, tuple[int, int]] = {}
        self._lost: int | None = None  # the first position of what did not fit, once merged
        self.folded = 0  # deltas that were merged into others
        # Nothing is ever kept back for a while: with an empty outbox, rows go out as they come.
        self.direct = not (terms.batch_ms or terms.coalesce_ms)

    @property
    def rows(self) -> int:
        return self.outbox.entries + (0 if self._window is None else self._window.entries)

    @property
    def full(self) -> bool:
        """Whether something had to be dropped, or too much would have to be remembered."""
        return self._lost is not None or len(self._ahead) > AHEAD_MAX

    def settled(self, through: int) -> int:
        """Nothing waits that was released up to here, of all up to `through`."""
        found = self.outbox.settled_position if self.outbox.entries else through
        if self._window is not None:
            for first in (self._window.first_position, self._lost):
                found = found if first is None else min(found, first - 1)
        return found

    def keep(self, rows: ReleasedRows, now_ms: int) -> bool:
        if self._window is None:
            return self.outbox.add(rows, now_ms)
        self._window.add(rows.packed(), now_ms)
        return True

    def collect(self, now_ms: int) -> None:
        window = self._window
        if window is not None:
            first, rows = window.first_position, window.due(now_ms)
            if rows is not None and not self.outbox.add(rows, now_ms):
                self._lost = first

    def wait_ms(self, now_ms: int) -> float | None:
        """How long what waits may wait for more; None: nothing waits, 0: no longer."""
        found = None
        if self._window is not None and self._window.due_ms is not None:
            found = self._window.due_ms - now_ms
        terms, outbox = self._terms, self.outbox
        if outbox.entries:
            if not terms.batch_ms or outbox.entries >= min(terms.batch_rows, terms.batch_max):
                return 0.0
            left_ms = terms.batch_ms - (now_ms - (outbox.oldest_ms or 0))
            found = left_ms if found is None else min(found, left_ms)
        return None if found is None else max(found, 0.0)

    def take(self, entries: int, bytes_: int, now_ms: int, through: int) -> ReleasedRows | None:
        rows = self.outbox.take(entries, bytes_)
        if rows is None:
            return None
        self.folded += rows.folded
        if not self.outbox.entries:
            self._ahead.clear()
        else:
            self._remember(rows, self.settled(through))
        return rows

    def _remember(self, rows: ReleasedRows, settled: int) -> None:
        early = rows.positions > settled
        if early.any():
            vectors, positions = sixteens(rows.batch.vector[early]), rows.positions[early].tolist()
            places = zip(positions, rows.ordinals[early].tolist(), strict=True)
            self._ahead.update(zip(vectors, places, strict=True))
        if len(self._ahead) > AHEAD_MAX:
            known = self._ahead.items()
            self._ahead = {vector: place for vector, place in known if place[0] > settled}

    def drop(self) -> dict[bytes, int]:
        """Forget what waits; of each vector the last that was sent out of turn."""
        sent = {vector: ordinal for vector, (_, ordinal) in self._ahead.items()}
        self._ahead.clear()
        self.outbox.clear()
        if self._window is not None:
            self._window.clear()
        self._lost = None
        return sent


class SubscriptionTerms(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    routes: Routes = ()
    cursor: str = ""
    credit_entries: int = 10_000
    credit_bytes: int = 8 << 20
    batch_max: int = 1000  # rows of one sending
    batch_ms: int = 0  # how long the first of a batch may wait for others
    batch_rows: int = 1000  # … unless there are so many
    read_rows: int = 1000  # rows of one sending while it reads on from the log
    coalesce_ms: int = 0
    hosted: bool = False  # a sink of this node
    needs_fold: bool = False  # it looks at states: not while a thread has the fold
    in_order: bool = False  # never by urgency: all that waits is sent together
    outbox_entries: int = 10_000
    outbox_bytes: int = 8 << 20
    ageing_ms: int = 10_000
    rate_min: float = 1000.0
    rate_max: float = 1_000_000.0
