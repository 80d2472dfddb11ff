"""Every hour: bring the sinks of a pipeline up to date, prove them, make the lake small again.

A step fails when its command does, and what comes after it is not begun. Steps may be tried again,
and whole runs repeated, because a trigger of the pipeline counts once however often it is run.
"""

import json
import os
import subprocess
from collections.abc import Container
from typing import Any

import dagster as dg

PENSTOCK = os.environ.get("PENSTOCK_BIN", "penstock")
CONFIG = os.environ.get("PENSTOCK_CONFIG", "/etc/penstock/pipeline.toml")
TIMEOUT_S = 50 * 60  # a node or a store that is away is waited for
POOL = "penstock"  # of one, as dagster.yaml says: a pipeline has one driver
AGAIN = dg.RetryPolicy(max_retries=2, delay=5, backoff=dg.Backoff.EXPONENTIAL)


def penstock(job: str, *options: str, fine: Container[int] = (0,)) -> dict[str, Any]:
    """What a command of the pipeline answers, if it ends with an exit code that is fine."""
    command = [PENSTOCK, "pipeline", job, "--config", CONFIG, "--json", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    if done.returncode not in fine:
        raise RuntimeError(f"{job} ended with exit code {done.returncode}: {done.stdout}")
    return json.loads(done.stdout)


@dg.asset(pool=POOL, retry_policy=AGAIN)
def sinks() -> dg.MaterializeResult:
    """Lake, index, cache: with all that was in the log when the run began."""
    found = penstock("run", "--available-now")
    rows = {f"{sink['name']}/rows": sink["rows"] for sink in found["sinks"]}
    return dg.MaterializeResult(metadata={"trigger": found["changes"]["last"], **rows})


@dg.asset_check(asset=sinks, blocking=True, retry_policy=AGAIN)
def audit() -> dg.AssetCheckResult:
    """Whether the log is whole and every sink holds what it adds up to.

    A sink that is only lagging, because the log has grown since the run, is worth a warning.
    """
    found = penstock("audit", fine=(0, 1))
    if "error" in found:
        raise dg.Failure(found["error"]["message"], allow_retries=False)
    verdicts = {name: sink["verdict"] for name, sink in found["sinks"].items()}
    if "unavailable" in verdicts.values():
        raise RuntimeError(f"a sink could not be read: {verdicts}")
    lagging = "lagging" in verdicts.values() and "different" not in verdicts.values()
    return dg.AssetCheckResult(
        passed=found["ok"],
        severity=dg.AssetCheckSeverity.WARN if lagging else dg.AssetCheckSeverity.ERROR,
        metadata={
            "messages": sum(partition["messages"] for partition in found["partitions"]),
            "partitions": found["partitions"],
            "sinks": found["sinks"],
            **{f"{name}/verdict": verdict for name, verdict in verdicts.items()},
        },
    )


@dg.asset(deps=[sinks], retry_policy=AGAIN)
def compacted_lake() -> dg.MaterializeResult:
    """The lake with the newest row of each vector, in few files."""
    lakes = penstock("compact")["lakes"]
    rows = {f"{name}/rows": lake["vectors"]["rows"] for name, lake in lakes.items()}
    return dg.MaterializeResult(metadata=rows)


job = dg.define_asset_job("penstock_pipeline", [sinks, compacted_lake])
defs = dg.Definitions(
    assets=[sinks, compacted_lake],
    asset_checks=[audit],
    jobs=[job],
    schedules=[dg.ScheduleDefinition(job=job, cron_schedule="@hourly")],
)
