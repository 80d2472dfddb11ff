"""Writing what a log has staged, whoever staged it: a coordinator's turn, or a follower's stream.

One write is under way at a time, off the event loop; what is staged meanwhile shares the next one.
Space is set aside ahead of need. After a failure nothing is written or acknowledged any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from penstock.errors import DiskFull, PenstockError, StorageFailed, Unavailable
from penstock.log.partition import PartitionLog
from penstock.model.batch import HEADER_SIZE
from penstock.node.clock import Clock
from penstock.node.observe.metrics import Metrics
from penstock.node.storage.syncer import Submit, Syncer

GROW_AHEAD_BYTES: Final = 1 << 20
DISK_RETRY_MS: Final = 1000
BATCH_OVERHEAD: Final = HEADER_SIZE + 64  # header, body header, padding

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
        self._disk_full_until_ms = 0
        self._alone = False  # somebody works on the files: no write begins
        self._ended = asyncio.Event()  # set for a moment when a write, growing or `alone` ends
        self.failed: Unavailable | None = None  # nothing is acknowledged any more

    # --- writing ---

    def flush(self) -> None:
        """Write everything staged, one write at a time. The kernel syncs a small write by itself;
        others take the writer thread."""
        if self.writing or self.failed is not None or self._alone:
            return
        log, syncer = self.log, self._syncer
        flush = log.take()
        if flush is None:
            return
        self.writing = True
        started = time.perf_counter()

        def done(finish: Callable[[], int]) -> None:
            """`finish` gives the last durable sequence, or raises what has failed."""
            self.writing = False
            self.writes += 1
            self._ended.set()
            self._ended.clear()
            try:
                sequence = finish()
                self._metrics.log_written.add((), flush.bytes)
                self._metrics.fsync_seconds.observe((), time.perf_counter() - started)
                self._on_durable(sequence)
            except Exception as error:  # noqa: BLE001 - who calls back here would drop it
                self.fail(error)

        def synced(error: OSError | None) -> None:
            done(partial(log.finish, flush, error))
            # No write waits for the floor, which a busy log remembers now and then.
            if log.floor_due and not self._keeping and self.failed is None:
                self._persist_floor()

        descriptor = None if syncer is None or syncer.full else log.begin(flush)
        if syncer is None or descriptor is None:
            written = self._submit(lambda: log.write(flush))
            written.add_done_callback(lambda written: done(written.result))
        else:
            syncer.sync(descriptor, synced)
        if log.room(True) < self._ahead_bytes and self.disk_full() is None:
            self.grow(self._ahead_bytes)

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

    def _persist_floor(self) -> None:
        self._keeping = True

        def done(persisted: asyncio.Future[None]) -> None:
            self._keeping = False
            error = persisted.exception()
            if error is not None:
                self.fail(error)

        self._submit(self.log.persist_floor).add_done_callback(done)

    # --- work that no write may run beside ---

    async def alone(self, work: Callable[[], T]) -> T:
        """Run `work` in the writer thread while nothing is being written, and nothing begins."""
        while self._alone or self.writing or self._growing:
            await self._ended.wait()
        self._alone = True
        try:
            return await asyncio.shield(self._submit(work))
        finally:
            self._alone = False
            self._ended.set()
            self._ended.clear()

    # --- room on disk ---

    def disk_full(self) -> DiskFull | None:
        """The refusal to write, if no room was found a moment ago. It is looked for again after a
        while."""
        if self._clock.now_ms() >= self._disk_full_until_ms:
            return None
        return DiskFull(
            f"no space left for partition {self.log.partition}; settle or delete messages"
        )

    def has_room(self, body_bytes: int, *, enqueue: bool = False) -> bool:
        """Whether a batch fits that is an enqueue, or may use the reserve."""
        return self.log.room(enqueue) >= body_bytes + BATCH_OVERHEAD

    async def make_room(self, body_bytes: int, *, enqueue: bool) -> None:
        """Wait until a batch of so many bytes fits; raises `DiskFull` if it will not."""
        while not self.has_room(body_bytes, enqueue=enqueue):
            refusal = self.failed or self.disk_full()
            if refusal is not None:
                raise refusal
            self.grow(body_bytes, enqueue=enqueue)
            await self._ended.wait()

    def grow(self, body_bytes: int, *, enqueue: bool = True) -> None:
        """Make room in the writer thread, then tell `on_room`."""
        if self._growing or self.failed is not None:
            return
        self._growing = True
        log = self.log

        def done(grown: asyncio.Future[None]) -> None:
            self._growing = False
            self._ended.set()
            self._ended.clear()
            error = grown.exception()
            if isinstance(error, DiskFull):
                self._disk_full_until_ms = self._clock.now_ms() + DISK_RETRY_MS
            elif error is not None:
                self.fail(error)
                return
            self._on_room()

        grown = self._submit(lambda: log.grow(body_bytes + BATCH_OVERHEAD, enqueue=enqueue))
        grown.add_done_callback(done)
