"""Writer threads: storage work off the event loop, in order per log, results back on the loop.

fsync and pwrite release the GIL, so a few threads keep several logs busy. A log is pinned to one
thread, which gives it the rule that it is written by one thread at a time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Final

Work = Callable[[], Any]
Done = Callable[[Any, BaseException | None], None]
_GATHER_MAX: Final = 64  # jobs whose results are handed back together


class WriterPool:
    def __init__(self, threads: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._queues: list[SimpleQueue[tuple[Work, Done] | None]] = [
            SimpleQueue() for _ in range(threads)
        ]
        self._threads = [
            threading.Thread(target=self._run, args=(queue,), name=f"writer-{i}", daemon=True)
            for i, queue in enumerate(self._queues)
        ]
        self._next = 0
        for thread in self._threads:
            thread.start()

    def pin(self) -> Callable[[Work, Done], None]:
        """A submit function bound to one of the threads."""
        queue = self._queues[self._next % len(self._queues)]
        self._next += 1
        return lambda work, done: queue.put((work, done))

    async def close(self) -> None:
        """Finish what is queued and end the threads."""
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _run(self, queue: SimpleQueue[tuple[Work, Done] | None]) -> None:
        open_ = True
        while open_:
            results: list[tuple[Done, Any, BaseException | None]] = []
            job = queue.get()
            while True:
                if job is None:
                    open_ = False
                    break
                work, done = job
                try:
                    results.append((done, work(), None))
                except BaseException as error:  # noqa: BLE001 - handed to the owner on the loop
                    results.append((done, None, error))
                if len(results) >= _GATHER_MAX:
                    break
                try:
                    job = queue.get_nowait()
                except Empty:
                    break
            if results:
                self._loop.call_soon_threadsafe(_deliver, results)


def _deliver(results: list[tuple[Done, Any, BaseException | None]]) -> None:
    for done, value, error in results:
        done(value, error)
