"""A coordinator that hears no quorum: nobody waits for ever, and nothing is given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
from tests.unit.node.replica.hosting import Cluster, payloads, put

from penstock.errors import PenstockError, QuorumUnavailable, Unavailable
from penstock.model.columns import Buffer
from penstock.model.entries import ENQ
from penstock.model.ids import MessageId
from penstock.node.atomic import ParticipantHere
from penstock.node.calls.messages import move_share, purge_share
from penstock.node.calls.table import NodeShare
from penstock.node.engine import Engine
from penstock.node.replica.host import Host
from penstock.node.serve.streams import ConsumerStream
from penstock.node.write import EnqueuePart, EnqueueRequest
from penstock.replication.replica import Role
from penstock.wire.messages import Delivery


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path)
    await cluster.start()
    yield cluster
    await cluster.stop()
    assert cluster.fatal == []


async def alone(cluster: Cluster) -> Host:
    """The coordinator, which has not noticed yet that the others hear nothing and say nothing."""
    leader = await cluster.serving()
    await cluster.at_rest()
    cluster.cut.update("bc")
    cluster.quiet.update("bc")  # when they are back the tenure goes on
    return leader


class Reader(ConsumerStream):
    """A stream of one message, and what came of it."""

    def __init__(self, name: bytes, *, pops: bool) -> None:
        self.deliveries: list[Delivery] = []
        self.errors: list[PenstockError] = []
        super().__init__(
            name, window=1, batch_max=1, visibility_ms=60_000, send=self._take,
            fail=self.errors.append if pops else None,
        )  # fmt: skip

    def _take(self, delivery: Delivery, body: Buffer) -> None:
        self.deliveries.append(delivery)


async def test_who_waits_is_told_that_nobody_knows_and_the_tenure_goes_on(cluster: Cluster) -> None:
    leader = await alone(cluster)
    doubtful = put(leader, [b"doubtful"], producer=(b"p", 1))
    await cluster.until(doubtful.done)
    with pytest.raises(Unavailable, match="unknown") as told:
        await doubtful
    assert not isinstance(told.value, QuorumUnavailable) and "elsewhere" not in told.value.details
    assert leader.role is Role.SERVING and leader.partition is not None
    with pytest.raises(QuorumUnavailable):
        await put(leader, [b"refused"])


async def test_what_was_doubtful_commits_and_a_repeat_of_it_is_known(cluster: Cluster) -> None:
    leader = await alone(cluster)
    doubtful = put(leader, [b"doubtful"], producer=(b"p", 1))
    await cluster.until(doubtful.done)
    assert isinstance(doubtful.exception(), Unavailable)
    for other in "bc":
        cluster.heal(other)
    await cluster.until(lambda: leader.replica.writable(cluster.now_ms) is None)
    again = await put(leader, [b"doubtful"], producer=(b"p", 1))
    assert not again.placed and len(again.duplicates) == 1
    assert await cluster.serving() is leader and payloads(leader) == [b"doubtful"]


async def test_who_asks_for_a_commit_during_the_doubt_is_told_soon(cluster: Cluster) -> None:
    leader = await alone(cluster)
    doubtful = put(leader, [b"doubtful"])
    await cluster.until(doubtful.done)
    assert isinstance(doubtful.exception(), Unavailable)
    asked = leader.partition.committed(leader.log.sequence_last)
    await cluster.until(asked.done, ticks=5)
    assert isinstance(asked.exception(), Unavailable)


async def test_a_lease_that_commits_late_is_delivered_to_a_stream_and_not_to_a_pop(
    cluster: Cluster,
) -> None:
    leader = await cluster.serving()
    await put(leader, [b"one", b"two"])
    leader = await alone(cluster)
    stream, pop = Reader(b"stream", pops=False), Reader(b"pop", pops=True)
    for reader in (stream, pop):
        leader.topic.add_stream(reader)
    await cluster.until(lambda: pop.errors)
    assert "unknown" in pop.errors[0].message and not stream.deliveries
    leader.topic.remove_stream(pop)  # as the call does that has to answer
    for other in "bc":
        cluster.heal(other)
    await cluster.until(lambda: stream.deliveries)
    await cluster.until(lambda: leader.heap.ready == 1)  # what the pop had is given back
    assert not pop.deliveries


async def test_nothing_is_begun_that_could_not_be_committed(cluster: Cluster) -> None:
    placed = (await put(await cluster.serving(), [b"one"])).placed[0]
    leader = await alone(cluster)
    await cluster.until(lambda: leader.replica.writable(cluster.now_ms) is not None)
    topic, partition, last = leader.topic, leader.partition, leader.log.sequence_last
    body = ENQ.encode(1, {"payload": [b"part"]})
    request = EnqueueRequest(1, lambda _: None)
    part = EnqueuePart(request, ENQ.decode(body, 1), indices=range(1), body=body)
    moved = str(MessageId(placed.time_ms, 1, 0, placed.sequence))
    engine = cast(Engine, None)  # these shares need none
    for work in (
        ParticipantHere(topic, partition).stage(part, transaction=b"t" * 16, home=0),
        ParticipantHere(topic, partition).decide(b"t" * 16, commit=True),
        purge_share(NodeShare(engine, topic, [partition])),
        move_share(NodeShare(engine, topic, [partition]), message_id=moved, reason=""),
    ):
        with pytest.raises(QuorumUnavailable):
            await work
    assert leader.log.sequence_last == last


async def test_nobody_is_told_while_a_majority_is_there(cluster: Cluster) -> None:
    leader = await cluster.serving()
    await cluster.at_rest()
    cluster.isolate("b")
    answers = [put(leader, [b"%d" % i]) for i in range(3)]
    for _ in range(300):
        await cluster.tick()
    assert len(await asyncio.gather(*answers)) == 3
