"""The SDK and the command line against three real nodes and a real etcd."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.integration.cluster.asking import until

import penstock
from penstock.model.ids import partition_of
from penstock.spark.source.access import NodeAccess
from penstock.testing.cluster import ClusterProcesses, cluster_processes
from penstock.testing.process import clean_environment

PARTITIONS = 6
UP_S_MAX = 200
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ClusterProcesses]:
    async with cluster_processes(tmp_path_factory.mktemp("cluster")) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(shared: ClusterProcesses) -> ClusterProcesses:
    """All nodes up, whatever the test before did to them."""
    for node in set(shared.nodes) - set(shared.running):
        await shared.start(node)
    await shared.wait_ready()
    return shared


def key_of(partition: int) -> str:
    return next(str(i) for i in range(999) if partition_of(b"%d" % i, PARTITIONS) == partition)


async def committed(cluster: ClusterProcesses, topic: penstock.Topic[Any]) -> Counter[Any]:
    """Every message in the topic's log, with how often it stands there."""
    found: Counter[Any] = Counter()

    async def served() -> list[dict[str, Any]] | None:
        """Nothing while a partition is being handed back to a node that has returned."""
        parts = [p for p in (await cluster.status())["partitions"] if p["topic"] == topic.name]
        return parts if all(p["sequence_committed"] is not None for p in parts) else None

    for state in await until(served):
        last = state["sequence_committed"]
        async for batch in topic.log(state["partition"]).batches():
            if batch.kind.name == "ENQ":
                found.update(bytes(payload) for payload in batch.columns().binary("payload") or ())
            if batch.last >= last:
                break
    return found


def penstock_cli(*arguments: str, url: str) -> tuple[int, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "--url", url, *arguments, "--json"],
        capture_output=True, env=clean_environment(), timeout=200, check=False,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout)


async def test_kills_and_pauses_under_load_lose_and_double_nothing(
    cluster: ClusterProcesses,
) -> None:
    acknowledged: list[bytes] = []
    ended = asyncio.Event()
    one_node = cluster.url_of("n1")  # the others are learned
    async with penstock.connect(one_node) as client:
        topic = await client.topic("kills", of=bytes, partitions=PARTITIONS)

        async def produce(worker: int) -> None:
            number = 0
            while not ended.is_set():
                payload = b"%d-%d" % (worker, number)
                await topic.put(payload, key=str(number) if number % 2 else None)
                acknowledged.append(payload)
                number += 1

        async with asyncio.TaskGroup() as group:
            for worker in range(8):
                group.create_task(produce(worker))
            await asyncio.sleep(1)
            await cluster.kill("n1")
            await asyncio.sleep(3)
            await cluster.start("n1")
            await cluster.wait_ready()
            cluster.pause("n2")
            await asyncio.sleep(4)
            cluster.resume("n2")
            before = len(acknowledged)
            await asyncio.sleep(1)
            ended.set()
        assert len(acknowledged) > before
        await cluster.wait_ready()
        found = await committed(cluster, topic)
    assert len(acknowledged) == len(set(acknowledged))
    assert not set(acknowledged) - set(found), "acknowledged and lost"
    assert not set(found) - set(acknowledged), "never acknowledged"
    assert max(found.values()) == 1, "written twice"


async def test_a_consumer_moves_to_another_node_and_finishes(cluster: ClusterProcesses) -> None:
    async with penstock.connect(cluster.url) as client:
        topic = await client.topic("moves", of=int, partitions=PARTITIONS)
        await topic.put_many([penstock.Item(i, key=str(i)) for i in range(300)], atomic=False)
        seen: set[int] = set()
        home = client.link.live
        assert home is not None
        async with topic.consume(concurrency=4, visibility=5) as messages:
            async for message in messages:
                async with message:
                    seen.add(message.value)
                if len(seen) == 100:
                    await cluster.kill(home.welcome.node)
                if len(seen) == 300:
                    break
    assert seen == set(range(300))


