"""One subscriber of a partition: what it is sent, when, and how far it has come.

    BEHIND ── has taken all that was released ──► LIVE
      ▲  reads on from the log by itself            │ is offered every feed
      └────────── its outbox is full ───────────────┘

*Live* with nothing waiting and credit at hand, a feed goes out in the step of the loop that
committed it. What cannot go out waits in the outbox, which is bounded; when that is full it is
dropped, and the subscription reads on from the log (`catching_up`), which costs a slice of it. Both
changes of state happen in one step of the loop, so nothing is left out. What was sent out of turn
from the outbox (urgent classes go first) is remembered by ordinal, so nothing is sent twice.

A subscriber that takes part in no more than its credit can neither make the node hold more than
these bounds, nor hold anybody else up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidArgument, PenstockError, Unavailable
from penstock.node.clock import Clock, Timer
from penstock.node.live.catching_up import CatchingUp, Source
from penstock.node.live.credit import AHEAD_MAX, Ahead, Credit
from penstock.node.live.outgoing import Outgoing, Routes
from penstock.node.logs import get_logger
from penstock.propagation.bucket import Bucket
from penstock.propagation.outbox import Outbox, bytes_of
from penstock.propagation.rate import AdaptiveRate
from penstock.propagation.rows import Rows
from penstock.propagation.window import Window

FRAME_BYTES: Final = 1 << 20  # of rows in one sending, or a single row
ENTRY_BYTES: Final = 48  # of a row besides its payload and headers
PACE_MS: Final = 10  # between two sendings that the rate holds back, at least
QUIET_MS: Final = 1000  # after which a position that moved without rows is told
log = get_logger(__name__)


class State(Enum):
    BEHIND = "behind"
    LIVE = "live"
    CLOSED = "closed"


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What a subscriber asked for, within the node's bounds."""

    name: str
    routes: Routes = ()
    cursor: str = ""
    credit_entries: int = 10_000
    credit_bytes: int = 8 << 20
    batch_max: int = 1000  # rows of one sending
    batch_ms: int = 0  # how long the first of a batch may wait for others
    batch_rows: int = 1000  # … unless there are so many
    coalesce_ms: int = 0
    hosted: bool = False  # a sink of this node
    needs_fold: bool = False  # it looks at states: not while a thread has the fold
    in_order: bool = False  # never by urgency: all that waits is sent together
    outbox_entries: int = 10_000
    outbox_bytes: int = 8 << 20
    ageing_ms: int = 10_000
    rate_min: float = 1000.0
    rate_max: float = 1_000_000.0


class Emit(Protocol):
    def __call__(self, rows: Rows, position: int, shared: Outgoing | None) -> int:
        """Send rows, perhaps none, and that all is sent up to a position; the bytes it took.

        `shared`: these are all the rows that it has for these routes.
        """
        ...


