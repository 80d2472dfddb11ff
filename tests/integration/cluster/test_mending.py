"""A bit flips on the disk of a node that runs: its replica starts over, and nothing is lost."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.integration.cluster.asking import Asking, asking

from penstock.cluster.etcd import EtcdStore, cluster_prefix
from penstock.cluster.placement import record_key
from penstock.errors import PenstockError
from penstock.log.partition import PartitionLog
from penstock.model.ids import LeaseToken
from penstock.replication.assignment import PartitionRecord, decode_record

pytestmark = pytest.mark.asyncio(loop_scope="module")
MESSAGES = [b"%04d" % i * 500 for i in range(120)]
OPTIONS = {
    "cluster.lease_s": 2,
    "log.segment_bytes": 32 << 10,
    "log.allocate_bytes": 32 << 10,
    "log.reserve_bytes": 8 << 10,
    "log.cache_bytes": 0,
    "cache_bytes": 0,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Asking]:
    async with asking(tmp_path_factory.mktemp("mending"), OPTIONS) as made:
        yield made


async def fill(cluster: Asking, topic: str) -> int:
    """A topic whose messages die soon if nobody can read them, on all nodes; its id."""
    await cluster.create(topic, max_retries=2, visibility_ms=5000)
    for at in range(0, len(MESSAGES), 10):
        await asyncio.gather(*(cluster.put(topic, m, at="n1") for m in MESSAGES[at : at + 10]))
    for node in cluster.processes.nodes:
        await cluster.has_all(topic, node)
    found = (await cluster.call("topic_list"))["topics"]
    return next(int(config["id"]) for config in found if config["name"] == topic)


def folder_of(cluster: Asking, node: str, topic: int) -> Path:
    return cluster.processes.nodes[node].data / "topics" / f"{topic:08x}" / "0000"


def damage(folder: Path) -> None:
    oldest = min(folder.glob("*.seg"))
    with oldest.open("r+b") as file:
        file.seek(oldest.stat().st_size // 2)
        old = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([old[0] ^ 1]))


async def record_of(cluster: Asking, topic: int) -> PartitionRecord:
    processes = cluster.processes
    store = EtcdStore([processes.etcd.endpoint], prefix=cluster_prefix(processes.name))
    try:
        entry = await store.get(record_key((topic, 0)))
    finally:
        await store.close()
    assert entry is not None
    return decode_record(entry.value)


async def mended(cluster: Asking, node: str, topic: int, before: PartitionRecord) -> None:
    """Until another replica of the node counts, and the damaged one is removed."""
    kept = folder_of(cluster, node, topic).with_name("0000.rot")

    async def counts() -> bool:
        now = await record_of(cluster, topic)
        return now.uuids.get(node, before.uuids[node]) != before.uuids[node] and not kept.exists()

    await cluster.until(counts)


async def consume(cluster: Asking, topic: str) -> set[bytes]:
    """Everything, acknowledged; from whichever node answers."""
    got: list[bytes] = []
    while len(set(got)) < len(MESSAGES):
        for node in cluster.processes.running:
            try:
                popped = await cluster.call("pop", at=node, topic=topic, limit=10, wait_ms=200)
            except PenstockError:
                continue  # what it leased and could not deliver comes again
            tokens = [LeaseToken.parse(m["lease_token"]) for m in popped["messages"]]
            if tokens:
                await cluster.until(lambda at=node, of=tokens: settled(cluster, topic, at, of))
            got += [message["payload"] for message in popped["messages"]]
    return set(got)


async def settled(cluster: Asking, topic: str, node: str, tokens: list[LeaseToken]) -> bool:
    async with asyncio.timeout(10):
        await (await cluster.connection(node)).settle(topic, tokens)
    return True


async def check_whole(cluster: Asking, name: str, topic: int) -> None:
    """Nothing died, and at rest all logs are the same."""
    dead = (await cluster.call("stats", topic=name))["topics"][0]["dead"]
    assert dead == 0
    for node in cluster.processes.nodes:
        await cluster.has_all(name, node)


def chain_of(folder: Path, topic: int) -> tuple[int, int]:
    log = PartitionLog.open(folder, topic=topic, partition=0)
    try:
        assert sum(log.reader.scrub()) > 0
        return log.sequence_last, log.chain_last
    finally:
        log.close()


async def test_a_follower_whose_scrub_finds_damage(cluster: Asking) -> None:
    topic = await fill(cluster, "followed")
    [follower, _] = await cluster.followers("followed")
    before = await record_of(cluster, topic)
    damage(folder_of(cluster, follower, topic))
    assert not (await cluster.call("verify", at=follower))["ok"]
    await mended(cluster, follower, topic, before)
    assert (await record_of(cluster, topic)).epoch == before.epoch  # nobody else was disturbed
    assert (await cluster.call("node_status", at=follower))["damage"] is None
    assert (await cluster.call("verify", at=follower))["ok"]
    assert await cluster.payloads("followed") == MESSAGES
    await check_whole(cluster, "followed", topic)


async def test_a_coordinator_that_cannot_read_what_it_delivers(cluster: Asking) -> None:
    topic = await fill(cluster, "served")
    coordinator = await cluster.coordinator("served")
    before = await record_of(cluster, topic)
    damage(folder_of(cluster, coordinator, topic))
    async with asyncio.timeout(120):
        assert await consume(cluster, "served") == set(MESSAGES)
    await mended(cluster, coordinator, topic, before)
    assert (await record_of(cluster, topic)).epoch > before.epoch
    await check_whole(cluster, "served", topic)


async def test_a_node_that_starts_on_damage(cluster: Asking) -> None:
    topic = await fill(cluster, "started")
    [follower, _] = await cluster.followers("started")
    before = await record_of(cluster, topic)
    await cluster.processes.kill(follower)
    newest = max(folder_of(cluster, follower, topic).glob("*.seg"))
    newest.write_bytes(bytes(newest.stat().st_size))
    await cluster.processes.start(follower)
    await mended(cluster, follower, topic, before)
    await check_whole(cluster, "started", topic)


async def test_the_only_copy_is_refused_and_kept(cluster: Asking) -> None:
    await cluster.create("lonely", replication_factor=1)
    node = await cluster.coordinator("lonely")
    for message in MESSAGES[:20]:
        await cluster.put("lonely", message, at=node)
    topics = (await cluster.call("topic_list"))["topics"]
    topic = next(int(config["id"]) for config in topics if config["name"] == "lonely")
    await cluster.processes.kill(node)
    folder = folder_of(cluster, node, topic)
    newest = max(folder.glob("*.seg"))
    newest.write_bytes(bytes(newest.stat().st_size))
    held = sorted(path.name for path in folder.iterdir())
    await cluster.processes.start(node)

    async def reported() -> bool:
        return str(folder) in ((await cluster.call("node_status", at=node))["damage"] or "")

    await cluster.until(reported)
    assert sorted(path.name for path in folder.iterdir()) == held
    assert not folder.with_name("0000.rot").exists()


async def test_at_rest_all_logs_are_equal(cluster: Asking) -> None:
    """Of the tests before this one."""
    topics = (await cluster.call("topic_list"))["topics"]
    replicated = {c["name"]: int(c["id"]) for c in topics if c["replication_factor"] == 3}
    for name in replicated:
        await cluster.at_home(name)  # so that no more epochs are taken
    for name, node in itertools.product(replicated, cluster.processes.nodes):
        await cluster.has_all(name, node)
    # Killed at once: a node that stops hands over, and its heir begins an epoch with a barrier.
    await asyncio.gather(*map(cluster.processes.kill, cluster.processes.nodes))
    await cluster.processes.close()
    for topic in replicated.values():
        folders = [folder_of(cluster, node, topic) for node in cluster.processes.nodes]
        assert len({chain_of(folder, topic) for folder in folders}) == 1
    assert len(replicated) == 3
