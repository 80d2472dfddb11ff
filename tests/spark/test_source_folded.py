"""Released deltas and vectors: what the fold of a topic gives, as tables and as streams."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from tests.spark.conftest import RunningNode, run_spark
from tests.spark.folding import DIMENSIONS, delta, delta_topic, put, put_payloads

from penstock.config import Config, UpkeepOptions
from penstock.demo.corpus import ALL_OPS, CorpusOptions, generate
from penstock.log.flush import LogOptions
from penstock.model.delta import Op
from penstock.propagation.fold.merge import VectorStates
from penstock.propagation.fold.propagator import FeedOutcome, Propagator
from penstock.propagation.options import PropagationOptions
from penstock.spark.fold.partition_step import read_deltas
from penstock.spark.source.access import NodeAccess

OPTIONS = CorpusOptions(
    deltas=1500,
    vectors=120,
    dimensions=DIMENSIONS,
    components=3,
    duplicates=0.05,
    disorder=0.2,
    concurrent=0.1,
    window=100,
    ops=ALL_OPS,
    namespaces=("a", "b"),
)
PENDING = {"propagation.pending_ms": "3600000"}  # a slow machine quarantines nothing
FOLD = PropagationOptions(pending_ms=3_600_000)
MERGED = ("namespace", "vector_id", "vector", "metadata", "revision")
Feed = dict[tuple[str, str, str], Row]


def table(spark: SparkSession, node: RunningNode, **options: Any) -> DataFrame:
    return spark.read.format("penstock").option("url", node.url).options(**options).load()


def stream(spark: SparkSession, node: RunningNode, **options: Any) -> DataFrame:
    return spark.readStream.format("penstock").option("url", node.url).options(**options).load()


def triggers(frame: DataFrame, checkpoint: Path) -> list[list[Row]]:
    """The rows of each trigger until there is no more."""
    found: list[list[Row]] = []
    query = (
        frame.writeStream.foreachBatch(lambda batch, _: found.append(batch.collect()))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return found


def folded(
    node: RunningNode, topic: str = "vectors", *, last: int | None = None
) -> Iterator[tuple[int, list[FeedOutcome], VectorStates]]:
    """By the kernels alone, each partition in one go."""
    dimensions = node.access().config(topic).dimensions
    for status in node.access().log_status(topic):
        state, number = Propagator(dimensions, FOLD), status.partition
        outcomes = [
            state.feed(deltas, through=through)
            for deltas, through in read_deltas(
                node.access(), topic, number, first=1, last=last or status.readable
            )
        ]
        yield number, outcomes, state.states()


def ids_expected(node: RunningNode, topic: str = "vectors") -> dict[int, list[bytes]]:
    """By partition, in the order of release."""
    return {
        number: [id_ for outcome in outcomes for id_ in outcome.released.delta_ids()]
        for number, outcomes, _ in folded(node, topic)
    }


def ids_read(rows: list[Row]) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = defaultdict(list)
    for row in rows:
        found[row.partition].append(bytes(row.delta_id))
    return dict(found)


def states_expected(node: RunningNode, topic: str = "vectors") -> dict[tuple[str, str], Any]:
    found = {}
    for _, _, states in folded(node, topic):
        names = zip(states.namespace, states.vector_id, strict=True)
        for row, (namespace, id_) in enumerate(names):
            if not states.deleted[row]:
                value = (int(states.revision[row]), states.values[row].tolist())
                found[namespace.decode(), id_.decode()] = value
    return found


def states_of(rows: list[Row]) -> dict[tuple[str, str], Any]:
    found = {(row.namespace, row.vector_id): (row.revision, row.vector) for row in rows}
    assert len(found) == len(rows), "a vector stands there twice"
    return found


def applied(feed: list[list[Row]]) -> list[Row]:
    """A change feed applied to an empty table, trigger by trigger."""
    found: Feed = {}
    for rows in feed:
        for row in rows:
            key = (row.topic, row.namespace, row.vector_id)
            assert (key in found) == (row["_change_type"] != "insert"), row
            if row["_change_type"] == "delete":
                assert row.vector is None and row.metadata is None
                del found[key]
            else:
                found[key] = row
    return list(found.values())


# --- released deltas ---


def test_released_deltas_come_once_and_behind_their_parents(
    spark: SparkSession, node: RunningNode
) -> None:
    delta_topic(node, partitions=3)
    corpus = generate(OPTIONS)
    put(node, corpus, 0, 1500)

    rows = table(spark, node, topic="vectors", mode="released", **PENDING).collect()

    assert len(rows) == len(corpus.history) < 1500
    assert ids_read(rows) == ids_expected(node)
    seen: set[bytes] = set()
    for row in rows:
        assert row.parent is None or bytes(row.parent) in seen
        seen.add(bytes(row.delta_id))
    assert any(row.position > row.sequence for row in rows), "none waited for its parent"
    by_partition = defaultdict(list)
    for row in rows:
        by_partition[row.partition].append(row.ordinal)
    assert all(n == list(range(1, len(n) + 1)) for n in by_partition.values())


def test_a_released_delta_has_the_columns_of_a_delta(
    spark: SparkSession, node: RunningNode
) -> None:
    delta_topic(node, dimensions=4)
    made = [delta(1, "v", Op.CREATE, metadata={"colour": "red"}), delta(2, "v"), delta(1, "v")]
    put_payloads(node, made[:2])
    put_payloads(node, made[2:], at=2)
    deltas = table(spark, node, topic="vectors", mode="deltas")
    released = table(spark, node, topic="vectors", mode="released")

    first, second = released.collect()

    names = deltas.schema.names
    assert released.schema.names == [*names, "position", "ordinal"]
    assert released.schema[: len(names)] == deltas.schema[: len(names)]
    assert [first[name] for name in names] == [deltas.collect()[0][name] for name in names]
    assert json.loads(first.metadata) == {"colour": "red"}
    assert (second.op, second.indices, second.ordinal) == ("sparse", [2], 2)
    assert deltas.count() == 3


def test_what_waits_too_long_is_left_out(spark: SparkSession, node: RunningNode) -> None:
    """A delta whose parent never comes is quarantined, here because there is room for one."""
    delta_topic(node, dimensions=4)
    orphans = [delta(n, f"w{n}", parent=b"never-to-be-seen") for n in range(2, 5)]
    put_payloads(node, [delta(1, "v", Op.CREATE), *orphans, delta(2, "v")])
    options = {"mode": "released", "propagation.pending_max": "1"}

    rows = table(spark, node, topic="vectors", **options).collect()

    assert [(row.vector_id, row.op) for row in rows] == [("v", "create"), ("v", "sparse")]


@pytest.mark.parametrize("kept", [True, False])
def test_a_query_gives_each_delta_once_over_its_restarts(
    spark: SparkSession, node: RunningNode, tmp_path: Path, kept: bool
) -> None:
    delta_topic(node, partitions=2)
    corpus = generate(OPTIONS)
    state = {"state": str(tmp_path / "state"), "snapshotDeltas": "200"} if kept else {}
    frame = stream(
        spark, node, topic="vectors", mode="released", maxRowsPerTrigger=250, **PENDING, **state
    )
    found: list[list[Row]] = []

    for first, last in ((0, 700), (700, 1500)):
        put(node, corpus, first, last)
        found += triggers(frame, tmp_path / "checkpoint")

    assert len(found) >= 5
    rows = [row for rows in found for row in rows]
    assert ids_read(rows) == ids_expected(node)
    snapshots = list((tmp_path / "state").rglob("*.fold"))
    assert len(snapshots) == (4 if kept else 0), "two of each partition"


@pytest.mark.parametrize("mode", ["released", "vectors"])
def test_a_trigger_that_is_run_again_gives_the_same_rows(
    spark: SparkSession, node: RunningNode, tmp_path: Path, mode: str
) -> None:
    """It fails behind its tasks, whose states and snapshots are those of its end by then."""
    delta_topic(node, partitions=2)
    put(node, generate(OPTIONS), 0, 1500)
    options = {"mode": mode, "state": str(tmp_path / "state"), "snapshotDeltas": "100"}
    frame = stream(spark, node, topic="vectors", maxRowsPerTrigger=400, **options, **PENDING)
    found: dict[int, list[list[Row]]] = defaultdict(list)

    def take(batch: DataFrame, number: int) -> None:
        found[number].append(sorted(batch.collect(), key=str))
        if number == 2 and len(found[2]) == 1:
            raise ValueError("the store of the rows is away")

    def run() -> None:
        writer = frame.writeStream.foreachBatch(take).trigger(availableNow=True)
        writer.option("checkpointLocation", str(tmp_path / "c")).start().awaitTermination()

    with pytest.raises(StreamingQueryException, match="is away"):
        run()
    run()

    failed, again = found[2]
    assert failed == again != []
    assert len(found) >= 4
    last = [rows[-1] for _, rows in sorted(found.items())]
    if mode == "vectors":
        assert states_of(applied(last)) == states_expected(node)
    else:
        ids = [bytes(row.delta_id) for rows in last for row in rows]
        assert sorted(ids) == sorted(id_ for own in ids_expected(node).values() for id_ in own)


def test_a_start_only_chooses_what_is_given_out(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    delta_topic(node, dimensions=4)
    put_payloads(node, [delta(1, "v", Op.CREATE), delta(3, "v")])
    options = {"topic": "vectors", "mode": "released", "startingOffsets": "latest"}
    frame = stream(spark, node, **options)
    assert not any(triggers(frame, tmp_path / "checkpoint"))

    put_payloads(node, [delta(2, "v"), delta(1, "v", Op.CREATE)], at=2)
    (rows,) = triggers(frame, tmp_path / "checkpoint")

    # The third delta was there before; what it waited for was not.
    assert [(row.delta_time >> 16, row.ordinal) for row in rows] == [(2, 2), (3, 3)]
    last = node.access().log_status("vectors")[0].readable
    offsets = {"startingOffsets": json.dumps({"vectors": {"0": last - 1}})}
    some = table(spark, node, **(options | offsets)).collect()
    assert [row.delta_time >> 16 for row in some] == [2, 3]


# --- vectors ---


def test_vectors_are_what_the_topic_adds_up_to(spark: SparkSession, node: RunningNode) -> None:
    delta_topic(node, partitions=3)
    put(node, generate(OPTIONS), 0, 1500)

    frame = table(spark, node, topic="vectors", mode="vectors", **PENDING)

    assert frame.rdd.getNumPartitions() == 3
    rows = frame.collect()
    assert states_of(rows) == states_expected(node)
    assert {row["_change_type"] for row in rows} == {"insert"}
    assert all(isinstance(json.loads(row.metadata or "{}"), dict) for row in rows)
    some = frame.where("namespace = 'a' and partition = 1 and sequence > 500")
    expected = [r for r in rows if (r.namespace, r.partition) == ("a", 1) and r.sequence > 500]
    assert sorted(some.collect()) == sorted(expected) != []


@pytest.mark.parametrize("kept", [True, False])
def test_a_feed_applied_to_nothing_gives_the_vectors(
    spark: SparkSession, node: RunningNode, tmp_path: Path, kept: bool
) -> None:
    delta_topic(node, partitions=2)
    corpus = generate(OPTIONS)
    options = {"topic": "vectors", "mode": "vectors", **PENDING}
    state = {"state": str(tmp_path / "state")} if kept else {}
    frame = stream(spark, node, **options, **state, maxRowsPerTrigger=250)
    feed: list[list[Row]] = []

    for first, last in ((0, 700), (700, 1500)):
        put(node, corpus, first, last)
        feed += triggers(frame, tmp_path / "checkpoint")

    words = {row["_change_type"] for rows in feed for row in rows}
    assert words == {"insert", "update_postimage", "delete"}
    for rows in feed:
        assert len({(row.namespace, row.vector_id) for row in rows}) == len(rows)
    names = ("namespace", "vector_id", "vector", "metadata", "revision", "sequence", "time")
    told = {tuple(map(str, (row[n] for n in names))) for row in applied(feed)}
    whole = table(spark, node, **options).collect()
    assert told == {tuple(map(str, (row[n] for n in names))) for row in whole}
    assert states_of(whole) == states_expected(node)


def test_what_came_and_went_between_two_triggers_is_not_told(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    delta_topic(node, dimensions=4)
    frame = stream(spark, node, topic="vectors", mode="vectors")
    put_payloads(
        node, [delta(1, "v", Op.CREATE), delta(1, "w", Op.CREATE), delta(2, "w", Op.DELETE)]
    )
    (first,) = triggers(frame, tmp_path / "c")
    put_payloads(node, [delta(2, "v"), delta(3, "v", Op.DELETE), delta(1, "x", Op.CREATE)], at=3)
    (second,) = triggers(frame, tmp_path / "c")
    put_payloads(node, [delta(4, "v", Op.CREATE), delta(2, "x")], at=6)
    (third,) = triggers(frame, tmp_path / "c")

    told = [{row.vector_id: row["_change_type"] for row in rows} for rows in (first, second, third)]
    assert told == [
        {"v": "insert"},
        {"v": "delete", "x": "insert"},
        {"v": "insert", "x": "update_postimage"},
    ]
    assert table(spark, node, topic="vectors", mode="vectors").count() == 2


def merged(path: str, changes: DataFrame) -> None:
    """What MERGE in docs/spark.md does, for a table that Spark here cannot merge into."""
    values = {name: f"c.{name}" for name in MERGED}
    same = "t.namespace = c.namespace AND t.vector_id = c.vector_id"
    rows = changes.select(*MERGED, "_change_type").toArrow()
    (
        DeltaTable(path)
        .merge(rows, same, source_alias="c", target_alias="t")
        .when_matched_delete("c._change_type = 'delete'")
        .when_matched_update(values, "c.revision > t.revision")
        .when_not_matched_insert(values, "c._change_type <> 'delete'")
        .execute()
    )


def test_a_table_follows_a_topic(spark: SparkSession, node: RunningNode, tmp_path: Path) -> None:
    delta_topic(node, partitions=2)
    corpus, path = generate(OPTIONS), str(tmp_path / "films")
    options = {"topic": "vectors", "mode": "vectors", **PENDING}
    frame = stream(spark, node, **options, maxRowsPerTrigger=400)
    empty = spark.createDataFrame([], frame.select(*MERGED).schema).toArrow()
    write_deltalake(path, empty)

    def merge(changes: DataFrame, _: int) -> None:
        merged(path, changes)
        merged(path, changes)  # as after a crash

    for first, last in ((0, 800), (800, 1500)):
        put(node, corpus, first, last)
        writer = frame.writeStream.foreachBatch(merge).trigger(availableNow=True)
        writer.option("checkpointLocation", str(tmp_path / "c")).start().awaitTermination()

    rows = DeltaTable(path).to_pyarrow_table().to_pylist()
    assert states_of([Row(**row) for row in rows]) == states_expected(node)
    text = (Path(__file__).parents[2] / "docs" / "spark.md").read_text(encoding="utf-8")
    (statement,) = re.findall(r'MERGE = """(.*?)"""', text, re.DOTALL)
    spark._jsparkSession.sessionState().sqlParser().parsePlan(statement)


def test_vectors_as_they_were_at_a_time(spark: SparkSession, node: RunningNode) -> None:
    delta_topic(node, dimensions=4)
    put_payloads(node, [delta(1, "v", Op.CREATE), delta(1, "w", Op.CREATE)])
    options = {"topic": "vectors", "mode": "vectors"}
    newest = table(spark, node, **options).agg(F.max("time")).first()[0].replace(tzinfo=UTC)
    # A time is sought by the millisecond, so it has to be another one.
    while (then := datetime.now(UTC)) <= newest + timedelta(milliseconds=1):
        pass
    put_payloads(node, [delta(2, "v"), delta(2, "w", Op.DELETE)], at=2)

    before = table(spark, node, **options, endingTime=then.isoformat()).collect()
    now = table(spark, node, **options).collect()

    assert {row.vector_id: row.vector for row in before} == {"v": [1.0] * 4, "w": [1.0] * 4}
    assert {row.vector_id: row.vector for row in now} == {"v": [1.0, 1.0, 2.0, 1.0]}
    second = {row.vector_id: row.sequence for row in before}["w"]
    offsets = json.dumps({"vectors": {"0": second}})
    one = table(spark, node, **options, endingOffsets=offsets).collect()
    assert [row.vector_id for row in one] == ["v"]
    assert table(spark, node, **options, endingOffsets="earliest").count() == 0
    with pytest.raises(PySparkException, match="takes no start"):
        table(spark, node, **options, startingOffsets="latest").count()


def test_topics_of_different_dimensions_are_read_at_once(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    delta_topic(node, "vectors-small", dimensions=4)
    put_payloads(node, [delta(1, "v", Op.CREATE)], topic="vectors-small")
    options = {"subscribePattern": "vectors-.*", "mode": "vectors"}
    frame = stream(spark, node, **options)
    feed = triggers(frame, tmp_path / "c")
    delta_topic(node, "vectors-wide", partitions=2)
    corpus = generate(OPTIONS)
    put(node, corpus, 0, 300, topic="vectors-wide")
    feed += triggers(frame, tmp_path / "c")

    rows = applied(feed)

    assert {len(row.vector) for row in rows if row.topic == "vectors-small"} == {4}
    wide = [row for row in rows if row.topic == "vectors-wide"]
    assert states_of(wide) == states_expected(node, "vectors-wide")
    assert len(rows) == len(wide) + 1 == table(spark, node, **options).count()


def test_a_topic_that_was_made_again_is_folded_from_its_beginning(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    delta_topic(node)
    put(node, generate(OPTIONS), 0, 100)
    options = {"topic": "vectors", "mode": "vectors", "failOnDataLoss": "false"}
    frame = stream(spark, node, **options, state=str(tmp_path / "state"))
    triggers(frame, tmp_path / "c")
    node.client.topic("vectors").delete(force=True)
    delta_topic(node, dimensions=4)
    put_payloads(node, [delta(1, "v", Op.CREATE)])

    (rows,) = triggers(frame, tmp_path / "c")

    assert [(row.vector_id, row.vector) for row in rows] == [("v", [1.0] * 4)]


def test_vectors_in_sql(spark: SparkSession, node: RunningNode) -> None:
    delta_topic(node, dimensions=4)
    put_payloads(
        node, [delta(1, "v", Op.CREATE), delta(1, "w", Op.CREATE), delta(2, "v", Op.DELETE)]
    )
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW living USING penstock"
        f" OPTIONS (mode 'vectors', topic 'vectors', url '{node.url}')"
    )

    (row,) = spark.sql("SELECT namespace, vector_id, vector[0] AS x FROM living").collect()

    assert row.asDict() == {"namespace": "a", "vector_id": "w", "x": 1.0}
    described = {r.col_name: r.data_type for r in spark.sql("DESCRIBE living").collect()}
    assert described == {
        "topic": "string", "partition": "int", "sequence": "bigint", "time": "timestamp",
        "namespace": "string", "vector_id": "string", "vector": "array<float>",
        "metadata": "string", "revision": "bigint", "delta_time": "bigint",
        "_change_type": "string",
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["released", "vectors"])
def test_a_topic_of_messages_is_refused(spark: SparkSession, node: RunningNode, mode: str) -> None:
    node.topic("jobs", [b"a"])
    with pytest.raises(PySparkException, match="jobs is no delta topic"):
        table(spark, node, topic="jobs", mode=mode).count()


# --- a log that was cut ---


@pytest.fixture
def short(tmp_path: Path) -> Iterator[RunningNode]:
    """A node that deletes the beginning of a log as soon as it may."""
    log = LogOptions(segment_bytes=64 << 10, allocate_bytes=32 << 10, reserve_bytes=8 << 10)
    upkeep = UpkeepOptions(retention_s=0.05, snapshot_s=0.05)
    node = RunningNode(tmp_path / "short", config=Config(log=log, upkeep=upkeep, drain_s=5.0))
    yield node
    NodeAccess.close_shared()
    node.close()


def fill(node: RunningNode, first: int, last: int) -> None:
    """Deltas of one vector, 2 kB each; the first one creates it."""
    for at in range(first, last + 1, 5):
        numbers = range(at, min(at + 5, last + 1))
        more = {"metadata": {"text": "x" * 2000}}
        batch = [delta(n, "v", Op.METADATA if n > 1 else Op.CREATE, **more) for n in numbers]
        put_payloads(node, batch, at=at - 1)


def cut(node: RunningNode) -> None:
    """Let the node delete what it can of the log."""
    node.access().call("topic_update", topic="vectors", changes={"retention_ms": 0})
    deadline = time.monotonic() + 60
    while node.access().log_status("vectors")[0].sequence_first == 1:
        assert time.monotonic() < deadline, "the log was not cut"
        time.sleep(0.05)


PROGRAM = """
import sys
from penstock.spark.session import spark_session