class Subscription:
    def __init__(
        self,
        source: Source,
        terms: Terms,
        *,
        first: int,
        emit: Emit,
        fail: Callable[[PenstockError], None],
        clock: Clock,
        forget: Callable[[Subscription], None],
    ) -> None:
        self.source, self.terms = source, terms
        self._emit, self._on_fail, self._forget = emit, fail, forget
        self._clock, self._loop = clock, asyncio.get_running_loop()
        self.state = State.BEHIND
        self._start = first  # nothing before it is wanted
        self._through = first - 1  # LIVE: all feeds up to here were offered
        self._reading: CatchingUp | None = self._reader(first, {})
        self._outbox = Outbox(
            entries_max=terms.outbox_entries,
            bytes_max=terms.outbox_bytes,
            ageing_ms=terms.ageing_ms,
        )
        self._window = Window(terms.coalesce_ms) if terms.coalesce_ms else None
        self._window_bytes = 0
        self._ahead = Ahead()
        self.rate = AdaptiveRate(
            initial=terms.rate_max, minimum=terms.rate_min, maximum=terms.rate_max
        )
        self._bucket = Bucket(self.rate)
        self._saved = 0  # of what the rate allows, for rows that go together
        self._credit = Credit(terms.credit_entries, terms.credit_bytes)
        self._blocked = False
        self._due = False
        self._timer: Timer | None = None
        self._timer_ms = 0
        self._active = False  # something was sent or returned since the last tick
        self._told = first - 1  # the last position that was sent
        self._told_ms = clock.now_ms()
        self.acknowledged = first - 1
        self.delivered = self.frames = self.folded = 0
        self.switches = 0  # times it fell behind
        self._counted = (0, 0)
        self.opened: dict[str, int] = {}  # where it starts, for whoever asked
        self._schedule()

    # --- how things are ---

    @property
    def settled(self) -> int:
        """All that is wanted up to this position has been sent."""
        if self._reading is not None:
            return self._reading.settled
        waits = self._outbox.settled_position if self._outbox.entries else self._through
        gathers = None if self._window is None else self._window.first_position
        return waits if gathers is None else min(waits, gathers - 1)

    @property
    def blocked(self) -> bool:
        """The connection's send buffer is full."""
        return self._blocked

    @blocked.setter
    def blocked(self, blocked: bool) -> None:
        self._blocked = blocked
        if not blocked:
            self._schedule()

    def take_counts(self) -> tuple[int, int]:
        """Rows delivered, and times that it fell behind, since this was asked last."""
        delivered, switches = self._counted
        self._counted = self.delivered, self.switches
        return self.delivered - delivered, self.switches - switches

    @property
    def lag(self) -> int:
        """Sequences that are committed and not yet accounted for."""
        return max(0, self.source.sequence_committed - self.settled)

    @property
    def waiting(self) -> int:
        """Deltas that are kept for it."""
        gathered = 0 if self._window is None else self._window.entries
        return self._outbox.entries + gathered

    def status(self, now_ms: int) -> dict[str, Any]:
        oldest, lag = self._outbox.oldest_ms, self.lag
        return {
            "name": self.terms.name,
            "routes": [str(route) for route in self.terms.routes],
            "state": self.state.value,
            "cursor": self.terms.cursor,
            "position": self.settled,
            "acknowledged": self.acknowledged,
            "lag_entries": lag,
            "lag_ms": 0 if not lag or oldest is None else max(0, now_ms - round(oldest)),
            "outbox_entries": self.waiting,
            "outbox_bytes": self._outbox.bytes,
            "rate": round(self.rate.rate),
            "utilisation": round(self._credit.utilisation, 3),
            "credit_entries": self._credit.entries,
            "credit_bytes": self._credit.bytes,
            "delivered": self.delivered,
            "folded": self.folded,
            "behind_switches": self.switches,
        }

    # --- from the subscriber ---

    def grant(self, entries: int, bytes_: int) -> None:
        """It has taken this much: its credit comes back."""
        self._credit.give_back(entries, bytes_)
        self._active = True
        self._pump()

    def acknowledge(self, position: int) -> None:
        """It has handled everything up to here."""
        if position > self._told:
            raise InvalidArgument(
                f"position {position} was not sent, only up to {self._told}",
                field="position",
                limit=self._told,
            )
        self.acknowledged = max(self.acknowledged, position)

    def close(self) -> None:
        if self.state is State.CLOSED:
            return
        self.state = State.CLOSED
        if self._reading is not None:
            self._reading.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._outbox.clear()
        self._forget(self)

    def fail(self, error: BaseException) -> None:
        """End it from this side."""
        if self.state is State.CLOSED:
            return
        known = error if isinstance(error, PenstockError) else None
        if known is None:
            log.error("a subscription failed", name=self.terms.name, exc_info=error)
        self.close()
        self._on_fail(known or Unavailable("the subscription failed"))

    # --- from the partition ---

    def offer(self, outgoing: Outgoing, now_ms: int) -> None:
        """What a feed released. Who is behind finds it in the log."""
        if self.state is not State.LIVE:
            return
        rows = outgoing.rows_for(self.terms.routes)
        if self._start:
            rows = self._from_start(rows, outgoing.through)
        if not len(rows):
            self._through = outgoing.through
        elif self._may_send_at_once(rows, now_ms):
            self._through = outgoing.through
            self._send_at_once(rows, outgoing, now_ms)
        elif self._keep(rows, now_ms):
            self._through = outgoing.through
            self._pump()
        else:
            self._fall_behind()

    def _from_start(self, rows: Rows, through: int) -> Rows:
        """Without what was released before the position that it starts at."""
        if through < self._start:
            return Rows.empty()
        later = rows.positions >= self._start
        self._start = 0
        return rows if later.all() else rows.take(later)

    def _may_send_at_once(self, rows: Rows, now_ms: int) -> bool:
        terms, count = self.terms, len(rows)
        if (
            self._outbox.entries or self._blocked or terms.batch_ms or self._window is not None
            or count > self._credit.entries
        ):  # fmt: skip
            return False
        room = self._credit.bytes
        if len(rows.batch.blob) + ENTRY_BYTES * count > room and bytes_of(rows) > room:
            return False
        allowed = self._bucket.take(count, now_ms)
        if allowed < count:
            self._bucket.give_back(allowed)
        return allowed == count

    def _send_at_once(self, rows: Rows, outgoing: Outgoing, now_ms: int) -> None:
        """In the order of release, in as many frames as it takes."""
        terms = self.terms
        if len(rows) <= terms.batch_max and len(rows.batch.blob) <= FRAME_BYTES:
            shared = outgoing if rows is outgoing.rows_for(terms.routes) else None
            self._send(rows, self._through, shared=shared, now_ms=now_ms)
            return
        ends = np.cumsum(rows.batch.sizes)
        at = 0
        while at < len(rows):
            end = _fitting(ends, at, terms.batch_max)
            last = self._through if end == len(rows) else int(rows.positions[end]) - 1
            self._send(rows.cut(at, end), last, shared=None, now_ms=now_ms)
            at = end

    def _keep(self, rows: Rows, now_ms: int) -> bool:
        if self._window is None:
            return self._outbox.add(rows, now_ms)
        self._window.add(rows.packed(), now_ms)
        self._window_bytes += bytes_of(rows)
        return True

    def tick(self, now_ms: int) -> None:
        """Some tenths of a second have passed."""
        if self._active:  # who stands still tells nothing of what it could bear
            self._bucket.observe(self._credit.utilisation, now_ms)
            self._active = False
        if now_ms - self._told_ms >= QUIET_MS and not self._blocked:
            self._told_ms = now_ms
            settled = self.settled
            if settled > self._told and self.state is not State.CLOSED:
                self._told = settled
                self._emit(Rows.empty(), settled, None)
        self._pump()

    # --- sending ---

    def _schedule(self) -> None:
        if not self._due and self.state is not State.CLOSED:
            self._due = True
            self._loop.call_soon(self._pump_due)

    def _pump_due(self) -> None:
        self._due = False
        self._pump()

    def _pump(self) -> None:
        """Send what may be sent."""
        if self.state is State.CLOSED:
            return
        try:
            if self._reading is None:
                self._pump_outbox()
            else:
                self._pump_log(self._reading)
        except Exception as error:  # noqa: BLE001 - it ends this subscription, and is logged
            self.fail(error)

    def _room(self) -> tuple[int, int]:
        """Rows and bytes that credit and connection allow."""
        if self._blocked or (self.terms.needs_fold and not self.source.fold_idle):
            return 0, 0
        credit = self._credit
        return min(self.terms.batch_max, credit.entries), min(credit.bytes, FRAME_BYTES)

    def _pump_outbox(self) -> None:
        outbox, now_ms = self._outbox, self._clock.now_ms()
        if self._window is not None and not self._collect(self._window, now_ms):
            return
        while outbox.entries and self.state is State.LIVE:
            entries, size = self._room()
            if self.terms.in_order:
                if entries < outbox.entries or size < 1:
                    return
                entries, size = outbox.entries, outbox.bytes
            if entries < 1 or size < 1 or self._gathers(now_ms):
                return
            allowed = self._allowed(min(entries, outbox.entries), now_ms)
            if not allowed:
                return
            rows = outbox.take(allowed, size, now_ms)
            if rows is None:
                return
            self._bucket.give_back(allowed - len(rows))
            self._send(rows, self.settled, shared=None, now_ms=now_ms)
            self._remember(rows)

    def _allowed(self, rows: int, now_ms: int) -> int:
        """How many of so many rows the rate allows; 0: none, and it will be asked again."""
        found = self._bucket.take(rows, now_ms)
        if self.terms.in_order and found < rows:  # all or none: what is there is saved up
            self._saved += found
            found = 0
            if self._saved >= rows:
                self._saved, found = 0, rows
        if not found:
            self._wake_in(max(self._bucket.wait_ms(now_ms), PACE_MS), now_ms)
        return found

    def _collect(self, window: Window, now_ms: int) -> bool:
        """Put what has waited for its like into the outbox; False if that is full."""
        first = window.first_position
        full = self._window_bytes >= self.terms.outbox_bytes
        rows = window.flush() if full else window.due(now_ms)
        if rows is not None and first is not None:
            self._window_bytes = 0
            if not self._outbox.add(rows, now_ms):
                self._fall_behind(first)
                return False
            self.folded += rows.folded
        if window.due_ms is not None:
            self._wake_in(window.due_ms - now_ms, now_ms)
        return True

    def _gathers(self, now_ms: int) -> bool:
        """Whether what waits may wait for more."""
        terms, outbox = self.terms, self._outbox
        if not terms.batch_ms or outbox.entries >= min(terms.batch_rows, terms.batch_max):
            return False
        left_ms = terms.batch_ms - (now_ms - (outbox.oldest_ms or 0))
        if left_ms > 0:
            self._wake_in(left_ms, now_ms)
        return left_ms > 0

    def _remember(self, rows: Rows) -> None:
        """Keep in mind what was sent before others that wait."""
        if not self._outbox.entries:
            self._ahead.clear()
            return
        self._ahead.add(rows)
        if self._ahead.rows > AHEAD_MAX:
            self._ahead.settle(self.settled)
            if self._ahead.rows > AHEAD_MAX:
                self._fall_behind()

    def _pump_log(self, reading: CatchingUp) -> None:
        while True:
            if reading.done:
                self._reading, self.state = None, State.LIVE
                self._through = self.source.sequence
                return
            entries, size = self._room()
            if entries < 1 or size < 1:
                return
            if reading.held is None:
                if reading.fill():
                    self._schedule()  # others have their turn between two slices
                return
            now_ms = self._clock.now_ms()
            allowed = self._allowed(min(entries, len(reading.held)), now_ms)
            if not allowed:
                return
            rows = _cut(reading, allowed, size)
            self._bucket.give_back(allowed - len(rows))
            self._send(rows, reading.settled, shared=None, now_ms=now_ms)

    def _send(self, rows: Rows, position: int, *, shared: Outgoing | None, now_ms: int) -> None:
        self._told, self._told_ms = position, now_ms
        self.delivered += len(rows)
        self.frames += 1
        self._active = True
        self._credit.use(len(rows), self._emit(rows, position, shared))

    def _fall_behind(self, lost: int | None = None) -> None:
        """Drop what waits, and read on from the log; from `lost` on if that is still before."""
        first = self.settled + 1 if lost is None else min(self.settled + 1, lost)
        sent = self._ahead.sent()
        self._ahead.clear()
        self._outbox.clear()
        if self._window is not None:
            self._window.clear()
            self._window_bytes = 0
        self.state = State.BEHIND
        self.switches += 1
        self._reading = self._reader(first, sent)
        self._schedule()

    def _reader(self, first: int, sent: dict[bytes, int]) -> CatchingUp:
        return CatchingUp(
            self.source, first=first, routes=self.terms.routes, sent=sent, wake=self._schedule,
            fail=self.fail,
        )  # fmt: skip

    def _wake_in(self, delay_ms: float, now_ms: int) -> None:
        when_ms = now_ms + max(1, round(delay_ms))
        if self._timer is not None:
            if self._timer_ms <= when_ms:
                return
            self._timer.cancel()
        self._timer_ms = when_ms
        self._timer = self._clock.call_at(when_ms, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._pump()


def _fitting(ends: NDArray[np.int64], at: int, entries: int) -> int:
    """How far rows from `at` on fit one frame, one at least."""
    before = int(ends[at - 1]) if at else 0
    fit = int(np.searchsorted(ends, before + FRAME_BYTES, side="right"))
    return min(max(fit, at + 1), at + entries, len(ends))


def _cut(reading: CatchingUp, entries: int, size: int) -> Rows:
    """Take the first rows that fit out of what was read, one at least."""
    held = reading.held
    assert held is not None
    ends = np.cumsum(held.batch.sizes[:entries])
    count = max(1, int(np.searchsorted(ends, size, side="right")))
    reading.held = held.cut(count, len(held)) if count < len(held) else None
    return held.cut(0, count)
