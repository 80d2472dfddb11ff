"""The rate of a subscriber follows what it can bear, and comes to rest there."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from tests.integration.harness import Node
from tests.unit.node.live.subscribing import Reader, corpus, payloads_of, put, subscribe

TICK_S = 0.1


async def served(node: Node, reader: Reader, per_s: int) -> None:
    """A tenth of a second in which the subscriber handles so many deltas."""
    await node.advance(TICK_S)
    entries, size = reader.owed
    count = min(entries, round(per_s * TICK_S))
    if count:
        bytes_ = size * count // entries
        reader.owed = (entries - count, size - bytes_)
        reader.opened.grant(count, bytes_)
    await asyncio.sleep(0)


@pytest.mark.parametrize("swing", [0.0, 0.5])
async def test_it_converges_even_if_the_subscriber_swings(node: Node, swing: float) -> None:
    payloads = payloads_of(corpus(20_000, duplicates=0.0, disorder=0.0), 0)
    await put(node, payloads, size=5000)
    reader = await subscribe(
        node, start="sequence", at=1, credit_entries=500, batch_max=100, stalled=True
    )
    rates = []
    for step in range(150):
        per_s = 1000 * (1 + swing * (1 if step // 3 % 2 else -1))
        await served(node, reader, round(per_s))
        rates.append(reader.opened.rate.rate)
    late = rates[-60:]
    mean = sum(late) / len(late)
    assert 500 <= mean <= 2500, "about what it handles, not what could be sent"
    assert max(late) < 2.5 * min(late)
    turns = sum((b - a) * (c - b) < 0 for (a, b), (_, c) in pairwise(pairwise(late)))
    assert turns < 30, "it does not swing with every step"


async def test_an_idle_subscriber_is_not_slowed_down(node: Node) -> None:
    reader = await subscribe(node)
    await put(node, payloads_of(corpus(300)), size=10)
    await node.advance(5)
    assert reader.opened.rate.rate == reader.opened.rate.maximum


async def test_one_that_stood_still_is_not_punished_for_it(node: Node) -> None:
    reader = await subscribe(node, credit_entries=100, stalled=True)
    await put(node, payloads_of(corpus(500)), size=50)
    await node.advance(1)
    before = reader.opened.rate.rate
    await node.advance(60)
    assert reader.opened.rate.rate == before
