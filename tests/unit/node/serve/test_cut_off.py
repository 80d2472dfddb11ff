"""A node that is cut off: what it cannot serve, another one may; what it can, it does."""

from __future__ import annotations

import asyncio

import pytest
from tests.integration.harness import body
from tests.unit.node.conftest import Cluster
from tests.unit.node.live.subscribing import LateStore

from penstock.errors import NotFound, Unavailable
from penstock.model.ids import LeaseToken
from penstock.node.route import WAIT_S

ROWS = [{"payload": b"x"}]
DELTAS = {"kind": "delta", "dimensions": 4}
AT_ONCE_S = WAIT_S / 2  # and not after the wait for a coordinator


@pytest.fixture
async def alone(cluster: Cluster) -> Cluster:
    """`a` serves the first partition of `jobs` and is cut off from `b`, not from `c`; all of
    `mine` is here."""
    await cluster.topic("jobs", "abc")
    await cluster.topic("mine", "a")
    return cluster


def cut_off(cluster: Cluster) -> None:
    cluster.cut("a", "b")
    cluster.views["a"].cut_off = True
    cluster["a"].engine.end_unreached()


async def test_what_nobody_here_can_serve_is_sent_elsewhere_at_once(alone: Cluster) -> None:
    cut_off(alone)
    async with asyncio.timeout(AT_ONCE_S):
        with pytest.raises(Unavailable) as refused:
            await alone["a"].enqueue("jobs", ROWS, partition=1)
    assert refused.value.details["elsewhere"]


async def test_a_request_of_which_a_part_was_done_is_not_sent_elsewhere(alone: Cluster) -> None:
    held = []
    for index, name in enumerate("ab"):
        await alone["a"].enqueue("jobs", ROWS, partition=index)
        held += await alone[name].pop("jobs", 1)
    cut_off(alone)
    parts = [(index, 1, body(ROWS)) for index in (1, 0)]
    with pytest.raises(Unavailable) as refused:
        await alone["a"].connection.enqueue("jobs", parts)
    assert "elsewhere" not in refused.value.details
    with pytest.raises(Unavailable) as refused:
        await alone["a"].ack("jobs", held)
    assert "elsewhere" not in refused.value.details
    topic = alone["a"].engine.topics["jobs"]
    assert (topic.here(0).heap.ready, topic.here(0).heap.totals.acked) == (1, 1)


async def test_a_request_of_which_no_part_was_done_is_sent_elsewhere(cluster: Cluster) -> None:
    await cluster.topic("jobs", "bb")
    cut_off(cluster)
    parts = [(index, 1, body(ROWS)) for index in (0, 1)]
    with pytest.raises(Unavailable) as refused:
        await cluster["a"].connection.enqueue("jobs", parts)
    assert refused.value.details["elsewhere"]
    tokens = [LeaseToken(1, index, 1, 1) for index in range(2)]
    with pytest.raises(Unavailable) as refused:
        await cluster["a"].connection.settle("jobs", tokens)
    assert refused.value.details["elsewhere"]


async def test_what_is_served_here_or_by_a_node_in_reach_is_served(alone: Cluster) -> None:
    cut_off(alone)
    for partition in (0, 2):
        assert (await alone["a"].enqueue("jobs", ROWS, partition=partition)).placed
    assert await alone["a"].put("mine", b"x")
    assert len(await alone["a"].pop("mine", 1)) == 1


@pytest.mark.parametrize("method", ["pop", "peek", "stats", "routes", "topic_get"])
async def test_calls_about_a_topic_that_is_not_all_in_reach_go_elsewhere(
    alone: Cluster, method: str
) -> None:
    cut_off(alone)
    async with asyncio.timeout(AT_ONCE_S):
        with pytest.raises(Unavailable) as refused:
            await alone["a"].connection.call(method, topic="jobs")
    assert refused.value.details["elsewhere"]


async def test_that_a_topic_is_not_known_here_says_nothing(alone: Cluster) -> None:
    with pytest.raises(NotFound):
        await alone["a"].connection.call("topic_get", topic="unheard-of")
    cut_off(alone)
    with pytest.raises(Unavailable) as refused:
        await alone["a"].connection.call("topic_get", topic="unheard-of")
    assert refused.value.details["elsewhere"]


async def test_streams_that_would_wait_in_vain_end(alone: Cluster) -> None:
    connection = alone["a"].connection
    jobs = await connection.lease_stream("jobs", credits=1)
    mine = await connection.lease_stream("mine", credits=1)
    cut_off(alone)
    with pytest.raises(Unavailable) as ended:
        await anext(jobs)
    assert ended.value.details["elsewhere"]
    with pytest.raises(Unavailable):
        await connection.lease_stream("jobs", credits=1)
    await alone["a"].put("mine", b"x")
    assert (await anext(mine)).delivery.count == 1


async def test_a_subscription_that_would_wait_in_vain_is_refused(alone: Cluster) -> None:
    await alone.topic("vectors", "a", **DELTAS)
    store = LateStore(alone["a"])
    opening = await store.opening(alone["a"], "vectors")
    alone.lose_quorum("a", "vectors")
    cut_off(alone)
    async with asyncio.timeout(AT_ONCE_S):
        with pytest.raises(Unavailable) as refused:
            await opening
    assert refused.value.details["elsewhere"]
    store.answer()
    engine = alone["a"].engine
    topic = engine.topics["vectors"]
    while engine.hub(topic)._opening:
        await asyncio.sleep(0)
    assert engine.hub(topic).subscribers == 0


async def test_a_subscription_of_a_topic_that_is_deleted_meanwhile_is_refused(
    cluster: Cluster,
) -> None:
    await cluster.topic("vectors", "a", **DELTAS)
    opening = await LateStore(cluster["a"]).opening(cluster["a"], "vectors")
    await cluster["a"].forced("topic_delete", "vectors")
    async with asyncio.timeout(AT_ONCE_S):
        with pytest.raises(NotFound):
            await opening


async def test_a_pop_that_waits_for_nothing_is_answered(alone: Cluster) -> None:
    waiting = asyncio.ensure_future(alone["a"].connection.call("pop", topic="jobs", wait_ms=60_000))
    topic = alone["a"].engine.topics["jobs"]
    while not len(topic.dispatch.streams):
        await asyncio.sleep(0)
    cut_off(alone)
    with pytest.raises(Unavailable) as ended:
        await waiting
    assert ended.value.details["elsewhere"]


async def test_that_another_node_serves_nothing_now_is_not_said_of_this_one(
    cluster: Cluster,
) -> None:
    await cluster.topic("jobs", "b")
    cluster["b"].engine.refusal = Unavailable("the node is stopping", elsewhere=True)
    sent = asyncio.ensure_future(cluster["a"].put("jobs", b"x"))
    while not (cluster.waiters or sent.done()):
        await asyncio.sleep(0.001)
    cluster.give("jobs", 0, "c")
    assert await sent
    cluster["b"].engine.refusal = None


async def test_other_nodes_are_told_of_what_is_here(alone: Cluster) -> None:
    """An atomic batch may wait for the word of its home, whatever else is out of reach."""
    cut_off(alone)
    c = alone.views["c"].peers["a"]
    found = await c.call("transaction_outcome", topic="jobs", partition=0, transaction=bytes(16))
    assert found == {"commit": False}
