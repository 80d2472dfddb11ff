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

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fire timers on `loop` from now on."""
        self._loop = loop

    def advance(self, seconds: float) -> None:
        """Move time on; returns when everything that fell due has been told so."""
        loop = self._loop
        if loop is None or loop is _running_loop():
            super().advance(seconds)
            return
        done = threading.Event()

        def move() -> None:
            super(AdvancingClock, self).advance(seconds)
            done.set()

        loop.call_soon_threadsafe(move)
        done.wait()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
