"""What a scrape shows of a node, its partitions, its replicas and their followers."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from prometheus_client.core import Metric
from tests.integration.harness import Node
from tests.unit.node.replica.hosting import Cluster, put

from penstock.node.replica.host import Host
from penstock.node.upkeep import gauges, replica_gauges

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path)
    cluster.options = replace(cluster.options, lagging_ms=1000)
    await cluster.start()
    yield cluster
    await cluster.stop()
    assert cluster.fatal == []


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path)
    await node.start()
    yield node
    await node.stop()


def shown(families: Iterable[Metric]) -> dict[tuple[str, ...], float]:
    """(name, label values …) -> value, the labels in the order of their names."""
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in families
        for sample in family.samples
    }


def follower(host: Host, node: str) -> dict[str, float]:
    """What is shown of a follower, by the ends of the metrics' names."""
    return {
        name.removeprefix("penstock_follower_"): value
        for (name, *labels), value in shown(replica_gauges([host])).items()
        if name.startswith("penstock_follower_") and labels[0] == node
    }


async def test_a_follower_that_is_away_has_no_credit_and_lags_in_time(cluster: Cluster) -> None:
    leader = await cluster.serving()
    await cluster.at_rest()
    entries, size = cluster.options.credit_entries, cluster.options.credit_bytes
    well = {
        "lag_entries": 0, "credit_ratio": 1.0, "credit_entries": entries,
        "credit_entries_max": entries, "credit_bytes": size, "credit_bytes_max": size,
        "lagging": 0, "learner": 0,
    }  # fmt: skip
    await cluster.until(lambda: follower(leader, "c") == well)  # the last acknowledgement is heard
    cluster.isolate("c")
    await put(leader, [b"one", b"two"])
    assert follower(leader, "c") == {**dict.fromkeys(well, 0), "lag_entries": 2}
    await cluster.until(lambda: follower(leader, "c")["lagging"])
    assert not follower(leader, "b")["lagging"]
    cluster.heal("c")
    await cluster.until(lambda: follower(leader, "c") == well)


async def test_who_only_learns_is_told_from_who_counts(cluster: Cluster) -> None:
    leader = await cluster.serving()
    cluster.tell(msgspec.structs.replace(cluster.record, learners=("d",), target=tuple("abcd")))
    await cluster.until(lambda: follower(leader, "d"))
    assert follower(leader, "d")["learner"] and not follower(leader, "b")["learner"]
    assert follower(leader, "d")["lag_entries"] == leader.log.sequence_last


async def test_a_replica_shows_its_role_and_how_far_it_is(cluster: Cluster) -> None:
    leader = await cluster.serving()
    await put(leader, [b"one", b"two"])
    await cluster.at_rest()
    found, topic = shown(replica_gauges([cluster.hosts["c"]])), leader.topic.config.name
    assert found["penstock_replica_role", "0", "following", topic] == 1
    assert found["penstock_replica_epoch", "0", topic] == leader.replica.epoch
    assert found["penstock_replica_committed", "0", topic] == leader.committed
    assert found["penstock_replica_damaged", "0", topic] == 0
    assert ("penstock_backlog_messages", "0", topic) not in found, "another node serves it"


async def test_gauges_are_read_at_the_scrape(node: Node) -> None:
    await node.topic(partitions=1)
    await node.topic("vectors", kind="delta", dimensions=2, partitions=1)
    await node.put("jobs", b"one", b"two")
    assert shown(gauges(node.engine))["penstock_backlog_messages", "0", "jobs"] == 2
    await node.put("jobs", b"three")
    await node.delivered(await node.stream(credits=9))
    found = shown(gauges(node.engine))
    assert found["penstock_backlog_messages", "0", "jobs"] == 0
    assert found["penstock_inflight_messages", "0", "jobs"] == 3
    assert found["penstock_dlq_messages", "0", "jobs"] == 0
    assert found["penstock_connections",] == 1
    assert found["penstock_streams", "lease"] == 1
    assert found["penstock_credits", "lease"] == 6
    assert found["penstock_ingest_deltas", "low", "vectors"] == 0


async def test_what_does_not_exist_has_no_value(node: Node) -> None:
    await node.topic(partitions=1)
    names = {name for name, *_ in shown(gauges(node.engine))}
    assert "penstock_log_bytes" in names
    assert not names & {"penstock_oldest_age_seconds", "penstock_snapshot_age_seconds"}


async def test_the_documentation_lists_every_metric(node: Node) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text("utf-8").partition("## A pipeline")[0]
    scraped = node.engine.metrics.text().decode()
    names = set(re.findall(r"^# HELP (penstock_\w+)", scraped, re.MULTILINE))
    assert len(names) > 25
    assert {name for name in names if f"`{name}`" not in text} == set()
    assert set(re.findall(r"^\| `(penstock_\w+)`", text, re.MULTILINE)) == names
