"""What cannot be placed is pushed to nobody, but counted and told."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from tests.integration.harness import START_MS, Node
from tests.unit.node.live.subscribing import DIMENSIONS, TOPIC, feed_of, put, subscribe, until

from penstock.model.delta import Delta, Op, encode
from penstock.node.live import telemetry

PARENT = b"p" * 16
PENDING_S = 30
DEDUP_S = 24 * 3600


def change(
    number: int, *, vector: str = "", origin: str = "w", counter: int = 1,
    parent: bytes | None = None,
) -> bytes:  # fmt: skip
    """The first change of a vector of its own, unless it is told otherwise."""
    found = Delta(
        delta_id=b"%016d" % number, namespace="n", vector_id=vector or f"v{number}",
        op=Op.SPARSE, origin=origin, time=START_MS << 16, clock={origin: counter}, parent=parent,
        indices=np.array([1]), values=np.array([0.5]),
    )  # fmt: skip
    return encode(found, dimensions=DIMENSIONS)


async def time_out(node: Node, number: int) -> None:
    """Let all that waits wait for too long."""
    await node.advance(PENDING_S + 1)
    await put(node, [change(number)])
    feed = feed_of(node)
    await until(lambda: feed.sequence == node.engine.topics[TOPIC].here(0).sequence_readable)


async def partition_status(node: Node) -> dict[str, Any]:
    status = await node.call("live_status", topic=TOPIC)
    return dict(status["topics"][0]["partitions"][0])


def counted(node: Node, reason: str) -> list[str]:
    text = node.engine.metrics.text().decode()
    name = f'penstock_live_quarantined_deltas_total{{reason="{reason}",topic="{TOPIC}"}}'
    return [line.split()[-1] for line in text.splitlines() if line.startswith(name)]


async def test_it_is_counted_by_reason(node: Node) -> None:
    reader = await subscribe(node)
    await put(node, [change(1, parent=PARENT), change(2, parent=PARENT), change(3, counter=2)])
    assert (await partition_status(node))["quarantined"] == {}
    await time_out(node, 4)
    wanted = {"parent missing": 2, "cause missing": 1}
    assert (await partition_status(node))["quarantined"] == wanted
    assert counted(node, "parent missing") == ["2.0"]
    assert counted(node, "cause missing") == ["1.0"]
    assert len(reader.rows) == 1


async def test_a_fold_that_is_made_anew_counts_the_same_and_the_metrics_nothing(node: Node) -> None:
    await subscribe(node)
    await put(node, [change(1, parent=PARENT)])
    await time_out(node, 2)
    await node.restart()
    await subscribe(node)
    assert (await partition_status(node))["quarantined"] == {"parent missing": 1}
    assert counted(node, "parent missing") == []


async def test_the_first_of_a_burst_is_told_with_the_parent_that_is_missing(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if "quarantined" in r.getMessage()]

    await subscribe(node)
    with caplog.at_level(logging.WARNING):
        for number in range(10, 40, 10):
            await put(node, [change(number, parent=PARENT), change(number + 1, parent=PARENT)])
            await time_out(node, number + 2)
        assert len(lines()) == 1
        assert PARENT.hex() in lines()[0] and "parent missing" in lines()[0]
        monkeypatch.setattr(telemetry, "LINES_S", 0.0)
        await put(node, [change(50, counter=2)])
        await time_out(node, 51)
    assert len(lines()) == 2
    assert PARENT.hex() not in lines()[1] and "'count': 5" in lines()[1]
