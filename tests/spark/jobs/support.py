"""What the tests of jobs share: a topic full of deltas, and a pipeline that has run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession
from tests.spark.conftest import RunningNode

from penstock.config import Config, UpkeepOptions
from penstock.demo.corpus import ALL_OPS, Corpus, CorpusOptions, generate
from penstock.log.flush import LogOptions
from penstock.sinks.protocol import Items
from penstock.spark.jobs.audit import Audit
from penstock.spark.pipeline import Pipeline
from penstock.spark.settings import PipelineSettings
from penstock.spark.source.access import NodeAccess, NodeTopicWriter

MIXED = CorpusOptions(
    deltas=3_000, vectors=120, dimensions=16, components=4, duplicates=0.05, disorder=0.2,
    concurrent=0.1, window=100, ops=ALL_OPS, namespaces=("docs", "images"), seed=7,
)  # fmt: skip

PENDING_MS = 3_600_000  # a cause may come with the next load, however long the runs before it take


@contextmanager
def running(folder: Path) -> Iterator[RunningNode]:
    """A node that several tests share."""
    node = RunningNode(folder)
    try:
        yield node
    finally:
        NodeAccess.close_shared()
        node.close()


def make_topic(node: RunningNode, name: str, *, dimensions: int, partitions: int = 2) -> None:
    config = {"name": name, "kind": "delta", "dimensions": dimensions, "partitions": partitions}
    node.access().call("topic_create", config=config, exists_ok=True)


def load(
    node: RunningNode, corpus: Corpus, *, topic: str = "vectors", first: int = 0,
    end: int | None = None,
) -> None:  # fmt: skip
    """Arrivals `first` to `end` of the corpus into a delta topic."""
    make_topic(node, topic, dimensions=corpus.options.dimensions)
    writer = NodeTopicWriter(node.access)
    end = len(corpus) if end is None else end
    for start in range(first, end, 1_000):
        chunk = corpus.chunk(start, min(end, start + 1_000))
        items = Items(
            sequences=np.arange(start + 1, start + 1 + len(chunk), dtype=np.int64),
            payloads=pa.array(chunk.payloads.tolist(), pa.binary()),
        )
        writer.append(topic, producer="corpus", epoch=1, items=items, partition=0)


@dataclass(frozen=True)
class Ground:
    """A node, and a pipeline of it with its stores in one folder."""

    node: RunningNode
    spark: SparkSession
    folder: Path
    settings: PipelineSettings
    between_ms: int = 0  # a time between two runs

    @classmethod
    def of(cls, node: RunningNode, spark: SparkSession, folder: Path, **sinks: Any) -> Ground:
        tree = {
            "name": "ground",
            "url": node.url,
            "topics": ["vectors"],
            "state": str(folder / "state"),
            "drain_s": 300.0,
            "propagation": {"pending_ms": PENDING_MS},
            "sink": [{"kind": kind, **options} for kind, options in sinks.items()],
        }
        return cls(node, spark, folder, PipelineSettings.of(tree))

    def run(self, **changes: Any) -> None:
        """The pipeline up to the log's end."""
        settings = msgspec.structs.replace(self.settings, **changes)
        Pipeline(settings, session=self.spark).run(available_now=True)

    def audit(self, *, wait_s: float = 0.0) -> dict[str, Any]:
        return Audit(self.spark, self.settings, wait_s=wait_s).run()


def short_node(folder: Path) -> RunningNode:
    """A node that deletes of its log whatever it may, in small pieces."""
    log = LogOptions(segment_bytes=64 << 10, allocate_bytes=32 << 10, reserve_bytes=8 << 10)
    upkeep = UpkeepOptions(retention_s=0.05, snapshot_s=0.05)
    return RunningNode(folder, config=Config(log=log, upkeep=upkeep, drain_s=5.0))


def cut(node: RunningNode) -> None:
    """Let the node delete what it can of the log of both partitions."""
    node.access().call("topic_update", topic="vectors", changes={"retention_ms": 0})
    deadline = time.monotonic() + 60
    while any(one.sequence_first == 1 for one in node.access().log_status("vectors")):
        assert time.monotonic() < deadline, "the log was not cut"
        time.sleep(0.05)
    hour_ms = 3_600_000
    node.access().call("topic_update", topic="vectors", changes={"retention_ms": hour_ms})


@contextmanager
def without_snapshot(folder: Path, spark: SparkSession, **sinks: Any) -> Iterator[Ground]:
    """A pipeline with a lake, and other sinks, whose log has lost its beginning before there was a
    snapshot."""
    node = short_node(folder / "node")
    node.client.topic("news")
    ground = Ground.of(node, spark, folder, lake={"path": str(folder / "lake")}, **sinks)
    for first in (0, 1_000):  # the newest trigger always stays, and the one before goes
        load(node, mixed(), first=first, end=first + 1_000)
        ground.run()
    cut(node)
    yield ground
    NodeAccess.close_shared()
    node.close()


def mixed() -> Corpus:
    return generate(MIXED)
