"""DataFrames into topics."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from tests.spark.conftest import RunningNode

from penstock.model.delta import Delta, Op, decode, encode
from penstock.model.ids import partition_of


def save(frame: DataFrame, node: RunningNode, topic: str, **options: Any) -> None:
    writer = frame.write.format("penstock").mode("append").option("url", node.url)
    writer.options(topic=topic, **options).save()


def table(spark: SparkSession, node: RunningNode, topic: str, **options: Any) -> DataFrame:
    reader = spark.read.format("penstock").option("url", node.url)
    return reader.options(topic=topic, **options).load()


def numbered(spark: SparkSession, count: int, tasks: int = 2) -> DataFrame:
    return spark.range(count, numPartitions=tasks).select(F.col("id").cast("string").alias("value"))


def test_rows_become_messages(spark: SparkSession, node: RunningNode) -> None:
    node.topic("jobs", [], partitions=2)
    rows = spark.createDataFrame(
        [(b"a", 3, "k1", {"h": "x"}), (b"b", None, None, None)],
        "value binary, priority int, key string, headers map<string,string>",
    )

    save(rows, node, "jobs")

    found = {bytes(row.value): row for row in table(spark, node, "jobs").collect()}
    assert (found[b"a"].priority, bytes(found[b"a"].key)) == (3, b"k1")
    assert (found[b"a"].headers, found[b"a"].partition) == ({"h": "x"}, partition_of(b"k1", 2))
    assert (found[b"b"].priority, found[b"b"].key, found[b"b"].headers) == (0, None, None)


def test_a_write_done_again_under_its_name_adds_nothing(
    spark: SparkSession, node: RunningNode
) -> None:
    node.topic("jobs", [])
    rows = numbered(spark, 1000)

    for _ in range(2):
        save(rows, node, "jobs", producer="import-7")

    assert node.client.topic("jobs").stats().ready == 1000
    save(rows, node, "jobs")
    assert node.client.topic("jobs").stats().ready == 2000


def test_a_micro_batch_that_runs_again_adds_nothing(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    node.topic("source", [b"%d" % i for i in range(100)])
    node.topic("jobs", [])
    frame = spark.readStream.format("penstock").options(url=node.url, topic="source").load()

    def run() -> None:
        query = frame.select("value").writeStream.format("penstock")
        query = query.options(url=node.url, topic="jobs", checkpointLocation=str(tmp_path / "c"))
        query.trigger(availableNow=True).start().awaitTermination()

    run()
    (tmp_path / "c" / "commits" / "0").unlink()  # as if it had stopped before it noted the end
    (tmp_path / "c" / "commits" / ".0.crc").unlink(missing_ok=True)
    run()

    assert node.client.topic("jobs").stats().ready == 100


def test_deltas_are_copied_whole(spark: SparkSession, node: RunningNode) -> None:
    for name in ("vectors", "copy"):
        node.client.call("topic_create", config={"name": name, "kind": "delta", "dimensions": 4})
    deltas = [
        Delta(delta_id=b"1" * 16, namespace="a", vector_id="v", op=Op.CREATE, origin="me", time=1,
              clock={"me": 1}, values=[1, 2, 3, 4], metadata={"colour": "red"}),
        Delta(delta_id=b"2" * 16, namespace="b", vector_id="w", op=Op.SPARSE, origin="me", time=2,
              parent=b"1" * 16, clock={"me": 2, "you": 7}, indices=[1, 3], values=[5, 6]),
        Delta(delta_id=b"3" * 16, namespace="b", vector_id="w", op=Op.DELETE, origin="me", time=3,
              clock={"me": 3}),
    ]  # fmt: skip
    payloads = [encode(delta, dimensions=4) for delta in deltas]
    save(spark.createDataFrame([(p,) for p in payloads], "value binary"), node, "vectors")

    frame = table(spark, node, "vectors", mode="deltas")
    save(frame.drop("topic", "partition", "sequence", "time"), node, "copy")

    found = [bytes(row.value) for row in table(spark, node, "copy").collect()]
    assert sorted(decode(p).delta_id for p in found) == [d.delta_id for d in deltas]
    assert sorted(found) == sorted(payloads)
    assert [r.vector_id for r in frame.where("namespace = 'a'").collect()] == ["v"]


def test_a_stream_of_deltas_is_encoded_each_once_after_a_restart(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    for name in ("vectors", "copy"):
        node.topic(name, [], kind="delta", dimensions=2, partitions=2)
    deltas = node.client.deltas("vectors")
    for number in range(20):
        deltas.create(f"v{number}", [number, 1.0], metadata={"n": number})
        deltas.set(f"v{number}", {1: float(number)})
    source = spark.readStream.format("penstock").options(url=node.url, topic="vectors")
    frame = source.option("mode", "deltas").load().drop("topic", "partition", "sequence", "time")

    def run() -> None:
        query = frame.writeStream.format("penstock")
        query = query.options(url=node.url, topic="copy", checkpointLocation=str(tmp_path / "c"))
        query.trigger(availableNow=True).start().awaitTermination()

    run()
    (tmp_path / "c" / "commits" / "0").unlink()  # as if it had stopped before it noted the end
    (tmp_path / "c" / "commits" / ".0.crc").unlink(missing_ok=True)
    run()

    written, copied = (
        sorted(bytes(row.value) for row in table(spark, node, name).collect())
        for name in ("vectors", "copy")
    )
    assert len(written) == 40
    assert copied == written


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("id bigint", "write a column value"),
        ("value binary, colour string", "no column colour string is written"),
        ("value bigint", "no column value bigint is written"),
    ],
)
def test_rows_that_are_no_messages_are_refused(
    spark: SparkSession, node: RunningNode, columns: str, message: str
) -> None:
    node.topic("jobs", [])

    with pytest.raises(AnalysisException, match=message):
        save(spark.createDataFrame([], columns), node, "jobs")


def test_a_thread_writes_once_the_session_is_active_in_it(
    spark: SparkSession, node: RunningNode
) -> None:
    node.topic("jobs", [])
    rows = numbered(spark, 10)

    def write() -> None:
        spark.createDataFrame([], "id int")
        save(rows, node, "jobs")

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(Exception, match="DATA_SOURCE_NOT_FOUND"):
            pool.submit(save, rows, node, "jobs").result()
        pool.submit(write).result()

    assert node.client.topic("jobs").stats().ready == 10


def test_a_topic_is_not_overwritten(spark: SparkSession, node: RunningNode) -> None:
    node.topic("jobs", [])
    writer = numbered(spark, 1).write.format("penstock").options(url=node.url, topic="jobs")

    with pytest.raises(AnalysisException, match="not overwritten"):
        writer.mode("overwrite").save()


def test_a_column_says_to_which_topic_a_row_goes(spark: SparkSession, node: RunningNode) -> None:
    for name in ("a", "b"):
        node.topic(name, [])
    rows = [("a", b"1"), ("b", b"2"), ("a", b"3")]
    frame = spark.createDataFrame(rows, "topic string, value binary").coalesce(1)

    for _ in range(2):
        frame.write.format("penstock").mode("append").options(url=node.url, producer="p").save()

    assert [bytes(row.value) for row in table(spark, node, "a").collect()] == [b"1", b"3"]
    assert [bytes(row.value) for row in table(spark, node, "b").collect()] == [b"2"]
    with pytest.raises(AnalysisException, match="no column topic string is written"):
        save(frame, node, "a")
    with pytest.raises(AnalysisException, match="topic is missing"):
        frame.select("value").write.format("penstock").mode("append").option("url", node.url).save()
