"""A partition's journal: the log, the heap over it, and the coordinator that commits.

*Apply at append, answer at commit.* A batch changes the heap in the same step in which it is staged
to the log, so the next command sees it; whoever waits is called back only when the coordinator says
that the batch is committed. One write is under way at a time, off the event loop;
what is staged meanwhile shares the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from penstock.errors import DiskFull, PenstockError, StorageFailed, Unavailable
from penstock.heap import Applied, Heap
from penstock.log.crash import crash_point
from penstock.log.partition import PartitionLog
from penstock.log.staging import Flush
from penstock.model.batch import HEADER_SIZE, SCHEMAS, Batch, Codec, DeadReason, Kind, seal
from penstock.model.columns import Buffer, Columns, Value
from penstock.node.clock import Clock
from penstock.node.syncer import Syncer
from penstock.replication.single import Coordinator

GROW_AHEAD_BYTES: Final = 1 << 20
DISK_RETRY_MS: Final = 1000
LEASE_BYTES: Final = 512  # of a LEASE batch besides its messages, consumer included
_BATCH_OVERHEAD: Final = HEADER_SIZE + 64  # header, body header, padding

Submit = Callable[[Callable[[], Any], Callable[[Any, BaseException | None], None]], None]


class Journal:
    def __init__(
        self,
        heap: Heap,
        log: PartitionLog,
        coordinator: Coordinator,
        *,
        topic: int,
        partition: int,
        node: str,
        clock: Clock,
        submit: Submit,
        syncer: Syncer | None,
        reserve_bytes: int,
        wake: Callable[[], None],
        turn: Callable[[], None],
        observe: Callable[[Applied, str], None],
        on_write: Callable[[int, float], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self.heap, self.log, self.coordinator = heap, log, coordinator
        self.clock, self.wake = clock, wake
        self._topic, self._partition, self._node = topic, partition, node
        self._reserve_bytes, self._syncer = reserve_bytes, syncer
        # More than a share of a segment would make every segment that large.
        self._ahead_bytes = min(GROW_AHEAD_BYTES, log.options.segment_bytes // 4)
        self._submit, self._observe, self._turn = submit, observe, turn
        self._on_write, self._on_fatal = on_write, on_fatal
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()  # ascending sequences
        self._unobserved: deque[tuple[int, Applied, str]] = deque()  # the same, of all batches
        self.writing = False
        self.writes = 0  # finished
        self._growing = False
        self._growth_waiters: list[asyncio.Future[None]] = []
        self._futures: set[asyncio.Future[None]] = set()  # of `committed`, not done yet
        self._disk_full_until_ms = 0
        self.failed: Unavailable | None = None  # nothing is acknowledged any more

    @property
    def idle(self) -> bool:
        return not (self._waiting or self.writing)

    # --- appending ---

    def append(
        self, kind: Kind, body: Buffer, count: int, *, columns: Columns | None = None,
        codec: Codec = Codec.NONE, raw_length: int | None = None,
    ) -> Batch:  # fmt: skip
        """Stage one batch and apply it. The caller has made sure that there is room."""
        now_ms = self.clock.now_ms()
        log = self.log
        batch = seal(
            kind,
            body,
            topic=self._topic,
            partition=self._partition,
            epoch=self.coordinator.epoch,
            epoch_previous=log.epoch_last,
            first=log.sequence_last + 1,
            count=count,
            time_ms=max(now_ms, log.time_ms_last),
            chain_previous=log.chain_last,
            codec=codec,
            raw_length=raw_length,
        )
        log.stage(batch)
        self.coordinator.on_append(batch.last)
        columns = columns or batch.columns()
        applied = self.heap.apply(batch, columns, now_ms)
        reason = ""
        if kind is Kind.DEAD:  # a batch of them has one reason
            reason = DeadReason(int(columns.fixed("reason")[0])).name.lower()
        self._unobserved.append((batch.last, applied, reason))
        return batch

    def append_record(self, kind: Kind, count: int, values: dict[str, Value | None]) -> Batch:
        """Stage a batch of plain columns, for records that are not enqueues or leases."""
        return self.append(kind, SCHEMAS[kind].encode(count, values), count)

    def when_committed(self, sequence: int, callback: Callable[[], None]) -> None:
        """Call back once everything up to `sequence` is committed (at once if it is)."""
        if sequence <= self.coordinator.sequence_committed:
            callback()
            return
        if self._waiting:
            sequence = max(sequence, self._waiting[-1][0])
        self._waiting.append((sequence, callback))

    def committed(self, sequence: int) -> asyncio.Future[None]:
        """A future that is done once `sequence` is committed, or fails as the storage did."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.failed is not None:
            future.set_exception(self.failed)
            return future
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        self.when_committed(sequence, lambda: None if future.done() else future.set_result(None))
        return future

    def observe_at(self, sequence: int, applied: Applied) -> None:
        """Have something counted, once `sequence` is committed, that no record tells."""
        self.when_committed(sequence, lambda: self._observe(applied, ""))

    # --- writing ---

    def flush(self) -> None:
        """Write everything staged, one write at a time."""
        if self.writing or self.failed:
            return
        flush = self.log.take()
        if flush is None:
            self._grow_ahead()
            return
        self.writing = True
        started = time.perf_counter()

        def done(sequence: Any, error: BaseException | None) -> None:
            self.writing = False
            self.writes += 1
            if error is None:
                self._on_write(flush.bytes, time.perf_counter() - started)
            self._on_written(sequence, error)

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

        syncer.sync(descriptor, synced)

    def _on_written(self, sequence: int, error: BaseException | None) -> None:
        if error is not None:
            self._fail(error)
            return
        committed = self.coordinator.on_durable(self._node, sequence)
        if committed is None:
            self.wake()
            return
        self.log.advance_commit(committed.sequence)
        crash_point("node.commit.unanswered")
        unobserved = self._unobserved
        while unobserved and unobserved[0][0] <= committed.sequence:
            _, applied, reason = unobserved.popleft()
            self._observe(applied, reason)
        self._turn()  # the next write is under way while this one's waiters are answered
        self._answer(committed.sequence)

    def _answer(self, sequence_committed: int) -> None:
        waiting = self._waiting
        while waiting and waiting[0][0] <= sequence_committed:
            _, callback = waiting.popleft()
            try:
                callback()
            except Exception as error:  # noqa: BLE001 - the others must still be answered
                self._on_fatal(error)

    def _fail(self, error: BaseException) -> None:
        """Storage failed: nothing is acknowledged from here on; the node is told to stop."""
        known = error if isinstance(error, PenstockError) else StorageFailed(str(error))
        self.failed = Unavailable(f"storage failed: {known.message}")
        self._waiting.clear()
        self._unobserved.clear()
        for future in list(self._futures):
            if not future.done():
                future.set_exception(self.failed)
        self._on_fatal(error)
        self.wake()

    def persist_floor(self) -> None:
        """The log fell idle: remember on disk how far it was acknowledged."""
        if self.failed is None and not self.writing:
            self._submit(
                self.log.persist_floor, lambda _, error: self._fail(error) if error else None
            )

    # --- room on disk ---

    @property
    def disk_is_full(self) -> bool:
        """No room was found a moment ago; it is looked for again after a while."""
        return self.clock.now_ms() < self._disk_full_until_ms

    def disk_full(self) -> DiskFull:
        return DiskFull(f"no space left for partition {self._partition}; settle or delete messages")

    def has_room(self, body_bytes: int, *, enqueue: bool = False) -> bool:
        """Whether a batch fits that is an enqueue, or may use the reserve."""
        return self.log.room(enqueue) >= body_bytes + _BATCH_OVERHEAD

    def has_room_to_lease(self, count: int) -> bool:
        """As `has_room`, but what is leased must also find room to be settled."""
        body_bytes = count * 8 + LEASE_BYTES
        settling = self._reserve_bytes // 2
        return self.log.room(False) >= body_bytes + settling + _BATCH_OVERHEAD

    async def make_room(self, body_bytes: int) -> None:
        """Wait until an enqueue of so many bytes fits; raises `DiskFull` if it will not."""
        while not self.has_room(body_bytes, enqueue=True):
            if self.failed is not None:
                raise self.failed
            if self.disk_is_full:
                raise self.disk_full()
            self.grow(body_bytes)
            grown: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._growth_waiters.append(grown)
            await grown

    def grow(self, body_bytes: int) -> None:
        """Make room in the writer thread, then take another turn."""
        if self._growing or self.failed:
            return
        self._growing = True
        log = self.log

        def done(_: Any, error: BaseException | None) -> None:
            self._growing = False
            waiters, self._growth_waiters = self._growth_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
            if isinstance(error, DiskFull):
                self._disk_full_until_ms = self.clock.now_ms() + DISK_RETRY_MS
            elif error is not None:
                self._fail(error)
                return
            self.wake()

        self._submit(lambda: log.grow(body_bytes + _BATCH_OVERHEAD), done)

    def _grow_ahead(self) -> None:
        if self.log.room(True) < self._ahead_bytes and not self.disk_is_full:
            self.grow(self._ahead_bytes)
