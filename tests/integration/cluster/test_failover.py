"""Nodes are killed, stopped and wiped under writes; nothing that was acknowledged is lost."""

import asyncio
import contextlib
import shutil
from typing import Any

import numpy as np
import pytest
from tests.integration.cluster.asking import SOON_S, Asking

import penstock
from penstock.model.batch import Kind
from penstock.wire.messages import Changes, OpenSubscription

pytestmark = pytest.mark.asyncio(loop_scope="module")
ZEROS = np.zeros((1, 4))


async def test_every_node_takes_writes_of_a_replicated_topic(cluster: Asking) -> None:
    await cluster.create("shared", partitions=3)
    for partition in range(3):
        for node in ("n1", "n2", "n3"):
            await cluster.put("shared", node.encode(), at=node, partition=partition)
        assert await cluster.payloads("shared", partition=partition) == [b"n1", b"n2", b"n3"]

    async def shared_out() -> bool:
        coordinators = {await cluster.coordinator("shared", index) for index in range(3)}
        return coordinators == {"n1", "n2", "n3"}

    await cluster.until(shared_out)


async def test_a_killed_coordinator_is_replaced_and_nothing_is_lost(cluster: Asking) -> None:
    await cluster.create("killed")
    first = await cluster.coordinator("killed")
    async with cluster.writing("killed") as acknowledged:
        await cluster.until(lambda: _count(acknowledged, 50))
        await cluster.processes.kill(first)
        before = len(acknowledged)
        await cluster.until(lambda: _count(acknowledged, before + 50))
    assert max(took for _, took in acknowledged) < SOON_S
    held = await cluster.payloads("killed")
    assert {payload for payload, _ in acknowledged} <= set(held)
    await cluster.processes.start(first)
    await cluster.has_all("killed", first)


async def test_totals_survive_a_failover(cluster: Asking) -> None:
    """Before, they began at zero with each node that took a partition over."""
    await cluster.create("counted")
    first = await cluster.coordinator("counted")
    other = next(node for node in ("n1", "n2", "n3") if node != first)
    for i in range(5):
        await cluster.put("counted", b"%d" % i, at=first)
    async with penstock.connect(cluster.processes.url_of(other)) as client:
        topic = client.topic("counted")
        for message in await topic.pop(3):
            await message.ack()
        await cluster.processes.kill(first)
        await topic.put(b"after")
        found = await topic.stats()
    assert (found.enqueued_total, found.acked_total) == (6, 3)
    await cluster.processes.start(first)
    await cluster.has_all("counted", first)


async def test_a_preferred_coordinator_comes_back(cluster: Asking) -> None:
    await cluster.create("preferred")
    preferred = (await cluster.partition("preferred"))["voters"][0]

    async def coordinates() -> bool:
        return await cluster.coordinator("preferred") == preferred

    await cluster.until(coordinates)
    await cluster.processes.kill(preferred)
    await cluster.put_somehow("preferred", b"x")
    assert not await coordinates()
    await cluster.processes.start(preferred)
    await cluster.until(coordinates)
    assert await cluster.payloads("preferred") == [b"x"]


async def test_a_coordinator_that_was_taken_for_dead_follows_when_it_wakes(cluster: Asking) -> None:
    await cluster.create("asleep")
    asleep = await cluster.coordinator("asleep")
    cluster.processes.pause(asleep)
    awake = next(node for node in ("n1", "n2", "n3") if node != asleep)

    async def replaced() -> bool:
        return (await cluster.partition("asleep", at=awake))["coordinator"] not in ("", asleep)

    await cluster.until(replaced)
    await cluster.put("asleep", b"while it slept", at=awake)

    async def expired() -> bool:
        nodes = (await cluster.call("cluster_status", at=awake))["nodes"]
        return not next(node for node in nodes if node["id"] == asleep)["alive"]

    await cluster.until(expired)
    cluster.processes.resume(asleep)
    await cluster.processes.wait_ready()
    await cluster.has_all("asleep", asleep)
    assert await cluster.payloads("asleep") == [b"while it slept"]


async def test_a_cluster_without_etcd_goes_on(cluster: Asking) -> None:
    await cluster.create("orphan")
    await asyncio.to_thread(cluster.processes.etcd.kill)

    async def noticed() -> bool:
        return not (await cluster.call("cluster_status"))["metadata"]["available"]

    await cluster.until(noticed)
    assert await cluster.put_somehow("orphan", b"without") < SOON_S
    await asyncio.to_thread(cluster.processes.etcd.start)
    await cluster.processes.wait_ready()
    assert await cluster.put_somehow("orphan", b"with again") < SOON_S
    await cluster.create("after")
    assert await cluster.payloads("orphan") == [b"without", b"with again"]


