"""How a cluster is: what its nodes answer, what is not as it should be, and a drawing of it all.

A cluster is *settled* when every partition is served and every voter of it is connected, counts,
and is nearly where its coordinator is. Then any one node may go away and a majority is left that
has everything: `penstock cluster wait` is for whoever restarts one node after the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from penstock.cli.command import Invocation, listed
from penstock.console import cell, console, duration
from penstock.errors import NotFound, RetryableError

if TYPE_CHECKING:
    from penstock.client.network.connection import Connection

POLL_S: Final = 0.5
ASK_S_MAX: Final = 10.0  # for one answer: the node that is asked may be the one that hangs
SHOWN: Final = 5  # names in a line of text

Status = dict[str, Any]
PARTITIONS_SHOWN: Final = 40  # of a topic; the troubled ones are among them
BAR: Final = 10
CREDIT_LOW: Final = 0.2
BEHIND: Final = 100  # entries; less is on its way
# What a node may be to a partition: its mark, the mark's style, and what the legend says.
MARKS: Final = {
    "coordinator": ("★", "bold yellow", "coordinates"), "follower": ("●", "green", "follows"),
    "behind": ("◐", "yellow", "is behind"), "away": ("○", "red", "is away"),
    "learner": ("◇", "cyan", "learns"),
}  # fmt: skip


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


def view_of(status: Status) -> RenderableType:
    most = max((node["coordinators"] for node in status["nodes"]), default=0)
    cards = [_card(node, most=most) for node in status["nodes"]]
    parts: list[RenderableType] = [_headline(status), Columns(cards, padding=(0, 1))]
    topics = dict.fromkeys(part["topic"] for part in status["partitions"])
    parts += [_topic(status, topic) for topic in topics]
    if topics:
        parts.append(_legend())
    parts += [Text(line, style="bold red") for line in troubles(status)]
    parts += [Text(line, style="yellow") for line in warnings(status)]
    return Group(*parts)


def _headline(status: Status) -> Text:
    alive = sum(1 for node in status["nodes"] if not absence(node))
    served = sum(1 for part in status["partitions"] if part["state"] == "serving")
    total = len(status["partitions"])
    text = Text.assemble((f"{status['cluster']} ", "bold"))
    text.append(f"{alive} of {len(status['nodes'])} nodes", _good(alive == len(status["nodes"])))
    text.append(", ")
    text.append(f"{served} of {total} partitions served", _good(served == total))
    metadata = status["metadata"]
    text.append(f", {metadata['kind']} ")
    text.append(*(("up", "green") if metadata["available"] else ("AWAY", "bold red")))
    text.append(f", {status['policy']} coordinators\n", "dim")
    return text


def _good(condition: bool) -> str:
    return "green" if condition else "bold red"


def _card(node: dict[str, Any], *, most: int) -> Panel:
    state, style = _state(node)
    up = not absence(node)
    text = Text.assemble(("● " if up else "○ ", style), (state, style))
    if up and node["started_ms"]:
        text.append(f" for {duration(time.time() * 1000 - node['started_ms'])}", "dim")
    text.append(f"\n{node['address'] or '–'}\n", "dim")
    filled = 0 if not most else round(node["coordinators"] / most * BAR)
    text.append("★ ", "bold yellow")
    text.append("━" * filled, "yellow")
    text.append("─" * (BAR - filled), "dim")
    text.append(f" {node['coordinators']}\n● {node['replicas']} replicas")
    zone = f"[dim] {node['zone']}[/dim]" if node["zone"] else ""
    title = f"[bold]{node['id']}[/bold]{zone}"
    return Panel(text, title=title, title_align="left", border_style=style, width=30)


def _state(node: dict[str, Any]) -> tuple[str, str]:
    if not node["alive"]:
        return "DOWN", "bold red"
    if not node.get("reachable", True):
        return "UNREACHABLE", "bold red"
    if node.get("clock", {}).get("state") == "off":
        return "CLOCK OFF", "bold red"
    if node.get("rolled_back"):
        return "catching up", "yellow"
    return ("draining", "yellow") if node["draining"] else ("up", "green")


def _topic(status: Status, topic: str) -> Table:
    names = [node["id"] for node in status["nodes"]]
    alive = {node["id"] for node in status["nodes"] if not absence(node)}
    parts = [part for part in status["partitions"] if part["topic"] == topic]
    shown = _chosen(parts)
    made = Table(
        title=f"\n{topic}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption=f"and {len(parts) - len(shown)} more that are fine" if shown != parts else None,
        caption_justify="left",
    )
    made.add_column("", justify="right")
    for name in names:
        made.add_column(name, justify="center")
    for title in ("epoch", "committed", "lag"):
        made.add_column(title, justify="right")
    made.add_column("credits")
    made.add_column("")
    for part in shown:
        found = [_mark(part, name, alive) for name in names]
        marks = [Text(*MARKS[mark][:2]) if mark else Text("") for mark in found]
        made.add_row(
            str(part["partition"]), *marks, str(part["epoch"]), cell(part["sequence_committed"]),
            _lag(part), _credits(part), _remark(part),
        )  # fmt: skip
    return made


def _chosen(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most so many: first those with a story, then the others, in order."""
    if len(parts) <= PARTITIONS_SHOWN:
        return parts
    told = sorted(parts, key=lambda part: (not _remark(part).plain, part["partition"]))
    return sorted(told[:PARTITIONS_SHOWN], key=lambda part: part["partition"])


def _mark(part: dict[str, Any], name: str, alive: set[str]) -> str:
    """What a node is to the partition; empty: nothing."""
    if name == part["coordinator"]:
        return "coordinator" if name in alive else "away"
    if name not in (*part["voters"], *part["joint"], *part["learners"]):
        return ""
    if name not in alive:
        return "away"
    if name not in part["voters"]:
        return "learner"
    follower = next((one for one in part["followers"] if one["node"] == name), None)
    if follower is None:
        return "follower" if part["state"] == "unknown" else "away"
    if not follower["connected"]:
        return "away"
    return "behind" if (follower["lag"] or 0) > BEHIND else "follower"


def _lag(part: dict[str, Any]) -> Text:
    behind = max((follower["lag"] or 0 for follower in part["followers"]), default=0)
    return Text(cell(behind), style="yellow" if behind > BEHIND else "dim")


def _credits(part: dict[str, Any]) -> Text:
    """The bar of the follower with the least credit, in entries or bytes. Who is away has none."""
    left = [_share(follower) for follower in part["followers"]]
    if not left:
        return Text("–", style="dim")
    share = min(left)
    filled = round(share * BAR)
    style = "green" if share >= CREDIT_LOW else "yellow" if share > 0 else "bold red"
    return Text.assemble(("█" * filled, style), ("░" * (BAR - filled), "dim"), f" {share:4.0%}")


def _share(follower: dict[str, Any]) -> float:
    entries = follower["credits"] / max(1, follower["credits_max"])
    size = follower["credit_bytes"] / max(1, follower["credit_bytes_max"])
    return float(max(0.0, min(entries, size)))


def _remark(part: dict[str, Any]) -> Text:
    if part["state"] != "serving":
        return Text(part["state"], style="bold red")
    lagging = [follower["node"] for follower in part["followers"] if follower["lagging"]]
    if lagging:
        return Text(f"{', '.join(lagging)} lagging", style="red")
    if under_way(part):
        return Text(f"→ {' '.join(part['target'])}", style="cyan")
    return Text("")


def _legend() -> Text:
    text = Text()
    for mark, style, meaning in MARKS.values():
        text.append(mark, style)
        text.append(f" {meaning}   ", "dim")
    return text
