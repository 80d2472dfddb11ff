"""Topics as streams."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from tests.spark.conftest import RunningNode

from penstock.model.batch import decode


def stream(spark: SparkSession, node: RunningNode, **options: Any) -> DataFrame:
    reader = spark.readStream.format("penstock").option("url", node.url)
    return reader.options(**options).load()


def triggers(frame: DataFrame, checkpoint: Path) -> list[list[Row]]:
    """The rows of each trigger until there is no more."""
    found: list[list[Row]] = []
    query = (
        frame.writeStream.foreachBatch(lambda batch, _: found.append(batch.collect()))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return found


def values(rows: list[Row]) -> list[bytes]:
    return [bytes(row.value) for row in rows]


def test_a_query_goes_on_where_it_stopped(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    topic = node.topic("jobs", [b"a", b"b"])
    frame = stream(spark, node, topic="jobs")

    assert [values(rows) for rows in triggers(frame, tmp_path / "c")] == [[b"a", b"b"]]
    topic.put_many([b"c"])
    assert [values(rows) for rows in triggers(frame, tmp_path / "c")] == [[b"c"]]


def test_a_trigger_takes_the_urgent_topic_first(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    for name in ("bulk", "urgent"):
        topic = node.topic(name, [])
        for i in range(10):
            topic.put_many([b"%s-%d" % (name.encode(), i)] * 10)
    frame = stream(spark, node, topics="urgent,bulk", maxRowsPerTrigger=105)

    first, *others = triggers(frame, tmp_path / "c")

    assert [row.topic for row in first].count("urgent") == 100
    assert len(first) <= 105
    assert sum(map(len, others)) == 200 - len(first)
    assert {row.topic for rows in others for row in rows} == {"bulk"}


def test_bytes_bound_a_trigger(spark: SparkSession, node: RunningNode, tmp_path: Path) -> None:
    topic = node.topic("jobs", [])
    for _ in range(10):
        topic.put_many([b"x" * 10_000])
    frame = stream(spark, node, topic="jobs", maxBytesPerTrigger=32_000)

    found = triggers(frame, tmp_path / "c")

    assert max(map(len, found)) <= 3
    assert sum(map(len, found)) == 10


def test_ranges_name_what_there_is_to_read(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    node.topic("jobs", [b"x" * 1000] * 50, partitions=2)
    frame = stream(spark, node, topic="jobs", mode="ranges")

    (rows,) = triggers(frame, tmp_path / "c")

    status = node.access().log_status("jobs")
    assert [(row["from"], row["to"]) for row in rows] == [(1, s.readable) for s in status]
    assert sum(row.bytes for row in rows) > 50_000


def test_envelopes_are_the_log_as_it_is_stored(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    node.topic("jobs", [b"%d" % i for i in range(1000)])
    frame = stream(spark, node, topic="jobs", mode="envelopes")

    (rows,) = triggers(frame, tmp_path / "c")

    found = [decode(bytes(row.body)) for row in rows]
    assert [p for b in found for p in b.columns().binary("payload")] == [
        b"%d" % i for i in range(1000)
    ]
    assert sum(row["count"] for row in rows) == 1000


def test_progress_tells_the_lag(spark: SparkSession, node: RunningNode, tmp_path: Path) -> None:
    node.topic("jobs", [b"a"])
    frame = stream(spark, node, topic="jobs")
    query = frame.writeStream.format("noop").trigger(availableNow=True).start()
    query.awaitTermination()

    (source,) = query.recentProgress[0].sources

    (status,) = node.access().log_status("jobs")
    expected = {"jobs": {"id": status.topic_id, "0": status.readable + 1}}
    assert json.loads(source.latestOffset) == expected


def test_progress_counts_rows(spark: SparkSession, node: RunningNode) -> None:
    node.topic("jobs", [b"%d" % i for i in range(30)], partitions=2)
    frame = stream(spark, node, topic="jobs", maxRowsPerTrigger=12)
    query = frame.writeStream.format("noop").trigger(availableNow=True).start()
    query.awaitTermination()

    counts = [one.numInputRows for one in query.recentProgress]

    assert len(counts) > 1 and sum(counts) == 30
    assert [one.sources[0].numInputRows for one in query.recentProgress] == counts


def remade(spark: SparkSession, node: RunningNode, checkpoint: Path) -> None:
    """Read a topic, delete it, and make it again with more messages than it had."""
    node.topic("jobs", [b"old"])
    triggers(stream(spark, node, topic="jobs"), checkpoint)
    node.client.topic("jobs").delete(force=True)
    node.topic("jobs", [b"%d" % i for i in range(10)])


def test_a_topic_that_was_made_again_ends_the_query(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    remade(spark, node, tmp_path / "c")

    with pytest.raises(StreamingQueryException, match="jobs was deleted and made again"):
        triggers(stream(spark, node, topic="jobs"), tmp_path / "c")


def test_a_topic_that_was_made_again_is_read_from_its_beginning_if_asked(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    remade(spark, node, tmp_path / "c")

    frame = stream(spark, node, topic="jobs", failOnDataLoss="false")
    (rows,) = triggers(frame, tmp_path / "c")

    assert values(rows) == [b"%d" % i for i in range(10)]


def test_a_checkpoint_without_ids_is_understood(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    topic = node.topic("jobs", [b"a", b"b"])
    frame = stream(spark, node, topic="jobs")
    triggers(frame, tmp_path / "c")
    file = tmp_path / "c" / "offsets" / "0"
    former = re.sub(r'"id": ?\d+, ?', "", file.read_text())
    assert former != file.read_text()
    file.write_text(former)
    (file.parent / ".0.crc").unlink(missing_ok=True)
    topic.put_many([b"c"])

    assert [values(rows) for rows in triggers(frame, tmp_path / "c")] == [[b"c"]]


def test_a_start_that_does_not_exist_is_named(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    node.topic("jobs", [b"a"])
    frame = stream(spark, node, topic="jobs", startingOffsets='{"jobs": {"7": 1}}')

    with pytest.raises(StreamingQueryException, match="no partition 7"):
        triggers(frame, tmp_path / "c")


def test_topics_that_match_are_read_from_when_they_appear(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    node.topic("jobs-a", [b"a"])
    node.topic("other-jobs-a", [b"no"])
    frame = stream(spark, node, subscribePattern="jobs-.*", startingOffsets="latest")
    assert not any(triggers(frame, tmp_path / "c"))

    node.topic("jobs-b", [b"b", b"c"])

    assert [values(rows) for rows in triggers(frame, tmp_path / "c")] == [[b"b", b"c"]]


def test_a_trigger_waits_for_enough_rows(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    topic, found = node.topic("jobs", [b"first"]), []
    frame = stream(spark, node, topic="jobs", minRowsPerTrigger=5, maxTriggerDelay="1h")
    writer = frame.writeStream.foreachBatch(lambda batch, _: found.extend(values(batch.collect())))
    query = writer.option("checkpointLocation", str(tmp_path / "c")).start()

    query.processAllAvailable()
    topic.put_many([b"a", b"b"])
    query.processAllAvailable()
    assert found == [b"first"]
    topic.put_many([b"c"] * 5)
    query.processAllAvailable()
    assert found == [b"first", b"a", b"b", *[b"c"] * 5]
    topic.put_many([b"late"])
    query.stop()

    assert [values(rows) for rows in triggers(frame, tmp_path / "c")] == [[b"late"]]
