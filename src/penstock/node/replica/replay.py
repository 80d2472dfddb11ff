"""A replica read back from disk, and its heap, on which what is committed takes effect in order.

The heap is a function of the log up to `sequence_applied`. A coordinator applies as it appends, so
its heap may be ahead of the commit; that is no harm as long as the log keeps those entries. Only
when some of them are cut off, the heap is built again, from a snapshot and the log. What opens or
replays blocks; what is committed later is applied a little at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from penstock.errors import Corruption
from penstock.heap.machine import Heap
from penstock.log.files import storage_errors
from penstock.log.flush import LogOptions
from penstock.log.identity import ReplicaFile, asides, set_aside
from penstock.log.partition import PartitionLog
from penstock.model.batch import Batch
from penstock.model.topic import TopicConfig
from penstock.node.observe.logs import get_logger
from penstock.node.storage.log_io import SliceReader
from penstock.replication.facts import LogFacts

SLICE_BYTES: Final = 256 << 10  # applied before the loop gets to do something else
COLD_BYTES: Final = 4 << 20  # read at once by a thread
log = get_logger(__name__)


class SnapshotFacts(NamedTuple):
    sequence: int = 0
    bytes: int = 0
    time_ms: int = 0
    log_bytes: int = 0  # size of the log when it was taken


class ReplayedLog(NamedTuple):
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
        on_rebuilt: Callable[[ReplayedLog], None],
        on_unreadable: Callable[[BaseException], None],
    ) -> None:
        self.heap, self._log = heap, log
        self._on_rebuilt, self._on_unreadable = on_rebuilt, on_unreadable
        self._broken = False  # the log cannot be read where the heap is: it stays behind
        self._target = 0  # apply up to here
        self._scheduled = False
        # Its thread may build the heap, too.
        self._reader = SliceReader(log, self._on_failed, cold_bytes_max=COLD_BYTES)
        self._stale = False  # the heap holds entries that the log has lost
        self._held = False  # the log is being replaced: nobody reads
        self._progress = asyncio.Event()  # for those who wait; another one after each step
        self._loop = asyncio.get_running_loop()

    @property
    def settled(self) -> bool:
        """Whether the heap is what the log says, and all that was asked for is applied."""
        return not self._stale and self.heap.sequence_applied >= self._target

    def advance(self, sequence: int) -> None:
        if sequence > self._target:
            self._target = sequence
            self._schedule()

    async def catch_up(self, sequence: int, *, wanted: Callable[[], bool]) -> bool:
        """Apply all up to `sequence`, committed or not; False if that is not `wanted` or fails."""
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
        if not (self._scheduled or self._reader.busy or idle):
            self._scheduled = True
            self._loop.call_soon(self._apply_some)

    def _apply_some(self) -> None:
        self._scheduled = False
        if self._reader.busy or self._held or self.settled:
            self._tell()
            return
        if self._stale:
            config = self.heap.config
            self._reader.run(
                partial(replay, self._log, config, through=self._target), self._on_replayed
            )
            return
        first = self.heap.sequence_applied + 1
        batches = self._reader.read(
            first, through=self._target, bytes_max=SLICE_BYTES, then=self._apply
        )
        if batches is not None:
            self._apply(batches)

    def _apply(self, batches: list[Batch]) -> None:
        """What was read while the log was cut there is read anew."""
        try:
            for batch in [] if self._stale else batches:
                self.heap.apply(batch, batch.columns())
        except Corruption as error:
            self._on_failed(error)
            return
        if batches:
            self._schedule()
        self._tell()

    def _on_replayed(self, replayed: ReplayedLog) -> None:
        self.heap, self._stale = replayed.heap, False
        self._on_rebuilt(replayed)
        self._schedule()
        self._tell()

    def _on_failed(self, error: BaseException) -> None:
        self._broken = True
        self._on_unreadable(error)
        self._tell()

    # --- when the log was cut ---

    async def cut(self, sequence: int) -> None:
        """Everything after `sequence` is about to go. Returns when nobody reads there."""
        self._target = min(self._target, sequence)
        self._stale = self._stale or self.heap.sequence_applied > sequence
        while self._reader.busy:
            await self._progress.wait()
        self._stale = self._stale or self.heap.sequence_applied > sequence

    async def drop(self) -> None:
        """The whole log is about to be replaced. Returns when nobody reads it."""
        self._target, self._stale = 0, True
        while self._reader.busy:
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


@dataclass(frozen=True, slots=True)
class OpenedReplica:
    """A log, who its replica is and what it has promised, and the heap after all that it holds."""

    log: PartitionLog
    file: ReplicaFile
    facts: LogFacts
    replayed: ReplayedLog
    aside: bool  # damaged copies of it are kept


def open_replica(
    folder: Path,
    config: TopicConfig,
    index: int,
    *,
    options: LogOptions,
    accept_rot: bool = False,
    alone: bool = True,
    only: bool = False,
    uuid: str = "",
) -> OpenedReplica:
    """Recover a partition's folder, made if missing.

    `uuid` is who a new replica becomes. It is given only where the partition's record is at epoch
    0: nothing was ever written then, so an empty disk may count as one of those it names.
    `alone`: the node is in no cluster; `only`: it is, and the partition has no other voter. In both
    cases nobody else has the data, so damage is refused with `Corruption`. Otherwise a damaged
    replica is set aside, and comes back under a new uuid as a copy of the others.
    """
    recover = partial(_recover, folder, config, index, options=options, alone=alone)
    try:
        with storage_errors(folder):
            return recover(accept_rot=accept_rot and (alone or only), uuid=uuid)
    except Corruption as error:
        if alone or only:
            raise
        # Nobody knows yet whether the others have all of it.
        log.critical(
            "a damaged replica starts over as a copy of the others",
            topic=config.name, partition=index, error=error.message, kept=str(set_aside(folder)),
        )  # fmt: skip
    return recover()


def _recover(
    folder: Path,
    config: TopicConfig,
    index: int,
    *,
    options: LogOptions,
    alone: bool,
    accept_rot: bool = False,
    uuid: str = "",
) -> OpenedReplica:
    file = ReplicaFile(folder, uuid=uuid)
    stored = PartitionLog.open(
        folder, topic=config.id, partition=index, options=options, accept_rot=accept_rot
    )
    if stored.seeding and not alone:  # a copy was cut short; nothing of it counts yet
        empty(stored)
    facts = _end_of(stored) if alone else facts_of(stored)
    return OpenedReplica(stored, file, facts, replay(stored, config), bool(asides(folder)))


def empty(stored: PartitionLog) -> None:
    """Forget everything: the log begins at 1 again."""
    stored.reset(first=1, chain=0, epoch=0)
    stored.finish_seeding()


def facts_of(stored: PartitionLog) -> LogFacts:
    """What replication wants to know of a log: epochs from before its first verbatim entry on."""
    first = stored.reader.first_as_written()
    runs = stored.reader.epoch_runs(first - 1)
    base = stored.base
    if base.first == first > 1:  # what stood before it is not held, but its epoch is known
        if runs and runs[0][0] == base.epoch:
            runs[0] = (base.epoch, first - 1)
        else:
            runs.insert(0, (base.epoch, first - 1))
    return LogFacts(
        first=first, last=stored.sequence_last, durable=stored.sequence_durable, runs=runs
    )


def _end_of(stored: PartitionLog) -> LogFacts:
    """The same where nobody will ever ask for more than the end."""
    last = stored.sequence_last
    runs = [(stored.epoch_last, last)] if last else []
    return LogFacts(first=last + 1, last=last, durable=last, runs=runs)
