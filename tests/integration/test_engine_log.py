"""Log streams: the committed batches, byte for byte, within the reader's credit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.integration.harness import Node

from penstock.client.network.connection import LogStream
from penstock.errors import InvalidArgument, NotFound
from penstock.model.batch import Batch, Kind


def stored(node: Node, topic: str = "jobs", partition: int = 0) -> list[bytes]:
    log = node.engine.topics[topic].partitions[partition].log
    return [batch.encode() for batch in log.reader.scan(log.sequence_first)]


async def read(stream: LogStream, through: int) -> list[Batch]:
    found: list[Batch] = []
    async with asyncio.timeout(60):
        while not found or found[-1].last < through:
            found += await anext(stream)
    return found


async def last(node: Node, topic: str = "jobs", partition: int = 0) -> int:
    await node.settled()
    status = await node.call("log_status", topic=topic)
    assert status["partitions"][partition]["partition"] == partition
    return int(status["partitions"][partition]["sequence_committed"])


async def traffic(node: Node, topic: str, rounds: int = 5) -> None:
    for i in range(rounds):
        await node.put(topic, b"%d" % i * 100, b"second", priority=i)
        messages = await node.pop(topic, 2)
        await node.ack(topic, messages[:1])
        await node.nack(topic, messages[1:], delay_ms=0)


async def test_a_reader_gets_the_stored_bytes(node: Node) -> None:
    topic = await node.topic(partitions=2)
    await traffic(node, topic)
    await node.update(topic, max_retries=1)
    for partition in range(2):
        stream = await node.connection.log_stream(topic, partition=partition)
        batches = await read(stream, await last(node, partition=partition))
        assert [b.encode() for b in batches] == stored(node, partition=partition)
        assert batches[0].kind is Kind.BARRIER and stream.sequence_committed == batches[-1].last


async def test_a_reader_follows_what_commits(node: Node) -> None:
    topic = await node.topic()
    stream = await node.connection.log_stream(topic, partition=0)
    await traffic(node, topic)
    batches = await read(stream, await last(node))
    assert [b.encode() for b in batches] == stored(node)
    status = (await node.call("log_status", topic=topic))["partitions"][0]
    assert batches[-1].chain == status["chain"]


async def test_a_reader_resumes_where_it_stopped(node: Node) -> None:
    topic = await node.topic()
    await traffic(node, topic)
    everything = await read(await node.connection.log_stream(topic, partition=0), await last(node))
    for at in (1, 3, len(everything) - 1):
        stream = await node.connection.log_stream(
            topic, partition=0, from_sequence=everything[at].first
        )
        batches = await read(stream, everything[-1].last)
        assert [b.encode() for b in batches] == [b.encode() for b in everything[at:]]


async def test_from_zero_is_from_now_on(node: Node) -> None:
    topic = await node.topic()
    await traffic(node, topic)
    before = await last(node)
    stream = await node.connection.log_stream(topic, partition=0, from_sequence=0)
    await node.put(topic, b"new")
    batches = await read(stream, before + 1)
    assert [b.first for b in batches] == [before + 1]
    assert list(batches[0].columns().binary("payload")) == [b"new"]


async def arrived(node: Node, stream: LogStream) -> int:
    """Entries that lie on the reader's side without having been taken."""
    await node.settled()
    for _ in range(5):
        await asyncio.sleep(0)
    return sum(head.last - head.first + 1 for head, _ in stream._arrived)


async def test_no_more_entries_than_the_credit_are_out(node: Node) -> None:
    topic = await node.topic()
    for i in range(30):
        await node.put(topic, b"%d" % i)
    stream = await node.connection.log_stream(topic, partition=0, credit_entries=8)
    found: list[Batch] = []
    while len(found) < 31:
        assert await arrived(node, stream) <= 8
        found += await anext(stream)
    assert [b.encode() for b in found] == stored(node)


async def test_no_more_bytes_than_the_credit_are_out(node: Node) -> None:
    topic = await node.topic()
    for _ in range(12):
        await node.put(topic, b"x" * 1000)
    stream = await node.connection.log_stream(topic, partition=0, credit_bytes=4000)
    found: list[Batch] = []
    while len(found) < 13:
        await arrived(node, stream)
        assert sum(len(data) for _, data in stream._arrived) <= 4000
        found += await anext(stream)
    assert [b.encode() for b in found] == stored(node)


