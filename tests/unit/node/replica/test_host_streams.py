"""Streams at hosts whose tenure ends, whose commit lags, whose disk is full."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.log.mounts import fill, tmpfs
from tests.unit.node.replica.hosting import Cluster, SlowDisk, StuckDisk, payloads, put

from penstock.model.columns import Buffer
from penstock.node.door.budget import Budget
from penstock.node.door.flow import Outlet, ReadPace
from penstock.node.replica.host import Host
from penstock.node.serve.streams import ConsumerStream, ReaderStream
from penstock.replication.replica import Role
from penstock.replication.sender import Credit
from penstock.wire.messages import Delivery, LogSlice

DISK_BYTES = 1 << 20


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Three hosts; the disk of `b` is small."""
    with tmpfs(tmp_path / "b", size=DISK_BYTES):
        cluster = Cluster(tmp_path)
        await cluster.start()
        yield cluster
        await cluster.stop()
        assert cluster.fatal == []


class Consumer:
    """A stream of leases, and what was delivered on it."""

    def __init__(self, host: Host, *, window: int) -> None:
        self.delivered: list[Delivery] = []
        self.stream = ConsumerStream(
            b"c", window=window, batch_max=window, visibility_ms=60_000, send=self._take
        )
        host.topic.add_stream(self.stream)

    def _take(self, delivery: Delivery, body: Buffer) -> None:
        self.delivered.append(delivery)


class Reader:
    """A stream of a replica's log from its start, and how far it was sent."""

    def __init__(self, host: Host) -> None:
        self.last = 0
        self.failed: list[BaseException] = []
        stream = ReaderStream(
            host, partition=0, cursor=1, credit=Credit(entries=1000, bytes=1 << 20),
            send=self._take, fail=self.failed.append, end=lambda: None,
            send_room=Outlet(ReadPace(), Budget(1 << 30).account(), lambda: None),
        )  # fmt: skip
        host.topic.add_log_stream(stream)

    def _take(self, piece: LogSlice, batches: list[Buffer]) -> None:
        assert piece.first == self.last + 1
        self.last = piece.last


async def reading(cluster: Cluster) -> tuple[Host, Host, Reader]:
    """The leader, a follower, and who has read all of the log there."""
    leader = await cluster.serving()
    await cluster.at_rest()
    follower = cluster.hosts["b"]
    reader = Reader(follower)
    await cluster.until(lambda: reader.last == leader.committed)
    return leader, follower, reader


async def test_credit_of_a_lease_whose_outcome_is_unknown_comes_back(cluster: Cluster) -> None:
    leader = await cluster.serving()
    await cluster.at_rest()
    await put(leader, [b"%d" % i for i in range(5)])
    await cluster.at_rest()
    cluster.clogged = {"b", "c"}  # nothing is committed any more
    consumer = Consumer(leader, window=5)
    await cluster.until(lambda: consumer.stream.out == 5)
    cluster.isolate("a")
    cluster.clogged = set()
    await cluster.until(lambda: cluster.record.coordinator != "a")
    taker = await cluster.serving()
    cluster.heal("a")
    await cluster.until(lambda: leader.role is Role.FOLLOWING)
    assert (consumer.stream.out, consumer.delivered) == (0, [])
    assert (taker.heap.ready, taker.heap.leased) == (5, 0)
    await cluster.stop(taker.around.node)
    await cluster.until(lambda: leader.partition is not None)
    await cluster.until(lambda: sum(d.count for d in consumer.delivered) == 5)
    assert consumer.stream.out == 5


async def test_a_follower_shows_readers_what_is_committed_and_goes_on_when_it_takes_over(
    cluster: Cluster,
) -> None:
    leader, follower, reader = await reading(cluster)
    before = reader.last
    cluster.isolate("c")
    disk = SlowDisk(leader)
    answer = put(leader, [b"on b alone"])
    await cluster.until(lambda: follower.log.sequence_durable > before)
    follower.topic.turn()
    shown = reader.last
    disk.let_go()
    assert shown == before
    await answer
    await cluster.until(lambda: reader.last == leader.log.sequence_last)
    cluster.heal("c")
    await cluster.at_rest()
    await cluster.stop("a")
    taker = await cluster.serving()
    await put(taker, [b"after"])
    await cluster.until(lambda: reader.last == taker.log.sequence_last)
    assert reader.failed == []


async def test_a_follower_that_hears_of_a_commit_before_its_disk_is_done_shows_it_then(
    cluster: Cluster,
) -> None:
    leader, follower, reader = await reading(cluster)
    before = reader.last
    disk = StuckDisk(follower)
    await put(leader, [b"committed by the others"])
    await cluster.until(lambda: follower.log.sequence_committed > before)
    follower.topic.turn()
    assert reader.last == before
    disk.let_go()
    await cluster.until(lambda: reader.last == leader.log.sequence_last)


async def test_a_follower_without_space_slows_nobody_and_catches_up_when_there_is_some(
    cluster: Cluster, tmp_path: Path
) -> None:
    leader = await cluster.serving()
    await cluster.at_rest()
    filler = fill(tmp_path / "b")
    follower = cluster.hosts["b"]
    written = [b"%d" % i + b"x" * 1000 for i in range(200)]
    for payload in written:
        await put(leader, [payload])
    assert leader.committed == leader.log.sequence_last
    assert follower.log.sequence_last < leader.log.sequence_last
    assert leader.replica.writable(cluster.now_ms) is None
    filler.unlink()
    cluster.clock.advance(2)  # the disk is looked at again
    await cluster.at_rest()
    assert payloads(follower) == written
