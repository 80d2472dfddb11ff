"""A client takes the place of an earlier one of the same producer name, in the whole topic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.integration.harness import Node

import penstock
from penstock.client.options import Options
from penstock.errors import InvalidArgument, StaleProducer
from penstock.log.folder import FORMAT_PRODUCERS
from penstock.model.batch import Kind
from penstock.node.session.session import listen, port_of
from penstock.server.embedded import open_embedded

Connect = Callable[..., "asyncio.Future[penstock.Client]"]
KEYS = [f"user-{i}" for i in range(12)]
ROW = [{"payload": b"x"}]


@pytest.fixture
async def connect(tmp_path: Path) -> AsyncIterator[Connect]:
    """Clients of one node, the later ones with the higher epochs."""
    async with AsyncExitStack() as stack:
        embedded = await open_embedded(tmp_path)
        stack.push_async_callback(embedded.close)
        server = await listen(embedded.engine, host="127.0.0.1", port=0, tls=None)
        stack.callback(server.close)
        url = f"penstock://localhost:{port_of(server)}"

        async def one(producer: str | None = None) -> penstock.Client:
            made = penstock.connect(url, options=Options(producer=producer))
            return await stack.enter_async_context(made)

        yield one  # type: ignore[misc]


async def refused(topic: penstock.Topic[bytes]) -> int:
    """How many of twelve puts, one after the other, are refused."""
    count = 0
    for key in KEYS:
        try:
            await topic.put(b"old", key=key)
        except StaleProducer:
            count += 1
    return count


async def test_a_client_that_was_replaced_is_refused_in_every_partition(connect: Connect) -> None:
    """Before, 9 of 12 puts of the earlier client went through: only the partition that the later
    one had written to knew of it."""
    earlier = (await connect("shop")).topic("jobs", partitions=12)
    assert await refused(earlier) == 0
    later = (await connect("shop")).topic("jobs", partitions=12)
    await later.put(b"new", key=KEYS[0])
    assert await refused(earlier) == 12
    with pytest.raises(StaleProducer):
        await earlier.put_many([penstock.Item(b"old", key=key) for key in KEYS])
    with pytest.raises(StaleProducer):
        await earlier.put_many([b"old"], atomic=False)
    await later.put_many([penstock.Item(b"new", key=key) for key in KEYS])
    assert (await later.stats()).ready == 12 + 1 + 12


async def test_an_earlier_client_does_not_begin_after_a_later_one(connect: Connect) -> None:
    """Before, its first puts went to partitions that had not heard of the later one."""
    clients = [await connect("shop") for _ in range(2)]
    earlier, later = (client.topic("jobs", partitions=12) for client in clients)
    await later.put(b"new", key=KEYS[0])
    assert await refused(earlier) == 12


async def test_who_only_consumes_replaces_nobody(connect: Connect) -> None:
    earlier = (await connect("shop")).topic("jobs", partitions=4)
    await earlier.put(b"x")
    later = (await connect("shop")).topic("jobs", partitions=4)
    await (await later.pop())[0].ack()
    assert await refused(earlier) == 0


async def test_clients_without_a_name_write_no_record(node: Node) -> None:
    await node.topic("jobs", partitions=4)
    client = penstock.Client(_Near(node), Options())
    async with client:
        await client.topic("jobs", partitions=4).put(b"x")
    for partition in node.engine.topics["jobs"].local:
        assert Kind.PRODUCER not in {batch.kind for batch in partition.log.reader.scan(1)}


class _Near:
    """Connections to a node in this process."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def connect(self) -> penstock.Connection:
        return (await self._node.connect()).connection

    async def close(self) -> None:
        """The node is the test's."""


@pytest.mark.parametrize("restart", ["clean", "snapshot", "crash"])
async def test_a_beginning_outlives_a_restart(node: Node, restart: str) -> None:
    await node.topic("jobs", partitions=3)
    await node.call("producer_begin", topic="jobs", producer="p", epoch=7)
    if restart == "snapshot":
        await node.call("snapshot", topic="jobs")
    await (node.crash() if restart == "crash" else node.restart())
    for index in range(3):
        with pytest.raises(StaleProducer) as stale:
            await node.enqueue("jobs", ROW, partition=index, producer=(f"p.{index}", 6, 1))
        assert stale.value.details["epoch"] == 7
        await node.enqueue("jobs", ROW, partition=index, producer=(f"p.{index}", 7, 1))
    assert await node.counts() == (3, 0, 0, 0)


async def test_what_was_written_in_an_epoch_is_known_after_it_begins_once_more(node: Node) -> None:
    await node.topic("jobs", partitions=2)
    await node.enqueue("jobs", ROW, partition=1, producer=("p.1", 7, 1))
    await node.call("producer_begin", topic="jobs", producer="p", epoch=7)
    again = await node.enqueue("jobs", ROW, partition=1, producer=("p.1", 7, 1))
    assert len(again.duplicates) == 1
    with pytest.raises(StaleProducer):
        await node.call("producer_begin", topic="jobs", producer="p", epoch=6)


async def test_a_beginning_is_forgotten_with_its_producer(node: Node) -> None:
    """That is why clients begin again before it is."""
    await node.topic("jobs", dedup_ms=10_000)
    await node.call("producer_begin", topic="jobs", producer="p", epoch=7)
    await node.advance(9)
    await node.call("producer_begin", topic="jobs", producer="p", epoch=7)
    await node.advance(9)
    await node.enqueue("jobs", ROW, producer=("other", 1, 1))  # log time moves on
    with pytest.raises(StaleProducer):
        await node.enqueue("jobs", ROW, producer=("p.0", 6, 1))
    await node.advance(11)
    await node.enqueue("jobs", ROW, producer=("other", 1, 2))
    await node.enqueue("jobs", ROW, producer=("p.0", 6, 1))


async def test_ids_that_are_the_same_in_all_partitions(node: Node) -> None:
    """As callers of the gateways have them."""
    await node.topic("jobs", partitions=3)
    await node.call("producer_begin", topic="jobs", producer="p", epoch=7, suffixed=False)
    for index in range(3):
        with pytest.raises(StaleProducer):
            await node.enqueue("jobs", ROW, partition=index, producer=("p", 6, 1))


@pytest.mark.parametrize(
    "arguments", [{"producer": ""}, {"producer": "p" * 127}, {"epoch": -1}, {"epoch": 1 << 63}]
)
async def test_a_beginning_that_makes_no_sense_is_refused(
    node: Node, arguments: dict[str, object]
) -> None:
    await node.topic("jobs")
    with pytest.raises(InvalidArgument):
        await node.call("producer_begin", topic="jobs", **{"producer": "p", "epoch": 1} | arguments)


async def test_a_folder_with_such_records_is_kept_from_older_versions(node: Node) -> None:
    await node.topic("jobs")
    await node.enqueue("jobs", ROW, producer=("p.0", 1, 1))
    assert node.engine.folder.format < FORMAT_PRODUCERS
    await node.call("producer_begin", topic="jobs", producer="p", epoch=7)
    assert node.engine.folder.format == FORMAT_PRODUCERS
    await node.restart()
    assert node.engine.folder.format == FORMAT_PRODUCERS
