"""Jobs on a log whose beginning retention has deleted: they begin from the pipeline's snapshot."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from tests.spark.conftest import RunningNode
from tests.spark.jobs.support import Ground, load, mixed

from penstock.config import Config, UpkeepOptions
from penstock.errors import FailedPrecondition
from penstock.log.flush import LogOptions
from penstock.sinks.index import Index
from penstock.spark.delivery.attachment import node_of
from penstock.spark.jobs.compaction import compact
from penstock.spark.jobs.filling import ReplayWindow, reindex, replay
from penstock.spark.jobs.materialise import materialise
from penstock.spark.source.access import NodeAccess


@pytest.fixture
def short(tmp_path: Path, spark: SparkSession) -> Iterator[Ground]:
    """A pipeline that has folded most of its log, with snapshots, before the node cut it."""
    log = LogOptions(segment_bytes=64 << 10, allocate_bytes=32 << 10, reserve_bytes=8 << 10)
    upkeep = UpkeepOptions(retention_s=0.05, snapshot_s=0.05)
    node = RunningNode(tmp_path / "node", config=Config(log=log, upkeep=upkeep, drain_s=5.0))
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


def cut(node: RunningNode) -> None:
    """Let the node delete what it can of the log of both partitions."""
    node.access().call("topic_update", topic="vectors", changes={"retention_ms": 0})
    deadline = time.monotonic() + 60
    while any(one.sequence_first == 1 for one in node.access().log_status("vectors")):
        assert time.monotonic() < deadline, "the log was not cut"
        time.sleep(0.05)
    hour_ms = 3_600_000
    node.access().call("topic_update", topic="vectors", changes={"retention_ms": hour_ms})


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
