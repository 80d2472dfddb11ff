"""Topics as tables."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from tests.spark.conftest import RunningNode

from penstock.client.queue.entries import Item


def table(spark: SparkSession, node: RunningNode, **options: Any) -> DataFrame:
    return spark.read.format("penstock").option("url", node.url).options(**options).load()


def test_every_column_of_a_message(spark: SparkSession, node: RunningNode) -> None:
    topic = node.topic("jobs", [])
    topic.put_many([Item(b"a", priority=7, key="k", headers={"h": "x", "n": 1}), Item(b"b")])

    first, second = table(spark, node, topic="jobs").orderBy("sequence").collect()

    assert (first.topic, first.partition, first.priority) == ("jobs", 0, 7)
    assert (bytes(first.key), bytes(first.value)) == (b"k", b"a")
    assert first.headers == {"h": "x", "n": "1"}
    assert abs(first.time.replace(tzinfo=UTC) - datetime.now(UTC)).total_seconds() < 600
    assert (second.sequence, second.key, second.headers) == (first.sequence + 1, None, None)


def test_a_topic_is_split_between_batches(spark: SparkSession, node: RunningNode) -> None:
    topic = node.topic("jobs", [])
    for i in range(20):
        topic.put_many([b"%d" % i] * 10)

    frame = table(spark, node, topic="jobs", splitRows=50)

    assert frame.rdd.getNumPartitions() >= 4
    assert frame.select("sequence").distinct().count() == 200


def test_conditions_choose_what_is_read(spark: SparkSession, node: RunningNode) -> None:
    node.topic("jobs", [b"%d" % i for i in range(100)])
    node.topic("other", [b"x"])
    frame = table(spark, node, topics="jobs,other")
    first = frame.where("topic = 'jobs'").agg(F.min("sequence")).first()[0]

    chosen = frame.where(f"topic = 'jobs' and sequence > {first + 9} and sequence <= {first + 19}")

    assert [bytes(row.value) for row in chosen.collect()] == [b"%d" % i for i in range(10, 20)]
    assert "Filter (" not in chosen._jdf.queryExecution().executedPlan().toString()
    assert frame.where("topic = 'jobs' and partition = 5").count() == 0


def test_a_time_finds_what_came_after_it(spark: SparkSession, node: RunningNode) -> None:
    topic = node.topic("jobs", [b"old"])
    # A time is sought by the millisecond, so it has to be another one.
    while (now := datetime.now(UTC)) <= topic_time(spark, node) + timedelta(milliseconds=1):
        pass
    topic.put_many([b"new"])
    frame = table(spark, node, topic="jobs")

    assert [bytes(r.value) for r in frame.where(F.col("time") >= F.lit(now)).collect()] == [b"new"]
    assert [bytes(r.value) for r in frame.where(F.col("time") < F.lit(now)).collect()] == [b"old"]
    after = table(spark, node, topic="jobs", startingTime=now.isoformat())
    assert [bytes(row.value) for row in after.collect()] == [b"new"]


def topic_time(spark: SparkSession, node: RunningNode) -> datetime:
    found = table(spark, node, topic="jobs").agg(F.max("time")).first()[0]
    return found.replace(tzinfo=UTC)


def test_offsets_bound_a_read(spark: SparkSession, node: RunningNode) -> None:
    topic = node.topic("jobs", [])
    ids = topic.put_many([b"%d" % i for i in range(10)])
    assert len(ids) == 10
    last = node.access().log_status("jobs")[0].readable
    bounds = {"startingOffsets": f'{{"jobs": {{"0": {last - 4}}}}}'}
    bounds["endingOffsets"] = f'{{"jobs": {{"0": {last}}}}}'

    found = table(spark, node, topic="jobs", **bounds).collect()

    assert [bytes(row.value) for row in found] == [b"5", b"6", b"7", b"8"]


def test_only_the_columns_asked_for_are_made(spark: SparkSession, node: RunningNode) -> None:
    node.topic("jobs", [b"a"])
    reader = spark.read.format("penstock").option("url", node.url).option("topic", "jobs")

    (row,) = reader.schema("value binary, sequence bigint").load().collect()

    assert row.asDict().keys() == {"value", "sequence"}
    with pytest.raises(Exception, match="no column colour"):
        reader.schema("colour string").load().collect()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("mode", "rows", "mode is one of"),
        ("maxRowsPerTrigger", "-1", "maxRowsPerTrigger is a whole number"),
        ("startingOffsets", "now", "startingOffsets is earliest"),
        ("startingTime", "noon", "startingTime is not an ISO"),
        ("colour", "red", "no such option: colour"),
    ],
)
def test_a_bad_option_is_named(spark: SparkSession, option: str, value: str, message: str) -> None:
    reader = spark.read.format("penstock").option("url", "penstock://h").option("topic", "jobs")
    with pytest.raises(AnalysisException, match=message):
        reader.option(option, value).load()


def test_a_plain_session_finds_the_source_by_itself(spark: SparkSession, node: RunningNode) -> None:
    node.topic("jobs", [b"a", b"b"])
    plain = spark.newSession()
    plain.conf.set("spark.sql.python.filterPushdown.enabled", "false")

    frame = table(plain, node, topic="jobs").where("topic = 'jobs' and sequence > 0")

    assert [bytes(row.value) for row in frame.collect()] == [b"a", b"b"]


def test_a_view_of_a_topic_is_made_in_sql(spark: SparkSession, node: RunningNode) -> None:
    node.topic("jobs", [b"a", b"b"])
    plain = spark.newSession()

    options = f"url '{node.url}', topic 'jobs'"
    plain.sql(f"CREATE TEMPORARY VIEW v USING penstock OPTIONS ({options})")

    assert plain.sql("SELECT count(*) FROM v WHERE partition = 0").first()[0] == 2


def test_some_partitions_are_assigned(spark: SparkSession, node: RunningNode) -> None:
    items = [Item(b"%d" % i, key=b"%d" % i) for i in range(40)]
    node.topic("jobs", [], partitions=3).put_many(items)

    found = table(spark, node, assign='{"jobs": [0, 2]}').select("partition").distinct().collect()

    assert {row.partition for row in found} == {0, 2}
    with pytest.raises(PySparkException, match="jobs has no partition 7"):
        table(spark, node, assign='{"jobs": [7]}').count()


def test_each_partition_may_begin_at_a_time_of_its_own(
    spark: SparkSession, node: RunningNode
) -> None:
    items = [Item(b"%d" % i, key=b"%d" % i) for i in range(40)]
    node.topic("jobs", [], partitions=2).put_many(items)
    never = 1 << 50

    frame = table(
        spark, node, topic="jobs", startingOffsetsByTimestamp=f'{{"jobs": {{"1": {never}}}}}'
    )

    assert {row.partition for row in frame.collect()} == {0}


def test_there_are_as_many_spark_partitions_as_asked(
    spark: SparkSession, node: RunningNode
) -> None:
    topic = node.topic("jobs", [])
    for i in range(8):
        topic.put_many([b"%d" % i] * 10)

    frame = table(spark, node, topic="jobs", minPartitions=4)

    assert frame.rdd.getNumPartitions() >= 4
    assert frame.count() == 80


def test_headers_come_as_bytes_if_asked(spark: SparkSession, node: RunningNode) -> None:
    node.topic("jobs", []).put_many([Item(b"a", headers={"t": "x", "b": b"\xff", "n": 1})])

    (row,) = table(spark, node, topic="jobs", includeHeaders="binary").collect()

    assert {name: bytes(value) for name, value in row.headers.items()} == {
        "t": b"x",
        "b": b"\xff",
        "n": b"1",
    }
