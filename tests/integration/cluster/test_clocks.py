"""Nodes whose clocks differ: no delay ends early because of whose turn it was to take over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.integration.cluster.asking import Asking, asking
from tests.integration.cluster.commands import penstock as penstock_command

import penstock

OPTIONS = {"cluster.lease_s": 2}
TOPIC = "jobs"
HOUR_S = 3600


def preload() -> str:
    """The library that shows a process another time of day."""
    [found] = Path("/usr/lib").glob("*/faketime/libfaketime.so.1")
    return str(found)


def shift(cluster: Asking, node: str, seconds: int) -> None:
    """Set the wall clock of a node, running or not. What it measures spans with is left alone."""
    process = cluster.processes.nodes[node]
    offset = process.data.with_name(f"{node}.offset")
    offset.write_text(f"{seconds:+d}\n")
    process.environment |= {
        "LD_PRELOAD": preload(),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


@asynccontextmanager
async def three_nodes(folder: Path) -> AsyncIterator[tuple[Asking, list[str]]]:
    """A cluster, and the nodes in the order in which they would coordinate its partition."""
    async with asking(folder, OPTIONS) as cluster:
        await cluster.create(TOPIC, partitions=1)
        yield cluster, (await cluster.partition(TOPIC))["voters"]


async def put_delayed(cluster: Asking, count: int) -> None:
    async with penstock.connect(cluster.processes.url) as client:
        topic = client.topic(TOPIC, of=str)
        for number in range(count):
            await topic.put(str(number), delay=600)


async def popped(cluster: Asking) -> list[str]:
    """What can be had within a moment, through any node."""
    async with penstock.connect(cluster.processes.url) as client:
        messages = await client.topic(TOPIC, of=str).pop(10, wait=1.0)
        return [message.value for message in messages]


async def clock_of(cluster: Asking, node: str, *, at: str) -> dict[str, Any]:
    status = await cluster.call("cluster_status", at=at)
    return dict(next(each for each in status["nodes"] if each["id"] == node)["clock"])


async def test_a_node_whose_clock_is_ahead_does_not_take_over(tmp_path: Path) -> None:
    """Before, it did, and all five messages were popped ten minutes early."""
    async with three_nodes(tmp_path) as (cluster, (first, second, third)):
        await cluster.processes.stop(second)
        shift(cluster, second, HOUR_S)
        await cluster.processes.start(second)
        await cluster.has_all(TOPIC, second)
        await cluster.until(lambda: is_off(cluster, second, at=first))
        await put_delayed(cluster, 5)
        await cluster.processes.kill(first)
        await cluster.until(lambda: served_by(cluster, third, at=third))
        assert await popped(cluster) == []
        shown = await penstock_command("cluster", "status", url=cluster.processes.url_of(third))
        assert "CLOCK OFF" in shown.out and f"the clock of {second} is +3600" in shown.out
        assert "is off from a majority" in cluster.processes.nodes[second].log_path.read_text()


async def test_time_is_held_back_where_two_clocks_differ_and_no_third_is_known(
    tmp_path: Path,
) -> None:
    """Before, the fast one of two took over, and the five messages were popped at once."""
    async with three_nodes(tmp_path) as (cluster, (first, second, third)):
        await put_delayed(cluster, 5)
        for node in (first, second, third):
            await cluster.processes.kill(node)
        shift(cluster, second, HOUR_S)
        cluster.processes.nodes[third].options["replication.stagger_ms"] = 30_000  # it is patient
        await asyncio.gather(cluster.processes.start(second), cluster.processes.start(third))
        await cluster.until(lambda: served_by(cluster, second, at=third))
        assert (await clock_of(cluster, second, at=third))["state"] == "unsure"
        assert await popped(cluster) == []


async def test_a_clock_that_is_set_right_is_noticed(tmp_path: Path) -> None:
    """A node hands over when its clock is found to be off, here an hour behind, and has its
    partition back when the machine's clock is set, without a restart."""
    async with three_nodes(tmp_path) as (cluster, (first, _, third)):
        await cluster.processes.stop(first)
        shift(cluster, first, -HOUR_S)
        await cluster.processes.start(first)
        await cluster.until(lambda: is_off(cluster, first, at=third))
        await cluster.until(lambda: served_by_other(cluster, first, at=third))
        await put_delayed(cluster, 1)
        shift(cluster, first, 0)
        await cluster.until(lambda: served_by(cluster, first, at=third))
        assert (await clock_of(cluster, first, at=third))["state"] == "agreed"
        assert await popped(cluster) == []


async def is_off(cluster: Asking, node: str, *, at: str) -> bool:
    return bool((await clock_of(cluster, node, at=at))["state"] == "off")


async def served_by_other(cluster: Asking, node: str, *, at: str) -> bool:
    found = await cluster.partition(TOPIC, at=at)
    return bool(found["state"] == "serving" and found["coordinator"] != node)


async def served_by(cluster: Asking, node: str, *, at: str) -> bool:
    found = await cluster.partition(TOPIC, at=at)
    return bool(found["state"] == "serving" and found["coordinator"] == node)
