"""Readers of the log take turns: many of them make no turn of the loop longer than a few do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from tests.integration.harness import Node
from tests.unit.node.live.subscribing import corpus, expected, payloads_of, put, subscribe, until

from penstock.node.live.catch_up import SLICES_PER_TURN, CatchUp, ReadTurns
from penstock.node.live.subscription import SubscriptionState

READERS = 20


class Slices:
    """Counts what is read from the log by the turn of the loop, and by the reader."""

    def __init__(self) -> None:
        self.by_turn: Counter[int] = Counter()
        self.by_reader: Counter[int] = Counter()
        self.spread = 0  # the most that a reader was ahead of another one
        self._turn = 0
        self._loop = asyncio.get_running_loop()
        self._next()

    def _next(self) -> None:
        self._turn += 1
        self._handle = self._loop.call_soon(self._next)

    def stop(self) -> None:
        self._handle.cancel()

    def count(self, reader: CatchUp) -> None:
        self.by_turn[self._turn] += 1
        self.by_reader[id(reader)] += 1
        if len(self.by_reader) == READERS:
            counts = self.by_reader.values()
            self.spread = max(self.spread, max(counts) - min(counts))


@pytest.fixture
async def slices(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Slices]:
    slices, fill = Slices(), CatchUp.fill

    def counted(self: CatchUp) -> bool:
        slices.count(self)
        return fill(self)

    monkeypatch.setattr(CatchUp, "fill", counted)
    yield slices
    slices.stop()


async def test_readers_of_the_past_share_a_turn_and_all_get_there(
    node: Node, slices: Slices
) -> None:
    some = corpus(12_000)
    await put(node, payloads_of(some, 0, 11_900), size=1000)
    readers = [await subscribe(node, start="sequence", at=1) for _ in range(READERS)]
    live = await subscribe(node)
    await until(lambda: all(reader.opened.state is SubscriptionState.LIVE for reader in readers))
    assert max(slices.by_turn.values()) <= SLICES_PER_TURN
    assert min(slices.by_reader.values()) > 5, "there was something to share"
    assert slices.spread <= 2
    await put(node, payloads_of(some, 11_900))
    wanted = expected(node)
    await until(lambda: all(len(reader.rows) == len(wanted) for reader in readers))
    assert all(reader.rows == wanted for reader in readers)
    assert live.rows == wanted[-len(live.rows) :]


async def test_turns_are_taken_in_rotation() -> None:
    turns, taken = ReadTurns(), []

    def again(name: str, times: int) -> None:
        taken.append(name)
        if times > 1:
            turns.add(lambda: again(name, times - 1))

    for name in "abc":
        turns.add(lambda name=name: again(name, 2))  # type: ignore[misc]
    assert taken == []
    while len(taken) < 6:
        before = len(taken)
        await asyncio.sleep(0)
        assert len(taken) - before <= SLICES_PER_TURN
    assert "".join(taken) == "abcabc"