async def test_a_batch_larger_than_the_window_comes_alone(node: Node) -> None:
    topic = await node.topic()
    await node.put(topic, *(b"x" * 100 for _ in range(50)))
    stream = await node.connection.log_stream(
        topic, partition=0, credit_entries=1, credit_bytes=100
    )
    batches = await read(stream, await last(node))
    assert [b.count for b in batches] == [1, 50]


async def test_a_reader_that_does_not_read_holds_up_nobody(node: Node) -> None:
    topic = await node.topic()
    stalled = await node.connection.log_stream(topic, partition=0, credit_entries=2)
    lively = await node.connection.log_stream(topic, partition=0)
    await traffic(node, topic, 20)
    batches = await read(lively, await last(node))
    assert [b.encode() for b in batches] == stored(node)
    assert await arrived(node, stalled) <= 2


@pytest.mark.parametrize(
    "wrong",
    [{"partition": 1}, {"credit_entries": 0}, {"credit_bytes": 0}, {"credit_entries": 10**9}],
)
async def test_a_wrong_subscription_is_refused(node: Node, wrong: dict[str, Any]) -> None:
    topic = await node.topic()
    with pytest.raises(InvalidArgument) as refused:
        await node.connection.log_stream(topic, **({"partition": 0} | wrong))
    assert refused.value.field in wrong
    with pytest.raises(NotFound):
        await node.connection.log_stream("nowhere", partition=0)


async def test_the_log_survives_restarts_with_a_barrier_each(node: Node) -> None:
    topic = await node.topic()
    await traffic(node, topic, 2)
    before = stored(node)
    await node.restart()
    after = await read(await node.connection.log_stream(topic, partition=0), await last(node))
    assert [b.encode() for b in after[: len(before)]] == before
    assert [b.kind for b in after[len(before) :]] == [Kind.BARRIER]
    assert after[-1].epoch > after[-2].epoch


async def test_a_time_is_found_in_the_log(node: Node) -> None:
    topic = await node.topic()
    before = await last(node)
    node.clock.advance(1000)
    middle = node.clock.now_ms()
    await node.put(topic, b"one")
    found = await node.call("log_find", topic=topic, partition=0, time_ms=middle)
    assert found == {"sequence": before + 1}
    later = await node.call("log_find", topic=topic, partition=0, time_ms=middle + 1)
    assert later == {"sequence": await last(node) + 1}
    with pytest.raises(InvalidArgument) as refused:
        await node.call("log_find", topic=topic, partition=1, time_ms=0)
    assert refused.value.field == "partition"


async def test_the_log_is_stable_up_to_an_undecided_batch(node: Node) -> None:
    topic = await node.topic(partitions=2)
    await node.put(topic, b"plain")
    partition = node.engine.topics[topic].partitions[1]
    values: dict[str, Any] = {"priority": [0], "payload": [b"x"], "transaction": [b"t" * 16]}
    prepared = partition.append_record(Kind.PREPARE, 1, values | {"home": [0]})
    [sure, waiting] = (await node.call("log_status", topic=topic))["partitions"]
    assert sure["sequence_stable"] == sure["sequence_committed"]
    assert waiting["sequence_stable"] == prepared.first - 1
    assert waiting["sequence_committed"] == prepared.last
    partition.append_record(Kind.DECIDE, 1, {"transaction": [b"t" * 16], "commit": [1]})
    [_, decided] = (await node.call("log_status", topic=topic))["partitions"]
    assert decided["sequence_stable"] == decided["sequence_committed"] == prepared.last + 1


async def test_a_stream_ends_with_the_batch_it_was_asked_for(node: Node) -> None:
    topic = await node.topic()
    for _ in range(3):
        await node.put(topic, b"a", b"b")
    inside = await last(node) - 2
    stream = await node.connection.log_stream(topic, partition=0, through=inside)
    found = [batch async for batches in stream for batch in batches]
    assert found[-1].first <= inside <= found[-1].last < await last(node)
    assert stream.ended


async def test_an_extent_is_what_fits_of_what_is_committed(node: Node) -> None:
    topic = await node.topic()
    await node.put(topic, *[b"x"] * 10)
    end = await last(node)
    asked = {"partition": 0, "from_sequence": 1, "through": 10**9}
    answer = await node.call("log_extent", topic=topic, extents=[asked, asked | {"entries_max": 1}])
    [whole, one] = answer["extents"]
    assert whole["last"] == end and whole["bytes"] > one["bytes"] > 0
    assert one["last"] < end
