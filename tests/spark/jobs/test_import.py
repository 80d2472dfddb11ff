"""Files into a delta topic: every row once, however often it is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from pyspark.sql import SparkSession
from tests.spark.conftest import RunningNode
from tests.spark.jobs.support import make_topic

from penstock.errors import InvalidArgument
from penstock.spark.jobs import imports
from penstock.spark.jobs.imports import ImportOptions, Named, import_files, plan
from penstock.spark.jobs.materialise import materialise
from penstock.spark.source.options import Connecting

NOW_MS = 1_790_000_000_000


def rows(count: int, *, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"id": f"v{n}", "vector": [float(n), 0.5, -1.0], "metadata": {"n": n}}
        for n in range(start, start + count)
    ]


def vectors(spark: SparkSession, node: RunningNode, folder: Path) -> dict[str, list[float]]:
    found = materialise(spark, Connecting(url=node.url), ["docs"], folder, overwrite=True)
    assert sum(partition.get("quarantined", 0) for partition in found["partitions"]) == 0
    return {row["vector_id"]: row["vector"] for row in pq.read_table(folder).to_pylist()}


def imported(
    spark: SparkSession, node: RunningNode, *files: Path, **options: Any
) -> dict[str, Any]:
    make_topic(node, "docs", dimensions=3)
    return import_files(
        spark, Connecting(url=node.url), plan(files),
        ImportOptions(topic="docs", **options), now_ms=NOW_MS,
    )  # fmt: skip


def length(node: RunningNode) -> int:
    return sum(status.readable for status in node.access().log_status("docs"))


def test_the_three_formats_give_the_same_vectors(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    table = pa.Table.from_pylist(rows(300))
    pq.write_table(table.slice(0, 100), tmp_path / "a.parquet", row_group_size=30)
    write_deltalake(str(tmp_path / "b"), table.slice(100, 100))
    lines = [json.dumps(row) for row in rows(100, start=200)]
    (tmp_path / "c.jsonl").write_text("\n".join(lines) + "\n\n")
    found = imported(spark, node, *(tmp_path / name for name in ("a.parquet", "b", "c.jsonl")))
    assert (found["rows"], found["units"]) == (300, 3)
    held = vectors(spark, node, tmp_path / "out")
    assert held == {row["id"]: row["vector"] for row in rows(300)}
    row = pq.read_table(tmp_path / "out", filters=[("vector_id", "==", "v7")]).to_pylist()[0]
    assert row["metadata"] == '{"n":7}'


def test_an_import_run_again_writes_nothing(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    pq.write_table(pa.Table.from_pylist(rows(50)), tmp_path / "a.parquet")
    imported(spark, node, tmp_path / "a.parquet")
    before = length(node)
    again = imported(spark, node, tmp_path / "a.parquet")
    assert (again["sent"], length(node)) == (50, before)
    imported(spark, node, tmp_path / "a.parquet", salt="another")
    assert length(node) >= before + 50


def test_a_journal_lets_an_import_go_on_where_it_stopped(
    spark: SparkSession, node: RunningNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "UNIT_BYTES", 500)
    good = [json.dumps(row) for row in rows(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(good))
    bad = tmp_path / "b.jsonl"
    bad.write_text(json.dumps({"id": "x", "vector": [1.0, 2.0]}))
    files, journal = (tmp_path / "a.jsonl", bad), tmp_path / "journal"
    with pytest.raises(InvalidArgument, match=r"b\.jsonl, row 0 .* 2 components") as refused:
        imported(spark, node, *files, journal=journal)
    assert refused.value.field == "vector"
    (file,) = journal.iterdir()
    done = json.loads(file.read_text())["done"]
    assert sum(done.values()) == 40 and len(done) > 3
    progress: list[float] = []
    planned = plan(files[:1])
    options = ImportOptions(topic="docs", journal=journal)
    for _ in range(2):
        import_files(spark, Connecting(url=node.url), planned, options, now_ms=NOW_MS,
                     progress=lambda done, total: progress.append(done))  # fmt: skip
    assert progress[-1] == len(planned.units)
    assert len(vectors(spark, node, tmp_path / "out")) == 40


def test_of_rows_with_one_name_the_last_wins(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    first, second = rows(10), rows(10)
    for row in second:
        row["vector"] = [9.0, 9.0, float(row["id"][1:])]
    pq.write_table(pa.Table.from_pylist(first + second), tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist(first[:5]), tmp_path / "b.parquet")
    imported(spark, node, tmp_path / "a.parquet", tmp_path / "b.parquet")
    held = vectors(spark, node, tmp_path / "out")
    assert held["v7"] == [9.0, 9.0, 7.0]
    assert held["v3"] == [3.0, 0.5, -1.0]


def test_columns_and_namespaces_can_be_named(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    table = pa.table({"sku": [1, 2], "e": [[1.0, 2.0, 3.0]] * 2, "shop": ["de", None],
                      "note": ['{"a": 1}', None]})  # fmt: skip
    pq.write_table(table, tmp_path / "a.parquet")
    named = Named(vector_id="sku", vector="e", namespace="shop", metadata="note")
    imported(spark, node, tmp_path / "a.parquet", named=named)
    vectors(spark, node, tmp_path / "out")
    found = pq.read_table(tmp_path / "out").select(["namespace", "vector_id", "metadata"])
    assert sorted(found.to_pylist(), key=lambda row: row["vector_id"]) == [
        {"namespace": "de", "vector_id": "1", "metadata": '{"a":1}'},
        {"namespace": "default", "vector_id": "2", "metadata": None},
    ]


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"id": "a", "vector": [1.0, float("nan"), 0.0]}, "vector"),
        ({"id": None, "vector": [1.0, 2.0, 0.0]}, "id"),
        ({"id": "a", "vector": [1.0, 2.0, 0.0], "metadata": "no map"}, "metadata"),
        ({"name": "a", "vector": [1.0, 2.0, 0.0]}, "columns"),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_sent(
    spark: SparkSession, node: RunningNode, tmp_path: Path, row: dict[str, Any], field: str
) -> None:
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    make_topic(node, "docs", dimensions=3)
    before = length(node)
    with pytest.raises(InvalidArgument, match=r"a\.parquet") as refused:
        imported(spark, node, tmp_path / "a.parquet")
    assert (refused.value.field, length(node)) == (field, before)


def test_only_files_that_say_what_they_are_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(InvalidArgument, match="--format"):
        plan([tmp_path / "a.txt"])
    with pytest.raises(InvalidArgument, match="nothing"):
        plan([tmp_path])
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    with pytest.raises(InvalidArgument, match="not a Parquet file"):
        plan([tmp_path])
