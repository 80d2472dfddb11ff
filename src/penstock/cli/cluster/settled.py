"""`penstock cluster wait`: until another node can be missed.

A cluster is *settled* when every partition is served and every voter of it is connected, counts,
and is nearly where its coordinator is. Then any one node may go away and a majority is left that
has everything: whoever restarts one node after the other waits for this in between.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.cluster.status import Status, of_topic, troubles
from penstock.cli.output import console
from penstock.errors import RetryableError

if TYPE_CHECKING:
    from penstock.cli.command import Invocation

POLL_S: Final = 0.5
ASK_S_MAX: Final = 10.0  # for one answer: the node that is asked may be the one that hangs
SHOWN: Final = 5


async def wait(
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
            shown.update(f"waiting: {view_of(missing)}")
            await asyncio.sleep(min(POLL_S, timeout_s - waited_s))
    return {"settled": not missing, "missing": missing, "waited_s": round(waited_s, 1)}


async def _missing(cli: Invocation, *, topic: str | None, lag_max: int) -> list[str]:
    """A connection for each look: the node that was asked may be the one that restarts."""
    try:
        async with asyncio.timeout(ASK_S_MAX), cli.connection() as connection:
            found = of_topic(await connection.call("cluster_status"), topic)
    except RetryableError as error:
        return [error.message]
    except TimeoutError:
        return [f"no node has answered within {ASK_S_MAX:.0f} s"]
    return unsettled(found, lag_max=lag_max)


def unsettled(status: Status, *, lag_max: int) -> list[str]:
    """What is still to come, in words; nothing if one node may be missed."""
    away = [
        f"{node['id']} is not there"
        for node in status["nodes"]
        if not node["alive"] and any(node["id"] in _voters(p) for p in status["partitions"])
    ]
    behind = [
        f"{node} {lacks} {part['topic']}/{part['partition']}"
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


def view_of(missing: list[str]) -> str:
    more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
    return ", ".join(missing[:SHOWN]) + more
