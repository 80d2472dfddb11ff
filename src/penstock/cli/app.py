"""The command tree."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import (
    bench,
    cluster,
    completion,
    deltas,
    demo,
    dlq,
    doctor,
    fsck,
    gateway,
    key,
    messages,
    node,
    pipeline,
    stats,
    tail,
    topic,
)
from penstock.cli.command import URL_DEFAULT, Answer, Invocation, Json, command, group

app = group("Penstock: a durable priority queue with leases, retries and one log.", name="penstock")


@app.callback()
def options(
    ctx: typer.Context,
    as_json: Json = False,
    url: Annotated[
        str, typer.Option(help="The node's url, or a data folder.", envvar="PENSTOCK_URL")
    ] = URL_DEFAULT,
    api_key: Annotated[
        str | None, typer.Option(help="The API key.", envvar="PENSTOCK_API_KEY")
    ] = None,
    ca: Annotated[Path | None, typer.Option(help="Authorities to trust for penstocks://.")] = None,
) -> None:
    ctx.obj = Invocation(json=as_json, url=url, api_key=api_key, ca=ca)


@command(app, "version", connects=False)
def version(cli: Invocation) -> Answer:
    """Print the version."""
    from penstock import __version__

    return Answer(document={"version": __version__}, view=__version__)


for _module in (node, gateway, messages, tail, stats, fsck, doctor, demo, completion):
    app.add_typer(_module.app)  # without a name its commands join the root's
app.add_typer(topic.app, name="topic")
app.add_typer(deltas.app, name="deltas")
app.add_typer(dlq.app, name="dlq")
app.add_typer(key.app, name="key")
app.add_typer(pipeline.app, name="pipeline")
app.add_typer(cluster.app, name="cluster")
app.add_typer(bench.app, name="bench")


def run() -> None:
    completion.prepare()
    app(prog_name="penstock")
