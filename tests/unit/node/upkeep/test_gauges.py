"""What a coordinator tells of its followers, those that are away among them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.unit.node.replica.hosting import Cluster, put

from penstock.node.observe.readings import FollowerReading
from penstock.node.replica.host import Host
from penstock.node.upkeep.gauges import replica_reading


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path)
    cluster.options = replace(cluster.options, lagging_ms=1000)
    await cluster.start()
    yield cluster
    await cluster.stop()
    assert cluster.fatal == []


def follower(host: Host, node: str) -> FollowerReading:
    return {reading.node: reading for reading in replica_reading(host).followers}[node]


async def test_a_follower_that_is_away_has_no_credit_and_lags_in_time(cluster: Cluster) -> None:
    leader = await cluster.serving()
    await cluster.at_rest()
    options = cluster.options
    well = FollowerReading(
        "c", lag=0, credit=1.0, credit_entries=options.credit_entries,
        credit_entries_max=options.credit_entries, credit_bytes=options.credit_bytes,
        credit_bytes_max=options.credit_bytes,
    )  # fmt: skip
    assert follower(leader, "c") == well
    cluster.isolate("c")
    await put(leader, [b"one", b"two"])
    assert follower(leader, "c") == FollowerReading("c", lag=2, credit=0.0)
    await cluster.until(lambda: follower(leader, "c").lagging)
    assert not follower(leader, "b").lagging
    cluster.heal("c")
    await cluster.until(lambda: follower(leader, "c") == well)


async def test_who_only_learns_is_told_from_who_counts(cluster: Cluster) -> None:
    leader = await cluster.serving()
    cluster.tell(msgspec.structs.replace(cluster.record, learners=("d",), target=tuple("abcd")))
    await cluster.until(lambda: len(replica_reading(leader).followers) == 3)
    assert follower(leader, "d").learner and not follower(leader, "b").learner
    assert follower(leader, "d").lag == leader.log.sequence_last
