"""What an operator does with a cluster, by the command line, while it is used."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from tests.integration.cluster.asking import Asking, asking
from tests.integration.cluster.commands import penstock

pytestmark = pytest.mark.asyncio(loop_scope="module")
PARTITIONS = 4
CREDIT_ENTRIES = 20
OPTIONS = {
    "cluster.lease_s": 60,  # who is stopped for a while stays a member, and is seen to lag
    "limits.idle_s": 3,
    "replication.credit_entries": CREDIT_ENTRIES,
    "replication.lagging_ms": 1000,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Asking]:
    folder = tmp_path_factory.mktemp("operating")
    async with asking(folder, OPTIONS) as made:
        yield made


async def test_a_watched_status_is_drawn_again_and_again(cluster: Asking) -> None:
    await cluster.create("watched", partitions=PARTITIONS)
    watch = ("cluster", "status", "--watch", "--rounds", "2", "--interval", "0.1")
    lines, drawn = await asyncio.gather(
        penstock(*watch, "--json", "--topic", "watched", url=cluster.processes.url),
        penstock(*watch, url=cluster.processes.url),
    )
    assert (lines.code, drawn.code) == (0, 0)
    first, second = (json.loads(line) for line in lines.out.splitlines())
    assert len(first["partitions"]) == len(second["partitions"]) == PARTITIONS
    assert all(text in drawn.out for text in ("n1", "n2", "n3", "watched"))


async def test_a_lagging_follower_is_shown_and_taken_out(cluster: Asking) -> None:
    await cluster.create("lagging")
    coordinator, _, slow = await cluster.until(lambda: _preferred(cluster, "lagging"))
    url = cluster.processes.url_of(coordinator)
    await cluster.has_all("lagging", slow)  # one that has not begun to follow has no credit to lose
    cluster.processes.pause(slow)
    for number in range(CREDIT_ENTRIES + 1):
        await cluster.put("lagging", b"%d" % number, at=coordinator)

    async def lagging() -> bool:
        found = await cluster.partition("lagging", at=coordinator)
        return [f["node"] for f in found["followers"] if f["lagging"]] == [slow]

    await cluster.until(lagging)
    assert f"lagging: {slow} (lagging/0)" in (await penstock("cluster", "status", url=url)).out
    removed = await penstock(
        "cluster", "remove-replica", "lagging", "0", slow, "--force", "--json", url=url
    )
    assert removed.code == 0 and slow not in removed.document["voters"]
    await cluster.until(
        lambda: _settled(cluster, "lagging", removed.document["voters"], coordinator)
    )
    await cluster.put("lagging", b"without it", at=coordinator)
    cluster.processes.resume(slow)
    await cluster.processes.wait_ready()
    assert len(await cluster.payloads("lagging")) == CREDIT_ENTRIES + 2


async def test_a_hung_follower_lags_when_its_stream_is_closed(cluster: Asking) -> None:
    await cluster.create("hung")
    coordinator, _, hung = await cluster.until(lambda: _preferred(cluster, "hung"))
    await cluster.has_all("hung", hung)
    cluster.processes.pause(hung)
    await cluster.put("hung", b"which uses up no credit", at=coordinator)

    async def lost() -> dict[str, Any] | None:
        found = await cluster.partition("hung", at=coordinator)
        [follower] = [f for f in found["followers"] if f["node"] == hung]
        return None if follower["connected"] or not follower["lagging"] else follower

    follower = await cluster.until(lost)
    assert (follower["lag"], follower["credits"]) == (1, 0) and follower["sequence"] > 0
    cluster.processes.resume(hung)
    await cluster.has_all("hung", hung)
    assert not any(f["lagging"] for f in (await cluster.partition("hung"))["followers"])
    await cluster.destroy("topic_delete", "hung")


async def test_who_restarts_nodes_can_wait_for_a_backlog(cluster: Asking) -> None:
    await cluster.create("settling")
    coordinator, _, slow = await cluster.until(lambda: _preferred(cluster, "settling"))
    await cluster.has_all("settling", slow)
    url, look = cluster.processes.url_of(coordinator), ("--topic", "settling", "--json")
    cluster.processes.pause(slow)
    for number in range(2 * CREDIT_ENTRIES):
        await cluster.put("settling", b"%d" % number, at=coordinator)
    assert (await penstock("cluster", "status", *look, url=url)).code == 0, "all is served"
    wait = ("cluster", "wait", "--lag-max", "0", *look)
    once = await penstock(*wait, "--timeout", "0", url=url)
    assert (once.code, once.document["settled"]) == (1, False)
    assert any(slow in line and "settling/0" in line for line in once.document["missing"])
    waiting = asyncio.create_task(penstock(*wait, "--timeout", "80", url=url))
    cluster.processes.resume(slow)
    waited = await waiting
    assert (waited.code, waited.document["missing"]) == (0, [])
    [*followers] = (await cluster.partition("settling", at=coordinator))["followers"]
    assert [(f["connected"], f["counts"], f["lag"]) for f in followers] == [(True, True, 0)] * 2
    await cluster.destroy("topic_delete", "settling")


async def test_a_fourth_node_is_given_its_share_and_gives_it_back(cluster: Asking) -> None:
    await cluster.destroy("topic_delete", "lagging")  # in two replicas, of which no share is even
    for index in range(PARTITIONS):
        for number in range(50):
            await cluster.until(lambda at=index, n=number: _put(cluster, at, n))
    fourth = cluster.processes.add()
    await cluster.processes.start(fourth)
    await cluster.processes.wait_ready()
    url = cluster.processes.url_of(fourth)
    planned = await penstock("cluster", "rebalance", "--dry-run", "--json", url=url)
    assert planned.document["planned"] >= 3 and await _replicas(cluster, fourth) == 0
    async with cluster.writing("watched") as acknowledged:
        moved = await penstock("cluster", "rebalance", "--force", url=url)
    assert moved.code == 0 and "moves are done" in moved.out
    assert "moving" in moved.shown and "partitions" in moved.shown
    counts = [await _replicas(cluster, node) for node in cluster.processes.nodes]
    assert counts == [3, 3, 3, 3]
    assert not (await penstock("cluster", "rebalance", "--dry-run", "--json", url=url)).document[
        "moves"
    ]
    drained = await penstock("cluster", "drain", fourth, "--force", "--json", url=url)
    assert drained.document["done"] == drained.document["planned"] == 3
    assert await _replicas(cluster, fourth) == 0
    assert await cluster.processes.stop(fourth) == 0
    for index in range(PARTITIONS):
        held = await cluster.payloads("watched", partition=index)
        assert {b"%d" % number for number in range(50)} <= set(held)
    assert {payload for payload, _ in acknowledged} <= set(await cluster.payloads("watched"))


async def _preferred(cluster: Asking, topic: str) -> list[str]:
    """The voters, once the first of them coordinates: nothing is handed over after that."""
    found: dict[str, Any] = await cluster.partition(topic)
    return list(found["voters"]) if found["coordinator"] == found["voters"][0] else []


async def _put(cluster: Asking, partition: int, number: int) -> int:
    return await cluster.put("watched", b"%d" % number, at="n1", partition=partition)


async def _settled(cluster: Asking, topic: str, voters: list[str], at: str) -> bool:
    found: dict[str, Any] = await cluster.partition(topic, at=at)
    return bool(found["voters"] == voters and not found["joint"] and not found["target"])


async def _replicas(cluster: Asking, node: str) -> int:
    status = await cluster.call("cluster_status")
    return sum(int(n["replicas"]) for n in status["nodes"] if n["id"] == node)
