"""One log, three ways through it: one trigger, many small ones, the batch job. One result."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession
from tests.spark.conftest import RunningNode

from penstock.testing.corpus import CorpusOptions
from penstock.testing.determinism import Ways

SHORT = CorpusOptions(
    deltas=60_000, vectors=6_000, duplicates=0.05, disorder=0.2, concurrent=0.1, origins=4, seed=11
)


def test_the_lake_is_the_same_by_every_way(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    found = Ways(spark, node.url, tmp_path, SHORT).compare(trigger_rows=5_000)
    assert found["vectors"] == 6_000
    assert found["released"] == 57_000
    assert found["triggers"]["small"] >= 10 > found["triggers"]["one"]
    assert found["different"] == {}, found
