"""`penstock cluster`: try one out, look at it, move its replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.cluster.moves import carry_out, partition_of
from penstock.cli.cluster.status import status_of, told_of, troubles, wait_until_settled
from penstock.cli.cluster.up import run
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
from penstock.errors import InvalidArgument

app = group()

OnlyTopic = Annotated[str | None, typer.Option(help="Only this topic's partitions.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Until every move is done.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan, change nothing.")]


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
    from penstock.cli.node import run_loop

    named = [zone.strip() for zone in zones.split(",") if zone.strip()]
    run_loop(run(cli, nodes=nodes, data=data, zones=named, restart=restart))
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
    from penstock.cli.cluster.view import view_of  # and rich with it

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
