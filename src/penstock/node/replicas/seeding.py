"""Copying a replica that is too far behind: a snapshot, and the log as it is stored."""

from __future__ import annotations

import asyncio

from penstock.log.partition import PartitionLog
from penstock.model.batch import Batch
from penstock.node.flushing import Flusher
from penstock.node.replicas.ports import SeedHead


class Seeding:
    """The receiving end: a `SeedTarget`."""

    def __init__(self, log: PartitionLog, flusher: Flusher) -> None:
        self._log, self._flusher = log, flusher
        self.begun = False  # the log that was there is gone

    async def begin(self, head: SeedHead) -> None:
        self.begun = True
        await self._flusher.alone(lambda: self._start(head))

    def _start(self, head: SeedHead) -> None:
        self._log.reset(first=head.first, chain=head.chain, epoch=head.epoch)
        if head.snapshot_sequence:
            self._log.install_snapshot(
                sequence=head.snapshot_sequence,
                chain=head.snapshot_chain,
                epoch=head.snapshot_epoch,
                parts=[head.snapshot],
            )

    async def write(self, batches: list[Batch]) -> None:
        for batch in batches:
            await self._flusher.make_room(batch.size, enqueue=False)
            self._log.stage(batch, received=True)
        await self._flusher.alone(self._write_staged)

    def _write_staged(self) -> None:
        flush = self._log.take()
        if flush is not None:
            self._log.write(flush)

    async def finish(self) -> None:
        await self._flusher.alone(self._log.finish_seeding)


async def head_of(log: PartitionLog, committed: int) -> SeedHead:
    """What a copy of this log begins with."""

    def read() -> SeedHead:
        snapshot, base = log.load_snapshot(), log.base
        through = min(committed, log.sequence_durable)
        if snapshot is None:
            return SeedHead(base.first, base.chain, base.epoch, through)
        return SeedHead(
            base.first, base.chain, base.epoch, max(through, snapshot.sequence),
            snapshot.sequence, snapshot.chain, snapshot.epoch, bytes(snapshot.data),
        )  # fmt: skip

    return await asyncio.to_thread(read)


async def slice_of(
    log: PartitionLog, from_sequence: int, *, through: int, bytes_max: int
) -> list[Batch]:
    """The next batches of a copy, as stored."""

    def read() -> list[Batch]:
        found = log.read_slice(from_sequence, through=through, bytes_max=bytes_max, nowait=False)
        return found or []

    return await asyncio.to_thread(read)
