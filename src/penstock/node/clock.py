"""Time for the node: one millisecond clock that never steps back, and timers on it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    def now_ms(self) -> int: ...

    def resync(self) -> int:
        """Read the time of day anew; by how many milliseconds the clock has stepped."""
        ...

    def call_at(self, when_ms: int, callback: Callable[[], object]) -> Timer:
        """Run `callback` once the clock shows `when_ms`."""


class SystemClock:
    """Wall-clock time at the start, advanced by the monotonic clock from then on.

    Whoever sets the machine's clock while the node runs changes nothing here, in either direction,
    before `resync` is called or the node restarts.
    """

    def __init__(self) -> None:
        self._offset_ms = _wall_offset_ms()

    def now_ms(self) -> int:
        return int(self._offset_ms + time.monotonic() * 1000)

    def resync(self) -> int:
        before, self._offset_ms = self._offset_ms, _wall_offset_ms()
        return round(self._offset_ms - before)

    def call_at(self, when_ms: int, callback: Callable[[], object]) -> Timer:
        # One millisecond late rather than early: a timer that fires early finds nothing due.
        delay_s = max(0, when_ms - self.now_ms() + 1) / 1000
        return asyncio.get_running_loop().call_later(delay_s, callback)


def _wall_offset_ms() -> float:
    return time.time() * 1000 - time.monotonic() * 1000


class Alarm:
    """Calls back at the earliest of the times that it was set to, then no more until it is set."""

    __slots__ = ("_callback", "_clock", "_timer", "when_ms")

    def __init__(self, clock: Clock, callback: Callable[[], object]) -> None:
        self._clock, self._callback = clock, callback
        self._timer: Timer | None = None
        self.when_ms: int | None = None  # None: it is not set

    def set(self, when_ms: int) -> None:
        if self.when_ms is not None and self.when_ms <= when_ms:
            return
        self.cancel()
        self.when_ms = when_ms
        self._timer = self._clock.call_at(when_ms, self._ring)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.when_ms = None

    def _ring(self) -> None:
        self._timer = self.when_ms = None
        self._callback()


class NextTurn:
    """Calls back in the next turn of the loop, once, however often it is asked to."""

    __slots__ = ("_callback", "due")

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback = callback
        self.due = False

    def ask(self) -> None:
        if not self.due:
            self.due = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self.due = False
        self._callback()


class _ManualTimer:
    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ManualClock:
    """A clock for tests: it stands still until it is advanced."""

    def __init__(self, start_ms: int | None = None) -> None:
        self._now_ms = int(time.time() * 1000) if start_ms is None else start_ms
        self._timers: list[tuple[int, int, _ManualTimer]] = []
        self._order = itertools.count()

    def now_ms(self) -> int:
        return self._now_ms

    def call_at(self, when_ms: int, callback: Callable[[], object]) -> Timer:
        timer = _ManualTimer(callback)
        heapq.heappush(self._timers, (when_ms, next(self._order), timer))
        return timer

    def resync(self) -> int:
        return 0

    def advance(self, seconds: float) -> None:
        end_ms = self._now_ms + round(seconds * 1000)
        while self._timers and self._timers[0][0] <= end_ms:
            when_ms, _, timer = heapq.heappop(self._timers)
            self._now_ms = max(self._now_ms, when_ms)
            if timer.callback is not None:
                timer.callback()
        self._now_ms = end_ms
