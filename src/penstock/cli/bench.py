"""`penstock bench`: measure the queue, the pipeline, a cluster and the live path."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from penstock.cli.command import Answer, Invocation, command, group, quiet_logs
from penstock.console import say, to_json
from penstock.errors import InvalidArgument

app = group()

DESCRIPTIONS: Final = {
    "queue": "Throughput, latency, CPU, recovery and memory; fsync before every acknowledgement.",
    "pipeline": "Reading, ordering, the whole way into lake, index and cache, and freshness; on two"
    " cores.",
    "cluster": "Three nodes and etcd: throughput, latency, failover, a stopped follower; fsync on a"
    " quorum before every acknowledgement.",
    "live": "From a commit to sinks and subscribers, stage by stage; in batches; past a stalled"
    " subscriber.",
}

Runs = Annotated[int, typer.Option(help="Runs of each stage; medians count.", min=1)]
Quick = Annotated[bool, typer.Option("--quick", help="A tenth of the work.")]
Only = Annotated[list[str] | None, typer.Option("--only", help="A stage; may be repeated.")]
Folder = Annotated[
    Path | None, typer.Option(help="Where data folders are made, on the disk to measure.")
]
Scale = Annotated[
    bool, typer.Option("--scale", help="How it grows with tasks and vectors, instead.")
]
Save = Annotated[Path | None, typer.Option(help="Also write the JSON document into this folder.")]


def _register(name: str, description: str) -> None:
    def bench(
        cli: Invocation,
        runs: Runs = 3,
        quick: Quick = False,
        only: Only = None,
        folder: Folder = None,
        save: Save = None,
        scale: Scale = False,
    ) -> Answer:
        import uvloop

        from penstock.bench.pipeline.scale import draw
        from penstock.bench.report import view_of
        from penstock.bench.runner import measure
        from penstock.bench.subjects import SCALES, SUBJECTS

        if scale and name not in SCALES:
            raise InvalidArgument(f"{name} has no --scale", field="scale", limit=sorted(SCALES))
        subject = SCALES[name] if scale else SUBJECTS[name]
        chosen = _chosen(only, subject.names)
        quiet_logs()
        document = uvloop.run(measure(subject, chosen, runs=runs, quick=quick, folder=folder))
        if save is not None:
            _save(document, save, name)
            if scale and set(chosen) == set(subject.names):
                draw(document, save / f"{name}-scale.svg")
        return Answer(document, view_of(document, subject.metrics, what=name))

    bench.__doc__ = description
    command(app, name, connects=False)(bench)


for _name, _description in DESCRIPTIONS.items():
    _register(_name, _description)


def _chosen(only: list[str] | None, stages: tuple[str, ...]) -> list[str]:
    unknown = set(only or ()) - set(stages)
    if unknown:
        raise InvalidArgument(
            f"no stage {min(unknown)}; there are {', '.join(stages)}", field="only"
        )
    return [stage for stage in stages if not only or stage in only]


def _save(document: dict[str, Any], folder: Path, subject: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{subject}-{document['measured_at'].replace(':', '')}.json"
    path.write_text(to_json(document) + "\n")
    say(f"saved to {path}")
