"""Moves of replicas: the plan, the question, and the wait until they are done."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.cluster.status import Status, under_way
from penstock.cli.command import Answer
from penstock.cli.output import progress, show
from penstock.errors import NotFound

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.cli.command import Invocation
    from penstock.client.connection import Connection

POLL_S: Final = 0.5
Move = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A call that plans moves and, without `dry_run`, begins them."""

    method: str
    arguments: dict[str, Any] = field(default_factory=dict)
    question: str
    nothing: str  # said when there is nothing to move


async def carry_out(
    cli: Invocation, change: Change, *, dry_run: bool, wait: bool, force: bool
) -> Answer:
    async with cli.connection() as connection:
        planned = await connection.call(change.method, **change.arguments, dry_run=True)
        moves: list[Move] = planned["moves"]
        if dry_run:
            return _answer(moves, done=0, change=change)
        if moves:
            if not cli.json:
                show(table_of(moves))
            cli.confirm(change.question, force=force)
        # Also without moves: a node that holds nothing is still to be marked as drained.
        begun = await connection.call(change.method, **change.arguments, dry_run=False)
        moves = begun["moves"]
        done = await watch(connection, moves) if wait and moves else 0
    return _answer(moves, done=done, change=change, shown=True)


async def watch(connection: Connection, moves: list[Move]) -> int:
    """A bar until every move is done; how many were."""
    with progress("moving", total=len(moves), unit="partitions") as advance:
        while True:
            status = await connection.call("cluster_status")
            done = len(moves) - len(pending(status, moves))
            advance(done)
            if done == len(moves):
                return done
            await asyncio.sleep(POLL_S)


def pending(status: Status, moves: list[Move]) -> list[Move]:
    """The moves that are not over; a partition that is gone needs none."""
    parts = {(part["topic"], part["partition"]): part for part in status["partitions"]}
    found = []
    for move in moves:
        part = parts.get((move["topic"], move["partition"]))
        if part is not None and (part["voters"] != move["to"] or under_way(part)):
            found.append(move)
    return found


def partition_of(status: Status, topic: str, partition: int) -> dict[str, Any]:
    for part in status["partitions"]:
        if part["topic"] == topic and part["partition"] == partition:
            found: dict[str, Any] = part
            return found
    raise NotFound(f"no partition {topic}/{partition}", topic=topic)


def _answer(moves: list[Move], *, done: int, change: Change, shown: bool = False) -> Answer:
    document = {"moves": moves, "planned": len(moves), "done": done}
    if not moves:
        return Answer(document=document, view=change.nothing)
    if not shown:
        return Answer(document=document, view=lambda: table_of(moves))
    told = f"{done} moves are done" if done else f"{len(moves)} moves have begun"
    return Answer(document=document, view=told)


def table_of(moves: list[Move]) -> Table:
    from penstock.cli.output import table

    rows = [
        (move["topic"], move["partition"], " ".join(move["from"]), "→", " ".join(move["to"]))
        for move in moves
    ]
    return table("topic", ">partition", "from", "", "to", rows=rows, title=f"{len(moves)} moves")
