"""Log streams of partitions that another node serves: the same batches, under the same credit."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.node.conftest import Cluster
from tests.unit.node.live.subscribing import LateStore

from penstock.client.network.connection import LogStream
from penstock.errors import NotFound, Unavailable


async def entries(stream: LogStream, through: int) -> list[int]:
    """Sequences that the batches cover, up to `through`."""
    seen: list[int] = []
    async with asyncio.timeout(60):
        while not seen or seen[-1] < through:
            for batch in await anext(stream):
                seen += range(batch.first, batch.last + 1)
    return seen


async def test_a_log_is_read_through_any_node(cluster: Cluster) -> None:
    await cluster.topic("jobs", "b")
    for i in range(20):
        await cluster["a"].put("jobs", b"%d" % i)
    stream = await cluster["a"].connection.log_stream("jobs", partition=0, credit_entries=3)
    assert await entries(stream, 21) == list(range(1, 22))
    await cluster["c"].put("jobs", b"later")
    assert await entries(stream, 22) == [22]
    await stream.close()
    assert cluster["b"].engine.topics["jobs"].log_streams == []


async def test_a_relayed_stream_ends_where_it_was_told_to(cluster: Cluster) -> None:
    await cluster.topic("jobs", "b")
    await cluster["a"].put("jobs", b"x")
    stream = await cluster["a"].connection.log_stream("jobs", partition=0, through=2)
    assert [b.last for batches in [b async for b in stream] for b in batches] == [1, 2]


async def test_credit_of_the_reader_holds_back_the_other_node(cluster: Cluster) -> None:
    await cluster.topic("jobs", "b")
    for i in range(20):
        await cluster["a"].put("jobs", b"%d" % i)
    stream = await cluster["a"].connection.log_stream("jobs", partition=0, credit_entries=5)
    await asyncio.sleep(0.05)
    assert 0 < len(stream._arrived) <= 5
    b = cluster["b"].engine.topics["jobs"]
    assert next(iter(b.log_streams)).cursor <= 6


async def test_a_refusal_of_the_other_node_is_the_answer(cluster: Cluster) -> None:
    await cluster.topic("jobs", "b-")
    with pytest.raises(Unavailable):
        await cluster["a"].connection.log_stream("jobs", partition=1)
    known = cluster["b"].engine.topics.pop("jobs")
    with pytest.raises(NotFound):
        await cluster["a"].connection.log_stream("jobs", partition=0)
    cluster["b"].engine.topics["jobs"] = known


async def test_a_relayed_stream_ends_with_its_connection(cluster: Cluster) -> None:
    await cluster.topic("jobs", "b")
    stream = await cluster["a"].connection.log_stream("jobs", partition=0, from_sequence=2)
    cluster.cut("a", "b")
    with pytest.raises(Unavailable):
        await anext(stream)


async def test_a_topic_that_is_deleted_before_a_relay_is_open_is_not_found(
    cluster: Cluster,
) -> None:
    await cluster.topic("vectors", "b", kind="delta", dimensions=4)
    opening = await LateStore(cluster["b"]).opening(cluster["a"], "vectors")
    await cluster["a"].forced("topic_delete", "vectors")
    async with asyncio.timeout(5):
        with pytest.raises(NotFound):
            await opening


async def test_where_another_node_sends_its_readers_is_not_said_of_this_one(
    cluster: Cluster,
) -> None:
    await cluster.topic("jobs", "b")
    connection = cluster["a"].connection
    stream = await connection.log_stream("jobs", partition=0, from_sequence=2)
    cluster.lose_quorum("b", "jobs")
    cluster.views["b"].cut_off = True
    cluster["b"].engine.end_unreached()
    with pytest.raises(Unavailable) as ended:
        await anext(stream)
    with pytest.raises(Unavailable) as refused:
        await connection.log_stream("jobs", partition=0)
    for error in (ended, refused):
        assert "cut off" in error.value.message
        assert "elsewhere" not in error.value.details
    assert not connection.elsewhere
