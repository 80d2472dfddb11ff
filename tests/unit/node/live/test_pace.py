"""The rate of a subscriber follows what it can bear, and comes to rest there."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from tests.integration.harness import Node
from tests.unit.node.live.subscribing import (
    Reader,
    corpus,
    payloads_of,
    put,
    small_outbox,
    subscribe,
)

STEP_S = 0.01
STROKE_S = 0.1  # a subscriber returns credit so often
BEARS_PER_S = 3000


async def served(node: Node, reader: Reader, per_s: float) -> int:
    """A tenth of a second in which the subscriber handles so many deltas; those it did."""
    for _ in range(round(STROKE_S / STEP_S)):
        await node.advance(STEP_S)
    entries, size = reader.owed
    count = min(entries, round(per_s * STROKE_S))
    if count:
        bytes_ = size * count // entries
        reader.owed = (entries - count, size - bytes_)
        reader.opened.grant(count, bytes_)
    await asyncio.sleep(0)
    return count


@pytest.mark.parametrize(
    ("swing", "least_per_s"),
    # In the slow strokes of the last one its window is full: 2650 would be the most.
    [(0.0, 2300), (0.5, 2200), (0.9, 1700)],
)
async def test_it_converges_even_if_the_subscriber_swings(
    node: Node, swing: float, least_per_s: float
) -> None:
    small_outbox(node, 10_000, rate_min=10.0)
    await put(node, payloads_of(corpus(90_000, duplicates=0.0, disorder=0.0)), size=5000)
    reader = await subscribe(
        node, start="sequence", at=1, credit_entries=500, batch_max=100, stalled=True
    )
    rates, handled = [], []
    for stroke in range(280):
        per_s = BEARS_PER_S * (1 + swing * (1 if stroke // 3 % 2 else -1))
        handled.append(await served(node, reader, per_s))
        rates.append(reader.opened.rate.rate)
    late = rates[-100:]
    assert reader.opened.lag > 0, "there was always more to send"
    assert least_per_s <= sum(late) / len(late) <= 1.1 * BEARS_PER_S
    assert sum(handled[-100:]) >= least_per_s * 100 * STROKE_S
    assert max(late) < 1.5 * min(late)
    turns = sum((b - a) * (c - b) < 0 for (a, b), (_, c) in pairwise(pairwise(late)))
    assert turns < 50, "it does not swing with every stroke"


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
