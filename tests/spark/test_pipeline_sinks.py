"""Sinks that tasks write: what they hold in the end, whatever was done to them meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, expr
from redis import Redis
from tests.spark.conftest import RunningNode
from tests.spark.test_pipeline import (
    DIMENSIONS,
    OPTIONS,
    PARTITIONS,
    delta_topic,
    expected_states,
    put,
    settings_of,
)
from tests.unit.spark.delivery.delivering import eventually

from penstock.demo.corpus import Corpus, generate
from penstock.errors import InvalidArgument, PenstockError
from penstock.sinks.cache import CacheSink
from penstock.sinks.index import Index
from penstock.sinks.lake import latest
from penstock.sinks.protocol import Sink
from penstock.spark.jobs.audit import Audit
from penstock.spark.jobs.filling import reindex
from penstock.spark.pipeline import Pipeline
from penstock.spark.settings import PipelineSettings
from penstock.testing.redis import RedisProcess

Held = dict[str, tuple[int, list[float]]]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path / "redis", durable=False) as server:
        yield server


@pytest.fixture
def corpus(node: RunningNode) -> Corpus:
    delta_topic(node)
    made = generate(OPTIONS)
    put(node, made, 0, len(made) // 2)
    return made


class Place:
    """A pipeline's sinks in one folder, and what they hold."""

    def __init__(self, node: RunningNode, folder: Path, redis: RedisProcess) -> None:
        self.node, self.folder, self.redis = node, folder, redis
        self.tables: dict[str, dict[str, Any]] = {
            "lake": {"kind": "lake", "path": str(folder / "lake")},
            "index": {"kind": "index", "path": str(folder / "index"), "shards": 2},
            "cache": {"kind": "cache", "url": redis.url},
        }

    def settings(self, *sinks: str, **changed: Any) -> PipelineSettings:
        tables = [self.tables[name] | changed for name in sinks]
        return settings_of(self.node, self.folder, sink=tables)

    def run(self, spark: SparkSession, *sinks: str, **changed: Any) -> dict[str, Any]:
        settings = self.settings(*sinks, **changed)
        return Pipeline(settings, session=spark).run(available_now=True)

    def audit(self, spark: SparkSession, *sinks: str) -> dict[str, str]:
        found = Audit(spark, self.settings(*sinks)).run()
        return {name: sink["verdict"] for name, sink in found["sinks"].items()}

    def expected(self) -> Held:
        states = expected_states(self.node).items()
        return {name: (revision, values) for name, (revision, gone, values) in states if not gone}

    def lake(self) -> Held:
        rows = latest(str(self.folder / "lake")).read_all().to_pylist()
        return {row["vector_id"]: (row["revision"], row["vector"]) for row in rows}

    def index(self) -> Held:
        return _scanned(Index(str(self.folder / "index")))

    def cache(self) -> Held:
        sink = CacheSink("cache", url=self.redis.url)
        sink.open()
        return _scanned(sink)


def _scanned(held: Sink | Index) -> Held:
    rows = [row for batch in held.scan() for row in batch.to_pylist()]
    assert len(rows) == len({row["vector_id"] for row in rows})
    return {row["vector_id"]: (row["revision"], row["vector"]) for row in rows}


@pytest.fixture
def place(node: RunningNode, tmp_path: Path, redis: RedisProcess) -> Place:
    return Place(node, tmp_path, redis)


def sink_of(status: dict[str, Any], name: str) -> dict[str, Any]:
    return next(dict(sink) for sink in status["sinks"] if sink["name"] == name)


