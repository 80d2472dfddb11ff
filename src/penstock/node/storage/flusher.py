"""Writing what a log has staged, whoever staged it: a coordinator's turn, or a follower's stream.

One write is under way at a time, off the event loop; what is staged meanwhile shares the next one.
Space is set aside ahead of need. After a failure nothing is written or acknowledged any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from penstock.errors import DiskFull, PenstockError, StorageFailed, Unavailable
from penstock.log.flush import Flush
from penstock.log.partition import PartitionLog
from penstock.model.batch import HEADER_SIZE
from penstock.node.clock import Clock
from penstock.node.observe.metrics import Metrics
from penstock.node.storage.syncer import Syncer

GROW_AHEAD_BYTES: Final = 1 << 20
DISK_RETRY_MS: Final = 1000
BATCH_OVERHEAD: Final = HEADER_SIZE + 64  # header, body header, padding

Submit = Callable[[Callable[[], Any], Callable[[Any, BaseException | None], None]], None]
T = TypeVar("T")


class Flusher:
    """See the module. `on_durable` gets the last durable sequence after each write, `on_room` is
    called when there may be more room than before, `on_failed` once, when storage fails."""

    def __init__(
        self,
        log: PartitionLog,
        *,
        clock: Clock,
        submit: Submit,
        syncer: Syncer | None,
        metrics: Metrics,
        on_durable: Callable[[int], None],
        on_room: Callable[[], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self.log, self._clock = log, clock
        self._submit, self._syncer = submit, syncer
        self._metrics, self._on_durable = metrics, on_durable
        self._on_room, self._on_failed = on_room, on_failed
        # More than a share of a segment would make every segment that large.
        self._ahead_bytes = min(GROW_AHEAD_BYTES, log.options.segment_bytes // 4)
        self.writing = False
        self.writes = 0  # finished
        self._keeping = False  # the floor is being persisted
        self._growing = False
        self._growth_waiters: list[asyncio.Future[None]] = []
        self._disk_full_until_ms = 0
        self._alone = False  # somebody works on the files: no write begins
        self._quiet_waiters: list[asyncio.Future[None]] = []
        self.failed: Unavailable | None = None  # nothing is acknowledged any more

    # --- writing ---

    def flush(self) -> None:
        """Write everything staged, one write at a time."""
        if self.writing or self.failed is not None or self._alone:
            return
        flush = self.log.take()
        if flush is None:
            return
        self.writing = True
        started = time.perf_counter()

        def done(sequence: Any, error: BaseException | None) -> None:
            self.writing = False
            self.writes += 1
            self._release_quiet()
            if error is not None:
                self.fail(error)
                return
            self._metrics.log_written.add((), flush.bytes)
            self._metrics.fsync_seconds.observe((), time.perf_counter() - started)
            try:
                self._on_durable(sequence)
            except Exception as failure:  # noqa: BLE001 - who calls back here would drop it
                self.fail(failure)

        self._write(flush, done)
        self._grow_ahead()

    def _write(self, flush: Flush, done: Callable[[Any, BaseException | None], None]) -> None:
        """A small write is synced by the kernel on its own; others take the writer thread."""
        log, syncer = self.log, self._syncer
        descriptor = None if syncer is None or syncer.full else log.begin(flush)
        if syncer is None or descriptor is None:
            self._submit(lambda: log.write(flush), done)
            return

        def synced(error: OSError | None) -> None:
            try:
                sequence = log.finish(flush, error)
            except StorageFailed as failure:
                done(None, failure)
            else:
                done(sequence, None)
                self._keep_floor()

        syncer.sync(descriptor, synced)

    def fail(self, error: BaseException) -> None:
        """Storage failed: nothing is acknowledged from here on; the node is told to stop."""
        if self.failed is None:
            known = error if isinstance(error, PenstockError) else StorageFailed(str(error))
            self.failed = Unavailable(f"storage failed: {known.message}")
            self._on_failed(error)

    def persist_floor(self) -> None:
        """The log fell idle: remember on disk how far it was acknowledged."""
        if self.failed is None and not self.writing and not self._alone:
            self._persist_floor()

    def _keep_floor(self) -> None:
        """The same of a log that is busy, now and then. No write waits for it."""
        if self.log.floor_due and not self._keeping and self.failed is None:
            self._persist_floor()

    def _persist_floor(self) -> None:
        self._keeping = True

        def done(_: Any, error: BaseException | None) -> None:
            self._keeping = False
            if error is not None:
                self.fail(error)

        self._submit(self.log.persist_floor, done)

    # --- work that no write may run beside ---

    async def alone(self, work: Callable[[], T]) -> T:
        """Run `work` in the writer thread while nothing is being written, and nothing begins."""
        while self._alone or self.writing or self._growing:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._quiet_waiters.append(waiter)
            await waiter
        self._alone = True
        try:
            return await self.in_writer(work)
        finally:
            self._alone = False
            self._release_quiet()

    async def in_writer(self, work: Callable[[], T]) -> T:
        """Run `work` in the log's writer thread, after what was given to it before."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def done(value: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)

        self._submit(work, done)
        return await asyncio.shield(future)

    def _release_quiet(self) -> None:
        waiters, self._quiet_waiters = self._quiet_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # --- room on disk ---

    @property
    def disk_is_full(self) -> bool:
        """No room was found a moment ago; it is looked for again after a while."""
        return self._clock.now_ms() < self._disk_full_until_ms

    def disk_full(self) -> DiskFull:
        return DiskFull(
            f"no space left for partition {self.log.partition}; settle or delete messages"
        )

    def has_room(self, body_bytes: int, *, enqueue: bool = False) -> bool:
        """Whether a batch fits that is an enqueue, or may use the reserve."""
        return self.log.room(enqueue) >= body_bytes + BATCH_OVERHEAD

    async def make_room(self, body_bytes: int, *, enqueue: bool) -> None:
        """Wait until a batch of so many bytes fits; raises `DiskFull` if it will not."""
        while not self.has_room(body_bytes, enqueue=enqueue):
            if self.failed is not None:
                raise self.failed
            if self.disk_is_full:
                raise self.disk_full()
            self.grow(body_bytes, enqueue=enqueue)
            await self.grown()

    async def grown(self) -> None:
        """Wait until the growing that is under way has ended, one way or the other."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._growth_waiters.append(waiter)
        await waiter

    def grow(self, body_bytes: int, *, enqueue: bool = True) -> None:
        """Make room in the writer thread, then tell `on_room`."""
        if self._growing or self.failed is not None:
            return
        self._growing = True
        log = self.log

        def done(_: Any, error: BaseException | None) -> None:
            self._growing = False
            self._release_quiet()
            waiters, self._growth_waiters = self._growth_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
            if isinstance(error, DiskFull):
                self._disk_full_until_ms = self._clock.now_ms() + DISK_RETRY_MS
            elif error is not None:
                self.fail(error)
                return
            self._on_room()

        self._submit(lambda: log.grow(body_bytes + BATCH_OVERHEAD, enqueue=enqueue), done)

    def _grow_ahead(self) -> None:
        if self.log.room(True) < self._ahead_bytes and not self.disk_is_full:
            self.grow(self._ahead_bytes)
