"""How a cluster is: what its nodes answer, and what in it is not as it should be."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from penstock.cli.output import console, to_json
from penstock.errors import NotFound

if TYPE_CHECKING:
    from penstock.cli.command import Invocation
    from penstock.client.connection import Connection

Status = dict[str, Any]


def of_topic(status: Status, topic: str | None) -> Status:
    """The status with the partitions of one topic alone."""
    if topic is None:
        return status
    found = [part for part in status["partitions"] if part["topic"] == topic]
    if not found:
        raise NotFound(f"no topic {topic}", topic=topic)
    return status | {"partitions": found}


def troubles(status: Status) -> list[str]:
    """What keeps somebody waiting, in words; the worst first."""
    found = []
    unserved = [part for part in status["partitions"] if part["state"] != "serving"]
    if unserved:
        names = ", ".join(f"{part['topic']}/{part['partition']}" for part in unserved[:5])
        more = f" and {len(unserved) - 5} more" if len(unserved) > 5 else ""
        found.append(f"not served: {names}{more}")
    if not status["metadata"]["available"]:
        found.append("etcd is away: nothing can move or be taken over until it is back")
    return found


def warnings(status: Status) -> list[str]:
    """What works and needs a look."""
    found = [f"{node['id']} is not there" for node in status["nodes"] if not node["alive"]]
    lagging = sorted(
        {
            f"{follower['node']} ({part['topic']}/{part['partition']})"
            for part in status["partitions"]
            for follower in part["followers"]
            if follower["lagging"]
        }
    )
    if lagging:
        more = f" and {len(lagging) - 3} more" if len(lagging) > 3 else ""
        found.append(f"lagging: {', '.join(lagging[:3])}{more}")
    moving = sum(1 for part in status["partitions"] if under_way(part))
    if moving:
        found.append(f"on the move: {moving} of {len(status['partitions'])} partitions")
    return found


def under_way(part: dict[str, Any]) -> bool:
    """Whether a partition's replicas are not where they are wanted."""
    return bool(part["joint"]) or part["target"] not in ([], part["voters"])


async def follow(
    cli: Invocation,
    connection: Connection,
    *,
    topic: str | None,
    interval: float,
    rounds: int | None,
) -> None:
    """Draw it again and again."""
    from rich.live import Live

    from penstock.cli.cluster.view import view_of

    done = 0
    with Live(console=console(), auto_refresh=False) as live:
        while rounds is None or done < rounds:
            if done:
                await asyncio.sleep(interval)
            found = of_topic(await connection.call("cluster_status"), topic)
            if cli.json:
                print(to_json(found, indent=None), flush=True)
            else:
                live.update(view_of(found), refresh=True)
            done += 1
