"""What callers of gRPC can make a node hold: before they have shown a key, and after.

The hostile ones send plain HTTP/2 frames; the healthy one is the library's client with a key.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.integration.raw_grpc import DATA, RawGrpc, close_all, frame

from penstock.config import Config
from penstock.server._generated import penstock_pb2 as pb
from penstock.server._generated.penstock_pb2_grpc import PenstockStub
from penstock.server.embedded import open_embedded
from penstock.testing.process import ServerProcess, server_process

MIB = 1 << 20
ENQUEUE = "/penstock.v1.Penstock/EnqueueBatch"
PEEK = "/penstock.v1.Penstock/Peek"
WATCH = "/grpc.health.v1.Health/Watch"
CHECK = "/grpc.health.v1.Health/Check"
OPTIONS = {
    "require_key": "true", "limits.frame_s": 2, "limits.strangers_max": 50,
}  # fmt: skip


class Site:
    """A node that wants keys, and somebody who has one."""

    def __init__(self, server: ServerProcess, key: str) -> None:
        self.server, self.key = server, key
        self.port = server.ports["grpc"]
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")
        self.stub: Any = PenstockStub(self.channel)  # type: ignore[no-untyped-call]

    async def use(self) -> None:
        """Everything that a healthy caller does is answered."""
        metadata = (("x-api-key", self.key),)
        put = pb.EnqueueRequest(topic="jobs", payload=b"x")
        await self.stub.Enqueue(put, metadata=metadata, timeout=60)
        health = health_pb2_grpc.HealthStub(self.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

    async def newcomer(self) -> None:
        """The same over a new connection."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=options) as channel:
            await PenstockStub(channel).Enqueue(  # type: ignore[no-untyped-call]
                pb.EnqueueRequest(topic="jobs", payload=b"x"),
                metadata=(("x-api-key", self.key),), timeout=60,
            )  # fmt: skip

    async def open(self, count: int) -> list[RawGrpc]:
        return [await RawGrpc.open(self.port) for _ in range(count)]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    data = tmp_path / "data"
    node = await open_embedded(data, config=Config(data=data, drain_s=1.0))
    key = (await node.engine.keys.create("healthy")).text
    connection = await node.connect()
    await connection.call("topic_create", config={"name": "jobs"})
    await connection.close()
    await node.close()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(server_process(data, options=OPTIONS))
        site = Site(server, key)
        stack.push_async_callback(site.channel.close)
        await site.use()
        yield site


async def test_a_message_is_not_asked_for_before_its_key_is_good(site: Site) -> None:
    """Before, the library took 30 MiB of each of these, key or not: 600 MiB."""
    before = site.server.rss_bytes()
    connections = await site.open(20)

    async def send(connection: RawGrpc) -> tuple[int, bytes]:
        stream = connection.call(ENQUEUE, x_api_key="pk_no_good")
        sent = await connection.send_message(stream, 32 * MIB, sent=30 * MIB)
        return sent, await connection.wait_ended(stream)

    for sent, _ in await asyncio.gather(*map(send, connections)):
        assert sent <= 256 << 10  # what a window holds
    await site.use()
    assert site.server.rss_bytes() - before < 32 * MIB
    await close_all(connections)


async def test_unfinished_messages_count_in_the_budget(site: Site) -> None:
    """Before, twenty of them cost 604 MiB."""
    before = site.server.rss_bytes()
    connections = await site.open(20)

    async def send(connection: RawGrpc) -> None:
        stream = connection.call(ENQUEUE, x_api_key=site.key)
        await connection.send_message(stream, 32 * MIB, sent=30 * MIB)

    sending = asyncio.gather(*map(send, connections))
    growth = 0
    while not sending.done():
        await site.use()
        growth = max(growth, site.server.rss_bytes() - before)
        await asyncio.sleep(0.05)
    await sending
    assert growth < 150 * MIB
    for connection in connections:  # their deadline passes
        async with asyncio.timeout(60):
            await connection.closed.wait()
    await site.use()
    await close_all(connections)


async def test_watching_a_nodes_health_takes_no_place_from_callers(site: Site) -> None:
    """Before, a caller with a key was refused beside 4300 `Health/Watch`: RESOURCE_EXHAUSTED."""
    before = site.server.rss_bytes()
    connections = await site.open(10)

    async def watch(connection: RawGrpc) -> None:
        for _ in range(43):
            streams = {connection.call(WATCH) for _ in range(10)}
            for stream in streams:
                connection.writer.write(frame(DATA, 0x1, stream, bytes(5)))
            await connection.wait_answered(streams)

    await asyncio.gather(*map(watch, connections))
    await site.use()
    await site.newcomer()
    assert site.server.rss_bytes() - before < 64 * MIB
    await close_all(connections)


async def test_calls_without_a_message_take_no_place_from_others(site: Site) -> None:
    """Before, callers with a key were refused beside calls that never sent their message."""
    connections = await site.open(10)
    for connection in connections:
        for _ in range(500):
            connection.call(ENQUEUE, x_api_key=site.key)
            connection.call(CHECK)
        await connection.writer.drain()
    await site.use()
    await site.newcomer()
    await close_all(connections)


async def test_strangers_connections_keep_nobody_out(site: Site) -> None:
    """Before, as many were held as were opened."""
    silent = [await asyncio.open_connection("127.0.0.1", site.port) for _ in range(100)]
    strangers = await site.open(150)
    await site.newcomer()
    await site.use()
    closed = sum(one.closed.is_set() for one in strangers)
    for reader, writer in silent:  # the oldest had to go
        async with asyncio.timeout(60):
            await reader.read()
        writer.close()
    assert closed >= 50
    await close_all(strangers)


async def test_answers_that_nobody_reads_are_made_a_few_at_a_time(site: Site) -> None:
    """Before, all 300 were answered before anybody looked at their sizes: 1.7 GB."""
    messages = [pb.NewMessage(payload=bytes(4096)) for _ in range(1000)]
    filling = pb.EnqueueBatchRequest(topic="jobs", messages=messages)
    await site.stub.EnqueueBatch(filling, metadata=(("x-api-key", site.key),), timeout=60)
    before = site.server.rss_bytes()
    asked = pb.PeekRequest(topic="jobs", limit=1000).SerializeToString()
    message = b"\x00" + len(asked).to_bytes(4, "big") + asked
    connections = await site.open(10)
    streams = {connection: set[int]() for connection in connections}
    for connection in connections:  # none of them enlarges the window that answers may use
        for _ in range(30):
            stream = connection.call(PEEK, x_api_key=site.key)
            connection.writer.write(frame(DATA, 0x1, stream, message))
            streams[connection].add(stream)
    growth, refused = 0, 0
    async with asyncio.timeout(60):
        while not refused:  # there was no room for these
            await site.use()
            growth = max(growth, site.server.rss_bytes() - before)
            refused = sum(len(streams[one] & one.ended.keys()) for one in connections)
    assert growth < 150 * MIB
    await close_all(connections)
