"""Moments at a steady pace, by a timer of the kernel.

Those of an event loop are whole milliseconds: with a put each millisecond they would come up to one
too late, or too early, and the latency of a put is not much more than that.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Final

_MONOTONIC: Final = time.CLOCK_MONOTONIC  # which the performance counter shows, too
_ABSOLUTE: Final = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))

    @staticmethod
    def of(seconds: float) -> _Timespec:
        return _Timespec(*divmod(round(seconds * 1e9), 1_000_000_000))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("first", _Timespec))


async def ticks(tick_s: float, count: int) -> AsyncGenerator[float, None]:
    """So many ticks: each by when it was due. One that nobody was there for comes at once."""
    loop, passed, expired = asyncio.get_running_loop(), asyncio.Event(), 0
    start = time.perf_counter() + tick_s

    def on_expired() -> None:
        nonlocal expired
        expired += int.from_bytes(os.read(descriptor, 8), "little")
        passed.set()

    with _timer(start, tick_s) as descriptor:
        loop.add_reader(descriptor, on_expired)
        try:
            told = 0
            while told < count:
                await passed.wait()
                passed.clear()
                while told < min(expired, count):
                    yield start + told * tick_s
                    told += 1
                    await asyncio.sleep(0)  # nobody is to send in one go what was missed
        finally:
            loop.remove_reader(descriptor)


@contextmanager
def _timer(first: float, interval_s: float) -> Iterator[int]:
    """A descriptor that can be read from `first` on, again and again."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.timerfd_create(_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "no timer")
    try:
        setting = _Setting(_Timespec.of(interval_s), _Timespec.of(first))
        if libc.timerfd_settime(descriptor, _ABSOLUTE, ctypes.byref(setting), None):
            raise OSError(ctypes.get_errno(), "the timer was not set")
        yield descriptor
    finally:
        os.close(descriptor)
