"""Carrying a plan of moves out: some at a time, by the oldest node.

Everything that has to survive a node is in the metadata store: what waits in the plan, what has
begun in the records. So each look starts from there, and it does not matter which node took the
last one; two that take the same say the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Final

from penstock.cluster.placement import Move, Policy
from penstock.errors import NotFound, PenstockError
from penstock.node.cluster.cluster import Cluster
from penstock.node.observe.logs import get_logger
from penstock.node.replica.host import Host
from penstock.node.replica.ports import Key
from penstock.replication.assignment import PartitionRecord
from penstock.replication.follower import FollowerState
from penstock.replication.replica import LogHealth, Role

LOOK_S: Final = 1.0  # between looks for partitions to take back
RETURNS_MAX: Final = 4  # that are asked for in one look
AGAIN_S: Final = 10.0  # before a partition is asked for once more
IDLE_S: Final = 1.0  # between looks whether there is a plan
BUSY_S: Final = 0.25  # … while there is one
MOVE_S_MAX: Final = 3600.0  # for one partition; then its place is given to the next
log = get_logger(__name__)


class Mover:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._since: dict[Key, float] = {}  # when a partition was first seen on the move

    async def run(self) -> None:
        """One look, and the pause after it."""
        more = self._cluster.is_oldest and await self.look(time.monotonic())
        await asyncio.sleep(BUSY_S if more else IDLE_S)

    async def look(self, now: float) -> bool:
        """Begin as many moves as there are places for; whether there is a plan."""
        moves = await self._cluster.plans.waiting()
        if not moves:
            self._since.clear()
            return False
        records = await self._cluster.records.list()
        moving = [key for key, record in records.items() if on_the_move(record)]
        for move in moves[: self._places(moving, now)]:
            await self._begin(move)
        return True

    def _places(self, moving: Iterable[Key], now: float) -> int:
        self._since = {key: self._since.get(key, now) for key in moving}
        held = sum(now - since < MOVE_S_MAX for since in self._since.values())
        return max(0, self._cluster.options.moves_max - held)

    async def _begin(self, move: Move) -> None:
        place = {"topic": move.topic, "partition": move.partition}
        try:
            await self._cluster.records.set_target((move.topic, move.partition), move.target)
            log.info("a move begins", **place, target=move.target)
        except NotFound:
            log.info("not moved: the partition is gone", **place)
        await self._cluster.plans.begun(move)


def on_the_move(record: PartitionRecord) -> bool:
    return bool(record.joint) or record.target not in ((), record.voters)


class Returner:
    """Brings partitions back to their preferred coordinator.

    After a node was away, others coordinate its partitions. Once it follows again and has all of a
    partition of which it is the first replica, it asks the coordinator to resign in its favour; a
    few partitions per second, so that producers hardly notice.
    """

    def __init__(self, cluster: Cluster, hosts: Mapping[Key, Host]) -> None:
        self._cluster, self._hosts = cluster, hosts
        self._asked: dict[Key, float] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            itself = self._cluster.alive.get(self._cluster.node)
            if self._cluster.policy is not Policy.BALANCED or self._cluster.leaving:
                continue
            if itself is None or itself.draining or self._cluster.clocks.barred:
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
            and replica.health is LogHealth.SOUND
            and replica.role is Role.FOLLOWING
            and follower is not None
            and follower.state is FollowerState.STREAMING
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
