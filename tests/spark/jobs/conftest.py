"""One pipeline that has run, shared by the tests of jobs; each of them leaves it as it was."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from pyspark.sql import SparkSession
from tests.spark.jobs.support import Ground, load, make_topic, mixed, running

from penstock.testing.redis import RedisProcess


@pytest.fixture(scope="session")
def ground(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """A mixed corpus brought into every kind of sink in two runs, at rest."""
    folder = tmp_path_factory.mktemp("ground")
    corpus = mixed()
    with running(folder / "node") as node, RedisProcess(folder / "redis", durable=False) as server:
        load(node, corpus, end=1_500)
        make_topic(node, "copy", dimensions=16, partitions=1)
        node.access().call("topic_create", config={"name": "vectors-changes"})
        made = Ground.of(
            node, spark, folder,
            lake={"path": str(folder / "lake")},
            index={"path": str(folder / "index")},
            cache={"url": server.url},
            remote={"topic": "copy"},
            notify={},
        )  # fmt: skip
        made.run()
        between_ms = time.time_ns() // 1_000_000
        load(node, corpus, first=1_500)
        made.run()
        yield replace(made, between_ms=between_ms)
