"""`penstock bench`: measure queue, pipeline, cluster and live path, servers in their processes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
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

Document = dict[str, Any]
Subject = tuple[Callable[..., Coroutine[Any, Any, Document]], tuple[str, ...]]  # and its stages


def benchmark(name: str) -> Callable[[Callable[[], Subject]], None]:
    """Register the command `name`. Its subject is imported when it is asked for, not before."""

    def register(load: Callable[[], Subject]) -> None:
        def bench(
            cli: Invocation,
            runs: Runs = 3,
            quick: Quick = False,
            only: Only = None,
            folder: Folder = None,
            save: Save = None,
        ) -> Answer:
            import uvloop

            measure, stages = load()
            chosen = _chosen(only, stages)
            document = uvloop.run(measure(chosen, runs=runs, quick=quick, folder=folder))
            return _answer(document, what=name, save=save)

        bench.__doc__ = load.__doc__
        command(app, name, connects=False)(bench)

    return register


@benchmark("queue")
def _queue() -> Subject:
    """Throughput, latency, CPU, recovery and memory; fsync before every acknowledgement."""
    from penstock.cli.bench.runner import measure
    from penstock.cli.bench.targets import STAGES

    return measure, STAGES


@benchmark("pipeline")
def _pipeline() -> Subject:
    """Reading, ordering, the whole way into lake, index and cache, and freshness; on two cores."""
    from penstock.cli.bench.pipeline_runner import measure_pipeline
    from penstock.cli.bench.targets import PIPELINE_STAGES

    return measure_pipeline, PIPELINE_STAGES


@benchmark("cluster")
def _cluster() -> Subject:
    """Three nodes and etcd: throughput, latency, failover, a stopped follower; fsync on a quorum
    before every acknowledgement."""
    from penstock.cli.bench.cluster_runner import measure_cluster
    from penstock.cli.bench.targets import CLUSTER_STAGES

    return measure_cluster, CLUSTER_STAGES


@benchmark("live")
def _live() -> Subject:
    """From a commit to sinks and subscribers, stage by stage; batches; a stalled subscriber."""
    from penstock.cli.bench.live_runner import measure_live
    from penstock.cli.bench.targets import LIVE_STAGES

    return measure_live, LIVE_STAGES


def _chosen(only: list[str] | None, stages: tuple[str, ...]) -> list[str]:
    from penstock.cli.connect import quiet_logs

    unknown = set(only or ()) - set(stages)
    if unknown:
        raise InvalidArgument(
            f"no stage {min(unknown)}; there are {', '.join(stages)}", field="only"
        )
    quiet_logs()
    return [stage for stage in stages if not only or stage in only]


def _answer(document: Document, *, what: str, save: Path | None) -> Answer:
    from penstock.cli.bench.report import view_of

    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
        path = save / f"{what}-{document['measured_at'].replace(':', '')}.json"
        path.write_text(to_json(document) + "\n")
        say(f"saved to {path}")
    return Answer(document=document, view=lambda: view_of(document, what=what))
