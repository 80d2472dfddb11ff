"""Tenures of a partition that begin on clocks which differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from tests.integration.harness import Node

from penstock.node.clock import ManualClock

HOUR_MS = 3_600_000


class Doubt:
    """Nobody knows yet whether this node's clock is right; others say that it is no later."""

    def __init__(self, latest_ms: int) -> None:
        self._latest_ms = latest_ms
        self.agreed = False

    def latest_ms(self, own_ms: int) -> int:
        return self._latest_ms


async def enter(
    node: Node, topic: str, index: int, *, ahead_ms: int = 0, doubt: Doubt | None = None
) -> None:
    """Begin another tenure of a partition, with a clock that is ahead by so much."""
    engine = node.engine
    home, around = engine.topics[topic], engine.around
    clock = ManualClock(node.clock.now_ms() + ahead_ms)
    engine.around = replace(around, clock=clock, clocks=cast("Any", doubt) or around.clocks)
    try:
        key = home.key(index)
        if key in engine.hosts:
            await engine.close_hosts([key])
        await engine.around.control.enter([await engine.open_host(home, index)])
    finally:
        engine.around = around


async def take_over(node: Node, topic: str, index: int) -> None:
    """Take over a partition from a node whose clock is an hour ahead."""
    await enter(node, topic, index, ahead_ms=HOUR_MS)
    await node.engine.close_hosts([node.engine.topics[topic].key(index)])
    host = await node.engine.open_host(node.engine.topics[topic], index)
    assert host.log.time_ms_last == node.clock.now_ms() + HOUR_MS
    await node.engine.around.control.enter([host])
