"""The data source under Spark Connect, and in a declarative pipeline, which runs on it.

Both are processes of their own: a session of Connect and the tests' own session do not share one.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.spark.conftest import JAVA_OPTIONS, SPARK_HOME, RunningNode, run_spark

EXAMPLE = Path(__file__).parents[2] / "examples" / "declarative"

CONNECTED = f"""
import sys
from pyspark.sql import SparkSession
from pyspark.sql.connect.session import SparkSession as Connected

url, folder = sys.argv[1:]
spark = (
    SparkSession.builder.remote("local[2]")
    .config("spark.driver.extraJavaOptions", "{JAVA_OPTIONS}")
    .config("spark.sql.warehouse.dir", folder + "/warehouse")
    .getOrCreate()
)
assert isinstance(spark, Connected), type(spark)
jobs = spark.read.format("penstock").option("url", url).option("topic", "jobs").load()
assert [bytes(row.value) for row in jobs.orderBy("sequence").collect()] == [b"a", b"b", b"c"]
spark.sql(f"CREATE TEMPORARY VIEW jobs USING penstock OPTIONS (url '{{url}}', topic 'jobs')")
assert spark.sql("SELECT count(*) FROM jobs").first()[0] == 3
query = (
    spark.readStream.format("penstock").option("url", url).option("topic", "jobs").load()
    .select("value", "priority")
    .writeStream.format("penstock").option("url", url).option("topic", "copies")
    .option("checkpointLocation", folder + "/checkpoint")
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
spark.stop()
"""


def payloads(node: RunningNode, topic: str) -> list[bytes]:
    leased = node.client.topic(topic).pop(10)
    return sorted(bytes(message.payload) for message in leased)


def test_topics_are_read_and_written_through_connect(node: RunningNode, tmp_path: Path) -> None:
    node.topic("jobs", [b"a", b"b", b"c"])
    node.topic("copies", [])

    run_spark(sys.executable, "-c", CONNECTED, node.url, str(tmp_path), node=node, folder=tmp_path)

    assert payloads(node, "copies") == [b"a", b"b", b"c"]


def test_a_declarative_pipeline_reads_a_topic_and_writes_another(
    node: RunningNode, tmp_path: Path
) -> None:
    for payload, priority in ((b"at once", 1), (b"some day", 7)):
        node.client.topic("jobs").put(payload, priority=priority)
    node.topic("urgent", [])
    project = tmp_path / "project"
    shutil.copytree(EXAMPLE, project)
    spec = project / "spark-pipeline.yml"
    told = spec.read_text().replace("file:///var/lib/penstock/urgent-jobs", f"file://{tmp_path}/s")
    spec.write_text(told)

    command = SPARK_HOME / "bin" / "spark-pipelines"
    run_spark(str(command), "run", "--spec", str(spec), node=node, folder=project)

    assert payloads(node, "urgent") == [b"at once"]
