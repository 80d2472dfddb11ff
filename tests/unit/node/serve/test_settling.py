"""Leases of several partitions that end at once: the trouble of one is not that of the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.integration.harness import tokens_of
from tests.unit.node.conftest import Cluster

from penstock.client.network.connection import Connection
from penstock.client.network.exchange import memory_pair
from penstock.client.network.link import Fleet, Link
from penstock.client.options import Options
from penstock.client.queue.messages import Settler
from penstock.model.ids import LeaseToken
from penstock.node import route
from penstock.node.session.session import Session

ROWS = [{"payload": b"x"}]


class Near:
    """Connections to one node of a cluster, which forwards what it does not serve."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._engine = cluster[name].engine

    async def connect(self) -> Connection:
        connection = Connection()
        memory_pair(connection, Session(self._engine))
        await connection.greeted()
        return connection

    async def close(self) -> None:
        pass


class Routeless(Fleet):
    """A cluster of which one node is known, and no routes."""

    def toward(self, topic: str, partition: int) -> None:
        return None

    def ask(self, topic: str) -> None:
        pass


@pytest.fixture
async def link(cluster: Cluster) -> AsyncIterator[Link]:
    near = Near(cluster, "a")
    link = Link(near, Options(retry_wait_s=0.001, retry_wait_s_max=0.01))
    await link.open()
    link.fleet = Routeless(link, near)  # type: ignore[arg-type]
    yield link
    await link.close(within_s=5)


async def leased(cluster: Cluster) -> list[LeaseToken]:
    """Of each partition of `jobs` one."""
    await cluster.topic("jobs", "ab")
    held = []
    for index, name in enumerate("ab"):
        await cluster["a"].enqueue("jobs", ROWS, partition=index)
        held += await cluster[name].pop("jobs", 1)
    return sorted(tokens_of(held))


async def test_an_acknowledgement_does_not_share_the_fate_of_another_partition(
    cluster: Cluster, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "WAIT_S", 0.05)
    here, away = await leased(cluster)
    settler = Settler(link, "jobs")
    cluster.give("jobs", 1, "")  # it is being taken over
    acks = [asyncio.ensure_future(settler.ack(token)) for token in (here, away)]
    async with asyncio.timeout(60):
        await acks[0]
        assert not acks[1].done()
        cluster.give("jobs", 1, "b")
        await acks[1]
    served = [cluster[name].engine.topics["jobs"].here(i) for i, name in enumerate("ab")]
    assert [partition.heap.totals.acked for partition in served] == [1, 1]
