"""A replica's heap: what is committed takes effect on it, in order, a little at a time.

The heap is a function of the log up to `sequence_applied`. A coordinator applies as it appends, so
its heap may be ahead of the commit; that is no harm as long as the log keeps those entries. Only
when some of them are cut off, the heap is built again, from a snapshot and the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple

from penstock.errors import Corruption
from penstock.heap import Heap
from penstock.log.partition import PartitionLog
from penstock.model.batch import Batch
from penstock.model.topic import TopicConfig

SLICE_BYTES: Final = 256 << 10  # applied before the loop gets to do something else
COLD_BYTES: Final = 4 << 20  # read at once by a thread
Spawn = Callable[[Coroutine[Any, Any, None]], object]


class SnapshotFacts(NamedTuple):
    """The newest snapshot of a replica, for status and metrics."""

    sequence: int = 0
    bytes: int = 0
    time_ms: int = 0
    log_bytes: int = 0  # size of the log when it was taken


class ReplayedLog(NamedTuple):
    """A heap that was built from what is on disk."""

    heap: Heap
    snapshot: SnapshotFacts
    batches: int


def replay(log: PartitionLog, config: TopicConfig, *, through: int | None = None) -> ReplayedLog:
    """The heap after all that is durable, or after `through`, a batch's last. Blocks."""
    snapshot = log.load_snapshot()
    if snapshot is None:
        heap, facts, start = Heap(config, partition=log.partition), SnapshotFacts(), 1
    else:
        heap = Heap.restore(config, snapshot.data, partition=log.partition)
        facts = SnapshotFacts(
            snapshot.sequence, len(snapshot.data), snapshot.time_ms, log.bytes_total
        )
        start = snapshot.sequence + 1
    batches = 0
    for batch in log.reader.scan(start):
        if through is not None and batch.last > through:
            break
        heap.apply(batch, batch.columns())
        batches += 1
    return ReplayedLog(heap, facts, batches)


class HeapApplier:
    def __init__(
        self,
        heap: Heap,
        log: PartitionLog,
        *,
        spawn: Spawn,
        on_rebuilt: Callable[[ReplayedLog], None],
        on_unreadable: Callable[[Corruption], None],
    ) -> None:
        self.heap, self._log = heap, log
        self._spawn, self._on_rebuilt = spawn, on_rebuilt
        self._on_unreadable = on_unreadable
        self._broken = False  # the log cannot be read where the heap is: it stays behind
        self._target = 0  # apply up to here
        self._scheduled = False
        self._reading = False  # a thread reads, or builds the heap
        self._stale = False  # the heap holds entries that the log has lost
        self._held = False  # the log is being replaced: nobody reads
        self._progress = asyncio.Event()  # for those who wait; another one after each step
        self._loop = asyncio.get_running_loop()

    @property
    def settled(self) -> bool:
        """Whether the heap is what the log says, and all that was asked for is applied."""
        return not self._stale and self.heap.sequence_applied >= self._target

    def advance(self, sequence: int) -> None:
        """Apply everything up to `sequence`, soon."""
        if sequence > self._target:
            self._target = sequence
            self._schedule()

    async def catch_up(self, sequence: int, *, wanted: Callable[[], bool]) -> bool:
        """Apply everything up to `sequence`, committed or not; False once it is not `wanted`, or
        cannot be."""
        before, self._target = self._target, max(self._target, sequence)
        while not self.settled:
            if self._broken or not wanted():
                self._target = before
                return False
            self._schedule()
            await self._progress.wait()
        return wanted()

    def _schedule(self) -> None:
        idle = self._broken or self._held or self.settled
        if not (self._scheduled or self._reading or idle):
            self._scheduled = True
            self._loop.call_soon(self._apply_some)

    def _apply_some(self) -> None:
        self._scheduled = False
        if self._reading or self._held or self.settled:
            self._tell()
            return
        try:
            batches = None if self._stale else self._read(SLICE_BYTES, nowait=True)
        except Corruption:
            batches = None  # it is met again, where it is told
        if batches is None:
            self._reading = True
            self._spawn(self._apply_cold())
            return
        self._apply(batches)
        if batches:
            self._schedule()
        self._tell()

    def _read(self, bytes_max: int, *, nowait: bool) -> list[Batch] | None:
        return self._log.reader.read_slice(
            self.heap.sequence_applied + 1, through=self._target, bytes_max=bytes_max,
            nowait=nowait, staged=True,
        )  # fmt: skip

    def _apply(self, batches: list[Batch]) -> None:
        for batch in batches:
            self.heap.apply(batch, batch.columns())

    async def _apply_cold(self) -> None:
        """The page cache misses, or the heap is to be built anew: read in a thread, then go on."""
        anew = self._stale
        try:
            if anew:
                await self._rebuild()
            else:
                batches = await asyncio.to_thread(self._read, COLD_BYTES, nowait=False)
                self._apply([] if self._stale else batches or [])
        except Corruption as error:
            self._broken = True
            self._on_unreadable(error)
        finally:
            self._reading = False
        self._schedule()
        self._tell()

    async def _rebuild(self) -> None:
        replayed = await asyncio.to_thread(
            replay, self._log, self.heap.config, through=self._target
        )
        self.heap, self._stale = replayed.heap, False
        self._on_rebuilt(replayed)

    # --- when the log was cut ---

    async def cut(self, sequence: int) -> None:
        """Everything after `sequence` is about to go. Returns when nobody reads there."""
        self._target = min(self._target, sequence)
        self._stale = self._stale or self.heap.sequence_applied > sequence
        while self._reading:
            await self._progress.wait()
        self._stale = self._stale or self.heap.sequence_applied > sequence

    async def drop(self) -> None:
        """The whole log is about to be replaced. Returns when nobody reads it."""
        self._target, self._stale = 0, True
        while self._reading:
            await self._progress.wait()
        self._stale, self._held, self._broken = True, True, False

    def resume(self, committed: int) -> None:
        """The log was cut or replaced: go on from what is there."""
        self._held = False
        self._target = max(self._target, committed)
        self._schedule()
        self._tell()

    def _tell(self) -> None:
        progress, self._progress = self._progress, asyncio.Event()
        progress.set()
