"""`penstock cluster`: try one out, look at it, move its replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.command import Answer, Exit, Force, Invocation, command, group, watched
from penstock.errors import InvalidArgument

app = group()

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
    from penstock.cli.cluster.up import ClusterPlan, run
    from penstock.cli.node import run_loop

    named = [zone.strip() for zone in zones.split(",") if zone.strip()]
    run_loop(run(cli, ClusterPlan(nodes=nodes, data=data, zones=named, restart=restart)))
    return None


@command(app, "status")
async def status(
    cli: Invocation,
    topic: Annotated[str | None, typer.Option(help="Only this topic's partitions.")] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between refreshes.", min=0.1)] = 1.0,
    rounds: Annotated[int | None, typer.Option(help="Stop after this many refreshes.")] = None,
) -> Answer | None:
    """Draw nodes, coordinators, epochs, lag and credits. Exit code 1 if something is not served."""
    from penstock.cli.cluster.status import status_of, troubles
    from penstock.cli.cluster.view import view_of

    async with cli.connection() as connection:

        async def look() -> Answer:
            found = await status_of(connection, topic)
            code = Exit.FAILED if troubles(found) else Exit.OK
            return Answer(document=found, view=lambda: view_of(found), code=code)

        if not watch:
            return await look()
        await watched(cli, look, interval_s=interval, rounds=rounds)
        return None


@command(app, "wait")
async def wait(
    cli: Invocation,
    timeout: Annotated[float, typer.Option(help="Seconds; 0 looks once.", min=0)] = 600.0,
    lag_max: Annotated[int, typer.Option(help="Entries that are no lag.", min=0)] = 1000,
    topic: Annotated[str | None, typer.Option(help="Only this topic's partitions.")] = None,
) -> Answer:
    """Until every voter follows and has caught up, so that a node may be restarted. Exit code 1
    if that is not so in time."""
    from penstock.cli.cluster.status import told_of, wait_until_settled

    found = await wait_until_settled(cli, topic=topic, lag_max=lag_max, timeout_s=timeout)
    if found["settled"]:
        return Answer(document=found, view="every voter has caught up")
    told = f"not settled: {told_of(found['missing'])}"
    return Answer(document=found, view=told, code=Exit.FAILED)


@command(app, "rebalance")
async def rebalance(
    cli: Invocation, dry_run: DryRun = False, wait: Wait = True, force: Force = False
) -> Answer:
    """Spread replicas and coordinators over the nodes: plan, question, progress."""
    from penstock.cli.cluster.moves import PlannedChange, carry_out

    change = PlannedChange(
        method="cluster_rebalance",
        question="Move these replicas?",
        nothing="every replica is where it should be",
    )
    return await carry_out(cli, change, dry_run=dry_run, wait=wait, force=force)


@command(app, "drain")
async def drain(
    cli: Invocation,
    node: Annotated[str, typer.Argument(help="The node's id.")],
    dry_run: DryRun = False,
    wait: Wait = True,
    force: Force = False,
) -> Answer:
    """Move everything away from a node, so that it can be taken out."""
    from penstock.cli.cluster.moves import PlannedChange, carry_out

    change = PlannedChange(
        method="cluster_drain",
        arguments={"node": node},
        question=f"Move everything away from {node}?",
        nothing=f"nothing is on {node}",
    )
    return await carry_out(cli, change, dry_run=dry_run, wait=wait, force=force)


@command(app, "remove-replica")
async def remove_replica(
    cli: Invocation,
    topic: Annotated[str, typer.Argument(help="The topic.")],
    partition: Annotated[int, typer.Argument(help="Its partition.", min=0)],
    node: Annotated[str, typer.Argument(help="The node whose replica goes.")],
    force: Force = False,
) -> Answer:
    """Take one replica out of its partition without a replacement."""
    from penstock.cli.cluster.moves import partition_of
    from penstock.cli.cluster.status import status_of

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
    return Answer(document=answer, view=f"{topic}/{partition} will be on {voters}")
