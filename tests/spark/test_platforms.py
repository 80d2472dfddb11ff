"""The files of the examples for other platforms, as far as they can be run or judged here."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from deltalake import DeltaTable
from tests.spark.conftest import JAVA_OPTIONS, RUN_S, SPARK_HOME, RunningNode, run_spark

from penstock.sinks.lake import latest
from penstock.spark.settings import PipelineSettings

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
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


def test_the_bundle_for_databricks_names_what_there_is() -> None:
    folder = EXAMPLES / "databricks"
    bundle = yaml.safe_load((folder / "databricks.yml").read_text())
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    (job,) = bundle["resources"]["jobs"].values()
    (task,) = job["tasks"]

    assert (folder / task["spark_python_task"]["python_file"]).is_file()
    assert task["job_cluster_key"] in {one["job_cluster_key"] for one in job["job_clusters"]}
    used = re.findall(r"\$\{var\.(\w+)\}", (folder / "databricks.yml").read_text())
    assert set(used) == set(bundle["variables"])
    packages = [one["pypi"]["package"] for one in task["libraries"]]
    asked = [extra for one in packages for extra in re.findall(r"^penstock\[(\w+)\]", one)]
    assert asked and set(asked) <= set(extras["optional-dependencies"])


def test_the_script_for_yarn_can_be_read_and_names_what_there_is() -> None:
    script = EXAMPLES / "yarn" / "submit.sh"

    subprocess.run(["sh", "-n", script], check=True)

    named = set(re.findall(r"\$folder/([\w.]+)", script.read_text()))
    made = {name for name in named if name.startswith("environment")}
    assert named - made == {one.name for one in script.parent.iterdir()} - {script.name}


# Once, the job $DIES_IN does all of its work and dies before it can say so.
WRAPPED = """#!/bin/sh
"{penstock}" "$@" || exit
if [ "$2" = "$DIES_IN" ] && mkdir "{folder}/died" 2>/dev/null; then kill -9 $$; fi
"""
# What came of a run of a job, and what the check said. One job is the file's, one leaves out the
# pipeline's run.
EXECUTE_DAGSTER = """
import json, runpy, sys
import dagster as dg

defs = runpy.run_path(sys.argv[1])["defs"]
rest = dg.AssetSelection.all_asset_checks() | dg.AssetSelection.assets("compacted_lake")
rest = dg.Definitions(jobs=[dg.define_asset_job("audit_and_compact", rest)])
job = dg.Definitions.merge(defs, rest).get_job_def(sys.argv[2])
with dg.DagsterInstance.get() as instance:
    done = job.execute_in_process(instance=instance, raise_on_error=False)
