"""The command tree, and the completion of it in a shell.

A command's module is imported when the command is called, and not when commands are listed.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from penstock.cli.command import URL_DEFAULT, Answer, Invocation, Json, command, group

VARIABLE: Final = "_PENSTOCK_COMPLETE"
# A command's name, its module, and how the list of commands describes it.
COMMANDS: Final = {
    "serve": ("node", "Run a node until SIGTERM or Ctrl-C."),
    "gateway": ("node", "Translate gRPC and HTTP for the node at --url."),
    "put": ("messages", "Enqueue messages; returns when they are durable."),
    "pop": ("messages", "Take the best messages."),
    "ack": ("messages", "Acknowledge leased messages by their lease tokens."),
    "nack": ("messages", "Give leased messages back for a retry, or reject them."),
    "peek": ("messages", "Look at the best ready messages without taking them."),
    "tail": ("messages", "Print committed entries, one per line."),
    "stats": ("topic", "Show ready, delayed, leased and dead messages."),
    "fsck": ("doctor", "Verify a folder at rest: gapless, CRC, hash chain."),
    "doctor": ("doctor", "Check this machine and the data folder."),
    "demo": ("demo", "Show the whole system at work and check what it claims."),
}
# A group's name, where its commands are, and how the list of commands describes it.
GROUPS: Final = {
    "topic": ("topic:topics", "Make, show, change and delete topics."),
    "deltas": ("deltas:app", "Change vectors, look at them, and follow their changes."),
    "dlq": ("messages:dead_letters", "Dead letters: list, replay, delete."),
    "key": ("node:keys", "API keys; --url may be a data folder that no node has open."),
    "pipeline": ("pipeline:app", "Keep lake, index, cache and others in step with delta topics."),
    "cluster": ("cluster:app", "A cluster: start one here, see how it is, move its replicas."),
    "bench": ("bench:app", "Measure the queue, the pipeline, a cluster and the live path."),
}


class CommandTree(TyperGroup):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (_, description) in (COMMANDS | GROUPS).items():
            self.add_command(TyperCommand(name, help=description))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, found, rest = super().resolve_command(ctx, args)
        return name, load(name) if name in COMMANDS or name in GROUPS else found, rest


def load(name: str) -> Any:
    if name in COMMANDS:
        module, _ = COMMANDS[name]
        return get_group(import_module(f"penstock.cli.{module}").app).commands[name]
    place, description = GROUPS[name]
    module, _, attribute = place.partition(":")
    found = get_group(getattr(import_module(f"penstock.cli.{module}"), attribute))
    found.name, found.help = name, description
    return found


app = group("Penstock: a durable priority queue with leases, retries and one log.", cls=CommandTree)


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

    return Answer({"version": __version__}, __version__)


@command(app, "completion", connects=False)
def completion(
    cli: Invocation,
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="Your shell.")],
) -> Answer | None:
    """Print the completion script: eval "$(penstock completion bash)"."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # imported there

    script = get_completion_script(prog_name="penstock", complete_var=VARIABLE, shell=shell)
    if cli.json:
        return Answer({"shell": shell, "script": script})
    print(script)
    return None


def run() -> None:
    if VARIABLE in os.environ:  # a shell asks for completions
        from typer.completion import completion_init  # type: ignore[attr-defined]  # imported there

        completion_init()
    app(prog_name="penstock")
