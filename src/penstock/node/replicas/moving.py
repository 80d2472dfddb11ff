"""Carrying a plan of moves out: some at a time, by the oldest node.

Everything that has to survive a node is in the metadata store: what waits in the plan, what has
begun in the records. So each look starts from there, and it does not matter which node took the
last one; two that take the same say the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Final

from penstock.cluster.placement import Move
from penstock.errors import NotFound
from penstock.node.logs import get_logger
from penstock.node.replicas.cluster import Cluster
from penstock.node.replicas.ports import Key
from penstock.replication.assignment import PartitionRecord

IDLE_S: Final = 1.0  # between looks whether there is a plan
BUSY_S: Final = 0.25  # … while there is one
MOVE_S_MAX: Final = 3600.0  # for one partition; then its place is given to the next
log = get_logger(__name__)


class Moving:
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
            await self._cluster.records.set_target(move.topic, move.partition, move.target)
            log.info("a move begins", **place, target=move.target)
        except NotFound:
            log.info("not moved: the partition is gone", **place)
        await self._cluster.plans.begun(move)


def on_the_move(record: PartitionRecord) -> bool:
    return bool(record.joint) or record.target not in ((), record.voters)
