"""Whose frames are handled in a turn of the loop."""

from __future__ import annotations

import asyncio
from typing import cast

from penstock.node.door.flow import RESTS, TURN_S, Inbox, Rota


class Flood:
    """A connection that always has more, and takes all of a turn that it is given."""

    def __init__(self, rota: Rota) -> None:
        self._rota = rota
        self.served = 0

    def wait(self) -> None:
        self._rota.others.append(cast(Inbox, self))
        self._rota.schedule()

    def on_turn(self) -> None:
        self.served += 1
        self._rota.used_s += TURN_S
        self.wait()


class Newcomer:
    """A connection with one frame, for which there was no time left when it came."""

    def __init__(self, rota: Rota) -> None:
        self.served = False
        rota.fresh.append(cast(Inbox, self))
        rota.schedule()

    def on_turn(self) -> None:
        self.served = True


async def test_a_flood_is_served_in_one_of_several_turns() -> None:
    """Before, it had its four milliseconds of every turn, and a request takes many."""
    rota = Rota()
    flood = Flood(rota)
    flood.wait()
    for _ in range(10 * (RESTS + 1)):
        await asyncio.sleep(0)
    assert 9 <= flood.served <= 11


async def test_who_has_just_come_is_served_in_the_next_turn() -> None:
    rota = Rota()
    Flood(rota).wait()
    for _ in range(10):
        newcomer = Newcomer(rota)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert newcomer.served


async def test_two_floods_take_turns() -> None:
    rota = Rota()
    floods = [Flood(rota), Flood(rota)]
    for flood in floods:
        flood.wait()
    for _ in range(20 * (RESTS + 1)):
        await asyncio.sleep(0)
    assert all(9 <= flood.served <= 11 for flood in floods)
