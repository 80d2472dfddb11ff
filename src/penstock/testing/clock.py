"""A clock that a test moves by hand, from whichever thread the test runs in."""

from __future__ import annotations

import asyncio
import threading

from penstock.node.clock import ManualClock


class AdvancingClock(ManualClock):
    """Stands still until `advance`; timers fire on the loop of the node that uses it."""

    def __init__(self, start_ms: int | None = None) -> None:
        super().__init__(start_ms)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0  # the one in which the loop runs

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fire timers from now on on `loop`, which runs in this thread."""
        self._loop, self._thread = loop, threading.get_ident()

    def advance(self, seconds: float) -> None:
        """Move time on; returns when everything that fell due has been told so."""
        if self._loop is None or self._thread == threading.get_ident():
            super().advance(seconds)
            return
        done = threading.Event()

        def move() -> None:
            super(AdvancingClock, self).advance(seconds)
            done.set()

        self._loop.call_soon_threadsafe(move)
        done.wait()
