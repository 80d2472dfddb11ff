"""`penstock bench`: measure the queue, server and client in processes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.command import Answer, Invocation, command, group
from penstock.cli.output import say, to_json
from penstock.errors import InvalidArgument

app = group("Measure the queue on this machine.")


@command(app, "queue", connects=False)
def queue(
    cli: Invocation,
    runs: Annotated[int, typer.Option(help="Runs of each stage; medians count.", min=1)] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of the work.")] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="A stage; may be repeated.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where data folders are made, on the disk to measure.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Also write the JSON document into this folder.")
    ] = None,
) -> Answer:
    """Throughput, latency, CPU, recovery and memory; fsync before every acknowledgement."""
    import uvloop

    from penstock.cli.bench.report import view_of
    from penstock.cli.bench.runner import measure
    from penstock.cli.bench.targets import STAGES
    from penstock.cli.connect import quiet_logs

    unknown = set(only or ()) - set(STAGES)
    if unknown:
        raise InvalidArgument(
            f"no stage {min(unknown)}; there are {', '.join(STAGES)}", field="only"
        )
    quiet_logs()
    chosen = [stage for stage in STAGES if not only or stage in only]
    document = uvloop.run(measure(chosen, runs=runs, quick=quick, folder=folder))
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
        path = save / f"queue-{document['measured_at'].replace(':', '')}.json"
        path.write_text(to_json(document) + "\n")
        say(f"saved to {path}")
    return Answer(document=document, view=lambda: view_of(document))
