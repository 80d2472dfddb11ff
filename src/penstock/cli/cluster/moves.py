"""Moves of replicas: the plan, the question, and the wait until they are done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.cli.cluster.status import Status, place_of, status_of, told_of, under_way
from penstock.cli.command import Answer, Exit
from penstock.console import Columns, console, listing, progress
from penstock.errors import NotFound, Unavailable

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.cli.command import Invocation
    from penstock.client.network.connection import Connection

POLL_S: Final = 0.5
OVERRULED_S: Final = 5.0  # after which nobody wants a move: who is asked may hear of it late

Move = dict[str, Any]


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
