"""Whose turn it is to read on from the log.

A subscriber that is behind reads a slice of the log, puts it in order and sends it in one step of
the loop. However many of them there are, no more than a few have a step in one turn of the loop, in
rotation, so that writers and live subscribers wait for these few and not for all.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

SLICES_PER_TURN: Final = 2


class Turns:
    """Of all subscribers of a node."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._due = False

    def add(self, step: Callable[[], None]) -> None:
        """Have a step done, when those who came before had theirs."""
        self._waiting.append(step)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._take)

    def _take(self) -> None:
        self._due = False
        try:
            for _ in range(min(SLICES_PER_TURN, len(self._waiting))):
                self._waiting.popleft()()
        finally:
            self._schedule()