checkpoint, state = sys.argv[1:]
spark = spark_session("again", cores=1)
frame = (
    spark.readStream.format("penstock")
    .options(topic="vectors", mode="released", state=state)
    .load()
)
found = []
query = (
    frame.writeStream.foreachBatch(lambda batch, _: found.extend(batch.collect()))
    .option("checkpointLocation", checkpoint)
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
print(*(row.ordinal for row in found))
"""


@pytest.mark.timeout(300)
def test_a_snapshot_outlives_the_beginning_of_the_log(
    spark: SparkSession, short: RunningNode, tmp_path: Path
) -> None:
    """The second run is a program of its own: of the first it has only what that stored."""
    delta_topic(short, dimensions=4)
    fill(short, 1, 100)
    options = {"topic": "vectors", "mode": "released", "state": str(tmp_path / "state")}
    (first,) = triggers(stream(spark, short, **options), tmp_path / "c")
    assert [row.ordinal for row in first] == list(range(1, 101))
    fill(short, 101, 103)
    cut(short)

    printed = run_spark(
        sys.executable, "-c", PROGRAM, str(tmp_path / "c"), str(tmp_path / "state"), node=short
    )

    assert printed.split() == ["101", "102", "103"]


def test_a_log_without_its_beginning_is_refused(
    spark: SparkSession, short: RunningNode, tmp_path: Path
) -> None:
    delta_topic(short, dimensions=4)
    fill(short, 1, 100)
    cut(short)
    put_payloads(short, [delta(1, "w", Op.CREATE)], at=100)

    for mode in ("released", "vectors"):
        with pytest.raises(PySparkException, match=r"FailedPrecondition.*retention deleted"):
            table(spark, short, topic="vectors", mode=mode).collect()
    options = {"topic": "vectors", "mode": "vectors"}
    with pytest.raises(StreamingQueryException, match=r"FailedPrecondition.*retention deleted"):
        triggers(stream(spark, short, **options), tmp_path / "c")
    rest = table(spark, short, **options, failOnDataLoss="false").collect()
    assert "w" in {row.vector_id for row in rest}
