"""Answers that would be too large: calls are bounded by bytes as well as by count, and what is
leased and not answered is nobody's lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.gateways import Behind, behind_gateway
from tests.integration.harness import Caller, Node, delivered_payloads

from penstock.server._generated import penstock_pb2 as pb
from penstock.wire.messages import ANSWER_BYTES_MAX

SIX_KB = bytes(6000)
MIB = 1 << 20


async def fill(caller: Caller, count: int = 1000, *, payload: bytes = SIX_KB, **row: Any) -> None:
    for at in range(0, count, 500):
        rows = [{"payload": payload, **row} for _ in range(min(500, count - at))]
        await caller.enqueue("jobs", rows)


async def test_a_pop_leases_no_more_than_its_answer_holds(node: Node) -> None:
    """Before, all thousand were leased and the answer of 6 MB was refused by the client."""
    await node.topic("jobs")
    await fill(node)
    popped = await node.pop("jobs", 1000)
    assert ANSWER_BYTES_MAX // 2 < 6000 * len(popped) <= ANSWER_BYTES_MAX
    await node.settled()
    assert await node.counts() == (1000 - len(popped), 0, len(popped), 0)


async def test_a_pop_of_small_messages_gets_as_many_as_it_asks_for(node: Node) -> None:
    await node.topic("jobs")
    await fill(node, payload=b"small")
    assert len(await node.pop("jobs", 1000)) == 1000


async def test_what_a_pop_leased_and_cannot_answer_is_ready_again_and_in_order(node: Node) -> None:
    """The first messages are small, so more of the others are leased than fit. Before, all were
    leased and none of them answered."""
    await node.topic("jobs", max_retries=0)
    await fill(node, 100, payload=b"small", priority=1)
    await fill(node, 40, payload=bytes(MIB // 4), priority=2)
    seen = []
    while popped := await node.pop("jobs", 1000):
        assert all(message["attempts"] == 0 for message in popped)
        seen += [message["sequence"] for message in popped]
        await node.ack("jobs", popped)
        await node.settled()
    assert seen == sorted(seen) and len(seen) == 140
    assert (await node.stats())["dead"] == 0


async def test_one_message_is_answered_however_large(node: Node) -> None:
    """Before, the answer with a message over 4 MiB was refused by the client."""
    await node.topic("jobs", payload_bytes_max=16 * MIB)
    await node.put("jobs", bytes(16 * MIB), bytes(16 * MIB))
    assert [len(m["payload"]) for m in (await node.call("peek", topic="jobs"))["messages"]] == [
        16 * MIB
    ]
    (popped,) = await node.pop("jobs", 10)
    assert len(popped["payload"]) == 16 * MIB
    await node.settled()
    assert await node.counts() == (1, 0, 1, 0)


async def test_a_delivery_is_bounded_by_bytes(node: Node) -> None:
    """Before, the messages of one delivery made one frame, and one over 64 MiB ended the node."""
    await node.topic("jobs", payload_bytes_max=16 * MIB)
    for _ in range(5):
        await node.put("jobs", bytes(16 * MIB))
    await fill(node, 20, payload=bytes(MIB))
    stream = await node.stream("jobs", credits=100)
    found = [batch async for batch in _until(stream, 25)]
    sizes = [len(batch.columns.body) for batch in found]
    # Five are larger by themselves; numbers and offsets come on top of the payloads.
    assert sorted(sizes)[-6] <= ANSWER_BYTES_MAX + 1024
    assert len(delivered_payloads(found)) == 25
    tokens = [batch.delivery.token(i) for batch in found for i in range(batch.delivery.count)]
    assert await node.connection.settle("jobs", tokens) == []


async def _until(stream: Any, count: int) -> AsyncIterator[Any]:
    async for batch in stream:
        yield batch
        count -= batch.delivery.count
        if count <= 0:
            return


async def test_peeks_and_dead_letters_come_by_the_page(node: Node) -> None:
    """Before, both answers were over 4 MiB and refused by the client."""
    await node.topic("jobs")
    await fill(node)
    peeked = (await node.call("peek", topic="jobs", limit=1000))["messages"]
    assert 100 < len(peeked) <= ANSWER_BYTES_MAX // 6000
    while popped := await node.pop("jobs", 1000):
        await node.nack("jobs", popped, reject=True, reason="odd")
    seen: list[int] = []
    after = None
    while True:
        page = await node.call("dlq_list", topic="jobs", limit=1000, after=after)
        assert page["messages"]
        seen += [letter["sequence"] for letter in page["messages"]]
        if (after := page["next"]) is None:
            break
    assert len(seen) == 1000 and seen == sorted(set(seen))


async def test_headers_count_as_well(node: Node) -> None:
    """Before, 1000 messages with 10 KB of headers were leased and not answered."""
    await node.topic("jobs")
    await fill(node, payload=b"", headers={"a": "x" * 10_000})
    assert 0 < len(await node.pop("jobs", 1000)) <= ANSWER_BYTES_MAX // 10_000


async def test_a_pop_whose_caller_is_gone_leases_nothing(node: Node) -> None:
    """Before, what a pop leased for a connection that was lost meanwhile stayed leased until it
    expired, and counted as an attempt."""
    await node.topic("jobs")
    other = await node.connect()
    waiting = asyncio.ensure_future(other.pop("jobs", wait_ms=60_000))
    topic = node.engine.topics["jobs"]
    while not len(topic.dispatch.streams):
        await asyncio.sleep(0)
    other.connection.abort()
    await asyncio.gather(waiting, return_exceptions=True)
    await node.put("jobs", b"x")
    async with asyncio.timeout(30):
        while not (popped := await node.pop("jobs")):
            await node.settled()
    assert popped[0]["attempts"] == 0


class Site:
    def __init__(self, found: Behind) -> None:
        self.http, self.stub = found.http, found.stub

    async def counts(self) -> tuple[int, int]:
        (stats,) = (await self.http.get("/v1/stats?topic=jobs")).json()["topics"]
        return stats["ready"], stats["leased"]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """A gateway, a gRPC client with its default limits, and a topic with 6 MB in it."""
    async with behind_gateway(tmp_path) as found:
        caller = Caller(await found.node.connect())
        await caller.topic("jobs")
        await fill(caller)
        yield Site(found)


async def test_a_large_pop_over_http_is_answered(site: Site) -> None:
    """Before: 400, with all thousand leased."""
    answer = await site.http.post("/v1/pop", json={"topic": "jobs", "limit": 1000})
    assert answer.status_code == 200
    popped = len(answer.json()["messages"])
    assert 100 < popped <= ANSWER_BYTES_MAX // 6000
    assert await site.counts() == (1000 - popped, popped)
    peeked = await site.http.get("/v1/peek?topic=jobs&limit=1000")
    assert peeked.status_code == 200 and len(peeked.json()["messages"]) > 100


async def test_a_large_pop_over_grpc_is_answered(site: Site) -> None:
    """Before: INVALID_ARGUMENT, with all thousand leased."""
    answer = await site.stub.Pop(pb.PopRequest(topic="jobs", limit=1000))
    assert 100 < len(answer.messages) <= ANSWER_BYTES_MAX // 6000
    assert await site.counts() == (1000 - len(answer.messages), len(answer.messages))
    assert len((await site.stub.Peek(pb.PeekRequest(topic="jobs", limit=1000))).messages) > 100


async def test_a_large_delivery_over_grpc_reaches_a_client_with_default_limits(site: Site) -> None:
    """Before, the stream ended with RESOURCE_EXHAUSTED at the client, with all thousand leased."""
    stream = site.stub.PopStream()
    opening = pb.PopOpen(topic="jobs", credits=1000, batch_max=1000)
    await stream.write(pb.PopStreamRequest(open=opening))
    seen = 0
    while seen < 1000:
        response = await stream.read()
        assert response.ByteSize() < 4 << 20
        seen += len(response.items)
    stream.cancel()
