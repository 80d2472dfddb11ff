"""Stages on three nodes and etcd: the queue's work over 20 replicated partitions.

Requests of many go to the coordinators as the SDK routes them. One cluster serves all runs of a
stage; each run has a topic of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.bench.stages import (
    BATCH,
    Run,
    Values,
    at_once,
    batches,
    expect_empty,
    expect_payloads,
    payloads,
)
from penstock.errors import Unavailable

if TYPE_CHECKING:
    from penstock.client.client import Client
    from penstock.client.network.connection import Connection
    from penstock.testing.cluster import ClusterProcesses

NODES: Final = 3
PARTITIONS: Final = 20
REPLICATION: Final = 3
ENQUEUE_MESSAGES: Final = 200_000
POP_MESSAGES: Final = 150_000
PUT_MESSAGES: Final = 30_000
SLOW_MESSAGES: Final = 100_000
WARM_MESSAGES: Final = 10_000
ENQUEUE_IN_FLIGHT: Final = 48  # requests, over all nodes
PUT_CONCURRENT: Final = 256
POP_CREDITS: Final = 3200  # of each stream; there is one at every node
ROUTED_S_MAX: Final = 20.0
POLL_S: Final = 0.02


@dataclass(frozen=True)
class ClusterBench:
    """A running cluster, and a client that knows its way."""

    cluster: ClusterProcesses
    client: Client
    run: Run

    def cpu_seconds(self) -> float:
        """User and system time of all nodes so far."""
        return sum(node.cpu_seconds() for node in self.cluster.nodes.values())

    async def topic(self, name: str) -> str:
        """A new topic on all nodes, with every route known and every node connected."""
        await self.client.call(
            "topic_create",
            config={"name": name, "partitions": PARTITIONS, "replication_factor": REPLICATION},
        )
        await self.cluster.wait_ready()
        await self.routed(name)
        return name

    async def routed(self, topic: str) -> None:
        """Wait until requests go straight to coordinators."""
        deadline = time.monotonic() + ROUTED_S_MAX
        link = self.client.link
        for partition in range(PARTITIONS):
            while True:
                node = link.coordinator(topic, partition)
                nearest = link.toward(topic, partition)
                if nearest is not None and node == nearest.welcome.node:
                    break
                if time.monotonic() > deadline:
                    raise Unavailable(f"no way to {topic}/{partition} at {node or 'nobody'}")
                await asyncio.sleep(POLL_S)


@asynccontextmanager
async def fresh_cluster(run: Run) -> AsyncIterator[ClusterBench]:
    import penstock
    from penstock.testing.cluster import cluster_processes

    async with (
        cluster_processes(run.folder, nodes=NODES) as cluster,
        penstock.connect(cluster.url) as client,
    ):
        yield ClusterBench(cluster, client, run)


async def fill(bench: ClusterBench, topic: str, count: int) -> float:
    """Enqueue `count` messages in batches of 100 over all partitions; messages per second."""
    from penstock.model.batch import SCHEMAS, Kind

    made, schema = batches(), SCHEMAS[Kind.ENQ]
    link, identity = bench.client.link, bench.client.identity(topic)

    async def enqueue_batch(turn: int) -> None:
        partition = turn % PARTITIONS
        key = identity.run(partition, identity.take(partition, BATCH), BATCH)
        body = schema.encode(BATCH, {**made[turn % len(made)], **key}, runs=1)
        part = (partition, BATCH, body)
        # With its producer key: the partition may move, and then it is sent again.
        await link.request(partial(_enqueue, topic=topic, part=part), at=(topic, partition))

    began = time.perf_counter()
    await at_once(ENQUEUE_IN_FLIGHT, count // BATCH, enqueue_batch)
    return count / (time.perf_counter() - began)


async def _enqueue(connection: Connection, *, topic: str, part: Any) -> None:
    await connection.enqueue(topic, [part])


async def enqueue(bench: ClusterBench) -> list[Values]:
    rows = []
    for number in range(bench.run.runs):
        topic = await bench.topic(f"enqueue-{number}")
        await fill(bench, topic, bench.run.count(WARM_MESSAGES))
        count = bench.run.count(ENQUEUE_MESSAGES)
        used = bench.cpu_seconds()
        rate = await fill(bench, topic, count)
        cpu = (bench.cpu_seconds() - used) / count
        rows.append({"enqueue_batch100_per_s": rate, "nodes_cpu_us_per_enqueue": cpu * 1e6})
    return rows


async def pop(bench: ClusterBench) -> list[Values]:
    rows = []
    count = bench.run.count(POP_MESSAGES)
    for number in range(bench.run.runs):
        topic = await bench.topic(f"pop-{number}")
        await fill(bench, topic, count)
        used = bench.cpu_seconds()
        rate = await _drain(bench, topic, count)
        cpu = (bench.cpu_seconds() - used) / count
        await expect_empty(bench.client.call, topic)
        rows.append({"pop_ack_batch100_per_s": rate, "nodes_cpu_us_per_pop_ack": cpu * 1e6})
    return rows


async def _drain(bench: ClusterBench, topic: str, count: int) -> float:
    """A lease stream at every node, each batch acknowledged at its coordinator."""
    draining = _Draining(bench.client, topic, count)
    began = time.perf_counter()
    streams = [asyncio.create_task(draining.at(node.url)) for node in bench.cluster.nodes.values()]
    finished = asyncio.ensure_future(draining.done.wait())
    try:
        await asyncio.wait({finished, *streams}, return_when=asyncio.FIRST_COMPLETED)
        took = time.perf_counter() - began
    finally:
        finished.cancel()
        for stream in streams:
            stream.cancel()
    for result in await asyncio.gather(*streams, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
    return count / took


class _Draining:
    def __init__(self, client: Client, topic: str, count: int) -> None:
        self._link, self._topic, self._left = client.link, topic, count
        self.done = asyncio.Event()

    async def at(self, url: str) -> None:
        """Consume through one node until all is done."""
        from penstock.client.network.endpoints import open_connection

        connection = await open_connection(url)
        try:
            stream = await connection.lease_stream(
                self._topic, credits=POP_CREDITS, batch_max=BATCH
            )
            async with asyncio.TaskGroup() as settling:
                async for batch in stream:
                    expect_payloads(batch.columns)
                    settling.create_task(self._settle(batch))
        finally:
            await connection.close()

    async def _settle(self, batch: Any) -> None:
        head = batch.delivery
        tokens = np.arange(head.token_first, head.token_first + head.count, dtype=np.uint64)

        async def settle(connection: Connection) -> list[int]:
            return await connection.settle_range(self._topic, head.token(0), tokens)

        lost = await self._link.request(settle, at=(self._topic, head.partition))
        self._left -= head.count - len(lost)
        if self._left <= 0:
            self.done.set()


async def put(bench: ClusterBench) -> list[Values]:
    rows = []
    count = bench.run.count(PUT_MESSAGES)
    pool = payloads()
    for number in range(bench.run.runs):
        topic = bench.client.topic(await bench.topic(f"put-{number}"), of=bytes, create=False)

        async def put_one(turn: int, topic: Any = topic) -> None:
            await topic.put(pool[turn % len(pool)])

        began = time.perf_counter()
        await at_once(PUT_CONCURRENT, count, put_one)
        rows.append({"put_single_per_s": count / (time.perf_counter() - began)})
    return rows


async def slow_follower(bench: ClusterBench) -> list[Values]:
    """Alternately with a node that is stopped and without; each pair gives a ratio."""
    rows = []
    count = bench.run.count(SLOW_MESSAGES)
    topic = await bench.topic("slow")
    await fill(bench, topic, bench.run.count(WARM_MESSAGES))
    stopped = list(bench.cluster.nodes)[-1]
    for _ in range(bench.run.runs):
        with_all = await fill(bench, topic, count)
        bench.cluster.pause(stopped)
        try:
            await _served_without(bench, topic, stopped)
            without = await fill(bench, topic, count)
        finally:
            bench.cluster.resume(stopped)
        await _caught_up(bench, topic)
        rows.append(
            {
                "slow_follower_ratio": without / with_all,
                "enqueue_all_follow_per_s": with_all,
                "enqueue_one_stopped_per_s": without,
            }
        )
    return rows


async def _served_without(bench: ClusterBench, topic: str, stopped: str) -> None:
    """Until the others coordinate all partitions: then the stopped node is a mere follower."""
    link = bench.client.link
    deadline = time.monotonic() + ROUTED_S_MAX
    for partition in range(PARTITIONS):
        while link.coordinator(topic, partition) in (stopped, "", None):
            if time.monotonic() > deadline:
                raise Unavailable(f"{topic}/{partition} stayed with a node that is stopped")
            await asyncio.sleep(POLL_S)
    await bench.routed(topic)


async def _caught_up(bench: ClusterBench, topic: str) -> None:
    """Until every follower has everything, and coordinators are back where they belong."""
    deadline = time.monotonic() + 3 * ROUTED_S_MAX
    while True:
        await bench.cluster.wait_ready()
        parts = [p for p in (await bench.cluster.status())["partitions"] if p["topic"] == topic]
        behind = [f for p in parts for f in p["followers"] if f["lag"] or not f["connected"]]
        home = all(p["coordinator"] == p["voters"][0] for p in parts)
        whole = all(len(p["followers"]) == REPLICATION - 1 for p in parts)
        if home and whole and not behind:
            await bench.routed(topic)
            return
        if time.monotonic() > deadline:
            raise Unavailable(f"{len(behind)} followers of {topic} did not catch up")
        await asyncio.sleep(POLL_S * 5)
