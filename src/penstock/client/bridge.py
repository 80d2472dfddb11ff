"""The way from threads that wait into the event loop of a client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

R = TypeVar("R")


class ThreadBridge:
    """A loop in a thread of its own. Everything here may be called from any other thread."""

    def __init__(self, name: str = "penstock") -> None:
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def begin(self, work: Coroutine[Any, Any, R]) -> Future[R]:
        """Start `work` on the loop, and do not wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run `work` to its end; an interrupted caller cancels it."""
        future = self.begin(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def do(self, action: Callable[[], R]) -> R:
        async def act() -> R:
            return action()

        return self.run(act())

    def iterate(self, source: AsyncIterator[R]) -> Iterator[R]:
        """An async iterator, step by step; leaving it early closes it there."""

        async def step() -> R:
            return await anext(source)

        try:
            while True:
                try:
                    yield self.run(step())
                except StopAsyncIteration:
                    return
        finally:
            close = getattr(source, "aclose", None)
            if close is not None:
                self.run(close())

    def close(self) -> None:
        self.run(self._loop.shutdown_asyncgens())
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
