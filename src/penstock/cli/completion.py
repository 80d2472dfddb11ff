"""`penstock completion`: the script that completes commands and options in a shell."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

import typer

from penstock.cli.command import Answer, Invocation, command, group

app = group("Shell completion.")
VARIABLE: Final = "_PENSTOCK_COMPLETE"


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@command(app, "completion", connects=False)
def completion(
    cli: Invocation, shell: Annotated[Shell, typer.Argument(help="Your shell.")]
) -> Answer | None:
    """Print the completion script: eval "$(penstock completion bash)"."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # imported there

    script = get_completion_script(prog_name="penstock", complete_var=VARIABLE, shell=shell.value)
    if cli.json:
        return Answer(document={"shell": shell.value, "script": script})
    print(script)
    return None


def prepare() -> None:
    """Let the running process answer a shell that asks for completions."""
    import os

    if VARIABLE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]  # imported there

        completion_init()
