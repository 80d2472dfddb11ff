"""Snapshots of one replica, and copies of them for a replica that is too far behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.model.batch import Batch
from penstock.replication.facts import LogFacts
from verification.simulation.disk import Snapshot, end_of
from verification.simulation.schedule import SECOND

if TYPE_CHECKING:
    from verification.simulation.host import Host

SEED_TIMEOUT_US: Final = 2 * SECOND


class Copies:
    def __init__(self, host: Host) -> None:
        self._host = host
        self._seeding = 0  # number of the seeding under way, 0: none
        self._seedings = 0

    def take_snapshot(self) -> None:
        """Now and then, when the heap is what is committed; then old batches may go."""
        host = self._host
        every = host.simulation.profile.snapshot_batches
        batches, applied = host.disk.batches, host.heap.sequence_applied
        if not every or len(batches) < every or applied != host.committed:
            return
        if applied > host.replica.log.durable:
            return  # our own disk is not that far
        at = host.disk.batch_ending(applied)
        if at is None:
            return
        data = b"".join(bytes(part) for part in host.heap.snapshot())
        host.snapshot = Snapshot(end_of(at), data)
        keep = host.simulation.schedule.between(0, every // 2)
        through = max(0, applied - keep)
        host.disk.retain(host.snapshot, through=through)
        host.replica.log.first = host.disk.base.sequence + 1
        host.log("snapshot", applied, "base", host.disk.base.sequence)
        host.node.point("snapshot.asked")

    def reseed(self, source: str) -> None:
        host = self._host
        host.log("reseed", source)
        host.mending.on_replaced()
        self._seedings += 1
        number = self._seeding = self._seedings
        host.snapshot, host.committed = None, 0
        host.heap = host.rebuilt()

        def dropped() -> None:
            host.node.point("seed.dropped")
            if self._seeding == number:
                host.simulation.network.send(
                    host.node.name, source, "on_seed_asked", host.partition, host.node.name, number
                )
                host.node.after(SEED_TIMEOUT_US, self._on_seed_failed, number)

        host.disk.replace(None, [], dropped)

    def on_seed_asked(self, reader: str, number: int) -> None:
        host = self._host
        if host.snapshot is None:
            return  # it asks again
        batches = host.disk.read(host.snapshot.at.sequence + 1, through=host.committed)
        if host.platter.reads_bad(batches):
            host.on_rot()
            return
        host.simulation.network.send(
            host.node.name, reader, "on_seed", host.partition, number, host.snapshot, batches
        )

    def _on_seed_failed(self, number: int) -> None:
        host = self._host
        if self._seeding == number:
            self._seeding = 0
            host.log("seed failed")
            host.perform(host.replica.on_seeded(LogFacts(), 0, host.now))

    def on_seed(self, number: int, snapshot: Snapshot, batches: list[Batch]) -> None:
        host = self._host
        if self._seeding != number:
            return

        def stored() -> None:
            host.node.point("seed.stored")
            if self._seeding != number:
                return
            self._seeding = 0
            host.snapshot, host.committed = snapshot, snapshot.at.sequence
            host.heap = host.rebuilt()
            host.log("seeded", snapshot.at.sequence, host.disk.end.sequence)
            host.perform(host.replica.on_seeded(host.disk.facts(), snapshot.at.sequence, host.now))

        self._seedings += 1
        number = self._seeding = self._seedings
        host.disk.replace(snapshot, batches, stored)
