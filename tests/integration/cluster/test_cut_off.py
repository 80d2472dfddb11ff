"""A node that reaches neither the others nor etcd, while its clients still reach it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.chaos.arena import ETCD, KEY, NODES, Arena
from tests.chaos.network import network
from tests.integration.cluster.asking import until

import penstock
from penstock.client.network.connection import Connection
from penstock.client.network.endpoints import open_connection
from penstock.errors import Unavailable
from penstock.model.batch import SCHEMAS, Kind
from penstock.model.ids import partition_of
from penstock.wire.messages import Enqueued

HOME = "n1"
PARTITIONS = 6
ANSWERED_S = 20.0


@pytest.fixture
async def arena(tmp_path: Path) -> AsyncIterator[Arena]:
    """Three nodes and etcd, each with a network of its own."""
    disks: Any = {n: SimpleNamespace(data=tmp_path / n, free=lambda: None) for n in NODES}
    with network([*NODES, ETCD]) as net:
        made = Arena(tmp_path, net=net, disks=disks)
        try:
            await made.open()
            yield made
        finally:
            await made.close()


@asynccontextmanager
async def at_home(arena: Arena) -> AsyncIterator[penstock.Client]:
    """A client that may go anywhere, and has begun at the node that is cut off later."""
    urls = [f"penstock://{endpoint}" for endpoint in arena.endpoints()]
    while True:
        async with penstock.connect(urls, api_key=KEY) as client:
            assert client.link.live is not None
            if client.link.live.welcome.node == HOME:
                yield client
                return


async def cut_off(arena: Arena) -> None:
    for other in (*NODES, ETCD):
        if other != HOME:
            await asyncio.to_thread(arena.net.cut, HOME, other)
            await asyncio.to_thread(arena.net.cut, other, HOME)


def key_of(partition: int) -> str:
    return next(str(i) for i in range(999) if partition_of(b"%d" % i, PARTITIONS) == partition)


class Numbers:
    """Numbers that were put, and got, each in the partition of its remainder."""

    def __init__(self) -> None:
        self.put: dict[int, float] = {}  # when each was begun
        self.got: set[int] = set()
        self.slowest_s = 0.0

    async def produce(self, topic: penstock.Topic[int], partition: int) -> None:
        for number in range(partition, 1_000_000, PARTITIONS):
            began = time.monotonic()
            await topic.put(number, key=key_of(partition))
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            self.put[number] = began
            await asyncio.sleep(0.1)

    async def consume(self, topic: penstock.Topic[int]) -> None:
        async for message in topic.consume(concurrency=4):
            async with message:
                self.got.add(message.value)

    async def flow(self, since: float, within_s: float) -> None:
        """Until of each partition a number has been put and got that was begun since."""

        async def seen() -> bool:
            fresh = {n % PARTITIONS for n in self.got if self.put.get(n, 0.0) > since}
            return len(fresh) == PARTITIONS

        await until(seen, within_s)


@pytest.mark.timeout(180)
async def test_clients_of_a_node_that_is_cut_off_go_on_elsewhere(arena: Arena) -> None:
    numbers = Numbers()
    async with at_home(arena) as writer, at_home(arena) as reader:
        topic = await writer.topic("jobs", of=int, partitions=PARTITIONS, replication_factor=3)

        async def home_serves() -> bool:
            return HOME in await arena.coordinators("jobs")

        await until(home_serves, 60.0)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(numbers.produce(topic, p)) for p in range(PARTITIONS)]
            tasks.append(group.create_task(numbers.consume(await reader.topic("jobs", of=int))))
            await numbers.flow(0.0, ANSWERED_S)
            await cut_off(arena)
            await numbers.flow(time.monotonic(), ANSWERED_S)
            assert numbers.slowest_s < ANSWERED_S
            for task in tasks:
                task.cancel()


@pytest.mark.timeout(180)
async def test_what_a_node_that_is_cut_off_answers(arena: Arena) -> None:
    async with at_home(arena) as client:
        await client.topic("jobs", of=int, partitions=PARTITIONS, replication_factor=3)
        await client.topic("alone", of=int, partitions=PARTITIONS, replication_factor=1)
    lost = (await arena.coordinators("jobs")).index(HOME)
    kept = (await arena.coordinators("alone")).index(HOME)
    connection = await open_connection(arena.url_of(HOME), api_key=KEY)
    stream = await connection.lease_stream("jobs", credits=1)
    await cut_off(arena)
    async with asyncio.timeout(ANSWERED_S):
        with pytest.raises(Unavailable, match="unknown") as doubtful:
            await put(connection, "jobs", lost)
        assert "elsewhere" not in doubtful.value.details
        with pytest.raises(Unavailable) as ended:
            await anext(stream)
        assert ended.value.details["elsewhere"]
    for request in (
        put(connection, "jobs", lost),
        put(connection, "jobs", (lost + 1) % PARTITIONS),
        put(connection, "alone", (kept + 1) % PARTITIONS),
        connection.lease_stream("jobs", credits=1),
        connection.call("pop", topic="jobs", wait_ms=5000),
        connection.call("routes"),
    ):
        async with asyncio.timeout(2):
            with pytest.raises(Unavailable) as refused:
                await request
        assert refused.value.details["elsewhere"], refused.value
    assert (await put(connection, "alone", kept)).placed  # it needs nobody else
    await asyncio.to_thread(arena.net.mend_all)
    await until(lambda: put(connection, "jobs", lost))
    await connection.close()


async def put(connection: Connection, topic: str, partition: int) -> Enqueued:
    body = SCHEMAS[Kind.ENQ].encode(1, {"payload": [b"x"]})
    return await connection.enqueue(topic, [(partition, 1, body)])


@pytest.mark.timeout(180)
async def test_without_etcd_alone_nothing_changes(arena: Arena) -> None:
    async with at_home(arena) as client:
        topic = await client.topic("jobs", of=int, partitions=PARTITIONS, replication_factor=3)

        async def known() -> bool:
            statuses = [await arena.call(node, "cluster_status") for node in NODES]
            return all(part["coordinator"] for s in statuses for part in s["partitions"])

        await until(known)  # each node has heard from etcd who coordinates what
        for other in NODES:
            await asyncio.to_thread(arena.net.cut, other, ETCD)
            await asyncio.to_thread(arena.net.cut, ETCD, other)

        async def noticed() -> bool:
            statuses = [await arena.call(node, "cluster_status") for node in NODES]
            return not any(status["metadata"]["available"] for status in statuses)

        await until(noticed)
        for partition in range(PARTITIONS):
            await topic.put(partition, key=key_of(partition))
        assert client.link.live is not None and client.link.live.welcome.node == HOME
        assert {m.value for m in await topic.pop(PARTITIONS)} == set(range(PARTITIONS))
