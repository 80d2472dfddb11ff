"""`penstock cluster up`: etcd and nodes on this machine, for as long as somebody looks."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.console import Columns, console, listing, say, to_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.cli.command import Invocation
    from penstock.testing.cluster import ClusterProcesses

POLL_S: Final = 0.2
RESTART_S: Final = 5.0  # a node that was killed stays away so long, to be missed
NODE: Final[Columns] = {
    "node": "id", "native": "url", "http": "http", "pid": lambda node: str(node["pid"])
}  # fmt: skip


async def run(
    cli: Invocation, *, nodes: int, data: Path | None, zones: list[str], restart: bool
) -> None:
    from penstock.server.serve import stop_signal, unless
    from penstock.testing.cluster import ClusterProcesses
    from penstock.testing.etcd import etcd_program

    etcd_program()  # before anything is made: it may be missing
    stop = stop_signal()
    async with AsyncExitStack() as stack:
        folder = data
        if folder is None:
            made = tempfile.TemporaryDirectory(prefix="penstock-cluster-")
            folder = Path(stack.enter_context(made))
        cluster = ClusterProcesses(
            folder.resolve(), nodes=nodes, zones=zones, gateway=_gateway(),
            key=secrets.token_hex(32),
        )  # fmt: skip
        stack.push_async_callback(cluster.close)
        with console(stderr=True).status(f"starting etcd, {' '.join(cluster.nodes)} …"):
            started = await unless(stop.wait(), cluster.start_all())
        if not started:
            return
        _announce(cli, cluster, kept=data is not None)
        await _look_after(cluster, stop, restart=restart)
        say("stopping …")
        await cluster.stop_all()


def _gateway() -> bool:
    from penstock.errors import FailedPrecondition
    from penstock.server.serve import load_gateway

    try:
        load_gateway()
    except FailedPrecondition:
        return False
    return True


def _announce(cli: Invocation, cluster: ClusterProcesses, *, kept: bool) -> None:
    document = document_of(cluster)
    if cli.json:
        print(to_json(document, indent=None), flush=True)
    else:
        console().print(view_of(document, kept=kept))


def document_of(cluster: ClusterProcesses) -> dict[str, Any]:
    return {
        "cluster": cluster.name,
        "url": cluster.url,
        "etcd": cluster.etcd.endpoint,
        "folder": str(cluster.folder),
        "nodes": [
            {
                "id": name,
                "pid": node.pid,
                "url": node.url,
                "http": node.http if node.ports["http"] > 0 else None,
                "grpc": node.grpc if node.ports["grpc"] > 0 else None,
                "log": str(node.log_path),
            }
            for name, node in cluster.nodes.items()
        ],
        "pid": os.getpid(),
    }


def view_of(document: dict[str, Any], *, kept: bool) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    from penstock.testing.process import penstock_program

    program = penstock_program()
    nodes = document["nodes"]
    lines = [
        f"export PENSTOCK_URL={document['url']}",
        f"{program} topic create jobs --partitions 6",
        f"seq 1000 | {program} put jobs --lines",
        f"{program} cluster status --watch",
        f"kill -9 {nodes[0]['pid']}   # {nodes[0]['id']}; watch its partitions move",
        f"{program} pop jobs --count 10",
    ]
    after = "stay" if kept else "are removed then"
    return Group(
        listing(nodes, NODE, title="a cluster is up"),
        Panel(Text("\n".join(lines)), title="try it in another terminal", title_align="left"),
        f"[dim]data and logs in {document['folder']} {after};"
        f" etcd at {document['etcd']}[/dim]\nCtrl-C stops it all",
    )


async def _look_after(cluster: ClusterProcesses, stop: asyncio.Event, *, restart: bool) -> None:
    gone: dict[str, float] = {}
    while not stop.is_set():
        for name, node in cluster.nodes.items():
            if node.running:
                continue
            if name not in gone:
                gone[name] = time.monotonic()
                then = f", starts again in {RESTART_S:.0f} s" if restart else ""
                say(f"{name} has ended{then}")
            elif restart and time.monotonic() - gone[name] >= RESTART_S:
                await cluster.start(name)
                del gone[name]
                say(f"{name} is back, pid {node.pid}")
        try:
            async with asyncio.timeout(POLL_S):
                await stop.wait()
        except TimeoutError:
            continue
