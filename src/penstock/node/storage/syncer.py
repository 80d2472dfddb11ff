"""fdatasync without a thread: the kernel syncs, and an eventfd tells the loop.

A writer thread needs the GIL to begin and again to report, and gets it when the loop has nothing
left to do: on two cores a third to a half of the time from a write to its answer was that wait.
Linux' asynchronous I/O takes the request in one call that returns at once. Each such call wakes a
thread of the kernel, though, that may take the core from us. Among several nodes the syncs of one
turn of the loop share a call, behind what is sent in that turn; a node alone begins each at once,
and has the rest of its turn done when the disk is.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from typing import Any, Final, Protocol, TypeVar

from penstock.node.observe.logs import get_logger

REQUESTS_MAX: Final = 1024  # syncs under way at once; a log has one at most
Synced = Callable[[OSError | None], None]
T = TypeVar("T")
log = get_logger(__name__)


class Syncer:
    """Syncs of the loop that made it. Use `open_syncer`: not every system has what it takes."""

    def __init__(self, *, gather: bool = False) -> None:
        from caio import linux_aio

        if linux_aio is None:  # how caio says that the kernel lets it have none
            raise ImportError("no asynchronous I/O of the kernel")
        self._make: Callable[[int], Any] = linux_aio.Operation.fdsync
        self._context = linux_aio.Context(max_requests=REQUESTS_MAX)
        self._under_way = 0
        self._gather = gather
        self._gathered: list[tuple[Any, Synced]] = []  # in this turn of the loop
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._context.fileno, self._on_ready)

    @property
    def full(self) -> bool:
        return self._under_way >= REQUESTS_MAX

    def sync(self, descriptor: int, done: Synced) -> None:
        """Call `done` once everything written to the file is durable, or why it is not."""

        def completed(result: int) -> None:
            self._under_way -= 1
            done(_error_of(result) if result else None)

        operation = self._make(descriptor)
        operation.set_callback(completed)
        self._under_way += 1
        self._gathered.append((operation, done))
        if not self._gather:
            self._submit()
        elif len(self._gathered) == 1:
            self._loop.call_soon(self._submit)

    def close(self) -> None:
        """Nothing may be under way. What the kernel keeps for it is a share of what all processes
        may have together, so it is given back now and not when the garbage is collected."""
        self._loop.remove_reader(self._context.fileno)
        self._gathered.clear()
        del self._context

    def _submit(self) -> None:
        """Hand over what has gathered. The kernel takes all before the first that it refuses."""
        left, self._gathered = self._gathered, []
        while left:
            try:
                taken = self._context.submit(*[operation for operation, _ in left])
            except (OSError, SystemError, ValueError) as error:
                number = next((a for a in error.args if isinstance(a, int)), errno.EIO)
                self._under_way -= 1
                self._loop.call_soon(left[0][1], OSError(number, os.strerror(number)))
                taken = 1
            left = left[taken:]

    def _on_ready(self) -> None:
        try:
            self._context.poll()
        except BlockingIOError:
            pass  # told of it already; what has completed is there all the same
        while self._context.process_events():
            continue


def _error_of(result: int) -> OSError:
    """What the kernel answers if not 0: a negated error number that arrives as unsigned."""
    number = (1 << 64) - result if result >> 63 else -result
    return OSError(number, os.strerror(number))


def open_syncer(*, gather: bool = False) -> Syncer | None:
    """A syncer, or None where there is none to be had: writer threads do it then."""
    try:
        return Syncer(gather=gather)
    except (ImportError, OSError, SystemError, NotImplementedError) as error:
        log.info("no asynchronous sync here, threads do it", error=str(error))
        return None


class Submit(Protocol):
    """Runs work in a log's writer thread, after what was given to it before."""

    def __call__(self, work: Callable[[], T], /) -> asyncio.Future[T]: ...


class WriterPool:
    """Threads for the storage work that the kernel does not do by itself. fsync and pwrite release
    the GIL, so a few threads keep several logs busy. A log is pinned to one of them, so that it is
    written by one thread at a time."""

    def __init__(self, threads: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._threads = [ThreadPoolExecutor(1, f"writer-{i}") for i in range(threads)]
        self._turns = cycle(self._threads)

    def pin(self) -> Submit:
        return partial(self._loop.run_in_executor, next(self._turns))

    async def close(self) -> None:
        """Finish what is queued and end the threads."""
        for thread in self._threads:
            await asyncio.to_thread(thread.shutdown)
