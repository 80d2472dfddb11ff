"""A node for code that waits."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.spark.conftest import RunningNode

from penstock.client.queue.entries import Item
from penstock.config import Config, UpkeepOptions
from penstock.errors import NotFound
from penstock.log.flush import LogOptions
from penstock.model.batch import SCHEMAS, Batch, Kind
from penstock.spark.source import access
from penstock.spark.source.access import NodeAccess
from penstock.spark.source.options import ReadOptions
from penstock.spark.source.ranges import LogBounds


def payloads(batches: list[Batch]) -> list[bytes]:
    return [payload for batch in batches for payload in batch.columns().binary("payload") or ()]


def read(node: RunningNode, topic: str, partition: int = 0, *, first: int = 1) -> list[Batch]:
    last = node.access().log_status(topic)[partition].readable
    ranges = node.access().read_range(topic, partition, first, last)
    return [batch for batches in ranges for batch in batches]


def test_a_range_has_the_messages_of_its_batches(node: RunningNode) -> None:
    node.topic("jobs", [b"%d" % i for i in range(5000)])
    node.client.topic("jobs").pop(limit=10)

    found = read(node, "jobs")

    assert payloads(found) == [b"%d" % i for i in range(5000)]
    assert {batch.kind for batch in found} == {Kind.ENQ}


def test_status_says_how_far_the_log_reaches(node: RunningNode) -> None:
    node.topic("jobs", [b"a", b"b"], partitions=2)

    found = node.access().log_status("jobs")

    assert [status.partition for status in found] == [0, 1]
    assert all(status.sequence_first == 1 for status in found)
    assert sum(status.readable for status in found) >= 2


def test_an_atomic_batch_stands_at_its_prepare(node: RunningNode) -> None:
    topic = node.client.topic("jobs", partitions=2)
    items = [Item(b"%d" % i, key=b"%d" % i) for i in range(20)]
    topic.put_many(items, atomic=True)

    found = [batch for partition in (0, 1) for batch in read(node, "jobs", partition)]

    assert sorted(payloads(found)) == sorted(b"%d" % i for i in range(20))
    assert {batch.kind for batch in found} == {Kind.PREPARE}


def test_a_decision_beyond_the_range_is_found(node: RunningNode) -> None:
    topic = node.client.topic("jobs", partitions=2)
    topic.put_many([Item(b"%d" % i, key=b"%d" % i) for i in range(20)], atomic=True)
    prepared = read(node, "jobs")[0]

    found = list(node.access().read_range("jobs", 0, prepared.first, prepared.first))

    assert [batch.first for batches in found for batch in batches] == [prepared.first]


def test_a_check_is_shown_every_kind(node: RunningNode) -> None:
    node.topic("jobs", [b"a"])
    last = node.access().log_status("jobs")[0].readable
    found: list[Batch] = []

    list(node.access().read_range("jobs", 0, 1, last, check=found.extend))

    assert [batch.kind for batch in found][:1] == [Kind.BARRIER]
    assert found[-1].last == last


def test_an_enqueue_again_changes_nothing(node: RunningNode) -> None:
    node.topic("jobs", [])
    columns = {
        "payload": [b"a", b"b"], "run_count": [2], "run_epoch": [1], "run_sequence": [1],
        "run_producer": [b"p"],
    }  # fmt: skip
    part = (0, 2, SCHEMAS[Kind.ENQ].encode(2, columns, runs=1))

    assert [node.access().enqueue_all("jobs", [[part]]) for _ in range(2)] == [2, 0]
    assert payloads(read(node, "jobs")) == [b"a", b"b"]


def test_a_restarted_node_is_found_again(node: RunningNode) -> None:
    node.topic("jobs", [b"a"])
    before = node.access().log_status("jobs")
    node.stop()
    node.start()

    assert node.access().log_status("jobs")[0].readable >= before[0].readable
    assert payloads(read(node, "jobs")) == [b"a"]


def test_an_unknown_topic_is_named(node: RunningNode) -> None:
    with pytest.raises(NotFound, match="jobs"):
        node.access().log_status("jobs")


def test_a_read_goes_on_after_the_connection_was_lost(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "WINDOW_BYTES", 1 << 10)  # so that most is still to come
    topic = node.topic("jobs", [])
    for i in range(20):
        topic.put_many([b"%d" % i * 1000])
    last = node.access().log_status("jobs")[0].readable
    ranges = node.access().read_range("jobs", 0, 1, last)

    found = next(ranges)
    node.stop()
    node.start()
    found += [batch for batches in ranges for batch in batches]

    assert payloads(found) == [b"%d" % i * 1000 for i in range(20)]


def test_what_retention_dropped_is_told(tmp_path: Path) -> None:
    log = LogOptions(segment_bytes=64 << 10, allocate_bytes=32 << 10, reserve_bytes=8 << 10)
    upkeep = UpkeepOptions(retention_s=0.05, snapshot_s=0.05)
    node = RunningNode(tmp_path / "small", config=Config(log=log, upkeep=upkeep, drain_s=5.0))
    try:
        first = dropped(node)
        options = ReadOptions.of({"url": node.url, "topic": "jobs"})
        with pytest.raises(NotFound) as gone:
            list(node.access().read_range("jobs", 0, 1, first))
        assert gone.value.details["sequence_first"] >= first
        with pytest.raises(NotFound, match="the first that can be read is"):
            LogBounds(node.access(), options).held({"jobs": {0: 1}})
        lenient = msgspec.structs.replace(options, fail_on_data_loss=False)
        assert LogBounds(node.access(), lenient).held({"jobs": {0: 1}})["jobs"][0] >= first
    finally:
        NodeAccess.close_shared()
        node.close()


def dropped(node: RunningNode) -> int:
    """Fill a topic and empty it until the node drops the beginning of its log."""
    topic = node.client.topic("jobs", retention_ms=0)
    while (first := node.access().log_status("jobs")[0].sequence_first) == 1:
        topic.put_many([b"x" * 10_000] * 5)
        for message in topic.pop(limit=5):
            message.ack()
    return first


def test_a_topic_of_a_pattern_that_is_gone_is_named(node: RunningNode) -> None:
    node.topic("jobs-a", [b"a"])
    node.topic("other", [b"b"])
    options = {"url": node.url, "subscribePattern": "jobs-.*"}
    before = {"jobs-a": {0: 1}, "jobs-b": {0: 5}, "former": {0: 5}}

    bounds = LogBounds(node.access(), ReadOptions.of(options))
    assert list(bounds.ids) == ["jobs-a"]
    with pytest.raises(NotFound, match="jobs-b was deleted, so"):
        bounds.held(before, {"jobs-b": 7, "former": 8})

    bounds = LogBounds(node.access(), ReadOptions.of(options | {"failOnDataLoss": "false"}))
    assert bounds.held(before, {"jobs-b": 7, "former": 8}) == {"jobs-a": {0: 1}}
