"""The transforms of the examples, on a pipeline."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from redis import Redis
from tests.spark.conftest import RunningNode

from penstock.sinks.index import Index
from penstock.spark.pipeline import Pipeline
from penstock.spark.settings import PipelineSettings
from penstock.testing.redis import RedisProcess

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def memo(tmp_path: Path) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path / "redis", durable=False) as server:
        yield server


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])


def run(spark: SparkSession, node: RunningNode, folder: Path, name: str, function: str) -> Index:
    index = {"kind": "index", "path": str(folder / name), "transform": f"transforms:{function}"}
    tree = {"name": name, "url": node.url, "topics": ["vectors"], "state": str(folder / f"{name}-")}
    Pipeline(PipelineSettings.of(tree | {"sink": [index]}), session=spark).run(available_now=True)
    return Index(str(folder / name))


def names(index: Index) -> list[str]:
    return sorted(name for batch in index.scan() for name in batch["vector_id"].to_pylist())


@pytest.mark.usefixtures("on_path")
def test_the_examples_filter_join_and_embed(
    spark: SparkSession,
    node: RunningNode,
    tmp_path: Path,
    memo: RedisProcess,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node.topic("vectors", [], kind="delta", dimensions=2)
    deltas = node.client.deltas("vectors")
    shown = {"red": "a red shoe", "blue": "a blue shoe", "tree": "an old tree"}
    for name, text in shown.items():
        deltas.create(name, [1.0, 2.0], metadata={"text": text})
    deltas.create("secret", [1.0, 2.0], metadata={"text": "a red shoe", "hidden": True})
    pq.write_table(pa.table({"vector_id": ["red", "tree", "other"]}), tmp_path / "prices.parquet")
    monkeypatch.setenv("PRICES", str(tmp_path / "prices.parquet"))

    assert names(run(spark, node, tmp_path, "seen", "visible")) == ["blue", "red", "tree"]
    assert names(run(spark, node, tmp_path, "sold", "priced")) == ["red", "tree"]


@pytest.mark.usefixtures("on_path")
def test_a_text_that_did_not_change_is_not_embedded_again(
    spark: SparkSession, node: RunningNode, tmp_path: Path, memo: RedisProcess
) -> None:
    import transforms  # type: ignore[import-not-found]

    node.topic("vectors", [], kind="delta", dimensions=2)
    deltas = node.client.deltas("vectors")
    deltas.create("red", [1.0, 2.0], metadata={"text": "a red shoe"})
    deltas.create("tree", [1.0, 2.0], metadata={"text": "an old tree"})
    spark.sparkContext.environment["EMBEDDINGS_URL"] = memo.url
    first = run(spark, node, tmp_path, "shop", "embedded")
    (nearest,) = first.search(transforms.model("a red shoe"), 1)
    assert (nearest.vector_id, first.dimensions()) == ("red", [transforms.DIMENSIONS])
    with closing(Redis.from_url(memo.url)) as client:
        before = int(client.get("embedding-calls") or 0)
        deltas.set_metadata("red", {"text": "a red shoe", "price": 5})
        deltas.set_metadata("tree", {"text": "a young tree"})
        index = run(spark, node, tmp_path, "shop", "embedded")
        assert int(client.get("embedding-calls") or 0) == before + 1
    found = index.get("red")
    assert found is not None and found.metadata == {"text": "a red shoe", "price": 5}
