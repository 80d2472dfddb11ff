"""Damage to a log of one of several hosts: it hands over, and starts over as a copy."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.unit.node.replica.hosting import LOG, Cluster, payloads, put

from penstock.errors import Corruption
from penstock.log.identity import asides
from penstock.node.replica.host import Host
from penstock.node.replica.log_ends import RESIGN_AGAIN_MS
from penstock.node.upkeep import scrub
from penstock.replication.replica import LogHealth, Role

UNCACHED = dataclasses.replace(LOG, cache_bytes=0)
MESSAGES = [b"%04d" % i * 250 for i in range(200)]


@asynccontextmanager
async def started(folder: Path, nodes: str = "abc") -> AsyncIterator[Cluster]:
    cluster = Cluster(folder, nodes=nodes, log=UNCACHED)
    await cluster.start()
    yield cluster
    await cluster.stop()
    assert cluster.fatal == []


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with started(tmp_path) as cluster:
        yield cluster


async def fill(cluster: Cluster) -> Host:
    """Some sealed segments on every replica; the host that serves."""
    leader = await cluster.serving()
    for at in range(0, len(MESSAGES), 10):
        await put(leader, MESSAGES[at : at + 10])
    await cluster.at_rest()
    return leader


def damage(host: Host, segment: int = 0) -> None:
    """Flip a bit of a sealed segment."""
    found = sorted(host.log.folder.glob("*.seg"))
    assert len(found) > segment + 1
    data = bytearray(found[segment].read_bytes())
    data[len(data) // 2] ^= 1
    found[segment].write_bytes(data)


async def find(host: Host) -> None:
    with pytest.raises(Corruption):
        await scrub(host.log, float("inf"))


def renewed(cluster: Cluster, *names: str) -> Callable[[], bool]:
    def all_of_them() -> bool:
        uuids = cluster.record.uuids
        return all(uuids.get(name, f"uuid-{name}") != f"uuid-{name}" for name in names)

    return all_of_them


async def check_whole(cluster: Cluster) -> None:
    await cluster.at_rest()
    for host in cluster.hosts.values():
        assert payloads(host) == MESSAGES
        assert await scrub(host.log, float("inf")) > 0
    assert len({host.heap.digest() for host in cluster.hosts.values()}) == 1
    assert len({host.log.chain_last for host in cluster.hosts.values()}) == 1


async def test_a_damaged_follower_becomes_another_replica(cluster: Cluster) -> None:
    await fill(cluster)
    follower, folder = cluster.hosts["b"], cluster.hosts["b"].log.folder
    damage(follower)
    await find(follower)
    await cluster.until(renewed(cluster, "b"))
    await check_whole(cluster)
    assert [error.details["partition"] for error in cluster.damages] == [0]
    await cluster.until(lambda: not asides(folder))


async def test_a_damaged_coordinator_hands_over_first(cluster: Cluster) -> None:
    leader = await fill(cluster)
    damage(leader)
    await find(leader)
    await cluster.until(renewed(cluster, "a"))
    await check_whole(cluster)
    assert cluster.record.epoch == 2 and cluster.record.coordinator != "a"


async def test_a_damaged_copy_is_kept_until_the_new_one_counts(cluster: Cluster) -> None:
    leader = await fill(cluster)
    follower = cluster.hosts["b"]
    cluster.clogged.add("b")  # it cannot catch up
    damage(follower)
    await find(follower)
    await cluster.until(lambda: cluster.hosts.get("b", follower) is not follower)
    [kept] = asides(follower.log.folder)
    assert list(kept.glob("*.seg")) and not renewed(cluster, "b")()
    cluster.clogged.clear()
    leader.on_writable("b")
    await cluster.until(lambda: renewed(cluster, "b")() and not kept.exists())


async def test_what_an_acknowledgement_makes_it_read_is_damaged(cluster: Cluster) -> None:
    """The follower that sent it hears of no error, and gets the rest from another."""
    leader = await cluster.serving()
    await cluster.until(lambda: len(leader.replica.coordinator.senders) == 2)
    cluster.isolate("c")
    for at in range(0, len(MESSAGES), 10):
        await put(leader, MESSAGES[at : at + 10])
    await cluster.until(lambda: cluster.hosts["b"].committed == leader.log.sequence_last)
    damage(leader)
    cluster.heal("c")
    await cluster.until(renewed(cluster, "a"))
    await check_whole(cluster)


async def test_nothing_is_dropped_while_nobody_else_serves(cluster: Cluster) -> None:
    leader = await fill(cluster)
    cluster.isolate("b")
    cluster.isolate("c")
    damage(leader)
    await find(leader)
    for _ in range(3 * RESIGN_AGAIN_MS // 20):
        await cluster.tick()
    assert cluster.hosts["a"] is leader and leader.replica.health is LogHealth.DAMAGED
    assert leader.role is Role.SERVING and asides(leader.log.folder) == []
    cluster.heal("b")
    await cluster.until(lambda: cluster.hosts["b"].role is Role.SERVING)
    cluster.heal("c")
    await cluster.until(renewed(cluster, "a"))
    await check_whole(cluster)


async def test_a_follower_is_not_dropped_while_nobody_coordinates(cluster: Cluster) -> None:
    await fill(cluster)
    follower = cluster.hosts["b"]
    cluster.quiet |= {"b", "c"}
    await cluster.stop("a")
    damage(follower)
    await find(follower)
    for _ in range(500):
        await cluster.tick()
    assert cluster.hosts["b"] is follower and cluster.record.uuids["b"] == "uuid-b"
    cluster.quiet.clear()
    await cluster.until(lambda: cluster.record.coordinator == "c")  # it lets the other go first
    await cluster.start("a")
    await cluster.until(renewed(cluster, "b"))
    await check_whole(cluster)


async def test_what_is_cut_off_while_it_is_read_is_not_damage(cluster: Cluster) -> None:
    leader = await fill(cluster)
    for sequence, health in ((1, LogHealth.SOUND), (0, LogHealth.DAMAGED)):
        leader.log.reader.on_damage(Corruption("zeros", sequence=leader.committed + sequence))
        await cluster.tick()
        assert leader.replica.health is health
    await cluster.until(renewed(cluster, "a"))


async def test_two_of_three_are_damaged_in_different_places(cluster: Cluster) -> None:
    leader = await fill(cluster)
    damage(leader, 0)
    damage(cluster.hosts["b"], 1)
    await asyncio.gather(find(leader), find(cluster.hosts["b"]))
    await cluster.until(renewed(cluster, "a", "b"), ticks=10_000)
    await check_whole(cluster)


async def test_with_two_replicas_the_sound_one_takes_over(tmp_path: Path) -> None:
    """The other stays: nothing could be written while it copies."""
    async with started(tmp_path, "ab") as cluster:
        leader = await fill(cluster)
        damage(leader)
        await find(leader)
        await cluster.until(lambda: cluster.hosts["b"].role is Role.SERVING)
        for _ in range(500):
            await cluster.tick()
        assert payloads(await cluster.serving()) == MESSAGES
        assert cluster.record.coordinator == "b" and cluster.hosts["a"] is leader


async def test_a_damaged_replica_that_is_needed_for_the_majority_stays(cluster: Cluster) -> None:
    leader = await fill(cluster)
    await cluster.stop("c")
    follower = cluster.hosts["b"]
    damage(follower)
    await find(follower)
    for _ in range(200):
        await put(leader, [b"x"])
        await cluster.tick()
    assert cluster.hosts["b"] is follower
    await cluster.start("c")
    await cluster.until(renewed(cluster, "b"))


async def test_one_replica_alone_reports_damage_and_goes_on(tmp_path: Path) -> None:
    async with started(tmp_path, "a") as cluster:
        leader = await fill(cluster)
        damage(leader)
        await find(leader)
        for _ in range(500):
            await cluster.tick()
        assert leader.role is Role.SERVING and len(cluster.damages) == 1
        await put(leader, [b"more"])


async def test_a_log_that_cannot_be_lent_is_adopted_from_nobody(cluster: Cluster) -> None:
    """The taker would choose it again and again."""
    leader = await fill(cluster)
    cluster.isolate("c")
    await put(leader, [b"x" * 60_000])
    await put(leader, MESSAGES[:100])
    await cluster.until(lambda: cluster.hosts["b"].committed == leader.log.sequence_last)
    last = len(sorted(cluster.hosts["b"].log.folder.glob("*.seg"))) - 1
    damage(cluster.hosts["b"], last - 1)
    cluster.quiet.add("b")
    await cluster.stop("a")
    cluster.heal("c")
    lender = cluster.hosts["b"]
    await cluster.until(lambda: lender.replica.health is LogHealth.FAULTY)
    assert cluster.hosts["c"].partition is None  # nobody has all of it
    await cluster.start("a")
    await cluster.until(lambda: cluster.record.coordinator in ("a", "c"))
    await cluster.until(renewed(cluster, "b"), ticks=10_000)
    await cluster.at_rest()
    assert payloads(cluster.hosts["b"]) == [*MESSAGES, b"x" * 60_000, *MESSAGES[:100]]
