"""How a cluster is: what its nodes answer, and what in it is not as it should be.

A cluster is *settled* when every partition is served and every voter of it is connected, counts,
and is nearly where its coordinator is. Then any one node may go away and a majority is left that
has everything: `penstock cluster wait` is for whoever restarts one node after the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.command import listed
from penstock.console import console
from penstock.errors import NotFound, RetryableError

if TYPE_CHECKING:
    from penstock.cli.command import Invocation
    from penstock.client.network.connection import Connection

POLL_S: Final = 0.5
ASK_S_MAX: Final = 10.0  # for one answer: the node that is asked may be the one that hangs
SHOWN: Final = 5  # names in a line of text

Status = dict[str, Any]


async def status_of(connection: Connection, topic: str | None = None) -> Status:
    return of_topic(await listed(connection, "cluster_status", "partitions"), topic)


def of_topic(status: Status, topic: str | None) -> Status:
    if topic is None:
        return status
    found = [part for part in status["partitions"] if part["topic"] == topic]
    if not found:
        raise NotFound(f"no topic {topic}", topic=topic)
    return status | {"partitions": found}


def place_of(part: Mapping[str, Any]) -> str:
    return f"{part['topic']}/{part['partition']}"


def told_of(names: list[str], most: int = SHOWN) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def troubles(status: Status) -> list[str]:
    """What keeps somebody waiting, in words; the worst first."""
    found = []
    unserved = [part for part in status["partitions"] if part["state"] != "serving"]
    if unserved:
        found.append(f"not served: {told_of([place_of(part) for part in unserved])}")
    if not status["metadata"]["available"]:
        found.append("etcd is away: nothing can move or be taken over until it is back")
    return found


def warnings(status: Status) -> list[str]:
    """What works and needs a look."""
    found = [f"{node['id']} {lacks}" for node in status["nodes"] if (lacks := absence(node))]
    found += [
        f"{node['id']} runs on an older copy of its data folder; it catches up, and counts then"
        for node in status["nodes"]
        if node.get("rolled_back")
    ]
    found += [
        f"the clock of {node['id']} is {node['clock']['ahead_ms'] / 1000:+.1f} s off: "
        "it coordinates nothing"
        for node in status["nodes"]
        if node.get("clock", {}).get("state") == "off"
    ]
    lagging = sorted(
        {
            f"{follower['node']} ({place_of(part)})"
            for part in status["partitions"]
            for follower in part["followers"]
            if follower["lagging"]
        }
    )
    if lagging:
        found.append(f"lagging: {told_of(lagging, 3)}")
    moving = sum(1 for part in status["partitions"] if under_way(part))
    if moving:
        found.append(f"on the move: {moving} of {len(status['partitions'])} partitions")
    return found


def absence(node: dict[str, Any]) -> str:
    """Why a node takes part in nothing; empty: it does."""
    if not node["alive"]:
        return "is not there"
    return "" if node.get("reachable", True) else "is registered, and no other node reaches it"


def under_way(part: dict[str, Any]) -> bool:
    """Whether a partition's replicas are not where they are wanted."""
    return bool(part["joint"]) or part["target"] not in ([], part["voters"])


async def wait_until_settled(
    cli: Invocation, *, topic: str | None, lag_max: int, timeout_s: float
) -> dict[str, Any]:
    """Look until it is settled, or the time is over; at least once."""
    began = time.monotonic()
    with console(stderr=True).status("waiting …") as shown:
        while True:
            missing = await _missing(cli, topic=topic, lag_max=lag_max)
            waited_s = time.monotonic() - began
            if not missing or waited_s >= timeout_s:
                break
            shown.update(f"waiting: {told_of(missing)}")
            await asyncio.sleep(min(POLL_S, timeout_s - waited_s))
    return {"settled": not missing, "missing": missing, "waited_s": round(waited_s, 1)}


async def _missing(cli: Invocation, *, topic: str | None, lag_max: int) -> list[str]:
    """A connection for each look: the node that was asked may be the one that restarts."""
    try:
        async with asyncio.timeout(ASK_S_MAX), cli.connection() as connection:
            found = await status_of(connection, topic)
    except RetryableError as error:
        return [error.message]
    except TimeoutError:
        return [f"no node has answered within {ASK_S_MAX:.0f} s"]
    return unsettled(found, lag_max=lag_max)


def unsettled(status: Status, *, lag_max: int) -> list[str]:
    """What is still to come, in words; nothing if one node may be missed."""
    away = [
        f"{node['id']} {lacks}"
        for node in status["nodes"]
        if (lacks := absence(node)) and any(node["id"] in _voters(p) for p in status["partitions"])
    ]
    behind = [
        f"{node} {lacks} {place_of(part)}"
        for part in status["partitions"]
        if part["state"] == "serving"
        for node in sorted(_voters(part) - {part["coordinator"]})
        if (lacks := _lacks(part, node, lag_max=lag_max))
    ]
    return troubles(status) + away + behind


def _voters(part: dict[str, Any]) -> set[str]:
    """While a set changes both the old and the new one must agree."""
    return {*part["voters"], *part["joint"]}


def _lacks(part: dict[str, Any], node: str, *, lag_max: int) -> str:
    """What keeps a voter from standing in for another; empty: nothing."""
    told = next((row for row in part["followers"] if row["node"] == node), None)
    if told is None or not told["connected"]:
        return "does not follow"
    if not told["sequence"]:  # it is connected, and nobody knows what it holds
        return "has acknowledged nothing of"
    if told["lag"] > lag_max:
        return f"is {told['lag']} entries behind in"
    if not told["counts"]:
        return "does not count yet for"
    return ""
