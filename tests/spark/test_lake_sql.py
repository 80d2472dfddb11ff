"""Metadata in the lake, queried as the documentation says."""

import re
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from tests.conformance.sinks.changes import State, delta, deltas, opened, states

from penstock.sinks.lake import LakeSink
from penstock.sinks.protocol import Work

DOCUMENT = Path(__file__).parents[2] / "docs" / "sinks.md"


def documented(word: str) -> str:
    """The SQL of the documentation that uses `word`."""
    blocks = re.findall(r"```sql\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (found,) = [block for block in blocks if word in block]
    return str(found)


@pytest.fixture
def lake(tmp_path: Path, spark: SparkSession) -> None:
    """The views `vectors` and `history` over a lake. Spark alone reads Parquet, not Delta."""
    shoe = {"lang": "de", "price": 9.5, "tags": ["new", "red"], "maker": {"country": "at"}}
    rows = states(
        State(vector_id="shoe", revision=1, metadata=shoe),
        State(vector_id="boot", revision=1, metadata={"lang": "de", "price": 80}),
        State(vector_id="sock", revision=1),
    )
    changes = deltas(1, delta(1, vector_id="shoe", origin='w"', clock={'w"': 1, "web": 12}))
    with opened(LakeSink("lake", path=str(tmp_path), pipeline="p")) as sink:
        sink.write(Work(pipeline="p", first=0, last=0, states=rows, deltas=changes))
    for name in ("vectors", "history"):
        files = DeltaTable(str(tmp_path / name)).file_uris()
        spark.read.parquet(*files).createOrReplaceTempView(name)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("get_json_object", {("shoe", "at")}),
        ("explode", {("shoe", 9.5, "new"), ("shoe", 9.5, "red")}),
        ("parse_json", {("shoe", "at"), ("boot", None), ("sock", None)}),
        ("MAP<STRING, BIGINT>", {("shoe", 12)}),
    ],
)
@pytest.mark.usefixtures("lake")
def test_spark_looks_into_json(
    word: str, expected: set[tuple[object, ...]], spark: SparkSession
) -> None:
    found = spark.sql(documented(word)).collect()
    assert {tuple(row) for row in found} == expected


@pytest.mark.usefixtures("lake")
def test_tables_hold_text(spark: SparkSession) -> None:
    kinds = dict(spark.table("vectors").dtypes) | dict(spark.table("history").dtypes)
    assert {kinds[name] for name in ("metadata", "headers", "clock")} == {"string"}
    assert "original" not in kinds and "payload" not in kinds
