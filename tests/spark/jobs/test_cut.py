"""Jobs on a log whose beginning retention has deleted: they begin from the pipeline's snapshot."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from tests.spark.conftest import RunningNode
from tests.spark.jobs.support import Ground, cut, load, mixed, short_node, without_snapshot

from penstock.errors import FailedPrecondition
from penstock.sinks.index import Index
from penstock.sinks.lake import latest
from penstock.sinks.schema import SCANNED
from penstock.spark.delivery.attachment import node_of
from penstock.spark.jobs.compaction import compact
from penstock.spark.jobs.filling import ReplayWindow, reindex, replay
from penstock.spark.jobs.materialise import materialise
from penstock.spark.source.access import NodeAccess


@pytest.fixture
def short(tmp_path: Path, spark: SparkSession) -> Iterator[Ground]:
    """A pipeline that has folded most of its log, with snapshots, before the node cut it."""
    node = short_node(tmp_path / "node")
    ground = Ground.of(
        node, spark, tmp_path, lake={"path": str(tmp_path / "lake")},
        index={"path": str(tmp_path / "index")},
    )  # fmt: skip
    settings = msgspec.structs.replace(ground.settings, snapshot_deltas=100)
    ground = replace(ground, settings=settings)
    load(node, mixed(), end=2_000)
    ground.run()
    cut(node)
    load(node, mixed(), first=2_000)  # not yet in a snapshot
    yield replace(ground, between_ms=time.time_ns() // 1_000_000)
    NodeAccess.close_shared()
    node.close()


def test_a_log_that_was_cut_is_proved_and_folded_from_the_snapshot(short: Ground) -> None:
    lagging = short.audit()
    assert {sink["verdict"] for sink in lagging["sinks"].values()} == {"lagging"}
    one = lagging["partitions"][0]
    assert one["from"] == "snapshot"
    assert 1 < one["first"] <= one["snapshot_sequence"] + 1 <= one["last"]
    short.run()
    found = short.audit()
    assert found["ok"], found
    assert found["sinks"]["index"]["vectors"]["compared"] > 0
    Index(str(short.folder / "index")).database.open_table("vectors_16").delete("revision > 3")
    assert short.audit()["sinks"]["index"]["verdict"] == "different"
    assert reindex(short.spark, short.settings, "index")["states"] == mixed().facts["vectors"]
    assert short.audit()["ok"]
    replayed = replay(short.spark, short.settings, ["index"], window=ReplayWindow())
    assert replayed["sinks"]["index"]["states"] == mixed().facts["vectors"]
    short.run()
    assert short.audit()["ok"]


def test_what_a_snapshot_cannot_tell_is_refused(short: Ground, tmp_path: Path) -> None:
    node = node_of(short.settings)
    told = {"pipeline": short.settings}
    found = materialise(short.spark, node, ["vectors"], tmp_path / "now", **told)  # type: ignore[arg-type]
    assert {one["from"] for one in found["partitions"]} == {"snapshot"}
    assert pq.read_table(tmp_path / "now").num_rows == found["vectors"] > 0
    with pytest.raises(FailedPrecondition, match="no pipeline has a snapshot"):
        materialise(short.spark, node, ["vectors"], tmp_path / "other")
    with pytest.raises(FailedPrecondition, match="later than was asked for"):
        materialise(short.spark, node, ["vectors"], tmp_path / "then", at_ms=1_000, **told)  # type: ignore[arg-type]
    with pytest.raises(FailedPrecondition, match="is wanted"):
        replay(short.spark, short.settings, ["lake"], window=ReplayWindow())
    fresh = msgspec.structs.replace(short.settings, state=str(tmp_path / "none"))
    document = replace(short, settings=fresh).audit()
    assert (document["ok"], document["sinks"]) == (False, {})
    assert "no pipeline has a snapshot" in document["reasons"][0]


@pytest.fixture
def bare(tmp_path: Path, spark: SparkSession) -> Iterator[Ground]:
    index = {"path": str(tmp_path / "index")}
    with without_snapshot(tmp_path, spark, index=index, notify={"topic": "news"}) as ground:
        yield ground


def lake_of(ground: Ground) -> list[dict[str, Any]]:
    rows = latest(str(ground.folder / "lake")).read_all().to_pylist()
    return sorted(rows, key=lambda row: (row["namespace"], row["vector_id"]))


def test_without_a_snapshot_vectors_are_those_of_the_lake(bare: Ground, tmp_path: Path) -> None:
    node, told = node_of(bare.settings), {"pipeline": bare.settings}
    load(bare.node, mixed(), first=2_000, end=2_100)  # not yet folded
    found = materialise(bare.spark, node, ["vectors"], tmp_path / "now", **told)  # type: ignore[arg-type]
    rows = pq.read_table(tmp_path / "now").select(SCANNED).to_pylist()
    assert sorted(rows, key=lambda row: (row["namespace"], row["vector_id"])) == lake_of(bare)
    assert {one["from"] for one in found["partitions"]} == {"lake"}
    assert sum(one["last"] for one in found["partitions"]) < 2_100
    with pytest.raises(FailedPrecondition, match="not as they were then"):
        materialise(bare.spark, node, ["vectors"], tmp_path / "then", at_ms=1_000, **told)  # type: ignore[arg-type]
    with pytest.raises(FailedPrecondition, match="no snapshot of it yet"):
        reindex(bare.spark, bare.settings, "index", origin="log")
    Index(str(bare.folder / "index")).database.open_table("vectors_16").delete("revision > 3")
    assert reindex(bare.spark, bare.settings, "index")["from"] == "lake"
    held = [row for batch in Index(str(bare.folder / "index")).scan() for row in batch.to_pylist()]
    assert sorted(held, key=lambda row: (row["namespace"], row["vector_id"])) == lake_of(bare)


def test_without_a_snapshot_a_replay_is_of_the_lake(bare: Ground) -> None:
    deltas = DeltaTable(str(bare.folder / "lake" / "history")).to_pyarrow_table()
    names = ["index", "notify"]
    found = replay(bare.spark, bare.settings, names, window=ReplayWindow())["sinks"]
    assert found["notify"]["deltas"] == deltas.num_rows
    assert found["index"]["states"] >= len(lake_of(bare))  # the deleted ones, too
    late = ReplayWindow(from_ms=max(deltas["log_time_ms"].to_pylist()))
    found = replay(bare.spark, bare.settings, names, window=late)["sinks"]
    assert 0 < found["notify"]["deltas"] < deltas.num_rows
    with pytest.raises(FailedPrecondition, match="no lake to take it from"):
        replay(bare.spark, bare.settings, ["lake"], window=ReplayWindow())


def test_a_lake_is_compacted_while_the_pipeline_appends(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    ground = Ground.of(node, spark, tmp_path, lake={"path": str(tmp_path / "lake")})
    load(node, mixed(), end=600)
    ground.run()
    small = {"min": 200, "max": 200, "initial": 200}
    rows = msgspec.convert(small, type(ground.settings.rows_per_trigger))
    load(node, mixed(), first=600, end=2_000)
    writing = threading.Thread(target=lambda: ground.run(rows_per_trigger=rows))
    writing.start()
    while writing.is_alive():
        compact(spark, ground.settings)
    writing.join()
    done = ground.audit()
    assert done["ok"], done
    found = compact(spark, ground.settings)["lakes"]["lake"]["vectors"]
    assert found["rows"] <= found["rows_before"]
    assert ground.audit()["ok"]
