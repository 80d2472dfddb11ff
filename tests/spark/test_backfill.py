"""Sinks that are added to an old pipeline whose log retention has shortened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from tests.spark.jobs.support import Ground, load, mixed, without_snapshot
from tests.unit.spark.delivery.delivering import eventually

from penstock.sinks.index import Index
from penstock.sinks.lake import latest
from penstock.spark.delivery.backlog import CursorFile
from penstock.spark.pipeline import Pipeline
from penstock.spark.settings import PipelineSettings

Table = dict[str, Any]


@pytest.fixture
def short(tmp_path: Path, spark: SparkSession) -> Iterator[Ground]:
    with without_snapshot(tmp_path, spark) as ground:
        yield ground


def with_sinks(ground: Ground, *tables: Table) -> Ground:
    """The same pipeline with more sinks behind its lake."""
    tree = msgspec.to_builtins(ground.settings)
    lake = {"kind": "lake", "path": str(ground.folder / "lake")}
    wanted = {name: tree[name] for name in ("name", "url", "topics", "state", "propagation")}
    more = {"drain_s": 300.0, "delivery": {"backoff_s_cap": 0.2, "breaker_open_s": 0.2}}
    settings = PipelineSettings.of(wanted | more | {"sink": [lake, *tables]})
    return replace(ground, settings=settings)


def named(rows: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[int, list[float]]]:
    found = {(r["namespace"], r["vector_id"]): (r["revision"], r["vector"]) for r in rows}
    assert len(found) == len(rows)
    return found


def vectors(path: Path) -> dict[tuple[str, str], tuple[int, list[float]]]:
    return named(latest(str(path)).read_all().to_pylist())


def history(path: Path) -> list[dict[str, Any]]:
    rows = DeltaTable(str(path / "history")).to_pyarrow_table().to_pylist()
    return sorted(rows, key=lambda row: (row["partition"], row["ordinal"]))


def notices(ground: Ground) -> list[tuple[int, int]]:
    """The partition and ordinal of every notice."""
    topic = ground.node.client.topic("news")
    found = []
    while messages := topic.pop(1_000, visibility=600):
        decoded = [msgspec.msgpack.decode(message.payload) for message in messages]
        found += [(one["partition"], one["ordinal"]) for one in decoded]
    return sorted(found)


def last_error(ground: Ground, sink: str) -> str:
    """What a sink says after it has failed once in a pipeline that runs."""
    settings = msgspec.structs.replace(ground.settings, drain_s=0.0)
    pipeline = Pipeline(settings, session=ground.spark)
    pipeline.start()
    try:
        eventually(lambda: _error(pipeline, sink) is not None, timeout_s=120)
        return str(_error(pipeline, sink))
    finally:
        pipeline.stop()


def _error(pipeline: Pipeline, sink: str) -> str | None:
    status = next(one for one in pipeline.status()["sinks"] if one["name"] == sink)
    error = status["last_error"]
    return None if error is None else error["message"]


def test_new_sinks_get_from_the_lake_what_the_log_no_longer_has(short: Ground) -> None:
    folder, node = short.folder, short.node
    ground = with_sinks(
        short,
        {"kind": "index", "path": str(folder / "index")},
        {"kind": "lake", "name": "copy", "path": str(folder / "copy")},
        {"kind": "notify", "topic": "news"},
    )
    load(node, mixed(), first=2_000, end=2_500)  # folded while they are filled
    ground.run()
    load(node, mixed(), first=2_500)
    ground.run()

    expected, released = vectors(folder / "lake"), history(folder / "lake")
    held = Index(str(folder / "index")).scan()
    assert named([row for batch in held for row in batch.to_pylist()]) == expected
    assert vectors(folder / "copy") == expected
    assert history(folder / "copy") == released
    assert notices(ground) == [(row["partition"], row["ordinal"]) for row in released]


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"kind": "notify", "topic": "news", "backfill": "log"}, "rules lakes out"),
        ({"kind": "remote", "topic": "copy"}, "does not keep messages as they were sent"),
    ],
)
def test_what_no_lake_may_give_is_refused_by_name(short: Ground, table: Table, why: str) -> None:
    error = last_error(with_sinks(short, table), table["kind"])
    assert "begins at sequence" in error
    assert why in error
    assert 'backfill = "none"' in error


def test_a_lake_that_lacks_something_fills_nobody(short: Ground) -> None:
    with_index = {"kind": "index", "path": str(short.folder / "index")}
    store = short.settings.store.open()
    file = CursorFile(store, "lake")
    cursor = file.load()
    assert cursor is not None
    file.save(msgspec.structs.replace(cursor, started=1))
    error = last_error(with_sinks(short, with_index), "index")
    assert "lake was not given what came before trigger 1" in error
