"""Turns of streams: how much of the loop all of them together may have."""

from __future__ import annotations

import asyncio

from penstock.server.subscriptions import PieceTurns


async def test_a_request_does_not_wait_for_all_streams() -> None:
    """If each stream gave way by itself, a turn of the loop would take a piece of each."""
    turns, steps = PieceTurns(), 0

    async def stream() -> None:
        nonlocal steps
        for _ in range(3):
            await turns.mine()
            steps += 1

    streams = [asyncio.create_task(stream()) for _ in range(50)]
    at_once, before = 0, 0
    while not all(one.done() for one in streams):
        await asyncio.sleep(0)  # a turn of the loop
        at_once, before = max(at_once, steps - before), steps
    assert steps == 150
    assert at_once == 1


async def test_streams_have_their_turns_in_rotation() -> None:
    turns, order = PieceTurns(), []

    async def stream(name: str) -> None:
        for _ in range(3):
            await turns.mine()
            order.append(name)

    await asyncio.gather(*(stream(name) for name in "abcd"))
    assert order == list("abcd" * 3)


async def test_a_stream_that_ended_takes_no_turn() -> None:
    turns = PieceTurns()
    gone = [asyncio.create_task(turns.mine()) for _ in range(10)]
    last = asyncio.create_task(turns.mine())
    await asyncio.sleep(0)  # now they wait
    for one in gone:
        one.cancel()
    await asyncio.wait_for(last, 5)
    assert all(one.cancelled() for one in gone[1:])
