"""Preferred coordinators come back by themselves.

After a node was away, others coordinate its partitions. Once it follows again and has all of a
partition of which it is the first replica, it asks the coordinator to resign in its favour; a few
partitions per second, so that producers hardly notice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Final

from penstock.cluster.placement import Policy
from penstock.errors import PenstockError
from penstock.node.logs import get_logger
from penstock.node.replicas.cluster import Cluster
from penstock.node.replicas.host import Host
from penstock.node.replicas.ports import Key
from penstock.replication.follower import State as Following
from penstock.replication.replica import Health, Role

LOOK_S: Final = 1.0
RETURNS_MAX: Final = 4  # per look
AGAIN_S: Final = 10.0  # before a partition is asked for once more
log = get_logger(__name__)


class Returning:
    def __init__(self, cluster: Cluster, hosts: Mapping[Key, Host]) -> None:
        self._cluster, self._hosts = cluster, hosts
        self._asked: dict[Key, float] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            itself = self._cluster.alive.get(self._cluster.node)
            if self._cluster.policy is not Policy.BALANCED or self._cluster.leaving:
                continue
            if itself is None or itself.draining:
                continue
            wanted = [key for key, host in self._hosts.items() if self._wanted(key, host)]
            for key in wanted[:RETURNS_MAX]:
                await self._ask(key)

    def _wanted(self, key: Key, host: Host) -> bool:
        held = self._cluster.control.records.get(key)
        if held is None or time.monotonic() - self._asked.get(key, -AGAIN_S) < AGAIN_S:
            return False
        record, replica = held.record, host.replica
        follower = replica.follower
        return (
            record.voters[0] == self._cluster.node
            and record.coordinator not in ("", self._cluster.node)
            and self._cluster.live(record.coordinator) is not None
            and not record.joint
            and not record.target
            and replica.counts
            and replica.health is Health.SOUND
            and replica.role is Role.FOLLOWING
            and follower is not None
            and follower.state is Following.STREAMING
        )

    async def _ask(self, key: Key) -> None:
        self._asked[key] = time.monotonic()
        node = self._cluster.control.coordinator(key)
        try:
            await self._cluster.ask(
                node, "replica_resign", topic=key[0], partition=key[1], node=self._cluster.node
            )
        except PenstockError as error:
            log.info("not handed back", topic=key[0], partition=key[1], error=error.message)
        else:
            log.info("handed back", topic=key[0], partition=key[1], by=node)