def test_every_sink_holds_what_the_log_adds_up_to(
    spark: SparkSession, place: Place, corpus: Corpus
) -> None:
    place.run(spark, "lake", "index", "cache")
    put(place.node, corpus, len(corpus) // 2, len(corpus))
    status = place.run(spark, "lake", "index", "cache")

    expected = place.expected()
    assert place.lake() == expected
    assert place.index() == expected
    assert place.cache() == expected
    assert len(Index(str(place.folder / "index")).places()) == 2
    assert not any(sink["retries"] or sink["rejected"] for sink in status["sinks"])


def test_a_sink_that_is_added_later_is_filled(
    spark: SparkSession, place: Place, corpus: Corpus
) -> None:
    place.run(spark, "cache")  # its triggers are deleted with its end
    put(place.node, corpus, len(corpus) // 2, len(corpus))

    place.run(spark, "cache", "index", "lake")

    expected = place.expected()
    assert place.index() == expected
    assert place.lake() == expected
    history = _history(place)
    assert len(history) == len(set(history)) > len(expected)


def test_a_node_that_is_added_later_is_given_every_delta_whole(
    spark: SparkSession, place: Place, corpus: Corpus
) -> None:
    place.run(spark, "cache")  # nobody wanted payloads of these triggers, and they are gone
    put(place.node, corpus, len(corpus) // 2, len(corpus))
    place.node.topic("copy", [], kind="delta", dimensions=DIMENSIONS, partitions=PARTITIONS)
    place.tables["remote"] = {"kind": "remote", "url": place.node.url, "topic": "copy"}

    place.run(spark, "cache", "remote")

    copied = _payloads(place.node, "copy")
    assert len(copied) == len(set(copied)) == len(corpus.history)
    assert set(copied) == set(_payloads(place.node, "vectors"))
    assert {name: held[1:] for name, held in expected_states(place.node, "copy").items()} == {
        name: held[1:] for name, held in expected_states(place.node).items()
    }


def _payloads(node: RunningNode, topic: str) -> list[bytes]:
    access = node.access()
    return [
        payload
        for one in access.log_status(topic)
        for batches in access.read_range(topic, one.partition, 1, one.readable)
        for batch in batches
        for payload in batch.columns().binary("payload") or ()
    ]


def test_a_sink_whose_tasks_hang_delays_no_other(
    spark: SparkSession, place: Place, corpus: Corpus
) -> None:
    spark.sparkContext.addPyFile(str(Path(__file__).with_name("hanging_sink.py")))
    release = place.folder / "go-on"
    hanging = {"kind": "hanging_sink:HangingSink", "name": "hanging", "path": str(release)}
    place.tables["hanging"] = hanging
    every = ("hanging", "lake", "cache")
    delivery = {"hang_s": 1.0}
    tables = [place.tables[name] for name in every]
    settings = settings_of(place.node, place.folder, sink=tables, delivery=delivery)

    def caught_up() -> bool:
        status = pipeline.status()
        rows = [sink_of(status, name)["lag"]["rows"] for name in every]
        folded = status["source"].get("lag") == 0 and status["source"]["to"] == reached
        return folded and rows[0] > 0 and rows[1:] == [0, 0]

    with Pipeline(settings, session=spark) as pipeline:
        for end in (len(corpus) // 2, len(corpus)):
            put(place.node, corpus, len(corpus) // 2, end)
            logs = place.node.access().log_status("vectors")
            reached = {f"vectors/{one.partition}": one.readable + 1 for one in logs}
            eventually(caught_up, timeout_s=120)
        eventually(lambda: sink_of(pipeline.status(), "hanging")["state"] == "hanging")
        release.touch()

    assert place.lake() == place.cache() == place.expected()
    assert not any(sink["lag"]["rows"] for sink in pipeline.status()["sinks"])


def _history(place: Place) -> list[tuple[int, int]]:
    from deltalake import DeltaTable

    rows = DeltaTable(str(place.folder / "lake" / "history")).to_pyarrow_table()
    return [(row["partition"], row["ordinal"]) for row in rows.to_pylist()]


def test_a_sink_is_filled_from_the_lake_if_it_is_told_so(
    spark: SparkSession, place: Place, corpus: Corpus
) -> None:
    place.run(spark, "lake")
    put(place.node, corpus, len(corpus) // 2, len(corpus))
    place.tables["index"]["backfill"] = "lake"

    place.run(spark, "lake", "index")

    assert place.index() == place.expected()
    assert place.audit(spark, "lake", "index") == {"lake": "equal", "index": "equal"}
    place.tables["lake"]["backfill"] = "lake"
    with pytest.raises(InvalidArgument, match="no lake to take it from"):
        place.run(spark, "lake")


def test_a_sink_that_is_not_to_be_filled_begins_with_what_comes(
    spark: SparkSession, place: Place, corpus: Corpus
) -> None:
    place.run(spark, "cache")
    put(place.node, corpus, len(corpus) // 2, len(corpus) // 2 + 50)

    place.run(spark, "cache", "index", backfill="none")

    expected, found = place.expected(), place.index()
    assert 0 < len(found) < len(expected)
    assert all(expected[name] == held for name, held in found.items())


def test_a_cache_that_lost_everything_is_filled_again(
    spark: SparkSession, place: Place, corpus: Corpus
) -> None:
    place.run(spark, "cache")
    with closing(Redis.from_url(place.redis.url)) as client:
        client.flushall()

    place.run(spark, "cache")

    assert place.cache() == place.expected()


def test_an_index_from_a_backup_is_brought_up_to_date(
    spark: SparkSession, place: Place, corpus: Corpus
) -> None:
    place.run(spark, "index")
    shutil.copytree(place.folder / "index", place.folder / "backup")
    put(place.node, corpus, len(corpus) // 2, len(corpus))
    place.run(spark, "index")
    shutil.rmtree(place.folder / "index")
    shutil.copytree(place.folder / "backup", place.folder / "index")

    place.run(spark, "index")

    assert place.index() == place.expected()


@contextmanager
def running(spark: SparkSession, settings: PipelineSettings) -> Iterator[Pipeline]:
    pipeline = Pipeline(settings, session=spark)
    pipeline.start()
    try:
        yield pipeline
    finally:
        pipeline.stop()


def flushed(place: Place) -> None:
    with closing(Redis.from_url(place.redis.url)) as client:
        client.flushall()


def restarted_empty(place: Place) -> None:
    place.redis.kill()
    place.redis.start()


def replaced_by_a_copy(place: Place) -> None:
    shutil.rmtree(place.folder / "index")
    shutil.copytree(place.folder / "backup", place.folder / "index")


def removed(place: Place) -> None:
    shutil.rmtree(place.folder / "index")


@pytest.mark.parametrize(
    ("name", "happens"),
    [
        ("cache", flushed),
        ("cache", restarted_empty),
        ("index", replaced_by_a_copy),
        ("index", removed),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_store_that_lost_rows_between_two_triggers_gets_them_back(
    spark: SparkSession,
    place: Place,
    corpus: Corpus,
    name: str,
    happens: Callable[[Place], None],
) -> None:
    half, quarter = len(corpus) // 2, len(corpus) // 4
    held = getattr(place, name)
    with running(spark, place.settings(name)):
        eventually(lambda: _equal(held, place), timeout_s=120)
        if name == "index":
            unfinished = shutil.ignore_patterns(".*")
            shutil.copytree(place.folder / "index", place.folder / "backup", ignore=unfinished)
        put(place.node, corpus, half, half + quarter)
        eventually(lambda: _equal(held, place), timeout_s=120)

        happens(place)
        put(place.node, corpus, half + quarter, half + quarter + 20)

        eventually(lambda: _equal(held, place), timeout_s=60)


def _equal(held: Callable[[], Held], place: Place) -> bool:
    """Whether a sink holds all; one that is being written may be unreadable for a moment."""
    try:
        return held() == place.expected() != {}
    except (PenstockError, AssertionError):
        return False


def halved(states: DataFrame) -> DataFrame:
    """A filter, and a join with a static table that says by how much values are to be changed."""
    names = states.sparkSession.createDataFrame([("default", 0.5)], "namespace string, by double")
    halves = expr("transform(vector, x -> cast(x * by as float))")
    kept = states.where(~col("vector_id").endswith("7"))
    return kept.join(names, "namespace").withColumn("vector", halves)


def short_of(held: Held) -> Held:
    return {
        name: (revision, [value * 0.5 for value in values])
        for name, (revision, values) in held.items()
        if not name.endswith("7")
    }


def test_a_transform_stands_between_the_fold_and_the_sinks(
    spark: SparkSession, place: Place, corpus: Corpus
) -> None:
    place.tables["index"]["transform"] = f"{__name__}:halved"
    place.tables["lake"]["transform"] = f"{__name__}:halved"
    place.run(spark, "lake", "index", "cache")
    put(place.node, corpus, len(corpus) // 2, len(corpus))
    status = place.run(spark, "lake", "index", "cache")

    expected = place.expected()
    assert place.index() == place.lake() == short_of(expected)
    assert place.cache() == expected
    assert len(_history(place)) == len(set(_history(place)))
    assert not any(sink["retries"] for sink in status["sinks"])
    every = ("lake", "index", "cache")
    assert place.audit(spark, *every) == dict.fromkeys(every, "equal")
    place.tables["index"].pop("transform")
    assert place.audit(spark, "index") == {"index": "different"}


def test_an_index_with_a_transform_is_made_anew_by_way_of_it(
    spark: SparkSession, place: Place, corpus: Corpus
) -> None:
    place.tables["index"]["transform"] = f"{__name__}:halved"
    place.run(spark, "index")
    place.tables["index"]["shards"] = 4

    reindex(spark, place.settings("index"), "index")
    place.run(spark, "index")

    assert place.index() == short_of(place.expected())
    assert len(Index(str(place.folder / "index")).places()) == 4


def test_a_transform_that_loses_a_column_is_told_by_name(
    spark: SparkSession, place: Place, corpus: Corpus
) -> None:
    def without(states: DataFrame) -> DataFrame:
        return states.drop("revision")

    settings = settings_of(place.node, place.folder, sink=[place.tables["index"]], drain_s=0.0)
    pipeline = Pipeline(settings, session=spark, transform=without)
    pipeline.start()
    eventually(lambda: sink_of(pipeline.status(), "index")["last_error"] is not None, timeout_s=120)
    error = sink_of(pipeline.status(), "index")["last_error"]["message"]
    pipeline.stop()

    assert "the transform gives revision as nothing, must be bigint" in error
