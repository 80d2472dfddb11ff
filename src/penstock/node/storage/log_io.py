"""A log's writes and reads beside the event loop, and the threads and the kernel that do them.

The flusher writes what a log has staged, whoever staged it: a coordinator's turn, or a follower's
stream. One write is under way at a time, off the event loop; what is staged meanwhile shares the
next one. Space is set aside ahead of need. After a failure nothing is written or acknowledged.

A slice reader reads from memory or the page cache at once, else by a thread. Each reader of a log
(a follower's stream, a client's, a heap that catches up, a subscriber that is behind) has one. It
reads one slice at a time, and asks for the next when it can use it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import cycle
from typing import Any, Final, Protocol, TypeVar

from penstock.errors import DiskFull, PenstockError, StorageFailed, Unavailable
from penstock.log.partition import PartitionLog
from penstock.model.batch import HEADER_SIZE, Batch
from penstock.node.clock import Clock
from penstock.node.observe.logs import get_logger
from penstock.node.observe.metrics import Metrics

GROW_AHEAD_BYTES: Final = 1 << 20
DISK_RETRY_MS: Final = 1000
BATCH_OVERHEAD: Final = HEADER_SIZE + 64  # header, body header, padding
REQUESTS_MAX: Final = 1024  # syncs under way at once; a log has one at most
Synced = Callable[[OSError | None], None]
T = TypeVar("T")
log = get_logger(__name__)


class Syncer:
    """fdatasync without a thread: the kernel syncs, and an eventfd tells the loop that made this.
    Use `open_syncer`: not every system has what it takes.

    A writer thread needs the GIL to begin and again to report, and gets it when the loop has
    nothing left to do: on two cores a third to a half of the time from a write to its answer was
    that wait. Linux' asynchronous I/O takes the request in one call that returns at once. Each such
    call wakes a thread of the kernel, though, that may take the core from us. Among several nodes
    the syncs of one turn of the loop share a call, behind what is sent in that turn; a node alone
    begins each at once, and has the rest of its turn done when the disk is.
    """

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
    """Runs work in a log's writer thread, after what was given to it before, and then has the loop
    call `done` with it."""

    def __call__(self, work: Callable[[], T], done: Callable[[Future[T]], None], /) -> None: ...


class WriterPool:
    """For what the kernel does not do by itself: fsync and pwrite release the GIL. A log is pinned
    to one of these threads, so that it is written by one at a time."""

    def __init__(self, threads: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._threads = [ThreadPoolExecutor(1, f"writer-{i}") for i in range(threads)]
        self._turns = cycle(self._threads)

    def pin(self) -> Submit:
        thread, soon = next(self._turns), self._loop.call_soon_threadsafe

        def submit(work: Callable[[], T], done: Callable[[Future[T]], None]) -> None:
            # Without a future of the loop's own, which takes a turn of the loop to tell anybody.
            thread.submit(work).add_done_callback(lambda worked: soon(done, worked))

        return submit

    async def close(self) -> None:
        for thread in self._threads:
            await asyncio.to_thread(thread.shutdown)


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
            self._submit(lambda: log.write(flush), lambda written: done(written.result))
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

        def done(persisted: Future[None]) -> None:
            self._keeping = False
            error = persisted.exception()
            if error is not None:
                self.fail(error)

        self._submit(self.log.persist_floor, done)

    # --- work that no write may run beside ---

    async def alone(self, work: Callable[[], T]) -> T:
        """Run `work` in the writer thread while nothing is being written, and nothing begins."""
        while self._alone or self.writing or self._growing:
            await self._ended.wait()
        self._alone = True
        worked: asyncio.Future[Future[T]] = asyncio.get_running_loop().create_future()
        self._submit(work, worked.set_result)
        try:
            return (await asyncio.shield(worked)).result()
        finally:
            self._alone = False
            self._ended.set()
            self._ended.clear()

    # --- room on disk ---

    def disk_full(self) -> DiskFull | None:
        """The refusal to write, if no room was found a moment ago; it is looked for again later."""
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

        def done(grown: Future[None]) -> None:
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

        self._submit(lambda: log.grow(body_bytes + BATCH_OVERHEAD, enqueue=enqueue), done)


class ThreadErrand:
    """What a thread does for somebody on the loop, one thing at a time: the owner looks whether it
    is busy, and closes it when the outcome is no longer wanted. `go_on` is called after each
    outcome that went well."""

    def __init__(
        self, fail: Callable[[BaseException], None], *, go_on: Callable[[], object] = lambda: None
    ) -> None:
        self._fail, self._go_on = fail, go_on
        self.busy = self.closed = False

    def begin(self, work: Callable[[], T]) -> asyncio.Future[T]:
        self.busy = True
        future = asyncio.get_running_loop().run_in_executor(None, work)
        future.add_done_callback(self._rest)
        return future

    def _rest(self, _: object) -> None:
        self.busy = False

    def run(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        def done(future: asyncio.Future[T]) -> None:
            if self.closed or future.cancelled():
                return
            error = future.exception()
            if error is not None:
                self._fail(error)
            else:
                then(future.result())
                self._go_on()

        self.begin(work).add_done_callback(done)


class SliceReader(ThreadErrand):
    """`staged`: whether what is not durable yet may be read. `cold_bytes_max`: what a thread may
    read at once, if that is more than what is asked for."""

    def __init__(
        self,
        log: PartitionLog,
        fail: Callable[[BaseException], None],
        *,
        staged: bool = True,
        cold_bytes_max: int = 0,
        go_on: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(fail, go_on=go_on)
        self._log, self._staged, self._cold_bytes_max = log, staged, cold_bytes_max

    def read(
        self, first: int, *, through: int, bytes_max: int, then: Callable[[list[Batch]], None]
    ) -> list[Batch] | None:
        """The batches from the one that covers `first` on; see `log.reader.Reader.read_slice`. None
        if they are not at hand: `then` gets them from a thread, or `fail` is told why they cannot
        be read."""
        read, staged = self._log.reader.read_slice, self._staged
        try:
            found = read(first, through=through, bytes_max=bytes_max, nowait=True, staged=staged)
        except PenstockError as error:  # dropped by retention, or damaged
            self._fail(error)
            return None
        if found is None:
            size = self._cold_bytes_max or bytes_max
            self.run(
                lambda: read(first, through=through, bytes_max=size, nowait=False, staged=staged),
                lambda batches: then(batches or []),
            )
        return found

    def size(self, first: int, *, through: int, bytes_max: int) -> int | None:
        """The bytes that `read` would read, 0 if it would fail; None if only the disk can tell."""
        try:
            return self._log.reader.slice_size(first, through=through, bytes_max=bytes_max)
        except PenstockError:
            return 0


def covered(
    batches: Iterable[Batch], *, entries: int, bytes: int, lone: bool, align: int = 1
) -> tuple[list[Batch], int, int]:
    """The leading batches that so much credit covers, with their entries and bytes. `lone`: the
    first may exceed it. `align`: what the size of each is rounded up to a multiple of."""
    found: list[Batch] = []
    counted = size = 0
    for batch in batches:
        aligned = batch.size + -batch.size % align
        over = counted + batch.count > entries or size + aligned > bytes
        if over and (found or not lone):
            break
        found.append(batch)
        counted, size = counted + batch.count, size + aligned
    return found, counted, size