async def test_stopping_and_starting_each_node_fails_no_call(cluster: ClusterProcesses) -> None:
    async with penstock.connect(cluster.url) as client:
        topic = await client.topic("rolling", of=int, partitions=PARTITIONS)
        popped = await client.topic("rolling-pops", of=int, partitions=PARTITIONS)
        empty = await client.topic("rolling-waits", of=int, partitions=PARTITIONS)
        ended = asyncio.Event()
        calls = Counter[str]()

        async def repeat(name: str, call: Callable[[], Awaitable[Any]]) -> None:
            while not ended.is_set():
                await call()
                calls[name] += 1

        async def put() -> None:
            await popped.put(1)
            await topic.stats()

        async def put_batch() -> None:
            await topic.put_many([penstock.Item(1, key=key_of(p)) for p in range(PARTITIONS)])

        async def pop() -> None:
            for message in await popped.pop(wait=1):
                await message.ack()

        async def consume() -> None:
            async with topic.consume(concurrency=4) as messages:
                async for message in messages:
                    await message.ack()
                    calls["consume"] += 1
                    if ended.is_set():
                        break

        async with asyncio.TaskGroup() as group:
            group.create_task(repeat("put", put))
            group.create_task(repeat("atomic", put_batch))
            group.create_task(repeat("pop", pop))
            group.create_task(repeat("wait", lambda: empty.pop(wait=2)))
            group.create_task(consume())
            for node in list(cluster.nodes):
                assert await cluster.stop(node) == 0
                await cluster.start(node)
                await cluster.wait_ready()
            ended.set()
    assert set(calls) == {"put", "atomic", "pop", "wait", "consume"}


async def test_requests_go_straight_to_coordinators(cluster: ClusterProcesses) -> None:
    async with penstock.connect(cluster.url_of("n2")) as client:
        topic = await client.topic("routes", of=bytes, partitions=PARTITIONS)
        async with asyncio.timeout(60):
            while set(owners := await cluster.coordinators("routes")) != {"n1", "n2", "n3"}:
                await asyncio.sleep(0.05)
            for partition, owner in enumerate(owners):
                while True:
                    nearest = client.link.toward("routes", partition)
                    if nearest is not None and nearest.welcome.node == owner:
                        break
                    await topic.put(b"x", key=key_of(partition))


def read_everything(url: str, topic: str) -> int:
    """As Spark's workers do: how many messages the committed ranges of all partitions hold."""
    access = NodeAccess(url)
    try:
        return sum(
            batch.entries
            for state in access.log_status(topic)
            for batches in access.read_range(topic, state.partition, 1, state.readable)
            for batch in batches
        )
    finally:
        access.close()


async def test_spark_reads_the_partitions_of_all_nodes(cluster: ClusterProcesses) -> None:
    async with penstock.connect(cluster.url) as client:
        topic = await client.topic("read", of=int, partitions=PARTITIONS)
        await asyncio.gather(*(topic.put(i, key=str(i)) for i in range(200)))
    assert await asyncio.to_thread(read_everything, cluster.url, "read") == 200


async def test_the_command_line_shows_and_drains(cluster: ClusterProcesses) -> None:
    async with penstock.connect(cluster.url) as client:
        for other in await client.topics():  # in three replicas, which two nodes cannot hold
            await client.topic(other["name"], create=False).delete(force=True)
        await client.topic("drained", partitions=PARTITIONS, replication_factor=1)
    code, status = await asyncio.to_thread(penstock_cli, "cluster", "status", url=cluster.url)
    assert code == 0 and [node["id"] for node in status["nodes"]] == ["n1", "n2", "n3"]
    code, plan = await asyncio.to_thread(
        penstock_cli, "cluster", "drain", "n3", "--dry-run", url=cluster.url
    )
    assert code == 0 and plan["planned"] > 0 and plan["done"] == 0
    code, done = await asyncio.to_thread(
        penstock_cli, "cluster", "drain", "n3", "--force", url=cluster.url
    )
    assert code == 0 and done["done"] == done["planned"] == plan["planned"]
    assert "n3" not in await cluster.coordinators("drained")


async def test_up_serves_until_it_is_stopped(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock.cli", "cluster", "up", "--nodes", "3",
        "--data", str(tmp_path / "up"), "--json", stdout=asyncio.subprocess.PIPE,
        env=clean_environment(),
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(UP_S_MAX):
            told = json.loads(await process.stdout.readline())
            async with penstock.connect(told["url"]) as client:
                await client.topic("jobs", of=str).put("hello")
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
    for node in told["nodes"]:
        with pytest.raises(ProcessLookupError):
            os.kill(node["pid"], 0)
