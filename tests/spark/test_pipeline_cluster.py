"""A pipeline on a Spark cluster whose machines share nothing but the store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.s3 import make_bucket, s3_server
from tests.spark.clusters import executors, free_port, standalone
from tests.spark.conftest import JAVA_OPTIONS, RunningNode
from tests.spark.test_pipeline import (
    OPTIONS,
    ROOT,
    delta_topic,
    expected_states,
    put,
)

from penstock.demo.corpus import generate
from penstock.sinks.lake import latest
from penstock.spark.fold.state import ChangeLog
from penstock.spark.store import StoreAddress

CONFIG = """
name = "vectors"
url = "{url}"
topics = ["vectors"]
state = "{place}/state"
storage = {storage}
master = "{master}"
trigger_interval_s = 0.2
executors_s = {patience}
snapshot_deltas = 300
propagation = {{ pending_ms = 3600000 }}
rows_per_trigger = {{ min = 10, max = 300, initial = 300 }}

[spark]
"spark.executor.memory" = "{memory}"
"spark.driver.host" = "127.0.0.1"
"spark.driver.bindAddress" = "127.0.0.1"
"spark.driver.extraJavaOptions" = "{java}"
"spark.executor.extraJavaOptions" = "{java}"
"spark.pyspark.python" = "{python}"
"spark.master.ui.port" = "{web}"

[[sink]]
kind = "lake"
path = "{place}/lake"
storage_options = {storage}
"""


@contextmanager
def driver(
    config: Path, folder: Path, *options: str, command: str = "run", crash: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """A driver, or a job, in a folder of its own, which is its machine."""
    folder.mkdir()
    program = [sys.executable, "-m", "penstock.cli", "pipeline", command, "--config", str(config)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])  # of the code that is tested
    environ = os.environ | {"PYTHONPATH": path, "PENSTOCK_CRASH": crash}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*program, *options], cwd=folder, env=environ, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_trigger(store: StoreAddress, trigger: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while (ChangeLog(store.open()).last or 0) < trigger:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)


def configure(
    file: Path, node: RunningNode, *, place: str, storage: dict[str, str], **more: object
) -> None:
    table = "{ " + ", ".join(f'{name} = "{text}"' for name, text in storage.items()) + " }"
    told = {"url": node.url, "java": JAVA_OPTIONS, "python": sys.executable}
    told |= {"memory": "512m", "patience": 300, "web": 8080} | more
    file.write_text(CONFIG.format(place=place, storage=table, **told))


@pytest.mark.timeout(900)
def test_a_cluster_that_grants_no_executor_is_not_waited_for_in_silence(
    node: RunningNode, tmp_path: Path
) -> None:
    """Its workers have less memory than an executor is to have."""
    delta_topic(node)
    config, web = tmp_path / "pipeline.toml", free_port()
    with standalone(tmp_path / "cluster", workers=1, web=web) as master:
        more = {"master": master, "memory": "20g", "patience": 4, "web": web}
        configure(config, node, place=str(tmp_path / "place"), storage={}, **more)
        for command in ("run", "audit"):
            with driver(config, tmp_path / command, command=command) as process:
                assert process.wait(300) not in (0, None)
            said = " ".join((tmp_path / command / "log").read_text().split())
            assert "no executor was granted yet" in said
            assert "has granted no executor in 4 s" in said and "spark.executor.memory: 20g" in said
            assert "1 of 1 cores and 600 of 600 MiB" in said


@pytest.mark.timeout(900)  # three Sparks are started
def test_drivers_and_executors_die_and_another_machine_goes_on(
    node: RunningNode, tmp_path: Path
) -> None:
    delta_topic(node)
    corpus = generate(OPTIONS)
    put(node, corpus, 0, len(corpus))
    cluster, config = tmp_path / "cluster", tmp_path / "pipeline.toml"
    with s3_server() as options, standalone(cluster) as master:
        place = f"s3://{make_bucket(options)}/films"
        configure(config, node, place=place, storage=options, master=master)
        store = StoreAddress(url=f"{place}/state", options=options)
        with driver(config, tmp_path / "one", crash="pipeline.commit.before:3") as first:
            assert first.wait(300) == -signal.SIGKILL, (tmp_path / "one/log").read_text()[-3000:]
        with driver(config, tmp_path / "two") as second:
            wait_for_trigger(store, 4, second)
            for pid in executors(cluster)[:1]:
                os.kill(pid, signal.SIGKILL)
            wait_for_trigger(store, 6, second)
        with driver(config, tmp_path / "three", "--available-now") as third:
            assert third.wait(300) == 0, (tmp_path / "three/log").read_text()[-3000:]
        rows = latest(f"{place}/lake", storage_options=options).read_all().to_pylist()
    expected = expected_states(node)
    living = {name: values for name, (_, deleted, values) in expected.items() if not deleted}
    assert {row["vector_id"]: row["vector"] for row in rows} == living
    assert len(rows) == len(living)
