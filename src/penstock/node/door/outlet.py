"""What waits to be sent to one connection, and what its streams may read from logs for it.

Answers and frames of streams count in the node's budget from when they are made until the other end
has read them. Whoever reads more slowly than `READ_BYTES_PER_S` does not read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from penstock.node.door.budget import LITTLE_BYTES, MODEST_BYTES, Account, Held

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
        self.used = 0  # bytes, of this turn
        self.waiting: dict[Outlet, None] = {}  # their streams go on in another turn, in this order
        self._scheduled = False

    def schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled, self.used = False, 0
        for outlet in list(self.waiting):
            if self.used >= TURN_BYTES:
                self.schedule()
                return
            del self.waiting[outlet]
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
        if self._pace.used >= TURN_BYTES:
            self._wait()
            return False
        # What is larger than most answers need not fit into the part for answers, which may be
        # smaller than the largest batch.
        kind = Held.READS if size <= MODEST_BYTES else Held.ANSWERS
        if not self._account.makes_room(size, kind):
            self._timer = asyncio.get_running_loop().call_later(ROOM_S, self._look_again)
            return False
        self._taken += size
        self._account.take(size, Held.READS)
        self._pace.used += size
        self._pace.schedule()
        return True

    def give_back(self, size: int) -> None:
        """What was read is sent. If nobody reads it, it counts as an answer from now on."""
        self._taken -= size
        self._account.give_back(size, Held.READS)
        if self._missed:
            self._missed = False
            self._wait()

    def _wait(self) -> None:
        self._pace.waiting[self] = None
        self._pace.schedule()

    def _look_again(self) -> None:
        self._timer = None
        self.go_on()

    def end(self) -> None:
        self._pace.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
