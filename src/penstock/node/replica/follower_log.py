"""The log of a replica that follows: it is extended, cut, or replaced as its stream says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from penstock.errors import Corruption, DiskFull, PenstockError
from penstock.log.crash import crash_point
from penstock.log.partition import PartitionLog
from penstock.model.batch import Batch
from penstock.node.observe.logs import get_logger
from penstock.node.replica.heap_applier import HeapApplier
from penstock.node.replica.opener import empty, facts_of
from penstock.node.replica.ports import FetchSeed, Key, SeedHead, Slow
from penstock.node.storage.flusher import Flusher
from penstock.replication.effects import Effects
from penstock.replication.facts import LogFacts
from penstock.replication.replica import Replica

RETRY_S: Final = 1.0  # after a copy that failed
log = get_logger(__name__)


class FollowerLog:
    """What it is told returns None when it is done, or the rest of the work, to be awaited."""

    def __init__(
        self,
        key: Key,
        replica: Replica,
        *,
        log: PartitionLog,
        flusher: Flusher,
        applying: HeapApplier,
        now: Callable[[], int],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        perform: Callable[[Effects], None],
    ) -> None:
        self._key, self._replica = key, replica
        self._log, self._flusher, self._applying = log, flusher, applying
        self._now, self._spawn, self._perform = now, spawn, perform
        self._copying: asyncio.Task[None] | None = None

    # --- more of it ---

    def extend(self, batches: list[Batch]) -> Slow | None:
        for at, batch in enumerate(batches):
            if not self._flusher.has_room(batch.size):
                return self._write_with_room(batches[at:])
            self._stage(batch)
        self._flusher.flush()
        return None

    def _stage(self, batch: Batch) -> None:
        crash_point("node.follower.staging")
        try:
            self._log.stage(batch, received=True)
        except ValueError as error:  # the core has compared it: this can only be a fault of ours
            raise Corruption(f"a batch does not fit the log: {error}") from error

    async def _write_with_room(self, batches: list[Batch]) -> Effects:
        try:
            for batch in batches:
                self._flusher.flush()
                await self._flusher.make_room(batch.size, enqueue=False)
                self._stage(batch)
        except DiskFull as error:
            log.warning("a follower's disk is full", partition=self._key[1], error=error.message)
            # It may have been the end of a log that we took over: then we cannot.
            effects = self._replica.resign(self._now())
            return effects + self._replica.on_unwritten(self._log.sequence_last, self._now())
        finally:
            self._flusher.flush()
        return []

    # --- less of it ---

    async def truncate(self, sequence: int) -> Effects:
        """Raises `Corruption` if that must not be."""
        await self._applying.cut(sequence)
        crash_point("node.follower.cutting")
        try:
            await self._flusher.alone(lambda: self._log.truncate(sequence))
        except ValueError as error:
            raise Corruption(f"the log cannot be cut after {sequence}: {error}") from error
        self._applying.resume(self._log.sequence_committed)
        effects = self._replica.on_truncated(sequence, self._now())
        return effects + self._replica.on_durable(self._log.sequence_durable)

    # --- another one ---

    @property
    def copying(self) -> bool:
        return self._copying is not None

    def reseed(self, source: str, fetch: FetchSeed) -> None:
        """Take a copy, beside everything else: it may take long, and promises do not wait."""
        self._copying = self._spawn(self._copy(source, fetch))

    async def _copy(self, source: str, fetch: FetchSeed) -> None:
        await self._applying.drop()
        try:
            await fetch(source, self._key, self)
            await self._flusher.alone(self._log.finish_seeding)
        except (PenstockError, ValueError) as error:
            log.warning("a copy failed", source=source, error=str(error))
            await self._flusher.alone(lambda: empty(self._log))
            await asyncio.sleep(RETRY_S)
        facts = await asyncio.to_thread(facts_of, self._log)
        self._copying = None
        committed = self._log.sequence_committed
        self._applying.resume(committed)
        self._perform(self._replica.on_seeded(facts, committed, self._now()))

    async def abandon_copy(self) -> Effects:
        """The stream was left while a copy was made: what has come of it is of no use."""
        await self.stop()
        await self._flusher.alone(lambda: empty(self._log))
        self._applying.resume(0)
        # The replica tells nobody where its log ends until it hears that the log is whole again.
        return self._replica.on_seeded(LogFacts(), 0, self._now())

    async def stop(self) -> None:
        task, self._copying = self._copying, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    # --- the copy, as it comes: `ports.SeedTarget` ---

    async def begin(self, head: SeedHead) -> None:
        await self._flusher.alone(lambda: self._begin_copy(head))

    def _begin_copy(self, head: SeedHead) -> None:
        self._log.reset(first=head.first, chain=head.chain, epoch=head.epoch)
        if head.snapshot_sequence:
            self._log.install_snapshot(
                sequence=head.snapshot_sequence, chain=head.snapshot_chain,
                epoch=head.snapshot_epoch, parts=[head.snapshot],
            )  # fmt: skip

    async def write(self, batches: list[Batch]) -> None:
        for batch in batches:
            await self._flusher.make_room(batch.size, enqueue=False)
            self._log.stage(batch, received=True)
        await self._flusher.alone(self._write_staged)

    def _write_staged(self) -> None:
        flush = self._log.take()
        if flush is not None:
            self._log.write(flush)
