"""Priority over partitions of several nodes: each pop against a plain list of what is there."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from tests.integration.cluster.asking import Asking

import penstock
from penstock.client.queue.entries import Item
from penstock.model.ids import partitions_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
PARTITIONS, K = 6, 12  # a list has two candidates of each partition, and is soon used up


class Shelf:
    """What is committed and not taken, as the clients know it."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._numbers = itertools.count()
        self._there: dict[str, int] = {}  # id -> priority
        self.taken: list[str] = []

    @property
    def left(self) -> dict[str, int]:
        """A message may be taken before its producer hears that it is there."""
        taken = set(self.taken)
        return {i: priority for i, priority in self._there.items() if i not in taken}

    async def put(self, topic: Any, count: int) -> None:
        """Most of the best ones share a partition, so that its list has to be refilled."""
        items = [self._item() for _ in range(count)]
        ids = await topic.put_many(items)
        self._there |= dict(zip(ids, (item.priority for item in items), strict=True))

    def _item(self) -> Item:
        key = str(next(self._numbers))
        crowded = partitions_of([key.encode()], PARTITIONS)[0] == 0
        low = 0 if crowded else 500
        return Item(key.encode(), priority=self._dice.randrange(low, low + 1000), key=key)

    async def pop(self, topic: Any) -> int:
        """Take some: how many better ones, of those that were there before, are left behind."""
        before = self.left
        messages = await topic.pop(self._dice.randint(1, 12), wait=5, visibility=60)
        for message in messages:
            await message.ack()
            before.pop(message.id, None)
            self.taken.append(message.id)
        worst = max((message.priority for message in messages), default=0)
        return sum(priority < worst for priority in before.values())


@asynccontextmanager
async def topics_at(cluster: Asking, name: str, nodes: Sequence[str]) -> AsyncIterator[list[Any]]:
    """The topic as each of these nodes serves it."""
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(penstock.connect(cluster.processes.url_of(node)))
            for node in nodes
        ]
        yield [client.topic(name, bytes, create=False) for client in clients]


async def pops_in_turn(shelf: Shelf, topics: Sequence[Any], *, leaving: int) -> None:
    for topic in itertools.cycle(topics):
        if len(shelf.left) <= leaving:
            return
        error = await shelf.pop(topic)
        assert error <= K


async def test_ranks_keep_to_the_bound_over_nodes_and_a_failover(cluster: Asking) -> None:
    await cluster.create("ranked", partitions=PARTITIONS, k=K)
    coordinators = {await cluster.coordinator("ranked", p) for p in range(PARTITIONS)}
    assert coordinators == {"n1", "n2", "n3"}  # so every pop is about other nodes too
    shelf = Shelf(seed=1)
    async with topics_at(cluster, "ranked", ["n1", "n2", "n3"]) as topics:
        await shelf.put(topics[0], 240)
        await pops_in_turn(shelf, topics, leaving=140)
    await cluster.processes.kill("n2")
    await cluster.processes.wait_ready()
    async with topics_at(cluster, "ranked", ["n1", "n3"]) as topics:
        await pops_in_turn(shelf, topics, leaving=60)
        await cluster.processes.start("n2")
        await cluster.processes.wait_ready()
        await pops_in_turn(shelf, topics, leaving=0)
    assert len(set(shelf.taken)) == len(shelf.taken) == 240


async def test_ranks_keep_to_the_bound_while_better_ones_come(cluster: Asking) -> None:
    await cluster.create("rushed", partitions=PARTITIONS, k=K)
    shelf = Shelf(seed=2)
    async with topics_at(cluster, "rushed", ["n1", "n2", "n3"]) as topics:
        await shelf.put(topics[0], 100)

        async def produce() -> None:
            while True:
                await shelf.put(topics[1], 3)

        async with asyncio.TaskGroup() as tasks:
            producing = tasks.create_task(produce())
            for topic in topics * 10:
                assert await shelf.pop(topic) <= K
            producing.cancel()
