"""Performer effects in order, when some of them take a while."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from penstock.errors import PenstockError
from penstock.replication.effects import Effect, Effects

Slow = Coroutine[Any, Any, Effects]  # the rest of an effect, and what follows from it


class Performer:
    """One effect at a time: what comes after a slow one waits for it.

    `do` returns None when an effect is done. After `stop` nothing is done any more.
    """

    def __init__(
        self,
        do: Callable[[Effect], Slow | None],
        *,
        perform: Callable[[Effects], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        on_error: Callable[[PenstockError], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._do, self._perform, self._start = do, perform, spawn
        self._on_error, self._on_fatal = on_error, on_fatal
        self._waiting: deque[Effect] = deque()
        self._running = False  # effects that come of effects wait for their turn
        self._slow = False
        self._stopped = False

    def add(self, effects: Effects) -> None:
        self._waiting.extend(effects)
        if not self._running:
            self._run()

    def stop(self) -> None:
        self._stopped = True
        self._waiting.clear()

    def _run(self) -> None:
        self._running = True
        try:
            while self._waiting and not (self._slow or self._stopped):
                slow = self._do(self._waiting.popleft())
                if slow is not None:
                    self._slow = True
                    self.spawn(self._finish(slow)).add_done_callback(_closing(slow))
        except PenstockError as error:
            self._on_error(error)
        except Exception as error:  # noqa: BLE001 - what is half done cannot be gone on from
            self._on_fatal(error)
        finally:
            self._running = False

    async def _finish(self, slow: Slow) -> None:
        effects = await slow
        self._slow = False
        self._perform(effects)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` beside everything else; whatever it raises is told."""

        async def guarded() -> None:
            try:
                await work
            except PenstockError as error:
                self._on_error(error)
            except Exception as error:  # noqa: BLE001 - what is half done cannot be gone on from
                self._on_fatal(error)

        task = self._start(guarded())
        task.add_done_callback(_closing(work))
        return task


def _closing(work: Coroutine[Any, Any, Any]) -> Callable[[asyncio.Task[None]], None]:
    """Close `work` when the task that was to await it is done: one that is cancelled before its
    first step never has."""
    return lambda _: work.close()
