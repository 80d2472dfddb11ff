"""Calls over topics whose partitions are served by several nodes."""

from __future__ import annotations

import asyncio

import pytest
from tests.integration.harness import payloads_of
from tests.unit.node.conftest import Cluster

from penstock.errors import NotFound, StaleProducer, Unauthenticated, Unavailable
from penstock.node.calls import pages, table
from penstock.node.calls.table import Caller, dispatch_call
from penstock.wire.messages import OpenSubscription


@pytest.fixture
async def jobs(cluster: Cluster) -> Cluster:
    """Six partitions over three nodes, ten messages in each, priority 0 to 59."""
    await cluster.topic("jobs", "abcabc")
    for index in range(6):
        rows = [{"payload": b"%d" % p, "priority": p} for p in range(index, 60, 6)]
        await cluster["a"].enqueue("jobs", rows, partition=index)
    return cluster


async def bury(cluster: Cluster, count: int) -> None:
    """Make the best messages dead letters."""
    held = await cluster["a"].pop("jobs", count)
    await cluster["a"].nack("jobs", held, reject=True, reason="no")


async def test_peek_merges_what_the_nodes_have(jobs: Cluster) -> None:
    for name in "abc":
        found = (await jobs[name].call("peek", topic="jobs", limit=20))["messages"]
        assert payloads_of(found) == [b"%d" % p for p in range(20)]


async def test_stats_sum_up_over_the_nodes(jobs: Cluster) -> None:
    await bury(jobs, 6)
    stats = await jobs["b"].stats()
    assert (stats["ready"], stats["dead"], stats["enqueued_total"]) == (54, 6, 60)
    assert [p["coordinator"] for p in stats["partitions"]] == list("abcabc")


async def test_stats_show_what_nobody_serves(jobs: Cluster) -> None:
    jobs.give("jobs", 2, "")
    stats = await jobs["a"].stats()
    assert [p["coordinator"] for p in stats["partitions"]] == ["a", "b", "", "a", "b", "c"]
    assert stats["ready"] == 50


async def test_dead_letters_are_listed_a_page_at_a_time(jobs: Cluster) -> None:
    await bury(jobs, 30)
    seen, after = [], None
    while True:
        page = await jobs["c"].call("dlq_list", topic="jobs", limit=7, after=after)
        seen += [(m["partition"], m["sequence"]) for m in page["messages"]]
        after = page["next"]
        if after is None:
            break
    assert seen == sorted(seen)
    assert len(set(seen)) == 30


