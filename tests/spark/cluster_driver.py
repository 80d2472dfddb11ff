"""A Spark program for a cluster: copies a topic and says what it saw."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

from penstock.spark.session import spark_session


def executor(_: Iterator[object]) -> Iterator[int]:
    """The process that forked this worker: there is one on each executor."""
    yield os.getppid()


def main(master: str, url: str, checkpoint: str, java_options: str) -> None:
    conf = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.extraJavaOptions": java_options,
        "spark.executor.extraJavaOptions": java_options,
        "spark.executor.memory": "512m",
        "spark.sql.shuffle.partitions": "2",
    }
    spark = spark_session("penstock-cluster", master=master, conf=conf)
    source = {"url": url, "topic": "source", "splitRows": "300"}
    target = {"url": url, "topic": "target", "checkpointLocation": checkpoint}
    table = spark.read.format("penstock").options(**source).load()
    executors = table.rdd.mapPartitions(executor).distinct().count()
    stream = spark.readStream.format("penstock").options(**source).load().select("value")
    query = stream.writeStream.format("penstock").options(**target)
    query.trigger(availableNow=True).start().awaitTermination()
    print(json.dumps({"rows": table.count(), "executors": executors}))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
