"""Pipelines on real Spark and a real node: deltas in, states out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from tests.spark.conftest import RunningNode

from penstock.demo.corpus import ALL_OPS, Corpus, CorpusOptions, generate
from penstock.errors import FailedPrecondition, Unavailable, WrongEpoch
from penstock.propagation.fold.propagator import Propagator
from penstock.propagation.options import PropagationOptions
from penstock.sinks.protocol import Feed, Items, Work
from penstock.spark.fold.partition_step import read_deltas
from penstock.spark.fold.state import ChangeLog, DriverClaim, Manifest
from penstock.spark.pipeline import Pipeline
from penstock.spark.settings import PipelineSettings
from penstock.spark.source.access import NodeAccess, NodeTopicWriter

DIMENSIONS = 8
PARTITIONS = 3
PENDING_MS = 3_600_000  # a slow machine between two halves of the corpus quarantines nothing
OPTIONS = CorpusOptions(
    deltas=3000,
    vectors=200,
    dimensions=DIMENSIONS,
    components=3,
    duplicates=0.05,
    disorder=0.2,
    concurrent=0.1,
    window=100,
    ops=ALL_OPS,
)


ROOT = Path(__file__).parents[2]
CRASH = "pipeline.commit.after:2"
TOML = """
name = "vectors"
url = "{url}"
topics = ["vectors"]
state = "{folder}/state"
cores = 2
tasks = 2
trigger_interval_s = 0.0
propagation = {{ pending_ms = 3600000 }}
rows_per_trigger = {{ min = 10, max = 100000, initial = 1000 }}

[[sink]]
kind = "{sink}"
name = "out"
path = "{folder}/out"
"""


class FileSink:
    """A user's own sink: states and deltas by trigger in a folder, each written once."""

    feed = Feed.STATES | Feed.DELTAS
    ordered = True

    def __init__(self, name: str, *, path: str) -> None:
        self.name, self._path = name, Path(path)

    def open(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)

    def write(self, work: Work) -> None:
        rows = {
            "states": [] if work.states is None else work.states.to_pylist(),
            "deltas": [] if work.deltas is None else work.deltas.to_pylist(),
        }
        name = f"{work.first:06d}-{work.last:06d}.json"
        (self._path / name).write_text(json.dumps(rows, default=bytes.hex))

    def cursor(self) -> int | None:
        return None

    def scan(self) -> Iterator[pa.RecordBatch]:
        raise NotImplementedError

    def reset(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        return


def delta_topic(node: RunningNode, *, partitions: int = PARTITIONS) -> None:
    config = {"name": "vectors", "kind": "delta", "dimensions": DIMENSIONS}
    node.access().call("topic_create", config=config | {"partitions": partitions})


def put(node: RunningNode, corpus: Corpus, first: int, last: int) -> None:
    """Append the corpus' arrivals from `first` on, in small batches."""
    writer = NodeTopicWriter(node.access)
    for at in range(first, last, 250):
        chunk = corpus.chunk(at, min(at + 250, last))
        payloads = pa.array(chunk.payloads.tolist(), pa.binary())
        sequences = np.arange(at + 1, at + 1 + len(chunk))
        items = Items(sequences=sequences, payloads=payloads)
        writer.append("vectors", producer="corpus", epoch=1, items=items, partition=0)


def settings_of(node: RunningNode, folder: Path, **fields: Any) -> PipelineSettings:
    tree: dict[str, Any] = {
        "name": "vectors",
        "url": node.url,
        "topics": ["vectors"],
        "state": str(folder / "state"),
        "tasks": 2,
        "trigger_interval_s": 0.0,
        "propagation": {"pending_ms": PENDING_MS},
        "rows_per_trigger": {"min": 10, "max": 100_000, "initial": 1000},
        "sink": [{"kind": f"{__name__}:FileSink", "name": "out", "path": str(folder / "out")}],
    }
    return PipelineSettings.of(tree | fields)


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((folder / "out").iterdir())]