async def test_live_rows_of_all_nodes_are_told_once_and_in_order_over_pages(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node cuts its own list where it is full: here node b, which has most. Before, all were
    in one answer."""
    monkeypatch.setattr(pages, "PAGE_BYTES_MAX", 3000)
    await cluster.topic("vectors", "abcabc", kind="delta", dimensions=2)
    wanted = []
    for partition, count in enumerate([3, 12, 1, 2, 9, 1]):
        engine = cluster["abcabc"[partition]].engine
        hub = engine.hub(engine.topics["vectors"])
        for number in range(count):
            asked = OpenSubscription("vectors", partition, start="cursor", cursor=f"s{number:02}")
            await hub.subscribe(partition, asked, send=lambda *_: None, fail=lambda _: None)
            wanted.append((partition, f"s{number:02}"))
    for node in "abc":
        seen, rounds, after = [], 0, ""
        while after is not None:
            answer = await cluster[node].call("live_status", topic="vectors", after=after)
            for told in answer["topics"]:
                seen += [(row["partition"], row["name"]) for row in told["subscriptions"]]
            rounds, after = rounds + 1, answer["next"]
        assert seen == wanted and rounds > 2


async def test_named_dead_letters_are_replayed_and_deleted(jobs: Cluster) -> None:
    await bury(jobs, 12)
    ids = [m["message_id"] for m in await jobs["a"].dead()]
    assert (await jobs["b"].call("dlq_replay", topic="jobs", message_ids=ids[:5])) == {
        "replayed": 5
    }
    with pytest.raises(NotFound):
        await jobs["b"].call("dlq_replay", topic="jobs", message_ids=ids[4:7])
    assert await jobs["c"].forced("dlq_delete", "jobs", message_ids=ids[5:9]) == {"deleted": 4}
    assert await jobs["c"].call("dlq_replay", topic="jobs", limit=2) == {"replayed": 2}
    assert await jobs["a"].counts() == (55, 0, 0, 1)


async def test_purge_reaches_every_node(jobs: Cluster) -> None:
    assert await jobs["b"].forced("purge", "jobs") == {"purged": 60}
    assert await jobs["a"].counts() == (0, 0, 0, 0)


async def test_a_message_of_another_node_is_moved(jobs: Cluster) -> None:
    (best, *_) = (await jobs["a"].call("peek", topic="jobs", limit=2))["messages"]
    await jobs["c"].call("move_to_dlq", topic="jobs", message_id=best["message_id"])
    with pytest.raises(NotFound):
        await jobs["b"].call("move_to_dlq", topic="jobs", message_id=best["message_id"])
    assert [m["sequence"] for m in await jobs["b"].dead()] == [best["sequence"]]


async def test_the_logs_of_all_partitions_are_known_everywhere(jobs: Cluster) -> None:
    status = (await jobs["c"].call("log_status", topic="jobs"))["partitions"]
    assert [p["partition"] for p in status] == list(range(6))
    extents = [
        {"partition": i, "from_sequence": 1, "through": status[i]["sequence_committed"]}
        for i in (5, 0, 1)
    ]
    found = (await jobs["a"].call("log_extent", topic="jobs", extents=extents))["extents"]
    assert [e["partition"] for e in found] == [5, 0, 1]
    at = await jobs["a"].call("log_find", topic="jobs", partition=1, time_ms=0)
    assert at == {"sequence": 1}


async def test_snapshots_and_verification_reach_every_node(jobs: Cluster) -> None:
    taken = (await jobs["a"].call("snapshot", topic="jobs"))["snapshots"]
    assert [row["partition"] for row in taken] == list(range(6))
    assert (await jobs["a"].call("verify"))["ok"]


async def test_a_call_waits_for_a_partition_that_moves(jobs: Cluster) -> None:
    jobs.give("jobs", 1, "")
    call = asyncio.create_task(jobs["a"].call("log_status", topic="jobs"))
    await asyncio.sleep(0.02)
    jobs.give("jobs", 1, "b")
    assert len((await call)["partitions"]) == 6


async def test_a_call_fails_if_nobody_serves_a_partition(
    jobs: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.node.calls.table.WAIT_S", 0.1)
    jobs.give("jobs", 1, "")
    with pytest.raises(Unavailable, match="nobody serves partition 1"):
        await jobs["a"].call("peek", topic="jobs")


async def test_shares_are_for_nodes_only(jobs: Cluster) -> None:
    stranger = Caller("some-key", 1, False)
    arguments = {"topic": "jobs", "of": "purge_share", "partitions": [0], "arguments": {}}
    with pytest.raises(Unauthenticated):
        await dispatch_call(jobs["a"].engine, stranger, "share", arguments)


async def test_pages_of_several_nodes_leave_nothing_out(cluster: Cluster) -> None:
    """A node whose list was cut has more that is better than what others still have. Before, no
    list was cut, and the answer to a node was over 4 MiB."""
    await cluster.topic("jobs", "ab")
    for index, size in ((0, 20_000), (1, 2_000)):
        for at in range(0, 400, 50):
            rows = [{"payload": bytes(size), "priority": at + i} for i in range(50)]
            await cluster["a"].enqueue("jobs", rows, partition=index)
    peeked = (await cluster["a"].call("peek", topic="jobs", limit=1000))["messages"]
    assert 200 < len(peeked) < 800
    assert [m["priority"] for m in peeked] == sorted(i // 2 for i in range(len(peeked)))
    popped = await cluster["a"].pop("jobs", 1000)
    assert len(popped) < 800
    await cluster["a"].nack("jobs", popped, reject=True)
    seen = []
    after = None
    while True:
        page = await cluster["a"].call("dlq_list", topic="jobs", limit=1000, after=after)
        seen += [(m["partition"], m["sequence"]) for m in page["messages"]]
        if (after := page["next"]) is None:
            break
    assert seen == sorted((m["partition"], m["sequence"]) for m in popped)


async def test_a_producer_begins_on_every_node_or_not_at_all(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition that nobody serves cannot refuse anybody: so the beginning is not answered."""
    monkeypatch.setattr(table, "WAIT_S", 0.05)
    await cluster.topic("jobs", "ab-")
    begin = {"topic": "jobs", "producer": "p", "epoch": 7}
    with pytest.raises(Unavailable):
        await cluster["a"].call("producer_begin", **begin)
    cluster.give("jobs", 2, "c")
    assert (await cluster["a"].call("producer_begin", **begin))["partitions"] == 3
    for index in range(3):
        with pytest.raises(StaleProducer):
            await cluster["a"].enqueue(
                "jobs", [{"payload": b"x"}], partition=index, producer=(f"p.{index}", 6, 1)
            )
