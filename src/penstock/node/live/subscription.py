"""One subscriber of a partition: what it is sent, when, and how far it has come.

    BEHIND ── has taken all that was released ──► LIVE
      ▲  reads on from the log by itself            │ is offered every feed
      └────────── its outbox is full ───────────────┘

*Live* with nothing waiting and credit at hand, a feed goes out in the step of the loop that
committed it. What cannot go out waits in the outbox, which is bounded; when that is full it is
dropped, and the subscription reads on from the log (`catch_up`), which costs a slice of it. Both
changes of state happen in one step of the loop, so nothing is left out. What was sent out of turn
from the outbox (urgent classes go first) is remembered by ordinal, so nothing is sent twice.

A subscriber that takes part in no more than its credit can neither make the node hold more than
these bounds, nor hold anybody else up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidArgument, PenstockError, Unavailable
from penstock.model.columns import Buffer
from penstock.model.delta_batch import sixteens
from penstock.model.entries import CHANGES
from penstock.node.clock import Alarm, Clock
from penstock.node.live.catch_up import CatchUp, ReadTurns, ReleaseSource
from penstock.node.observe.logs import get_logger
from penstock.node.storage.log_io import SliceReader
from penstock.propagation.flow.outbox import CoalesceWindow, DeltaOutbox, bytes_of
from penstock.propagation.flow.rate import AdaptiveRate, TokenBucket
from penstock.propagation.flow.route import Routes, wanted
from penstock.propagation.fold.releases import ReleasedRows
from penstock.propagation.options import LiveOptions
from penstock.replication.sender import Credit

FRAME_BYTES: Final = 1 << 20  # of rows in one sending, or a single row
ENTRY_BYTES: Final = 48  # of a row besides its payload and headers
PACE_MS: Final = 10  # between two sendings that the rate holds back, at least
QUIET_MS: Final = 1000  # after which a position that moved without rows is told
AHEAD_MAX: Final = 100_000  # vectors of rows sent out of turn that are remembered
log = get_logger(__name__)


class SubscriptionState(Enum):
    BEHIND = "behind"
    LIVE = "live"
    CLOSED = "closed"


class Outgoing:
    """Released by one feed, up to a position: routed and encoded once for all who want the same."""

    __slots__ = ("_bodies", "_routed", "rows", "through")

    def __init__(self, rows: ReleasedRows, through: int) -> None:
        self.rows, self.through = rows, through
        self._routed: dict[Routes, ReleasedRows] = {(): rows}
        self._bodies: dict[int, Buffer] = {}

    def rows_for(self, routes: Routes) -> ReleasedRows:
        found = self._routed.get(routes)
        if found is None:
            found = self._routed[routes] = wanted(self.rows, routes)
        return found

    def body_of(self, rows: ReleasedRows) -> Buffer:
        """The encoded body of all of these rows, which `rows_for` gave."""
        found = self._bodies.get(id(rows))
        if found is None:
            found = self._bodies[id(rows)] = encode(rows)
        return found


def encode(rows: ReleasedRows) -> bytes:
    batch = rows.batch
    return CHANGES.encode(
        len(rows.positions),
        {
            "position": rows.positions,
            "ordinal": rows.ordinals,
            "sequence": batch.sequences,
            "time_ms": batch.log_times_ms,
            "headers": batch.headers,
            "payload": batch.payloads,
        },
    )


class SubscriptionTerms(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    options: LiveOptions  # the bounds of its outbox and of its rate
    routes: Routes = ()
    cursor: str = ""
    start: str = "now"  # or else: at a sequence, at a time, or where its cursor is
    at: int = 0
    held: int | None = None  # whatever its cursor says, it has no more than this
    credit_entries: int
    credit_bytes: int
    batch_max: int  # rows of one sending
    batch_ms: int = 0  # how long the first of a batch may wait for others
    batch_rows: int  # … unless there are so many
    read_rows: int  # rows of one sending while it reads on from the log
    coalesce_ms: int = 0
    hosted: bool = False  # a sink of this node
    needs_fold: bool = False  # it looks at states: not while a thread has the fold
    in_order: bool = False  # never by urgency: all that waits is sent together


class HeldChanges:
    """Rows gather in a window if they are to be coalesced, and wait in the outbox; both are
    bounded. What goes out before others that were released earlier is remembered."""

    def __init__(self, terms: SubscriptionTerms) -> None:
        self._terms = terms
        self.outbox = DeltaOutbox(
            entries_max=terms.options.outbox_entries,
            bytes_max=terms.options.outbox_bytes,
            ageing_ms=terms.options.ageing_ms,
        )
        self._window: CoalesceWindow | None = None
        if terms.coalesce_ms:
            self._window = CoalesceWindow(terms.coalesce_ms, bytes_max=self.outbox.bytes_max)
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

    def take(self, entries: int, bytes_: int, through: int) -> ReleasedRows | None:
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


# Sends rows, perhaps none, and that all is sent up to a position; the bytes it took. With an
# `Outgoing`, these are all the rows that it has for the subscriber's routes.
Emit = Callable[[ReleasedRows, int, Outgoing | None], int]


class Subscription:
    def __init__(
        self,
        source: ReleaseSource,
        terms: SubscriptionTerms,
        *,
        first: int,
        emit: Emit,
        fail: Callable[[PenstockError], None],
        clock: Clock,
        turns: ReadTurns,
        forget: Callable[[Subscription], None],
    ) -> None:
        self.source, self.terms, self._turns = source, terms, turns
        self._emit, self._on_fail, self._forget = emit, fail, forget
        self._clock, self._loop = clock, asyncio.get_running_loop()
        self.state = SubscriptionState.BEHIND
        self._start = first  # nothing before it is wanted
        self._through = first - 1  # LIVE: all feeds up to here were offered
        self._reading: CatchUp | None = self._reader(first, {})
        self._waiting = HeldChanges(terms)
        slowest, fastest = terms.options.rate_min, terms.options.rate_max
        self.rate = AdaptiveRate(initial=fastest, minimum=slowest, maximum=fastest)
        self._bucket = TokenBucket(self.rate)
        self._moved = False  # something was sent or returned since the rate was adjusted
        self._credit = Credit(entries=terms.credit_entries, bytes=terms.credit_bytes)
        self._blocked = False
        self._due = False
        self._alarm = Alarm(clock, self._pump)
        self._told = first - 1  # the last position that was sent
        self._told_ms = clock.now_ms()
        self._log_ms = self._told_ms  # of the log, when it took what was sent last
        self.acknowledged = self.noted = first - 1  # `noted`: where its cursor is known to be
        self.delivered = 0
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
        return self._waiting.settled(self._through)

    @property
    def reading(self) -> bool:
        return self._reading is not None and self._reading.errand.busy

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

    def handled(self, position: int) -> bool:
        """Whether it has handled all that is wanted up to this position."""
        if self.acknowledged >= position:
            return True
        return self.settled >= position and not self._credit.entries_out

    @property
    def waiting(self) -> int:
        return self._waiting.rows

    def status(self, now_ms: int, **known: Any) -> dict[str, Any]:
        """How it is, behind what the caller knows of it."""
        outbox, lag = self._waiting.outbox, self.lag
        return known | {
            "name": self.terms.name,
            "routes": [str(route) for route in self.terms.routes],
            "state": self.state.value,
            "cursor": self.terms.cursor,
            "position": self.settled,
            "acknowledged": self.acknowledged,
            "lag_entries": lag,
            "lag_ms": 0 if not lag else max(0, now_ms - round(outbox.oldest_ms or self._log_ms)),
            "outbox_entries": self.waiting,
            "outbox_bytes": outbox.bytes,
            "rate": round(self.rate.rate),
            "utilisation": round(self._credit.utilisation, 3),
            "credit_entries": self._credit.entries,
            "credit_bytes": self._credit.bytes,
            "delivered": self.delivered,
            "folded": self._waiting.folded,
            "behind_switches": self.switches,
        }

    # --- from the subscriber ---

    def grant(self, entries: int, bytes_: int) -> None:
        """It has taken this much: its credit comes back."""
        self._credit.give_back(entries, bytes_)
        self._moved = True
        self._pump()

    def acknowledge(self, position: int) -> None:
        if position > self._told:
            raise InvalidArgument(
                f"position {position} was not sent, only up to {self._told}",
                field="position",
                limit=self._told,
            )
        self.acknowledged = max(self.acknowledged, position)

    def close(self) -> None:
        if self.state is SubscriptionState.CLOSED:
            return
        self.state = SubscriptionState.CLOSED
        if self._reading is not None:
            self._reading.errand.closed = True
        self._alarm.cancel()
        self._waiting.drop()
        self._forget(self)

    def fail(self, error: BaseException) -> None:
        """End it from this side."""
        if self.state is SubscriptionState.CLOSED:
            return
        known = error if isinstance(error, PenstockError) else None
        if known is None:
            log.error("a subscription failed", name=self.terms.name, exc_info=error)
        self.close()
        self._on_fail(known or Unavailable("the subscription failed"))

    # --- from the partition ---

    def offer(self, outgoing: Outgoing, now_ms: int) -> None:
        """What a feed released. Who is behind finds it in the log, once it is folded."""
        if self.state is not SubscriptionState.LIVE:
            if self.terms.needs_fold:
                self._schedule()
            return
        rows = outgoing.rows_for(self.terms.routes)
        if self._start:
            rows = self._from_start(rows, outgoing.through)
        if not len(rows.positions):
            self._through = outgoing.through
        elif self._may_send_at_once(rows, now_ms):
            self._through = outgoing.through
            self._send_at_once(rows, outgoing, now_ms)
        elif self._waiting.keep(rows, now_ms):
            self._through = outgoing.through
            self._pump()
        else:
            self._fall_behind()

    def _from_start(self, rows: ReleasedRows, through: int) -> ReleasedRows:
        if through < self._start:
            return ReleasedRows.empty()
        later = rows.positions >= self._start
        self._start = 0
        return rows if later.all() else rows.take(later)

    def _may_send_at_once(self, rows: ReleasedRows, now_ms: int) -> bool:
        count, credit, waiting = len(rows.positions), self._credit, self._waiting
        if self._blocked or not waiting.direct or waiting.outbox.entries or count > credit.entries:
            return False
        if self.terms.needs_fold and not (self.source.fold_idle and count <= self.terms.batch_max):
            return False
        room = credit.bytes
        if len(rows.batch.blob) + ENTRY_BYTES * count > room and bytes_of(rows) > room:
            return False
        return self._bucket.take_all(count, now_ms)

    def _send_at_once(self, rows: ReleasedRows, outgoing: Outgoing, now_ms: int) -> None:
        """In the order of release, in as many frames as it takes."""
        if len(rows.positions) <= self.terms.batch_max and len(rows.batch.blob) <= FRAME_BYTES:
            shared = outgoing if rows is outgoing.rows_for(self.terms.routes) else None
            self._send(rows, self._through, shared=shared, now_ms=now_ms)
            return
        ends = np.cumsum(rows.batch.sizes)
        at = 0
        while at < len(rows):
            end = _fitting(ends, at, self.terms.batch_max)
            last = self._through if end == len(rows) else int(rows.positions[end]) - 1
            self._send(rows.cut(at, end), last, shared=None, now_ms=now_ms)
            at = end

    def tick(self, now_ms: int) -> None:
        """Some tenths of a second have passed."""
        if self._moved:  # who stands still tells nothing of what it could bear
            self._bucket.observe(self._credit.utilisation, now_ms)
            self._moved = False
        if now_ms - self._told_ms >= QUIET_MS and not self._blocked:
            self._told_ms = now_ms
            settled = self.settled
            if settled > self._told and self.state is not SubscriptionState.CLOSED:
                self._told = settled
                self._emit(ReleasedRows.empty(), settled, None)
        self._pump()

    # --- sending ---

    def _schedule(self) -> None:
        if not self._due and self.state is not SubscriptionState.CLOSED:
            self._due = True
            if self._reading is None:
                self._loop.call_soon(self._pump_due)
            else:
                self._turns.add(lambda: self._pump_due(turn=True))

    def _pump_due(self, *, turn: bool = False) -> None:
        self._due = False
        self._pump(turn=turn)

    def _pump(self, *, turn: bool = False) -> None:
        """Send what may be sent; `turn`: it may read on from the log for it. Where states are to be
        copied, a step that is due is enough."""
        if self.state is SubscriptionState.CLOSED or (self._due and self.terms.needs_fold):
            return
        try:
            if self._reading is None:
                self._pump_outbox()
            else:
                self._pump_log(self._reading, turn=turn)
        except Exception as error:  # noqa: BLE001 - it ends this subscription, and is logged
            self.fail(error)

    def _room(self) -> tuple[int, int]:
        if self._blocked or (self.terms.needs_fold and not self.source.fold_idle):
            return 0, 0
        credit = self._credit
        return min(self.terms.batch_max, credit.entries), min(credit.bytes, FRAME_BYTES)

    def _pump_outbox(self) -> None:
        waiting, now_ms = self._waiting, self._clock.now_ms()
        outbox, in_order = waiting.outbox, self.terms.in_order
        waiting.collect(now_ms)
        while not waiting.full and self.state is SubscriptionState.LIVE:
            wait_ms = waiting.wait_ms(now_ms)
            if wait_ms:
                self._wake_in(wait_ms, now_ms)
            if wait_ms is None or wait_ms > 0:
                return
            entries, size = self._room()
            if entries < 1 or size < 1 or (in_order and entries < outbox.entries):
                return
            allowed = self._allowed(min(entries, outbox.entries), now_ms)
            size = outbox.bytes if in_order else size
            rows = waiting.take(allowed, size, self._through) if allowed else None
            if rows is None or not self._send_allowed(rows, allowed, now_ms, left=outbox.entries):
                return
        if waiting.full:
            self._fall_behind()

    def _pump_log(self, reading: CatchUp, *, turn: bool) -> None:
        while not reading.done:
            entries, size = self._room()
            if entries < 1 or size < 1:
                return
            if reading.held is None:
                if not turn or reading.fill():
                    self._schedule()  # others have their turn between two slices
                return
            now_ms = self._clock.now_ms()
            allowed = self._allowed(min(entries, self.terms.read_rows, reading.left), now_ms)
            if not allowed:
                return
            rows = reading.take(allowed, size)
            if not self._send_allowed(rows, allowed, now_ms, left=reading.left):
                return
        self._reading, self.state = None, SubscriptionState.LIVE
        self._through = self.source.sequence

    def _send_allowed(self, rows: ReleasedRows, allowed: int, now_ms: int, *, left: int) -> bool:
        """Send rows, of which the rate has allowed so many. Whether others may follow at once:
        where states are copied for them, everybody else has a turn before."""
        self._bucket.give_back(allowed - len(rows))
        self._send(rows, self.settled, shared=None, now_ms=now_ms)
        if self.terms.needs_fold and left:
            self._schedule()
            return False
        return True

    def _send(
        self, rows: ReleasedRows, position: int, *, shared: Outgoing | None, now_ms: int
    ) -> None:
        self._told, self._told_ms = position, now_ms
        self._log_ms = int(rows.batch.log_times_ms[-1])
        self.delivered += len(rows.positions)
        self._moved = True
        self._credit.use(len(rows.positions), self._emit(rows, position, shared))

    def _allowed(self, rows: int, now_ms: int) -> int:
        """How many of so many rows the rate allows; if none, it is asked again in a while."""
        found = self._bucket.take(rows, now_ms, whole=self.terms.in_order)
        if not found:
            self._wake_in(max(self._bucket.wait_ms(now_ms), PACE_MS), now_ms)
        return found

    def _fall_behind(self) -> None:
        first = self.settled + 1
        sent = self._waiting.drop()
        self.state = SubscriptionState.BEHIND
        self.switches += 1
        self._reading = self._reader(first, sent)
        self._schedule()

    def _reader(self, first: int, sent: dict[bytes, int]) -> CatchUp:
        errand = SliceReader(self.source.log, self.fail, go_on=self._schedule)
        return CatchUp(self.source, next=first, routes=self.terms.routes, sent=sent, errand=errand)

    def _wake_in(self, delay_ms: float, now_ms: int) -> None:
        self._alarm.set(now_ms + max(1, round(delay_ms)))


def _fitting(ends: NDArray[np.int64], at: int, entries: int) -> int:
    """How far rows from `at` on fit one frame, one at least."""
    before = int(ends[at - 1]) if at else 0
    fit = int(np.searchsorted(ends, before + FRAME_BYTES, side="right"))
    return min(max(fit, at + 1), at + entries, len(ends))
