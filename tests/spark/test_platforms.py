"""The files of the examples for other platforms, as far as they can be run or judged here."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from tests.spark.conftest import SPARK_HOME, RunningNode, run_spark

from penstock.sinks.lake import latest
from penstock.spark.settings import PipelineSettings

EXAMPLES = Path(__file__).parents[2] / "examples"
KUBERNETES = [
    one
    for one in yaml.safe_load_all((EXAMPLES / "kubernetes" / "pipeline.yaml").read_text())
    if one
]


@pytest.mark.parametrize("resource", KUBERNETES, ids=lambda one: str(one["kind"]))
def test_kubernetes_takes_the_resources(resource: dict[str, object]) -> None:
    kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


def test_the_pipeline_on_kubernetes_has_valid_settings() -> None:
    (config,) = (one for one in KUBERNETES if one["kind"] == "ConfigMap")

    settings = PipelineSettings.of(tomllib.loads(config["data"]["pipeline.toml"]))

    assert settings.master == "k8s://https://kubernetes.default.svc"
    ports = {
        port["port"]
        for one in KUBERNETES
        if one["kind"] == "Service"
        for port in one["spec"]["ports"]
    }
    assert {
        settings.spark["spark.driver.port"],
        settings.spark["spark.driver.blockManager.port"],
    } <= {str(port) for port in ports}


def test_the_job_for_yarn_counts_messages(node: RunningNode) -> None:
    topic = node.client.topic("jobs")
    for priority in (1, 1, 7):
        topic.put(b"job", priority=priority)
    folder = EXAMPLES / "yarn"
    submit = SPARK_HOME / "bin" / "spark-submit"
    settings = ("--properties-file", str(folder / "penstock.conf"))
    here = ("--master", "local[2]", "--conf", f"spark.executorEnv.PENSTOCK_URL={node.url}")

    shown = run_spark(str(submit), *here, *settings, str(folder / "count_jobs.py"), node=node)

    assert "priority 1: 2\npriority 7: 1\n" in shown


def test_the_task_for_databricks_brings_sinks_up_to_date(node: RunningNode, tmp_path: Path) -> None:
    node.topic("vectors", [], kind="delta", dimensions=2)
    node.client.deltas("vectors").create("a", [1.0, 2.0])
    config = tmp_path / "pipeline.toml"
    config.write_text(
        f'name = "vectors"\nurl = "{node.url}"\ntopics = ["vectors"]\nstate = "{tmp_path}/state"\n'
        f'[[sink]]\nkind = "lake"\npath = "{tmp_path}/lake"\n'
    )

    shown = run_spark(
        sys.executable, str(EXAMPLES / "databricks" / "run_pipeline.py"), str(config), node=node
    )

    assert "lake: 2 rows" in shown
    assert latest(f"{tmp_path}/lake").read_all()["vector_id"].to_pylist() == ["a"]
