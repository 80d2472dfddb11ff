"""`penstock stats`: how full topics are, and how fast they move."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer

from penstock.cli.command import (
    Answer,
    Interval,
    Invocation,
    Rounds,
    Watch,
    command,
    group,
    listed,
    looked,
)
from penstock.console import Columns, duration, listing, size

app = group()
Stats = dict[str, Any]
TOPIC: Final[Columns] = {
    "topic": "name", ">ready": "ready", ">delayed": "delayed", ">leased": "leased", ">dead": "dead",
    ">oldest": lambda t: duration(t["oldest_age_ms"]) if t["ready"] else "–",
    ">enqueued": "enqueued_total", ">acked": "acked_total", ">retried": "retried_total",
}  # fmt: skip
PARTITION: Final[Columns] = {
    "topic": "topic", ">partition": "partition", ">epoch": "epoch", ">first": "sequence_first",
    ">committed": "sequence_committed", ">ready": "ready", ">delayed": "delayed",
    ">leased": "leased", ">dead": "dead", ">bytes": lambda part: size(part["bytes"]),
    ">segments": "segments",
}  # fmt: skip


@command(app, "stats")
async def stats(
    cli: Invocation,
    topic: Annotated[str | None, typer.Argument(help="Only this topic.")] = None,
    watch: Watch = False,
    interval: Interval = 1.0,
    rounds: Rounds = None,
    partitions: Annotated[bool, typer.Option("--partitions", help="A row each.")] = False,
) -> Answer | None:
    """Show ready, delayed, leased and dead messages of topics and partitions."""
    subject = {} if topic is None else {"topic": topic}
    before: tuple[Stats, float] | None = None

    async def look() -> Answer:
        """To watch, with the rates since the look before."""
        nonlocal before
        found = await listed(connection, "stats", "topics", **subject)
        at, rates = time.monotonic(), dict[str, dict[str, float]]()
        if before is not None:
            rates = rates_of(before[0], found, at - before[1])
        before = found, at
        told = {**found, "rates": rates} if watch else found
        return Answer(told, lambda _: view_of(found, partitions=partitions, rates=rates))

    async with cli.connection() as connection:
        return await looked(cli, look, watch=watch, interval_s=interval, rounds=rounds)


def rates_of(before: Stats, after: Stats, seconds: float) -> dict[str, dict[str, float]]:
    known = {topic["name"]: topic for topic in before["topics"]}
    return {
        topic["name"]: {
            name: (topic[f"{name}_total"] - known[topic["name"]][f"{name}_total"]) / seconds
            for name in ("enqueued", "acked")
        }
        for topic in after["topics"]
        if topic["name"] in known and seconds > 0
    }


def view_of(
    found: Stats, *, partitions: bool = False, rates: dict[str, dict[str, float]] | None = None
) -> Any:
    from rich.console import Group

    def rate(name: str) -> Callable[[Stats], object]:
        return lambda t: round(speeds[t["name"]][name]) if t["name"] in speeds else "–"

    speeds = rates or {}
    columns = {**TOPIC, ">in/s": rate("enqueued"), ">out/s": rate("acked")}
    topics = listing(found["topics"], columns)
    if not partitions:
        return topics
    parts = [part | {"topic": t["name"]} for t in found["topics"] for part in t["partitions"]]
    return Group(topics, listing(parts, PARTITION))
