"""New replicas are copied at a pace; those that count are not held back."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.unit.node.replica.hosting import Cluster, payloads, put

from penstock.node.replica import log_ends as sending
from penstock.node.replica.host import Host
from penstock.node.replica.ports import CopyPace

BYTES_PER_S = 256 << 10
MESSAGE = b"x" * 1000
PUTS, EACH = 10, 20  # some 200 KB, of which a slice takes a batch


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """Three hosts, and a fourth that is not started."""
    monkeypatch.setattr(sending, "SLICE_BYTES", 16 << 10)
    cluster = Cluster(tmp_path, nodes="abcd")
    uuids = {node: uuid for node, uuid in cluster.record.uuids.items() if node != "d"}
    cluster.record = msgspec.structs.replace(cluster.record, voters=tuple("abc"), uuids=uuids)
    cluster.options = replace(cluster.options, seed_bytes_per_s=BYTES_PER_S)
    await cluster.start(*"abc")
    yield cluster
    await cluster.stop()
    assert cluster.fatal == []


async def write(leader: Host) -> None:
    for _ in range(PUTS):
        await put(leader, [MESSAGE] * EACH)


async def learn(cluster: Cluster) -> None:
    """`d` is to be a replica too."""
    cluster.tell(msgspec.structs.replace(cluster.record, target=tuple("abcd"), learners=("d",)))
    await cluster.start("d")


async def test_a_new_replica_is_copied_at_the_pace(cluster: Cluster) -> None:
    leader = await cluster.serving()
    await write(leader)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await learn(cluster)
    await cluster.until(lambda: "d" in cluster.record.voters, ticks=100_000)
    assert loop.time() - began >= 0.8 * PUTS * EACH * len(MESSAGE) / BYTES_PER_S
    await cluster.at_rest()
    assert payloads(cluster.hosts["d"]) == payloads(leader)


async def test_nobody_else_waits_for_what_is_copied(cluster: Cluster) -> None:
    leader = await cluster.serving()
    await write(leader)
    leader.around.pace.take(60 * BYTES_PER_S)  # the copy has a minute to wait
    await learn(cluster)
    sent = cluster.networks[leader.around.node].bytes_to
    await cluster.until(lambda: "d" in sent)
    async with asyncio.timeout(30):
        await write(leader)
    await cluster.until(lambda: cluster.hosts["c"].committed == leader.log.sequence_last)
    assert sent["d"] < 2 * EACH * 1100
    assert "d" not in cluster.record.voters


async def test_a_voter_that_was_away_is_not_held_back(cluster: Cluster) -> None:
    leader = await cluster.serving()
    away = next(name for name in "bc" if cluster.hosts[name] is not leader)
    await cluster.stop(away)
    await write(leader)
    leader.around.pace.take(60 * BYTES_PER_S)
    await cluster.start(away)
    async with asyncio.timeout(30):
        await cluster.at_rest()


async def test_all_copies_together_keep_the_pace() -> None:
    pace, loop = CopyPace(1_000_000), asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(pace.spend(10_000) for _ in range(5)))
    assert loop.time() - began >= 0.05
