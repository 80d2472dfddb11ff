"""What one connection makes the node hold, and when it is read no further.

Three things pile up for a client: requests that have no answer yet, the beginning of a frame whose
rest has not come, and answers that it does not read. All count in the node's budget (`budget`).
Past a bound of its own a connection is not read until there is less, and TCP holds the sender back.

It is the same between nodes, and cannot lock two of them up: the client's end of a connection
always reads, so what this end has to send gets away. Nor do acknowledgements of replicas wait
behind their slices: streams stop at the transport's own mark, far below `UNREAD_BYTES_MAX`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from penstock.config import Limits
from penstock.errors import Unavailable
from penstock.node.door.budget import LITTLE_BYTES, MODEST_BYTES, Account, Budget, Held
from penstock.wire.outbox import WireTransport

INFLIGHT_BYTES_MAX: Final = 32 << 20  # of one connection's requests
UNREAD_BYTES_MAX: Final = 4 << 20  # of one connection's answers, beside what the kernel has taken
READ_BYTES_PER_S: Final = 4 << 10  # slower than this, an answer is not being read
TURN_BYTES: Final = 1 << 20  # that streams read from logs in one turn of the loop
ROOM_S: Final = 0.25  # after which streams that found no room look again


class Unread:
    """What was sent and is not on its way yet, because the other end does not read."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self.size = 0
        self._whole = 0  # of what was sent since all was on its way: a part of it keeps all of it
        self.since = 0.0  # when it was last seen to get less, at the least rate; 0: all is sent
        self._size_then = 0

    def update(self, size: int, sent: int = 0) -> None:
        """So many bytes wait now, after so many were sent besides."""
        self.size = size
        self._whole = self._whole + sent if size else 0
        self._account.hold(max(size, self._whole), Held.ANSWERS)
        if not size:
            self.since = 0.0
        elif not self.since:
            self.since, self._size_then = time.monotonic(), size
            if self._account.holder is not None:
                self._account.budget.watch(self._account.holder)
        budget = self._account.budget
        if size > LITTLE_BYTES and budget.held > budget.bytes_large_max:
            budget.overrun(self._account)

    def overdue(self, write_s: float) -> bool:
        """Whether the other end has hardly read for so long. A byte now and then is not reading."""
        if not self.since:
            return False
        waited_s = time.monotonic() - self.since
        if self._size_then - self.size > READ_BYTES_PER_S * waited_s:
            self.since, self._size_then = time.monotonic(), self.size
            return False
        return waited_s > write_s


class ReadPace:
    """How much all streams together read from logs in one turn of the loop."""

    def __init__(self) -> None:
        self._used = 0  # bytes, of this turn
        self._waiting: dict[Outlet, None] = {}
        self._scheduled = False

    @property
    def open(self) -> bool:
        return self._used < TURN_BYTES

    def spend(self, size: int) -> None:
        self._used += size
        self._schedule()

    def wait(self, outlet: Outlet) -> None:
        """Have its streams go on in another turn, behind those that wait already."""
        self._waiting[outlet] = None
        self._schedule()

    def leave(self, outlet: Outlet) -> None:
        self._waiting.pop(outlet, None)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled, self._used = False, 0
        for outlet in list(self._waiting):
            if not self.open:
                self._schedule()
                return
            del self._waiting[outlet]
            outlet.go_on()


class Outlet:
    """Room for what the streams of one connection read from logs in order to send it.

    It counts before it is read: of a hundred readers that all ask at once and then read nothing,
    only those are sent something for whom there is room. The others wait for it.
    """

    def __init__(self, pace: ReadPace, account: Account, go_on: Callable[[], None]) -> None:
        self._pace, self._account, self.go_on = pace, account, go_on
        self._taken = 0
        self._missed = False  # a stream waits until others have sent what they read
        self._timer: asyncio.TimerHandle | None = None  # nobody has room before it is over

    def take(self, size: int) -> bool:
        """Whether a stream may read so much now. If not, all are told to go on when they may."""
        if self._timer is not None:
            return False
        if self._taken and self._taken + size > UNREAD_BYTES_MAX:
            self._missed = True
            return False
        if not self._pace.open:
            self._pace.wait(self)
            return False
        # What is larger than most answers need not fit into the part for answers, which may be
        # smaller than the largest batch.
        kind = Held.READS if size <= MODEST_BYTES else Held.ANSWERS
        if not self._account.makes_room(size, kind):
            self._timer = asyncio.get_running_loop().call_later(ROOM_S, self._look_again)
            return False
        self._taken += size
        self._account.take(size, Held.READS)
        self._pace.spend(size)
        return True

    def give_back(self, size: int) -> None:
        """What was read is sent. If nobody reads it, it counts as an answer from now on."""
        self._taken -= size
        self._account.give_back(size, Held.READS)
        if self._missed:
            self._missed = False
            self._pace.wait(self)

    def _look_again(self) -> None:
        self._timer = None
        self.go_on()

    def end(self) -> None:
        self._pace.leave(self)
        if self._timer is not None:
            self._timer.cancel()


