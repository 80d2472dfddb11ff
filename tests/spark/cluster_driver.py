"""A program for `spark-submit`: copies a topic and says what it saw."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

from penstock.spark.session import spark_session


def executor(_: Iterator[object]) -> Iterator[int]:
    """The process that forked this worker: there is one on each executor."""
    yield os.getppid()


def main(url: str, checkpoint: str) -> None:
    spark = spark_session("penstock-cluster")
    source = {"url": url, "topic": "source", "splitRows": "300"}
    target = {"url": url, "topic": "target", "checkpointLocation": checkpoint}
    table = spark.read.format("penstock").options(**source).load()
    executors = table.rdd.mapPartitions(executor).distinct().count()
    stream = spark.readStream.format("penstock").options(**source).load().select("value")
    query = stream.writeStream.format("penstock").options(**target)
    query.trigger(availableNow=True).start().awaitTermination()
    shuffle = spark.conf.get("spark.sql.shuffle.partitions")
    loggers = spark.sparkContext._jvm.org.apache.logging.log4j.LogManager
    kept = {"ui": bool(spark.sparkContext.uiWebUrl), "log": str(loggers.getRootLogger().getLevel())}
    print(json.dumps({"rows": table.count(), "executors": executors, "shuffle": shuffle} | kept))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