def states_written(folder: Path) -> dict[str, tuple[int, bool, list[float]]]:
    rows = [row for work in written(folder) for row in work["states"]]
    return {row["vector_id"]: (row["revision"], row["deleted"], row["vector"]) for row in rows}


def expected_states(
    node: RunningNode, topic: str = "vectors"
) -> dict[str, tuple[int, bool, list[float]]]:
    """By the kernels alone, each partition in one go."""
    found = {}
    for status in node.access().log_status(topic):
        state = Propagator(DIMENSIONS, PropagationOptions(pending_ms=PENDING_MS))
        for deltas, through in read_deltas(
            node.access(), topic, status.partition, first=1, last=status.readable
        ):
            state.feed(deltas, through=through)
        states = state.states()
        for row, name in enumerate(states.vector_id):
            values = states.values[row].tolist()
            found[name.decode()] = (int(states.revision[row]), bool(states.deleted[row]), values)
    return found


def released_once(folder: Path, corpus: Corpus) -> None:
    """Every distinct delta reached the sink exactly once, in gapless order per partition."""
    deltas = [row for work in written(folder) for row in work["deltas"]]
    assert len({row["delta_id"] for row in deltas}) == len(deltas) == len(corpus.history)
    for partition in {row["partition"] for row in deltas}:
        ordinals = [row["ordinal"] for row in deltas if row["partition"] == partition]
        assert ordinals == list(range(1, len(ordinals) + 1))


