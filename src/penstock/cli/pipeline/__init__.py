"""`penstock pipeline`: run the pipeline from delta topics to sinks, and what goes with it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.command import Answer, Exit, Invocation, command, group
from penstock.cli.node import LogLevel
from penstock.cli.pipeline import jobs, status
from penstock.console import say, to_json

if TYPE_CHECKING:
    from penstock.spark.pipeline import Pipeline

app = group()
for _module in (status, jobs):
    app.add_typer(_module.app)  # without a name its commands join these

Config = Annotated[Path, typer.Option("--config", "-c", help="The pipeline's TOML file.")]


@command(app, "run", connects=False)
def run(
    cli: Invocation,
    config: Config = Path("pipeline.toml"),
    url: Annotated[str | None, typer.Option(help="The node's url, instead of the file's.")] = None,
    state: Annotated[Path | None, typer.Option(help="The state folder, likewise.")] = None,
    master: Annotated[
        str | None, typer.Option(help="A Spark cluster's master. [default: this machine]")
    ] = None,
    cores: Annotated[int | None, typer.Option(help="Cores to use. [default: all]")] = None,
    available_now: Annotated[
        bool, typer.Option(help="Stop when all that is in the log now has reached the sinks.")
    ] = False,
    metrics: Annotated[
        str | None, typer.Option(help="Serve Prometheus metrics.", metavar="HOST:PORT")
    ] = None,
    log_level: LogLevel = None,
) -> Answer:
    """Run the pipeline until SIGTERM or Ctrl-C; said again, it does not wait for the sinks."""
    from penstock.node.observe.logs import configure
    from penstock.spark.pipeline import Pipeline
    from penstock.spark.settings import PipelineSettings

    overrides: dict[str, Any] = {
        "url": url, "state": None if state is None else str(state), "master": master,
        "cores": cores,
    }  # fmt: skip
    settings = PipelineSettings.load(config, overrides=overrides)
    configure(log_level or "info")
    pipeline = Pipeline(settings, metrics=metrics)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: pipeline.request_stop())
    pipeline.start(available_now=available_now)
    _announce(pipeline, as_json=cli.json)
    pipeline.wait()
    found = status.look(settings.state)
    return Answer(found, status.view_of, Exit.FAILED if pipeline.delivery.halted else Exit.OK)


def _announce(pipeline: Pipeline, *, as_json: bool) -> None:
    started = {"pipeline": pipeline.settings.name, "state": str(pipeline.settings.state)}
    if as_json:
        print(to_json({"started": started}, indent=None), file=sys.stderr, flush=True)
    else:
        say(f"pipeline {started['pipeline']} runs, its state is in {started['state']}")
