"""`penstock cluster`: try one out, look at it, move its replicas."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from penstock.cli.cluster_status import (
    Status,
    place_of,
    status_of,
    told_of,
    troubles,
    under_way,
    view_of,
    wait_until_settled,
)
from penstock.cli.command import (
    Answer,
    Exit,
    Force,
    Interval,
    Invocation,
    Rounds,
    Watch,
    command,
    group,
    looked,
)
from penstock.cli.node import run_loop
from penstock.console import Columns, console, listing, progress, say, to_json
from penstock.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable

if TYPE_CHECKING:
    from penstock.client.network.connection import Connection
    from penstock.testing.cluster import ClusterProcesses

app = group()

OnlyTopic = Annotated[str | None, typer.Option(help="Only this topic's partitions.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Until every move is done.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan, change nothing.")]
POLL_S: Final = 0.5
OVERRULED_S: Final = 5.0  # after which nobody wants a move: who is asked may hear of it late
Move = dict[str, Any]
NODES_POLL_S: Final = 0.2
RESTART_S: Final = 5.0  # a node that was killed stays away so long, to be missed
NODE: Final[Columns] = {
    "node": "id", "native": "url", "http": "http", "pid": lambda node: str(node["pid"])
}  # fmt: skip


@command(app, "up", connects=False)
def up(
    cli: Invocation,
    nodes: Annotated[int, typer.Option(help="How many.", min=1, max=9)] = 3,
    data: Annotated[
        Path | None, typer.Option(help="Folder to keep. [default: one that is removed]")
    ] = None,
    zones: Annotated[str, typer.Option(help="Dealt out in turn, as a,b,c.")] = "",
    restart: Annotated[
        bool, typer.Option("--restart/--no-restart", help="Start a node again that ended.")
    ] = True,
) -> Answer | None:
    """Start etcd and nodes on this machine until Ctrl-C, to try a cluster out."""
    named = [zone.strip() for zone in zones.split(",") if zone.strip()]
    run_loop(run_up(cli, nodes=nodes, data=data, zones=named, restart=restart))
    return None


@command(app, "status")
async def status(
    cli: Invocation,
    topic: OnlyTopic = None,
    watch: Watch = False,
    interval: Interval = 1.0,
    rounds: Rounds = None,
) -> Answer | None:
    """Draw nodes, coordinators, epochs, lag and credits. Exit code 1 if something is not served."""
    async with cli.connection() as connection:

        async def look() -> Answer:
            found = await status_of(connection, topic)
            return Answer(found, view_of, Exit.FAILED if troubles(found) else Exit.OK)

        return await looked(cli, look, watch=watch, interval_s=interval, rounds=rounds)


@command(app, "wait")
async def wait(
    cli: Invocation,
    timeout: Annotated[float, typer.Option(help="Seconds; 0 looks once.", min=0)] = 600.0,
    lag_max: Annotated[int, typer.Option(help="Entries that are no lag.", min=0)] = 1000,
    topic: OnlyTopic = None,
) -> Answer:
    """Until every voter follows and has caught up, so that a node may be restarted. Exit code 1
    if that is not so in time."""
    found = await wait_until_settled(cli, topic=topic, lag_max=lag_max, timeout_s=timeout)
    if found["settled"]:
        return Answer(found, "every voter has caught up")
    return Answer(found, f"not settled: {told_of(found['missing'])}", Exit.FAILED)


@command(app, "rebalance")
async def rebalance(
    cli: Invocation, dry_run: DryRun = False, wait: Wait = True, force: Force = False
) -> Answer:
    """Spread replicas and coordinators over the nodes: plan, question, progress."""
    return await carry_out(
        cli,
        "cluster_rebalance",
        question="Move these replicas?",
        nothing="every replica is where it should be",
        dry_run=dry_run,
        wait=wait,
        force=force,
    )


@command(app, "drain")
async def drain(
    cli: Invocation,
    node: Annotated[str, typer.Argument(help="The node's id.")],
    dry_run: DryRun = False,
    wait: Wait = True,
    force: Force = False,
) -> Answer:
    """Move everything away from a node, so that it can be taken out."""
    return await carry_out(
        cli,
        "cluster_drain",
        node=node,
        question=f"Move everything away from {node}?",
        nothing=f"nothing is on {node}",
        dry_run=dry_run,
        wait=wait,
        force=force,
    )


@command(app, "remove-replica")
async def remove_replica(
    cli: Invocation,
    topic: Annotated[str, typer.Argument(help="The topic.")],
    partition: Annotated[int, typer.Argument(help="Its partition.", min=0)],
    node: Annotated[str, typer.Argument(help="The node whose replica goes.")],
    force: Force = False,
) -> Answer:
    """Take one replica out of its partition without a replacement."""
    async with cli.connection() as connection:
        before = partition_of(await status_of(connection), topic, partition)
        if node not in (*before["voters"], *before["learners"]):
            raise InvalidArgument(f"{node} holds no replica of {topic}/{partition}", field="node")
        left = [voter for voter in before["voters"] if voter != node]
        cli.confirm(
            f"Leave {topic}/{partition} with {len(left)} voters ({', '.join(left)})?", force=force
        )
        answer = await connection.call(
            "cluster_remove_replica", topic=topic, partition=partition, node=node
        )
    voters = ", ".join(answer["voters"])
    return Answer(answer, f"{topic}/{partition} will be on {voters}")


async def carry_out(
    cli: Invocation,
    method: str,
    *,
    question: str,
    nothing: str,
    dry_run: bool,
    wait: bool,
    force: bool,
    **arguments: Any,
) -> Answer:
    """Make a call that plans moves and, without `dry_run`, begins them. `nothing` is said when
    there is nothing to move."""
    async with cli.connection() as connection:
        plan = await connection.call(method, **arguments, dry_run=True)
        if dry_run:
            return _answer(plan, nothing=nothing)
        if plan["moves"]:
            if not cli.json:
                console().print(table_of(plan["moves"]))
            cli.confirm(question, force=force)
        # Also without moves: a node that holds nothing is still to be marked as drained.
        plan = await connection.call(method, **arguments, dry_run=False)
        begun = Watched(done=0)
        if wait and plan["moves"]:
            begun = await watch(connection, plan["moves"])
    return _answer(plan, nothing=nothing, watched=begun)


class Watched(NamedTuple):
    """How many moves were done, and those that somebody else has decided otherwise on."""

    done: int
    overruled: Sequence[Move] = ()


async def watch(connection: Connection, moves: list[Move]) -> Watched:
    """A bar until every move is done, or no longer wanted."""
    since: dict[str, float] = {}  # when a move was first seen to be nobody's wish
    with progress("moving", total=1, unit="entries") as advance:
        while True:
            waiting = await _waiting(connection)  # first: what has begun since is in the status
            status = await status_of(connection)
            left, now = pending(status, moves), time.monotonic()
            unwanted = [m for m in left if waiting is not None and not wanted(status, waiting, m)]
            since = {place_of(move): since.get(place_of(move), now) for move in unwanted}
            overruled = [m for m in unwanted if now - since[place_of(m)] >= OVERRULED_S]
            if len(overruled) == len(left):
                return Watched(len(moves) - len(left), overruled)
            done, total = copied(status, moves)
            told = f"moving, {len(moves) - len(left)} of {len(moves)} partitions are done"
            advance(done, max(1, total), told)
            await asyncio.sleep(POLL_S)


async def _waiting(connection: Connection) -> list[Move] | None:
    """Moves that have not begun; None while the metadata are away, and with them the plan."""
    try:
        found: list[Move] = (await connection.call("cluster_moves"))["moves"]
    except Unavailable:
        return None
    return found


def pending(status: Status, moves: list[Move]) -> list[Move]:
    """The moves that are not over; a partition that is gone needs none."""
    parts = _by_place(status)
    return [
        move
        for move in moves
        if (part := parts.get(place_of(move))) is not None
        and (part["voters"] != move["to"] or under_way(part))
    ]


def wanted(status: Status, waiting: list[Move], move: Move) -> bool:
    """Whether a move that is not over is still to be: it waits, or its partition is on its way."""
    part = _by_place(status)[place_of(move)]
    if move["to"] in (part["target"], part["joint"]):
        return True
    return any(place_of(each) == place_of(move) and each["to"] == move["to"] for each in waiting)


def copied(status: Status, moves: list[Move]) -> tuple[int, int]:
    """Entries that the new replicas hold, and those that they are to hold."""
    parts, done, total = _by_place(status), 0, 0
    for move in moves:
        part = parts.get(place_of(move))
        last = 0 if part is None else part["sequence_last"] or 0
        for node in set(move["to"]) - set(move["from"]):
            total += last
            done += last if part is not None and node in part["voters"] else _held(part, node)
    return done, total


def _held(part: dict[str, Any] | None, node: str) -> int:
    """How far a replica that learns has come, by its stream or as a copy that it takes."""
    for follower in [] if part is None else part["followers"]:
        if follower["node"] == node:
            return int(follower["sequence"] or follower["copying"] or 0)
    return 0


def _by_place(status: Status) -> dict[str, dict[str, Any]]:
    return {place_of(part): part for part in status["partitions"]}


def partition_of(status: Status, topic: str, partition: int) -> dict[str, Any]:
    found = _by_place(status).get(f"{topic}/{partition}")
    if found is None:
        raise NotFound(f"no partition {topic}/{partition}", topic=topic)
    return found


def _answer(plan: dict[str, Any], *, nothing: str, watched: Watched | None = None) -> Answer:
    moves, left = plan["moves"], plan["left"]
    done, overruled = (0, []) if watched is None else (watched.done, list(watched.overruled))
    document = {
        "moves": moves, "planned": len(moves), "left": left, "done": done, "overruled": overruled,
    }  # fmt: skip
    if not moves:
        return Answer(document, nothing)
    if watched is None:
        return Answer(document, table_of(moves))
    told = [f"{done} moves are done" if done else f"{len(moves)} moves are planned"]
    if overruled:
        names = told_of([place_of(move) for move in overruled])
        told = [f"{done} of {len(moves)} moves are done; others were decided on for {names}"]
    if left:
        told.append(f"{left} more are needed: ask again")
    return Answer(document, "; ".join(told), Exit.FAILED if overruled or left else Exit.OK)


def table_of(moves: list[Move]) -> Table:
    columns: Columns = {
        "topic": "topic", ">partition": "partition", "from": lambda move: " ".join(move["from"]),
        "": lambda move: "→", "to": lambda move: " ".join(move["to"]),
    }  # fmt: skip
    return listing(moves, columns, title=f"{len(moves)} moves")


async def run_up(
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
    from penstock.server.serve import load_gateway

    try:
        load_gateway()
    except FailedPrecondition:
        return False
    return True


def _announce(cli: Invocation, cluster: ClusterProcesses, *, kept: bool) -> None:
    document = document_of_up(cluster)
    if cli.json:
        print(to_json(document, indent=None), flush=True)
    else:
        console().print(view_of_up(document, kept=kept))


def document_of_up(cluster: ClusterProcesses) -> dict[str, Any]:
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


def view_of_up(document: dict[str, Any], *, kept: bool) -> RenderableType:
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
            async with asyncio.timeout(NODES_POLL_S):
                await stop.wait()
        except TimeoutError:
            continue
