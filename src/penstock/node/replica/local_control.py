"""The metadata of a node that is alone: it is its own majority, and takes epochs from nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

import msgspec

from penstock.cluster.records import Records
from penstock.node.replica.host import Host
from penstock.node.replica.ports import Key
from penstock.replication.assignment import PartitionRecord


class LocalControl:
    """`ports.Control` over the store in the data folder."""

    def __init__(
        self,
        node: str,
        records: Records,
        hosts: Mapping[Key, Host],
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._node, self._records, self._hosts = node, records, hosts
        self._spawn = spawn

    async def enter(self, hosts: Iterable[Host]) -> None:
        """Give each of these partitions its next epoch, and wait until they are served."""
        alone = {
            host.key: PartitionRecord(voters=(self._node,), uuids={self._node: host.replica.uuid})
            for host in hosts
        }
        await self._records.ensure(alone)
        await asyncio.gather(
            *(self._take(key, record) for key, record in alone.items()),
            *(self._hosts[key].tenure.serving() for key in alone),
        )

    async def _take(self, key: Key, alone: PartitionRecord) -> None:
        held = await self._records.get(key)
        if held.record.voters != alone.voters or held.record.uuids != alone.uuids:
            # A folder that was renamed or restored: whatever is in it, there is nothing else.
            own = msgspec.structs.replace(alone, epoch=held.record.epoch)
            held = await self._records.change(key, own, held.revision)
        promised = self._hosts[key].replica.promised
        taken = await self._records.take_epoch(key, held, node=self._node, above=promised)
        self._hosts[key].on_epoch_taken(*taken)

    def take_epoch(self, key: Key) -> None:
        self._spawn(self.enter([self._hosts[key]]))

    def change_record(self, key: Key, record: PartitionRecord, revision: int) -> None:
        """There is nothing to change: the only replica is named from the start."""
        self._hosts[key].on_change_lost()

    def renew(self, key: Key, *, uuid: str, epoch: int) -> None:
        """There is nobody to copy from."""

    def retire(self, key: Key) -> None:
        """Nobody else could hold it."""
