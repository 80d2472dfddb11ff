"""`penstock demo`: a real server, a story, a `kill -9` in the middle, and checked claims."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.command import Answer, Invocation, command, group
from penstock.cli.exits import Exit
from penstock.cli.output import to_json
from penstock.errors import FailedPrecondition

app = group("Demonstration.")


@command(app, "demo", connects=False)
async def demo(
    cli: Invocation,
    data: Annotated[
        Path | None, typer.Option(help="A new folder to keep. [default: a temporary one]")
    ] = None,
    stay: Annotated[
        bool, typer.Option("--stay", help="Keep the server running at the end.")
    ] = False,
) -> Answer | None:
    """Enqueue, pop by priority, retry, dead-letter, crash, recover; exit 1 if a claim fails."""
    from penstock.cli.connect import quiet_logs
    from penstock.cli.demo.story import tell
    from penstock.cli.demo.view import Screen

    quiet_logs()
    with ExitStack() as stack:
        if data is None:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-demo-"))
            data = Path(scratch) / "data"
        elif data.exists() and any(data.iterdir()):
            raise FailedPrecondition(f"{data} is not empty; name a new folder", field="data")
        screen = Screen(quiet=cli.json)
        document = await tell(data, screen)
        screen.summary(document)
        code = Exit.OK if document["ok"] else Exit.FAILED
        if stay:
            await _stay(cli, data, document)
            return Answer(document=None, code=code) if not cli.json else None
    return Answer(document=document, code=code)


async def _stay(cli: Invocation, data: Path, document: dict[str, Any]) -> None:
    """Serve the story's folder until Ctrl-C or SIGTERM."""
    from penstock.cli.process import server_process

    async with server_process(data) as server:
        addresses = {"native": server.url, "grpc": server.grpc, "http": server.http}
        if cli.json:
            print(to_json({**document, "addresses": addresses}), flush=True)
        else:
            print("\nThe server keeps running; Ctrl-C ends it.")
            for name, address in addresses.items():
                print(f"  {name:<7} {address}", flush=True)
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        await stopped.wait()
        await server.stop()