class Flow:
    """Invariant: `reading` says whether the transport is to read; both change in `_steer` alone."""

    def __init__(self, budget: Budget, limits: Limits, cut_off: Callable[[str], None]) -> None:
        self._budget, self._limits, self._cut_off = budget, limits, cut_off
        self.account = budget.account(self)
        self._transport: WireTransport | None = None
        self._requests = 0  # bytes without an answer
        self.frame_bytes = 0  # counted of a large frame that is not whole yet
        self._frame_due_s = 0.0  # that the frame on its way may take as a whole
        self._frame_since = 0.0  # when it began, or this end began to read again; 0: there is none
        self._drained = asyncio.Event()  # clear: too many answers are unread
        self._drained.set()
        self.reading = True
        self._halts = 0  # reasons of the session's own not to read
        self._unsent = Unread(self.account)
        self.heard = time.monotonic()  # the last sign of life

    def start(self, transport: WireTransport) -> None:
        self._transport = transport

    def end(self) -> None:
        """The connection is lost. Requests under way are given back as they are answered."""
        self._transport = None
        self.hold_frame(0)
        self._unsent.update(0)
        self._frame_since = 0.0
        self._budget.unwatch(self)
        self.account.close()
        self._drained.set()

    # --- what comes in ---

    def take(self, size: int) -> None:
        self._requests += size
        self.account.take(size, Held.REQUESTS)
        if self._requests > INFLIGHT_BYTES_MAX or self.account.crowded:
            self._steer()

    def give_back(self, size: int) -> None:
        self._requests -= size
        self.account.give_back(size, Held.REQUESTS)
        if not self.reading:
            self._steer()

    def hold_frame(self, held: int) -> None:
        """So many bytes of an unfinished frame are here now."""
        self.account.hold(held, Held.FRAMES)
        self._budget.parts += _if_little(held) - _if_little(self.frame_bytes)
        self.frame_bytes = held

    def on_unfinished(self, size: int, *, begun: bool) -> None:
        """So much is here of a frame that is not whole; `begun`: of another one than before."""
        if begun or not self._frame_since:
            self._frame_since = time.monotonic()
            self._budget.watch(self)
        self._frame_due_s = self._limits.frame_s + size / self._limits.bytes_per_s_min

    def on_whole(self) -> None:
        """Nothing of a frame is waiting for its rest."""
        self._frame_since = 0.0

    def halt(self) -> None:
        """Do not read until `go_on`, for a reason of the session's own. Halts add up."""
        self._halts += 1
        self._steer()

    def go_on(self) -> None:
        self._halts -= 1
        self._steer()

    # --- what goes out ---

    def on_unsent(self, sent: int) -> None:
        """So much was sent while the transport's buffer is full."""
        if self._transport is None:
            return
        self._unsent.update(self._transport.get_write_buffer_size(), sent)
        if self._unsent.size > UNREAD_BYTES_MAX and self._drained.is_set():
            self._drained.clear()
            self._steer()

    def on_drained(self) -> None:
        self._unsent.update(0)
        self._drained.set()
        self._steer()

    @property
    def unread(self) -> bool:
        return not self._drained.is_set()

    async def room(self) -> None:
        """Until there is room for another answer; raises `Unavailable` if there never will be."""
        if self.unread:
            await self._drained.wait()
            if self._transport is None:
                raise Unavailable("the connection was lost")

    # --- both ---

    def silent_s(self) -> float:
        """Time without a sign of life. Who is not read may still show one: by reading. And who is
        not read because this node is slow to answer need not show any."""
        if self._transport is not None and not self.reading:
            before = self._unsent.size
            self._unsent.update(self._transport.get_write_buffer_size())
            if not self.unread or self._unsent.size != before:
                self.heard = time.monotonic()
        return time.monotonic() - self.heard

    def _steer(self) -> None:
        reading = (
            self._requests <= INFLIGHT_BYTES_MAX
            and not self._halts
            and not self.unread
            and not (self._requests and self.account.crowded)
        )
        if reading is self.reading or self._transport is None:
            return
        self.reading = reading
        self.heard = time.monotonic()
        if reading:
            if self._frame_since:
                self._frame_since = time.monotonic()  # its sender could not go on before
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    # --- as the budget's holder ---

    def stuck_s(self) -> float:
        since = [t for t in (self._frame_since, self._unsent.since) if t]
        return time.monotonic() - min(since) if since else 0.0

    def overdue(self) -> str | None:
        now = time.monotonic()
        if self._frame_since and self.reading and now - self._frame_since > self._frame_due_s:
            return "frame"
        if self._unsent.since and self._transport is not None:
            self._unsent.update(self._transport.get_write_buffer_size())
            if self._unsent.overdue(self._limits.write_s):
                return "unread"
        if not self._frame_since and not self._unsent.since:
            self._budget.unwatch(self)
        return None

    def evict(self, reason: str) -> None:
        self.end()
        self._cut_off(reason)


def _if_little(size: int) -> int:
    return size if size <= LITTLE_BYTES else 0
