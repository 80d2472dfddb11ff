"""The moves of replicas that wait for their turn, in the metadata store.

    cluster/plan    `{"moves": [{"topic": 3, "partition": 0, "target": ["n2", "n3", "n4"]}]}`, JSON

A move leaves the plan when it begins: from then on the partition's own record has its target. So
whichever node carries the plan out, nothing of it is lost with another. A later plan takes the
place of all that waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from penstock.cluster.placement import Move
from penstock.cluster.store import MetadataStore, until_won
from penstock.errors import Corruption

PLAN: Final = "cluster/plan"
MOVES_MAX: Final = 2000  # of one plan: it is one value, which has a bound


class _Move(msgspec.Struct, frozen=True):
    topic: int
    partition: int
    target: tuple[str, ...]


class _Plan(msgspec.Struct, frozen=True):
    moves: tuple[_Move, ...] = ()


class Plans:
    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def waiting(self) -> list[Move]:
        """In the order in which they are to begin."""
        found, _ = await self._read()
        return found

    async def replace(self, moves: Sequence[Move]) -> None:
        """Let these wait and no others."""
        if not moves:
            await self._store.delete(PLAN)
            return
        await self._store.put(PLAN, _encode(moves))

    async def begun(self, move: Move) -> None:
        """It waits no longer. If another plan is there by now, that one is left as it is, but for
        the same move."""

        async def swap() -> None:
            held, revision = await self._read()
            left = [each for each in held if each != move]
            if left == held:
                return
            if left:
                await self._store.put(PLAN, _encode(left), expected_revision=revision)
            else:
                await self._store.delete(PLAN, expected_revision=revision)

        await until_won(swap)

    async def _read(self) -> tuple[list[Move], int]:
        entry = await self._store.get(PLAN)
        if entry is None:
            return [], 0
        try:
            plan = msgspec.json.decode(entry.value, type=_Plan)
        except msgspec.DecodeError as error:
            raise Corruption(f"{PLAN} cannot be read: {error}") from error
        return [Move(m.topic, m.partition, m.target) for m in plan.moves], entry.revision


def _encode(moves: Sequence[Move]) -> bytes:
    return msgspec.json.encode(_Plan(tuple(_Move(*move) for move in moves)))
