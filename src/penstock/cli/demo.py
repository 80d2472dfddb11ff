"""`penstock demo`: the real system, a story, things that go wrong, and checked claims."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.cli.command import Answer, Exit, Invocation, command, group, quiet_logs
from penstock.console import to_json
from penstock.errors import FailedPrecondition

if TYPE_CHECKING:
    from penstock.demo.story import Running

app = group()


@command(app, "demo", connects=False)
async def demo(
    cli: Invocation,
    data: Annotated[
        Path | None, typer.Option(help="A new folder to keep. [default: a temporary one]")
    ] = None,
    act: Annotated[
        Literal["all", "queue", "pipeline"],
        typer.Option(help="Only a part of it. `queue` needs no Spark."),
    ] = "all",
    quick: Annotated[bool, typer.Option("--quick", help="With less data.")] = False,
    picture: Annotated[Path, typer.Option(help="Where to draw what happened.")] = Path(
        "penstock-demo.html"
    ),
    stay: Annotated[
        bool, typer.Option("--stay", help="Keep everything running at the end.")
    ] = False,
) -> Answer | None:
    """Show the whole system at work and check what it claims; exit 1 if a claim fails."""
    from penstock.demo.chapters import Screen
    from penstock.demo.story import Story
    from penstock.testing.redis import redis_program

    quiet_logs()
    _end_by_signal()
    with ExitStack() as stack:
        if data is None:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-demo-"))
            data = Path(scratch)
        elif data.exists() and any(data.iterdir()):
            raise FailedPrecondition(f"{data} is not empty; name a new folder", field="data")
        if act != "queue":
            redis_program()  # it is missed here, before anything is started

        async def keep(document: dict[str, Any], running: Running) -> None:
            await _stay(cli, document, running)

        story = Story(
            folder=data, screen=Screen(quiet=cli.json), queue=act != "pipeline",
            pipeline=act != "queue", quick=quick, picture=picture, keep=keep if stay else None,
        )  # fmt: skip
        try:
            document = await story.tell()
        except asyncio.CancelledError:  # by a signal: nobody else holds this task
            return Answer({"ok": False, "interrupted": True}, code=Exit.INTERRUPTED)
        if stay and cli.json:
            return None  # the document was printed before the wait
        return Answer(document, code=Exit.OK if document["ok"] else Exit.FAILED)


def _end_by_signal() -> None:
    """SIGTERM ends the demo as Ctrl-C does: with its processes, and not without them."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


async def _stay(cli: Invocation, document: dict[str, Any], running: Running) -> None:
    if cli.json:
        print(to_json({**document, "addresses": running.addresses}), flush=True)
    else:
        print("\nEverything keeps running; Ctrl-C ends it.\n")
        for name, address in running.addresses.items():
            print(f"  {name:<7} {address}")
        print("\nTry:\n")
        for line in running.commands:
            print(f"  {line}", flush=True)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    await stopped.wait()