def test_states_equal_a_direct_fold_over_restarts(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    delta_topic(node)
    corpus = generate(OPTIONS)
    settings = settings_of(node, tmp_path, snapshot_deltas=300)
    for first, last in ((0, 1300), (1300, 3000)):
        put(node, corpus, first, last)
        status = Pipeline(settings, session=spark).run(available_now=True)
        assert status["source"]["lag"] == 0
        assert states_written(tmp_path) == expected_states(node)
    assert status["changes"]["last"] >= 3  # it took several triggers
    released_once(tmp_path, corpus)
    assert any((tmp_path / "state/snapshots").iterdir())


def test_a_running_pipeline_is_stopped_and_goes_on(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    delta_topic(node)
    corpus = generate(OPTIONS)
    settings = settings_of(node, tmp_path)
    with Pipeline(settings, session=spark) as pipeline:
        with pytest.raises(Unavailable, match="in use by the pipeline of process"):
            Pipeline(settings, session=spark).start()
        put(node, corpus, 0, 1500)
        pipeline.changes.wait(-1, timeout_s=240)
        assert pipeline.changes.last is not None
    rest = pipeline.status()
    assert rest["state"] == "stopped"
    assert all(sink["lag"]["rows"] == 0 for sink in rest["sinks"])
    put(node, corpus, 1500, 3000)
    Pipeline(settings, session=spark).run(available_now=True)
    assert states_written(tmp_path) == expected_states(node)
    released_once(tmp_path, corpus)


def test_a_failure_that_passes_ends_the_trigger_and_not_the_pipeline(
    spark: SparkSession, node: RunningNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta_topic(node)
    corpus = generate(OPTIONS)
    pipeline = Pipeline(settings_of(node, tmp_path), session=spark)
    commit, failures = ChangeLog.commit, iter([Unavailable("the folder is away")])

    def flaky(changes: ChangeLog, manifest: Manifest, **check: Any) -> Manifest:
        for failure in failures:
            raise failure
        return commit(changes, manifest, **check)

    monkeypatch.setattr(ChangeLog, "commit", flaky)
    put(node, corpus, 0, 3000)
    pipeline.run(available_now=True)
    source = pipeline.status()["source"]
    assert source["restarts"] == 1
    assert source["last_error"]["message"] == "the folder is away"
    assert states_written(tmp_path) == expected_states(node)
    released_once(tmp_path, corpus)


def test_a_topic_that_is_taken_out_and_put_back_keeps_its_place(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    delta_topic(node)
    config = {"name": "others", "kind": "delta", "dimensions": DIMENSIONS}
    node.access().call("topic_create", config=config)
    corpus = generate(OPTIONS)
    put(node, corpus, 0, 1000)
    both = settings_of(node, tmp_path, topics=["vectors", "others"])
    Pipeline(both, session=spark).run(available_now=True)
    put(node, corpus, 1000, 2000)
    Pipeline(settings_of(node, tmp_path, topics=["others"]), session=spark).run(available_now=True)
    put(node, corpus, 2000, 3000)
    Pipeline(both, session=spark).run(available_now=True)
    assert states_written(tmp_path) == expected_states(node)
    released_once(tmp_path, corpus)


def test_the_number_of_tasks_may_change_between_runs(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    delta_topic(node)
    corpus = generate(OPTIONS)
    for tasks, first, last in ((1, 0, 1000), (3, 1000, 2000), (2, 2000, 3000)):
        put(node, corpus, first, last)
        settings = settings_of(node, tmp_path, tasks=tasks)
        Pipeline(settings, session=spark).run(available_now=True)
    assert states_written(tmp_path) == expected_states(node)
    released_once(tmp_path, corpus)


def test_a_driver_that_was_overtaken_ends_without_a_trace(
    spark: SparkSession, node: RunningNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sleeps between its fold and its commit, while another drives on."""
    delta_topic(node)
    corpus = generate(OPTIONS)
    put(node, corpus, 0, 1500)
    settings = settings_of(node, tmp_path)
    zombie = Pipeline(settings, session=spark)
    commit, asleep = ChangeLog.commit, iter([True])

    def sleeping(changes: ChangeLog, manifest: Manifest, **check: Any) -> Manifest:
        for _ in asleep:
            (tmp_path / "state" / "LOCK").unlink()  # on another machine no lock is seen
            put(node, corpus, 1500, 3000)
            Pipeline(settings, session=spark).run(available_now=True)
        return commit(changes, manifest, **check)

    monkeypatch.setattr(ChangeLog, "commit", sleeping)
    with pytest.raises(WrongEpoch, match="another driver"):
        zombie.run(available_now=True)
    assert states_written(tmp_path) == expected_states(node)
    released_once(tmp_path, corpus)
    Pipeline(settings, session=spark).run(available_now=True)
    released_once(tmp_path, corpus)


def test_what_cannot_go_on_is_said_before_anything_is_read(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    node.topic("jobs", [])
    with pytest.raises(FailedPrecondition, match="jobs is a queue topic"):
        Pipeline(settings_of(node, tmp_path, topics=["jobs"]), session=spark).start()
    delta_topic(node, partitions=1)
    settings = settings_of(node, tmp_path)
    Pipeline(settings, session=spark).run(available_now=True)
    put(node, generate(OPTIONS), 0, 10)
    Pipeline(settings, session=spark).run(available_now=True)
    node.client.topic("vectors").delete(force=True)
    NodeAccess.close_shared()
    delta_topic(node, partitions=1)
    with pytest.raises(FailedPrecondition, match="not the topic this pipeline has read"):
        Pipeline(settings, session=spark).start()
    DriverClaim(settings.store).close()  # nobody holds it


@pytest.mark.timeout(900)  # it starts a second Spark
def test_a_driver_killed_in_the_middle_leaves_nothing_lost_or_doubled(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    """It dies with the second manifest in the store."""
    delta_topic(node)
    corpus = generate(OPTIONS)
    put(node, corpus, 0, 3000)
    settings = settings_of(node, tmp_path)
    config = tmp_path / "pipeline.toml"
    config.write_text(TOML.format(url=node.url, folder=tmp_path, sink=f"{__name__}:FileSink"))
    run = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "pipeline", "run", "--config", str(config)],
        env=os.environ | {"PENSTOCK_CRASH": CRASH, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=800,
        check=False,
    )
    assert run.returncode == -signal.SIGKILL, run.stderr.decode()[-2000:]
    assert ChangeLog(settings.store.open()).last == 1
    Pipeline(settings, session=spark).run(available_now=True)
    assert states_written(tmp_path) == expected_states(node)
    released_once(tmp_path, corpus)
