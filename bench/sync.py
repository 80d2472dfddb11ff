"""From write to report while the loop has work to do: a writer thread against the kernel."""

from __future__ import annotations

import argparse
import asyncio
import os
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable

import uvloop

from penstock.node.storage.log_io import open_syncer

Sync = Callable[[int, Callable[[object], None]], None]
Make = Callable[[asyncio.AbstractEventLoop], Sync]
FILE_BYTES = 64 << 20
WRITE_BYTES = 5000


def by_thread(loop: asyncio.AbstractEventLoop) -> Sync:
    jobs: queue.SimpleQueue[tuple[int, Callable[[object], None]]] = queue.SimpleQueue()

    def run() -> None:
        while True:
            descriptor, done = jobs.get()
            os.fdatasync(descriptor)
            loop.call_soon_threadsafe(done, None)

    threading.Thread(target=run, daemon=True).start()
    return lambda descriptor, done: jobs.put((descriptor, done))


def by_kernel(_: asyncio.AbstractEventLoop) -> Sync:
    syncer = open_syncer()
    if syncer is None:
        raise SystemExit("this system has no asynchronous sync")
    return syncer.sync


def work(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


async def measure(
    make: Callable[[asyncio.AbstractEventLoop], Sync], times: int, busy: float
) -> None:
    loop = asyncio.get_running_loop()
    sync = make(loop)
    took: list[float] = []
    with tempfile.NamedTemporaryFile(dir=".") as file:
        os.posix_fallocate(file.fileno(), 0, FILE_BYTES)
        data, cpu = os.urandom(WRITE_BYTES), time.process_time()
        for i in range(times):
            done = loop.create_future()
            started = time.perf_counter()
            os.pwrite(file.fileno(), data, i * WRITE_BYTES % (FILE_BYTES - WRITE_BYTES))
            sync(file.fileno(), done.set_result)
            work(busy)
            await done
            took.append((time.perf_counter() - started) * 1e6)
        cpu = (time.process_time() - cpu) / times * 1e6
    ranked = statistics.quantiles(took, n=10)
    print(
        f"{make.__name__:>10}  p50 {ranked[4]:6.0f} µs  p90 {ranked[8]:6.0f} µs  cpu {cpu:5.0f} µs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=1000)
    parser.add_argument("--busy", type=float, default=300, help="µs of work on the loop per write")
    arguments = parser.parse_args()
    for make in (by_thread, by_kernel) * 3:
        uvloop.run(measure(make, arguments.times, arguments.busy / 1e6))


if __name__ == "__main__":
    main()
