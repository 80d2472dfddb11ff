"""`penstock bench`: measure queue, pipeline, cluster and live path, servers in their processes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.command import Answer, Invocation, command, group
from penstock.cli.output import say, to_json
from penstock.errors import InvalidArgument

app = group("Measure the queue, the pipeline, a cluster and the live path on this machine.")


Runs = Annotated[int, typer.Option(help="Runs of each stage; medians count.", min=1)]
Quick = Annotated[bool, typer.Option("--quick", help="A tenth of the work.")]
Only = Annotated[list[str] | None, typer.Option("--only", help="A stage; may be repeated.")]
Folder = Annotated[
    Path | None, typer.Option(help="Where data folders are made, on the disk to measure.")
]
Save = Annotated[Path | None, typer.Option(help="Also write the JSON document into this folder.")]


@command(app, "queue", connects=False)
def queue(
    cli: Invocation,
    runs: Runs = 3,
    quick: Quick = False,
    only: Only = None,
    folder: Folder = None,
    save: Save = None,
) -> Answer:
    """Throughput, latency, CPU, recovery and memory; fsync before every acknowledgement."""
    import uvloop

    from penstock.cli.bench.runner import measure
    from penstock.cli.bench.targets import STAGES

    chosen = _chosen(only, STAGES)
    document = uvloop.run(measure(chosen, runs=runs, quick=quick, folder=folder))
    return _answer(document, what="queue", save=save)


@command(app, "pipeline", connects=False)
def pipeline(
    cli: Invocation,
    runs: Runs = 3,
    quick: Quick = False,
    only: Only = None,
    folder: Folder = None,
    save: Save = None,
) -> Answer:
    """Reading, ordering, the whole way into lake, index and cache, and freshness; on two cores."""
    import asyncio

    from penstock.cli.bench.pipeline_runner import measure_pipeline
    from penstock.cli.bench.targets import PIPELINE_STAGES

    chosen = _chosen(only, PIPELINE_STAGES)
    document = asyncio.run(measure_pipeline(chosen, runs=runs, quick=quick, folder=folder))
    return _answer(document, what="pipeline", save=save)


@command(app, "cluster", connects=False)
def cluster(
    cli: Invocation,
    runs: Runs = 3,
    quick: Quick = False,
    only: Only = None,
    folder: Folder = None,
    save: Save = None,
) -> Answer:
    """Three nodes and etcd: throughput, latency, failover, a stopped follower; fsync on a quorum
    before every acknowledgement."""
    import uvloop

    from penstock.cli.bench.cluster_runner import measure_cluster
    from penstock.cli.bench.targets import CLUSTER_STAGES

    chosen = _chosen(only, CLUSTER_STAGES)
    document = uvloop.run(measure_cluster(chosen, runs=runs, quick=quick, folder=folder))
    return _answer(document, what="cluster", save=save)


@command(app, "live", connects=False)
def live(
    cli: Invocation,
    runs: Runs = 3,
    quick: Quick = False,
    only: Only = None,
    folder: Folder = None,
    save: Save = None,
) -> Answer:
    """From a commit to sinks and subscribers, stage by stage; batches; a stalled subscriber."""
    import uvloop

    from penstock.cli.bench.live_runner import measure_live
    from penstock.cli.bench.targets import LIVE_STAGES

    chosen = _chosen(only, LIVE_STAGES)
    document = uvloop.run(measure_live(chosen, runs=runs, quick=quick, folder=folder))
    return _answer(document, what="live", save=save)


def _chosen(only: list[str] | None, stages: tuple[str, ...]) -> list[str]:
    from penstock.cli.connect import quiet_logs

    unknown = set(only or ()) - set(stages)
    if unknown:
        raise InvalidArgument(
            f"no stage {min(unknown)}; there are {', '.join(stages)}", field="only"
        )
    quiet_logs()
    return [stage for stage in stages if not only or stage in only]


def _answer(document: dict[str, Any], *, what: str, save: Path | None) -> Answer:
    from penstock.cli.bench.report import view_of

    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
        path = save / f"{what}-{document['measured_at'].replace(':', '')}.json"
        path.write_text(to_json(document) + "\n")
        say(f"saved to {path}")
    return Answer(document=document, view=lambda: view_of(document, what=what))
