"""Every hour: bring the sinks of a pipeline up to date, prove them, make the lake small again.

A task fails when its command does, and what comes after it is not begun. Tasks may be tried again,
and whole runs repeated, because a trigger of the pipeline counts once however often it is run.
"""

import json
import os
import shlex
import subprocess
from datetime import UTC, datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG, task
from airflow.sdk.exceptions import AirflowFailException

PENSTOCK = os.environ.get("PENSTOCK_BIN", "penstock")
CONFIG = os.environ.get("PENSTOCK_CONFIG", "/etc/penstock/pipeline.toml")


def command(job: str, *options: str) -> list[str]:
    return [PENSTOCK, "pipeline", job, "--config", CONFIG, *options]


@task
def audit() -> dict[str, str]:
    """The verdict on each sink. A sink that is different stays so: that is not tried again.

    A sink that is only lagging, because the log has grown since the run, is no failure.
    """
    done = subprocess.run(command("audit", "--json"), stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"the audit ended with exit code {done.returncode}")
    found = json.loads(done.stdout)
    if "error" in found or "reasons" in found:
        raise AirflowFailException(found.get("error", found.get("reasons")))
    verdicts = {name: sink["verdict"] for name, sink in found["sinks"].items()}
    if "different" in verdicts.values():
        raise AirflowFailException(f"a sink does not hold what the log adds up to: {verdicts}")
    if "unavailable" in verdicts.values():
        raise RuntimeError(f"a sink could not be read: {verdicts}")
    return verdicts


with DAG(
    "penstock_pipeline",
    schedule="@hourly",
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,  # a pipeline has one driver
    default_args={"retries": 2, "execution_timeout": timedelta(minutes=50)},
) as dag:
    run = BashOperator(task_id="run", bash_command=shlex.join(command("run", "--available-now")))
    compact = BashOperator(task_id="compact", bash_command=shlex.join(command("compact")))
    run >> audit() >> compact
