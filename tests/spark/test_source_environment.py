"""Where the node is, if no option says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.spark.conftest import JAVA_OPTIONS, SPARK_HOME, RunningNode, run_spark

PROGRAM = """
import sys
from penstock.spark.session import spark_session

spark = spark_session("elsewhere")
jobs = spark.read.format("penstock").option("topic", "jobs").load()
jobs.select("value").write.format("penstock").mode("append").option("topic", "copy").save()
stream = spark.readStream.format("penstock").option("topic", "jobs").load().select("value")
query = (
    stream.writeStream.format("penstock")
    .option("topic", "copy")
    .option("checkpointLocation", sys.argv[1])
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
print("rows:", jobs.count())
"""


@pytest.mark.timeout(300)
def test_the_driver_decides_where_the_node_is(node: RunningNode, tmp_path: Path) -> None:
    """Before, the executors' environment won: `Unavailable: cannot connect to …:1`."""
    node.topic("jobs", [b"a", b"b"])
    node.topic("copy", [])
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    settings = {
        "spark.executorEnv.PENSTOCK_URL": "penstock://127.0.0.1:1",
        "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    }
    words = [word for pair in settings.items() for word in ("--conf", "=".join(pair))]
    submit = str(SPARK_HOME / "bin" / "spark-submit")

    shown = run_spark(
        submit, "--master", "local[2]", *words, str(program), str(tmp_path / "c"), node=node
    )

    assert "rows: 2" in shown
    assert node.client.topic("copy").stats().ready == 4
