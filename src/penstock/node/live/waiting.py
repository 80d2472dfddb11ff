"""What is released for a subscriber and not sent to it yet, and how fast it may be sent."""

from __future__ import annotations

from typing import Final

from penstock.node.live.credit import AHEAD_MAX, Ahead
from penstock.node.live.terms import Terms
from penstock.propagation.bucket import Bucket
from penstock.propagation.outbox import Outbox, bytes_of
from penstock.propagation.rate import AdaptiveRate
from penstock.propagation.rows import Rows
from penstock.propagation.window import Window

PACE_MS: Final = 10  # between two sendings that the rate holds back, at least


class Waiting:
    """Rows gather in a window if they are to be coalesced, and wait in the outbox; both are
    bounded. What goes out before others that were released earlier is remembered."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.outbox = Outbox(
            entries_max=terms.outbox_entries,
            bytes_max=terms.outbox_bytes,
            ageing_ms=terms.ageing_ms,
        )
        self._window = Window(terms.coalesce_ms) if terms.coalesce_ms else None
        self._window_bytes = 0
        self._ahead = Ahead()
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
        return self._lost is not None or self._ahead.rows > AHEAD_MAX

    def settled(self, through: int) -> int:
        """Nothing waits that was released up to here, of all up to `through`."""
        found = self.outbox.settled_position if self.outbox.entries else through
        if self._window is not None:
            for first in (self._window.first_position, self._lost):
                found = found if first is None else min(found, first - 1)
        return found

    def keep(self, rows: Rows, now_ms: int) -> bool:
        """Let rows wait; False: they do not fit."""
        if self._window is None:
            return self.outbox.add(rows, now_ms)
        self._window.add(rows.packed(), now_ms)
        self._window_bytes += bytes_of(rows)
        return True

    def collect(self, now_ms: int) -> None:
        """Put what has gathered for long enough into the outbox."""
        window = self._window
        if window is None or not window.entries:
            return
        first = window.first_position
        full = self._window_bytes >= self._terms.outbox_bytes
        rows = window.flush() if full else window.due(now_ms)
        if rows is not None:
            self._window_bytes = 0
            if not self.outbox.add(rows, now_ms):
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

    def take(self, entries: int, bytes_: int, now_ms: int, through: int) -> Rows | None:
        """What goes next."""
        rows = self.outbox.take(entries, bytes_, now_ms)
        if rows is None:
            return None
        self.folded += rows.folded
        if not self.outbox.entries:
            self._ahead.clear()
        else:
            self._ahead.add(rows)
            if self._ahead.rows > AHEAD_MAX:
                self._ahead.settle(self.settled(through))
        return rows

    def drop(self) -> dict[bytes, int]:
        """Forget what waits; of each vector the last that was sent out of turn."""
        sent = self._ahead.sent()
        self._ahead.clear()
        self.outbox.clear()
        if self._window is not None:
            self._window.clear()
            self._window_bytes = 0
        self._lost = None
        return sent


class Pace:
    """A rate that follows what the subscriber can bear. `whole`: rows go together or not at all,
    so what the rate allows meanwhile is saved up for them."""

    def __init__(self, terms: Terms) -> None:
        self._whole = terms.in_order
        self.rate = AdaptiveRate(
            initial=terms.rate_max, minimum=terms.rate_min, maximum=terms.rate_max
        )
        self._bucket = Bucket(self.rate)
        self._saved = 0
        self._active = False  # something was sent or returned since it was adjusted last
        self._held = False  # … was kept back by the rate since then

    def used(self) -> None:
        self._active = True

    def adjust(self, utilisation: float, now_ms: int) -> None:
        """Who stands still tells nothing of what it could bear."""
        if self._active:
            self._bucket.observe(utilisation, now_ms, held=self._held)
            self._active = self._held = False

    def take_all(self, rows: int, now_ms: int) -> bool:
        """Whether so many may go at once; takes them if so."""
        found = self._bucket.take(rows, now_ms)
        if found < rows:
            self._bucket.give_back(found)
            self._held = True
        return found == rows

    def take(self, rows: int, now_ms: int) -> int:
        """How many of so many rows may go."""
        found = self._bucket.take(rows, now_ms)
        self._held |= found < rows
        if self._whole and found < rows:
            self._saved += found
            found = 0
            if self._saved >= rows:
                self._saved, found = 0, rows
        return found

    def give_back(self, rows: int) -> None:
        self._bucket.give_back(rows)

    def wait_ms(self, now_ms: int) -> float:
        return max(self._bucket.wait_ms(now_ms), PACE_MS)
