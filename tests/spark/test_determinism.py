"""One log, several ways through it: one trigger, many small ones, the batch job, the node itself.

One result.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession
from tests.spark.conftest import RunningNode
from tests.spark.jobs.support import MIXED, load, make_topic

from penstock import Released
from penstock.config import Config
from penstock.demo.corpus import CorpusOptions, generate
from penstock.propagation.options import LiveOptions
from penstock.sinks.lake import LakeSink
from penstock.spark.jobs.comparison import compare
from penstock.spark.jobs.digests import COMPARED, EXPECTED, HELD, delta_digests
from penstock.spark.pipeline import Pipeline
from penstock.spark.settings import PipelineSettings
from penstock.spark.source.access import NodeAccess
from verification.determinism import Ways

SHORT = CorpusOptions(
    deltas=60_000, vectors=6_000, duplicates=0.05, disorder=0.2, concurrent=0.1, origins=4, seed=11
)
OPTIONS = replace(MIXED, deltas=6_000, vectors=300, seed=29)
PARTITIONS = range(2)
WITHIN_S = 240.0


def test_the_lake_is_the_same_by_every_way(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    found = Ways(spark, node.url, tmp_path, SHORT).compare(trigger_rows=5_000)
    assert found["vectors"] == 6_000
    assert found["released"] == 57_000
    assert found["triggers"]["small"] >= 10 > found["triggers"]["one"]
    assert found["different"] == {}, found


@pytest.fixture
def keeping(tmp_path: Path) -> Iterator[RunningNode]:
    """A node that keeps a lake of its own."""
    sink = {"topic": "vectors", "kind": "lake", "path": str(tmp_path / "live")}
    sink |= {"batch_rows": 2000, "batch_ms": 500}
    config = Config(data=tmp_path / "node", drain_s=5.0, live=LiveOptions(sink=(sink,)))
    running = RunningNode(tmp_path / "node", config=config)
    yield running
    NodeAccess.close_shared()
    running.close()


def test_the_live_path_comes_to_the_same(
    spark: SparkSession, keeping: RunningNode, tmp_path: Path
) -> None:
    """The node pushes what the log releases while it grows; a pipeline folds it afterwards."""
    node, corpus = keeping, generate(OPTIONS)
    make_topic(node, "vectors", dimensions=OPTIONS.dimensions)
    writer = threading.Thread(target=load, args=(node, corpus))
    writer.start()
    told = subscribed(node, len(corpus.history))
    writer.join()
    run_pipeline(spark, node, tmp_path)
    settled(node)
    live, piped = (opened(tmp_path / name) for name in ("live", "piped"))
    histories = [history(piped, partition) for partition in PARTITIONS]
    for partition, expected in zip(PARTITIONS, histories, strict=True):
        held = delta_digests(history(live, partition), HELD)
        both = pa.concat_tables([delta_digests(expected, EXPECTED), held])
        found = compare(both, kind="history")
        assert not found.wrong(), found.to_dict()
        heard = [(r.ordinal, r.position, r.delta.delta_id) for r in told[partition]]
        rows = (expected[name].to_pylist() for name in ("ordinal", "position", "delta_id"))
        assert sorted(heard) == list(zip(*rows, strict=True))
    assert sum(map(len, histories)) == len(corpus.history) < len(corpus)
    assert any(pc.any(pc.greater(h["position"], h["sequence"])).as_py() for h in histories)
    states = vectors(piped)
    assert vectors(live) == states
    assert len(states) > OPTIONS.vectors / 2


def subscribed(node: RunningNode, count: int) -> list[list[Released]]:
    """What a subscriber hears of each partition from the first position on, while it is written:
    no delta before its parent, whatever is urgent."""
    found: list[list[Released]] = [[] for _ in PARTITIONS]
    known: set[bytes | None] = {None}
    batches = node.client.deltas("vectors").subscribe_batches(from_sequence=1)
    while sum(map(len, found)) < count:
        batch = next(batches)
        for released in batch:
            assert released.delta.parent in known
            known.add(released.delta.delta_id)
            found[batch.partition].append(released)
    batches.close()
    return found


def run_pipeline(spark: SparkSession, node: RunningNode, folder: Path) -> None:
    tree = {
        "name": "piped",
        "url": node.url,
        "topics": ["vectors"],
        "state": str(folder / "state"),
        "tasks": 2,
        "rows_per_trigger": {"min": 6000, "max": 6000, "initial": 6000},
        "sink": [{"kind": "lake", "path": str(folder / "piped")}],
    }
    Pipeline(PipelineSettings.of(tree), session=spark).run(available_now=True)


def settled(node: RunningNode) -> None:
    """Until the node's own sink holds all that is committed."""
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        [topic] = node.access().call("live_status", topic="vectors")["topics"]
        ends = {end.partition: end.readable for end in node.access().log_status("vectors")}
        if {row["partition"]: row.get("acknowledged") for row in topic["sinks"]} == ends:
            return
        time.sleep(0.05)
    raise AssertionError(f"the sink did not catch up: {topic['sinks']}")


def opened(path: Path) -> LakeSink:
    lake = LakeSink("lake", path=str(path))
    lake.open()
    return lake


def history(lake: LakeSink, partition: int) -> pa.Table:
    """A partition's released deltas, in the order of release."""
    rows = lake.history.batches(COMPARED, where=pc.field("partition") == partition)
    return pa.Table.from_batches(rows).sort_by("ordinal")


def vectors(lake: LakeSink) -> dict[tuple[str, str], tuple[int, bytes, bytes | None]]:
    """Living vectors: revision, the bits of their values, metadata."""
    table = pa.Table.from_batches(lake.scan())
    values = [row.values.to_numpy().tobytes() for row in table["vector"]]
    names = zip(table["namespace"].to_pylist(), table["vector_id"].to_pylist(), strict=True)
    rows = zip(table["revision"].to_pylist(), values, table["metadata"].to_pylist(), strict=True)
    return dict(zip(names, rows, strict=True))
