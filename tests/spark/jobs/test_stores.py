"""Jobs that fill and tidy stores, on real ones; each leaves them equal to the log."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from tests.spark.jobs.support import MIXED, Ground, mixed

from penstock.errors import AlreadyExists, FailedPrecondition, NotFound, Unavailable
from penstock.model.delta import decode
from penstock.spark.delivery.attachment import node_of
from penstock.spark.fold.state import DriverClaim
from penstock.spark.jobs.compaction import compact
from penstock.spark.jobs.filling import ReplayWindow, reindex, replay
from penstock.spark.jobs.materialise import materialise
from penstock.spark.settings import SinkSettings
from verification.reference import fold


def expected(end: int) -> dict[tuple[str, str], np.ndarray]:
    """The living vectors after so many arrivals, but for those that wait for a cause."""
    corpus = mixed()
    deltas = [decode(p) for p in corpus.chunk(0, end).payloads]
    folded = fold(deltas, dimensions=MIXED.dimensions)
    return {key: one.values for key, one in folded.items() if not one.deleted}


def test_materialise_gives_the_vectors_of_the_log(ground: Ground, tmp_path: Path) -> None:
    node = node_of(ground.settings)
    options = ground.settings.propagation
    found = materialise(ground.spark, node, ["vectors"], tmp_path / "now", options=options)
    rows = pq.read_table(tmp_path / "now").to_pylist()
    wanted = expected(len(mixed()))
    assert found["vectors"] == len(rows) == len(wanted)
    for row in rows:
        values = np.array(row["vector"], np.float32)
        assert values.tobytes() == wanted[row["namespace"], row["vector_id"]].tobytes()
    with pytest.raises(AlreadyExists):
        materialise(ground.spark, node, ["vectors"], tmp_path / "now")


def test_materialise_goes_back_in_time(ground: Ground, tmp_path: Path) -> None:
    at_ms = ground.between_ms
    node = node_of(ground.settings)
    then = materialise(
        ground.spark, node, ["vectors"], tmp_path / "then", at_ms=at_ms, format="delta"
    )
    assert sum(partition["read"] for partition in then["partitions"]) == 1_500
    rows = DeltaTable(str(tmp_path / "then")).to_pyarrow_table().num_rows
    assert rows == then["vectors"] > 0
    before = materialise(ground.spark, node, ["vectors"], tmp_path / "none", at_ms=1_000)
    assert before["vectors"] == 0


@pytest.mark.parametrize("origin", ["log", "lake"])
def test_reindex_mends_what_was_lost(ground: Ground, origin: str) -> None:
    from penstock.sinks.index import Index

    Index(str(ground.folder / "index")).database.open_table("vectors_16").delete("revision > 3")
    assert ground.audit()["sinks"]["index"]["verdict"] == "different"
    found = reindex(ground.spark, ground.settings, "index", origin=origin)  # type: ignore[arg-type]
    assert found["states"] == mixed().facts["vectors"]
    assert ground.audit()["ok"]


def test_reindex_refuses_what_it_cannot_do(ground: Ground) -> None:
    with pytest.raises(FailedPrecondition, match="replay"):
        reindex(ground.spark, ground.settings, "lake")
    with pytest.raises(NotFound, match="lake, index, cache"):
        reindex(ground.spark, ground.settings, "other")
    running = DriverClaim(ground.settings.store)
    with pytest.raises(Unavailable, match="in use"):
        reindex(ground.spark, ground.settings, "index")
    running.close()
    alone = msgspec.structs.replace(ground.settings, sinks=ground.settings.sinks[1:2])
    with pytest.raises(FailedPrecondition, match="no lake"):
        reindex(ground.spark, alone, "index", origin="lake")
    assert ground.audit()["sinks"]["index"]["verdict"] == "equal"  # it was not emptied for nothing


def test_replay_fills_an_empty_lake_and_changes_a_full_one_in_nothing(ground: Ground) -> None:
    from penstock.spark.jobs.stores import opened_sink

    with opened_sink(ground.settings, ground.settings.sinks[0]) as lake:
        lake.sink.reset()
    assert ground.audit()["sinks"]["lake"]["verdict"] == "different"
    at_ms = ground.between_ms
    half = replay(ground.spark, ground.settings, ["lake"], window=ReplayWindow(from_ms=at_ms + 1))
    assert 0 < half["sinks"]["lake"]["deltas"] < mixed().facts["deltas"]
    for _ in range(2):
        replay(ground.spark, ground.settings, ["lake"], window=ReplayWindow())
        assert ground.audit()["ok"]


def test_compact_keeps_one_row_of_each_vector(ground: Ground) -> None:
    found = compact(ground.spark, ground.settings)["lakes"]["lake"]["vectors"]
    assert found["rows"] == mixed().facts["vectors"] < found["rows_before"]
    assert ground.audit()["ok"]
    assert json.dumps(found)
    with pytest.raises(FailedPrecondition, match="no lake"):
        compact(ground.spark, ground.settings, "index")


def test_a_sink_that_lags_is_named_with_its_lag(ground: Ground) -> None:
    """What came into the log since is not held against the sinks."""
    before = ground.audit()
    assert before["ok"]
    vectors = ground.node.client.deltas("vectors", origin="late")
    vectors.create("late", np.ones(16, np.float32), namespace="docs")
    found = ground.audit(wait_s=0.3)
    assert not found["ok"]
    assert {sink["verdict"] for sink in found["sinks"].values()} == {"lagging"}
    assert found["sinks"]["index"]["lag"] == {"triggers": 0, "sequences": 1}
    ground.run()
    assert ground.audit()["ok"]


def test_a_sink_that_only_the_driver_can_make_is_filled_and_proved_from_there(
    ground: Ground, tmp_path: Path
) -> None:
    plain = {"path": str(tmp_path / "plain.db")}
    kind = "tests.spark.jobs.plain_sink:PlainSink"
    one = SinkSettings(kind=kind, name="plain", options=plain)
    own = replace(ground, settings=msgspec.structs.replace(ground.settings, sinks=(one,)))
    assert own.audit()["sinks"]["plain"]["verdict"] == "lagging"
    assert reindex(own.spark, own.settings, "plain")["states"] >= mixed().facts["vectors"]
    assert own.audit()["ok"]
    with closing(sqlite3.connect(plain["path"])) as rows:
        rows.execute("update v set r = r + 1 where i = (select min(i) from v where not d)")
        rows.commit()
    assert own.audit()["sinks"]["plain"]["vectors"]["differences"] == {"revision": 1}
