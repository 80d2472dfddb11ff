"""What streams may read from logs: as much as there is room for, and a little in each turn."""

from __future__ import annotations

import asyncio

from penstock.node.door.budget import Budget, Held
from penstock.node.door.flow import TURN_BYTES, UNREAD_BYTES_MAX, Outlet, ReadPace, Unread

MIB = 1 << 20


class Streams:
    """Those of one connection, which are told to go on."""

    def __init__(self, pace: ReadPace, budget: Budget) -> None:
        self.told = asyncio.Event()
        self.outlet = Outlet(pace, budget.account(), self.told.set)


async def test_a_stream_waits_for_room_that_others_have() -> None:
    budget, pace = Budget(16 * MIB), ReadPace()
    other = budget.account()
    other.take(8 * MIB, Held.ANSWERS)
    streams = Streams(pace, budget)
    assert not streams.outlet.take(MIB)
    other.give_back(8 * MIB, Held.ANSWERS)
    async with asyncio.timeout(10):
        await streams.told.wait()
    assert streams.outlet.take(MIB) and budget.by_kind[Held.READS] == MIB
    streams.outlet.give_back(MIB)
    assert budget.held == 0


async def test_all_streams_read_so_much_in_a_turn_of_the_loop() -> None:
    budget, pace = Budget(1 << 30), ReadPace()
    first, second = Streams(pace, budget), Streams(pace, budget)
    assert first.outlet.take(TURN_BYTES)
    assert not second.outlet.take(1)
    async with asyncio.timeout(10):
        await second.told.wait()
    assert second.outlet.take(1) and not first.told.is_set()


async def test_a_connection_waits_until_what_it_reads_is_sent() -> None:
    streams = Streams(ReadPace(), Budget(1 << 30))
    assert streams.outlet.take(UNREAD_BYTES_MAX)
    assert not streams.outlet.take(1)
    await asyncio.sleep(0)
    assert not streams.told.is_set()
    streams.outlet.give_back(UNREAD_BYTES_MAX)
    async with asyncio.timeout(10):
        await streams.told.wait()
    assert streams.outlet.take(1)


def test_a_part_of_a_frame_keeps_all_of_it() -> None:
    """Before, what the kernel had taken did not count, though the frame was still in memory."""
    account = Budget(1 << 30).account()
    unread = Unread(account)
    unread.update(MIB, 5 * MIB)
    assert account.held == 5 * MIB
    unread.update(MIB // 2)
    assert account.held == 5 * MIB
    unread.update(0)
    assert account.held == 0
