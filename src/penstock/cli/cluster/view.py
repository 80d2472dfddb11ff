"""The drawing of a cluster: a card for each node, and who holds which partition.

★ coordinates   ● follows   ◐ is behind   ○ is away   ◇ learns
"""

from __future__ import annotations

import time
from typing import Any, Final

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from penstock.cli.cluster.status import Status, absence, troubles, under_way, warnings
from penstock.console import cell, duration

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
        marks = [
            Text(*MARKS[mark][:2]) if mark else Text("") for mark in _marks(part, names, alive)
        ]
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


def _marks(part: dict[str, Any], names: list[str], alive: set[str]) -> list[str]:
    """What each node is to the partition; empty: nothing."""
    followers = {follower["node"]: follower for follower in part["followers"]}
    return [_mark(part, name, followers.get(name), alive) for name in names]


def _mark(part: dict[str, Any], name: str, follower: dict[str, Any] | None, alive: set[str]) -> str:
    if name == part["coordinator"]:
        return "coordinator" if name in alive else "away"
    if name not in (*part["voters"], *part["joint"], *part["learners"]):
        return ""
    if name not in alive:
        return "away"
    if name not in part["voters"]:
        return "learner"
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
