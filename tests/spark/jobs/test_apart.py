"""Jobs whose driver and executors share nothing but an object store, and no rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from tests.s3 import make_bucket, s3_server
from tests.spark.jobs.support import MIXED, Ground, load, running

from penstock.demo.corpus import Corpus, generate
from penstock.errors import AlreadyExists, Fatal
from penstock.sinks.files import object_store
from penstock.sinks.index import Index
from penstock.spark.delivery.attachment import node_of
from penstock.spark.delivery.backlog import CursorFile
from penstock.spark.jobs.compaction import compact
from penstock.spark.jobs.filling import ReplayWindow, reindex, replay
from penstock.spark.jobs.materialise import SUCCESS, materialise
from penstock.spark.jobs.tasks import Tasks

SMALL = replace(MIXED, deltas=800, vectors=60)
LIMIT = "spark.driver.maxResultSize"


def corpus() -> Corpus:
    return generate(SMALL)


@pytest.fixture(scope="module")
def apart(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """A pipeline whose state, lake and index of four shards are in S3; half of the log is in."""
    folder = tmp_path_factory.mktemp("apart")
    with running(folder / "node") as node, s3_server() as options:
        load(node, corpus(), end=400)
        place = f"s3://{make_bucket(options)}"
        ground = Ground.of(
            node, spark, folder,
            lake={"path": f"{place}/lake", "storage_options": options},
            index={"path": f"{place}/index", "storage_options": options, "shards": 4},
        )  # fmt: skip
        settings = msgspec.structs.replace(
            ground.settings, state=f"{place}/state", storage=options
        ).validate()
        ground = replace(ground, settings=settings)
        ground.run()
        yield ground
        assert not [path.name for path in folder.iterdir() if path.name != "node"]


def place_of(ground: Ground, name: str) -> str:
    return ground.settings.state.replace("/state", f"/{name}")


def index_of(ground: Ground) -> Index:
    options = ground.settings.sinks[1].options
    return Index(options["path"], storage_options=options["storage_options"])


def test_reindex_of_shards_and_then_the_pipeline_goes_on(apart: Ground) -> None:
    assert apart.audit()["ok"]
    index = index_of(apart)
    assert len(index.places()) == 4
    index.table(index.places()[0]).delete("revision > 0")
    assert apart.audit()["sinks"]["index"]["verdict"] == "different"
    found = reindex(apart.spark, apart.settings, "index")
    assert found["states"] >= index.count() > 0
    cursor = CursorFile(apart.settings.store.open(), "index").load()
    assert cursor is not None
    assert cursor.told is not None
    assert cursor.told.position == (found["trigger"],) == cursor.position
    assert apart.audit()["ok"]
    load(apart.node, corpus(), first=400)
    apart.run()
    done = apart.audit()
    assert done["ok"], done


def test_what_is_materialised_is_in_the_object_store(apart: Ground) -> None:
    node, topics, out = node_of(apart.settings), ["vectors"], place_of(apart, "now")
    told = {"pipeline": apart.settings}
    found = materialise(apart.spark, node, topics, out, **told)  # type: ignore[arg-type]
    store = object_store(out, apart.settings.storage, field="output")
    named = json.loads(bytes(store.get(SUCCESS).bytes()))
    assert named["vectors"] == found["vectors"] == index_of(apart).count()
    with pytest.raises(AlreadyExists):
        materialise(apart.spark, node, topics, out, **told)  # type: ignore[arg-type]
    materialise(apart.spark, node, topics, out, overwrite=True, **told)  # type: ignore[arg-type]
    files = {str(one["path"]) for some in store.list() for one in some}
    again = json.loads(bytes(store.get(SUCCESS).bytes()))
    assert files == {SUCCESS, *again["files"]}
    table = place_of(apart, "table")
    for _ in range(2):
        materialise(
            apart.spark,
            node,
            topics,
            table,
            format="delta",
            overwrite=True,
            pipeline=apart.settings,
        )
    held = DeltaTable(table, storage_options=apart.settings.storage)
    assert sum(pa.table(held.get_add_actions())["num_records"].to_pylist()) == found["vectors"]


def test_a_lake_in_the_object_store_is_compacted_and_filled_again(apart: Ground) -> None:
    found = compact(apart.spark, apart.settings)["lakes"]["lake"]["vectors"]
    assert found["rows"] < found["rows_before"]
    assert compact(apart.spark, apart.settings)["lakes"]["lake"]["vectors"]["files_merged"] == 0
    assert apart.audit()["ok"]
    half = replay(apart.spark, apart.settings, ["lake"], window=ReplayWindow())
    assert half["sinks"]["lake"]["deltas"] > 0
    assert apart.audit()["ok"]


def test_no_rows_come_to_the_driver(apart: Ground) -> None:
    """Spark refuses an answer of more than some kilobytes: verdicts are smaller, rows are not."""
    context = apart.spark.sparkContext
    conf = context._jsc.sc().conf()
    before = conf.get(LIMIT, "1g")
    conf.set(LIMIT, "24k")
    try:
        assert apart.audit()["ok"]
        reindex(apart.spark, apart.settings, "index", origin="lake")
        replay(apart.spark, apart.settings, [], window=ReplayWindow())
        compact(apart.spark, apart.settings)
        tasks = Tasks(apart.spark, "rows")
        with pytest.raises(Fatal) as refused:
            tasks.collected(tasks.make(lambda n: [bytes(20_000)], [1, 2]))
        assert "bigger than" in str(refused.value.__cause__)
    finally:
        conf.set(LIMIT, before)
    assert apart.audit()["ok"]
