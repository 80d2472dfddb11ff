"""The task of a Databricks job: bring the sinks of a pipeline up to date, and end.

    run_pipeline.py pipeline.toml

It uses the cluster's own session, so what the file says of `master`, `cores` and `[spark]` does not
count there.
"""

import sys
from pathlib import Path

from penstock.spark.pipeline import Pipeline
from penstock.spark.session import spark_session
from penstock.spark.settings import PipelineSettings

settings = PipelineSettings.load(Path(sys.argv[1]))
status = Pipeline(settings, session=spark_session(settings.name)).run(available_now=True)
for sink in status["sinks"]:
    print(f"{sink['name']}: {sink['rows']} rows, {sink['state']}")
behind = [sink["name"] for sink in status["sinks"] if sink["lag"]["rows"]]
if behind:
    sys.exit(f"not up to date: {', '.join(behind)}")