(check,) = done.get_asset_check_evaluations()
events = [f"{event.step_key} {event.event_type_value}" for event in done.all_events]
told = {name: value.value for name, value in check.metadata.items()}
judged = {"passed": check.passed, "severity": check.severity.value, "metadata": told}
print(json.dumps({"ok": done.success, "events": events, **judged}))
"""


@dataclass
class Flow:
    """A pipeline with a lake, whose commands another program starts from its own environment."""

    name: str
    folder: Path
    node: RunningNode

    def prepare(self) -> None:
        self.node.topic("vectors", [], kind="delta", dimensions=2)
        deltas = self.node.client.deltas("vectors")
        deltas.create("a", [1.0, 2.0])
        deltas.create("b", [3.0, 4.0])
        (self.folder / "pipeline.toml").write_text(
            f'name = "vectors"\nurl = "{self.node.url}"\ntopics = ["vectors"]\n'
            f'state = "{self.folder}/state"\ncores = 1\n'
            f'[[sink]]\nkind = "lake"\npath = "{self.folder}/lake"\n'
            f'[spark]\n"spark.driver.extraJavaOptions" = "{JAVA_OPTIONS}"\n'
        )
        penstock = Path(sys.executable).with_name("penstock")
        self._binary.write_text(WRAPPED.format(penstock=penstock, folder=self.folder))
        self._binary.chmod(0o755)

    @property
    def _binary(self) -> Path:
        return self.folder / "penstock"

    def run(
        self, program: str, *arguments: str, **settings: str
    ) -> subprocess.CompletedProcess[str]:
        config = str(self.folder / "pipeline.toml")
        mine = {"PENSTOCK_BIN": str(self._binary), "PENSTOCK_CONFIG": config}
        command = [ROOT / ".venv" / self.name / "bin" / program, *arguments]
        return subprocess.run(
            command, env=os.environ | settings | mine, capture_output=True, text=True, timeout=RUN_S
        )

    def lake(self) -> list[str]:
        return sorted(latest(f"{self.folder}/lake").read_all()["vector_id"].to_pylist())

    def damage(self) -> None:
        lake = DeltaTable(f"{self.folder}/lake/vectors")
        lake.update(updates={"vector_id": "'stray'"}, predicate="vector_id = 'b'")


@pytest.fixture
def flow(node: RunningNode, tmp_path: Path) -> Callable[[str], Flow]:
    def made(name: str) -> Flow:
        subprocess.run(["make", f".venv/{name}/.stamp-flow"], cwd=ROOT, check=True, timeout=RUN_S)
        flow = Flow(name, tmp_path, node)
        flow.prepare()
        return flow

    return made


def test_airflow_runs_proves_and_compacts(flow: Callable[[str], Flow], tmp_path: Path) -> None:
    airflow = flow("airflow")
    settings = {
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(EXAMPLES / "airflow"),
        "AIRFLOW__CORE__DEFAULT_TASK_RETRY_DELAY": "1",
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        "DIES_IN": "run",
    }
    airflow.run("airflow", "db", "migrate", **settings).check_returncode()

    test = ("dags", "test", "penstock_pipeline")
    good = airflow.run("airflow", *test, **settings)

    assert good.returncode == 0, good.stdout[-4000:] + good.stderr[-4000:]
    assert _tasks(tmp_path) == {
        "run": ("success", 2),
        "audit": ("success", 1),
        "compact": ("success", 1),
    }
    assert airflow.lake() == ["a", "b"]

    airflow.damage()
    bad = airflow.run("airflow", *test, "--mark-success-pattern", "^run$", **settings)

    assert bad.returncode == 1
    assert _tasks(tmp_path) == {
        "run": ("success", 1),
        "audit": ("failed", 1),
        "compact": ("upstream_failed", 0),
    }
    assert "'lake': 'different'" in bad.stdout + bad.stderr


def _tasks(folder: Path) -> dict[str, tuple[str, int]]:
    """The tasks of the last run, with how often each was tried."""
    with closing(sqlite3.connect(folder / "airflow" / "airflow.db")) as database:
        rows = database.execute(
            "select task_id, state, try_number from task_instance"
            " where run_id = (select run_id from dag_run order by id desc limit 1)"
        )
        return {name: (state, tries) for name, state, tries in rows}


def test_dagster_runs_proves_and_compacts(flow: Callable[[str], Flow], tmp_path: Path) -> None:
    dagster = flow("dagster")
    home = tmp_path / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_bytes((EXAMPLES / "dagster" / "dagster.yaml").read_bytes())
    file = EXAMPLES / "dagster" / "penstock_pipeline.py"
    settings = {"DAGSTER_HOME": str(home), "DAGSTER_DISABLE_TELEMETRY": "1", "DIES_IN": "compact"}

    def executed(job: str) -> Any:
        done = dagster.run("python", "-c", EXECUTE_DAGSTER, str(file), job, **settings)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return json.loads(done.stdout)

    good = executed("penstock_pipeline")

    assert good["ok"] and good["passed"]
    assert (good["metadata"]["lake/verdict"], good["metadata"]["messages"]) == ("equal", 2)
    assert {"compacted_lake STEP_RESTARTED", "compacted_lake STEP_SUCCESS"} <= set(good["events"])
    assert dagster.lake() == ["a", "b"]

    dagster.node.client.deltas("vectors").create("c", [5.0, 6.0])
    behind = executed("audit_and_compact")

    assert (behind["ok"], behind["passed"], behind["severity"]) == (True, False, "WARN")
    assert behind["metadata"]["lake/verdict"] == "lagging"
    assert "compacted_lake STEP_SUCCESS" in behind["events"]

    dagster.damage()
    bad = executed("audit_and_compact")

    assert (bad["ok"], bad["passed"], bad["severity"]) == (False, False, "ERROR")
    assert bad["metadata"]["lake/verdict"] == "different"
    assert not {"sinks_audit STEP_RESTARTED", "compacted_lake STEP_START"} & set(bad["events"])