async def test_a_wiped_replica_is_copied_and_counts_again(cluster: Asking) -> None:
    await cluster.create("wiped", retention_ms=0, max_retries=0, dlq=False)
    coordinator = await cluster.coordinator("wiped")
    wiped, other = await cluster.followers("wiped")
    await _fill_and_drop(cluster, "wiped", coordinator)
    await cluster.processes.kill(wiped)
    await asyncio.to_thread(shutil.rmtree, cluster.processes.nodes[wiped].data)
    await cluster.put("wiped", b"while it was away", at=coordinator)
    await cluster.processes.start(wiped)
    await cluster.has_all("wiped", wiped)
    await cluster.put("wiped", b"with all", at=coordinator)
    await cluster.processes.kill(other)  # only the copy is left to agree
    assert await cluster.put_somehow("wiped", b"with the copy") < SOON_S
    await cluster.restore()


async def test_nodes_are_restarted_in_turn_without_a_loss(cluster: Asking) -> None:
    await cluster.create("rolling", partitions=1)
    async with cluster.writing("rolling") as acknowledged:
        for node in ("n1", "n2", "n3"):
            assert await cluster.processes.stop(node) == 0
            before = len(acknowledged)
            await cluster.until(lambda before=before: _count(acknowledged, before + 20))
            await cluster.processes.start(node)
            await cluster.processes.wait_ready()
    assert max(took for _, took in acknowledged) < SOON_S
    assert {payload for payload, _ in acknowledged} <= set(await cluster.payloads("rolling"))


async def test_a_subscriber_goes_on_at_the_next_coordinator(cluster: Asking) -> None:
    await cluster.create("live", kind="delta", dimensions=4, partitions=3)
    async with asyncio.timeout(200), penstock.connect(cluster.processes.url) as client:
        vectors = client.deltas("live", origin="w")
        source = vectors.subscribe(cursor="reader")
        async with contextlib.aclosing(source), asyncio.TaskGroup() as tasks:
            seen: list[penstock.Released] = []
            reading = tasks.create_task(collect(source, seen, 300))
            for number in range(300):
                await vectors.put_columns([f"v{number % 40}"], ZEROS + number)
                if number == 100:
                    await cluster.processes.kill(await cluster.coordinator("live", 0))
            await reading
    places = [(released.partition, released.sequence) for released in seen]
    assert len(set(places)) == len(places) == 300
    for vector in {released.delta.vector_id for released in seen}:
        counts = [r.delta.clock["w"] for r in seen if r.delta.vector_id == vector]
        assert counts == sorted(counts)


async def collect(source: Any, seen: list[penstock.Released], count: int) -> None:
    while len(seen) < count:
        seen.append(await anext(source))


async def test_any_node_passes_a_subscription_on(cluster: Asking) -> None:
    await cluster.create("passed", kind="delta", dimensions=4)
    [elsewhere, _] = await cluster.followers("passed")
    connection = await cluster.connection(elsewhere)
    arrived: asyncio.Queue[Changes] = asyncio.Queue()
    request = OpenSubscription("passed", 0, credit_entries=4)
    stream, answer = await cluster.until(
        lambda: connection.subscribe(request, lambda _, changes, __: arrived.put_nowait(changes))
    )
    assert answer["position"] > 0  # from now on: behind the coordinator's barrier
    async with asyncio.timeout(100), penstock.connect(cluster.processes.url) as client:
        vectors = client.deltas("passed", origin="w")
        for number in range(12):  # more than its credit, unless that comes back
            await vectors.put_columns([f"v{number}"], ZEROS)
            while (changes := await arrived.get()).count == 0:
                pass
            stream.took(changes.count, 0)
    await stream.close()


async def _count(acknowledged: list[tuple[bytes, float]], wanted: int) -> bool:
    return len(acknowledged) >= wanted


async def _fill_and_drop(cluster: Asking, topic: str, node: str) -> None:
    """Write and settle until the log no longer begins at its start."""

    async def begins_later() -> bool:
        for _ in range(20):
            await cluster.put(topic, bytes(4096), at=node)
        await cluster.destroy("purge", topic, at=node)
        [status] = (await cluster.call("stats", at=node, topic=topic))["topics"]
        return bool(status["partitions"][0]["sequence_first"] > 1)

    await cluster.until(begins_later)


async def test_a_reader_at_a_follower_goes_on_when_the_coordinator_is_killed(
    cluster: Asking,
) -> None:
    await cluster.create("read")
    killed = await cluster.coordinator("read")
    follower, _ = await cluster.followers("read")
    stream = await (await cluster.connection(follower)).log_stream("read", partition=0)
    found: list[bytes] = []

    async def read() -> None:
        async for batches in stream:
            for batch in batches:
                if batch.kind is Kind.ENQ:
                    found.extend(batch.columns().binary("payload").tolist())

    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(read())
        async with cluster.writing("read") as acknowledged:
            await cluster.until(lambda: _count(acknowledged, 50))
            await cluster.processes.kill(killed)
            before = len(acknowledged)
            await cluster.until(lambda: _count(acknowledged, before + 50))
        held = await cluster.payloads("read")
        await cluster.until(lambda: _read(found, held))
        reading.cancel()
    assert found[: len(held)] == held  # each in its place, and no other in between


async def _read(found: list[bytes], held: list[bytes]) -> bool:
    return len(found) >= len(held)
