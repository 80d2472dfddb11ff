"""`penstock stats`: how full topics are, and how fast they move."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.command import Answer, Invocation, command, group, listed, watched
from penstock.cli.output import duration, size, table

if TYPE_CHECKING:
    from penstock.client.network.connection import Connection

app = group()
Stats = dict[str, Any]


@command(app, "stats")
async def stats(
    cli: Invocation,
    topic: Annotated[str | None, typer.Argument(help="Only this topic.")] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between refreshes.", min=0.1)] = 1.0,
    rounds: Annotated[int | None, typer.Option(help="Stop after this many refreshes.")] = None,
    partitions: Annotated[bool, typer.Option("--partitions", help="A row each.")] = False,
) -> Answer | None:
    """Show ready, delayed, leased and dead messages of topics and partitions."""
    subject = {} if topic is None else {"topic": topic}
    async with cli.connection() as connection:
        if watch:
            looks = _Looks(connection, subject, partitions=partitions)
            await watched(cli, looks.look, interval_s=interval, rounds=rounds)
            return None
        found = await listed(connection, "stats", "topics", **subject)
    return Answer(document=found, view=lambda: view_of(found, partitions=partitions))


class _Looks:
    """Looks at the same topics, each with the rates since the one before."""

    def __init__(
        self, connection: Connection, subject: dict[str, str], *, partitions: bool
    ) -> None:
        self._connection, self._subject, self._partitions = connection, subject, partitions
        self._before: tuple[Stats, float] | None = None

    async def look(self) -> Answer:
        found = await listed(self._connection, "stats", "topics", **self._subject)
        at, rates = time.monotonic(), dict[str, dict[str, float]]()
        if self._before is not None:
            rates = rates_of(self._before[0], found, at - self._before[1])
        self._before = found, at
        return Answer(
            document={**found, "rates": rates},
            view=lambda: view_of(found, partitions=self._partitions, rates=rates),
        )


def rates_of(before: Stats, after: Stats, seconds: float) -> dict[str, dict[str, float]]:
    """Messages per second of each topic between two looks."""
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

    rows = []
    for topic in found["topics"]:
        speed = (rates or {}).get(topic["name"], {})
        rows.append(
            [
                topic["name"], topic["ready"], topic["delayed"], topic["leased"], topic["dead"],
                duration(topic["oldest_age_ms"]) if topic["ready"] else "–",
                topic["enqueued_total"], topic["acked_total"], topic["retried_total"],
                *(round(speed[n]) if n in speed else "–" for n in ("enqueued", "acked")),
            ]
        )  # fmt: skip
    topics = table(
        "topic", ">ready", ">delayed", ">leased", ">dead", ">oldest", ">enqueued", ">acked",
        ">retried", ">in/s", ">out/s", rows=rows,
    )  # fmt: skip
    return Group(topics, partition_table(found)) if partitions else topics


def partition_table(found: Stats) -> Any:
    names = (
        "partition", "epoch", "sequence_first", "sequence_committed", "ready", "delayed", "leased",
        "dead",
    )  # fmt: skip
    rows = [
        [topic["name"], *(part[n] for n in names), size(part["bytes"]), part["segments"]]
        for topic in found["topics"]
        for part in topic["partitions"]
    ]
    return table(
        "topic", ">partition", ">epoch", ">first", ">committed", ">ready", ">delayed", ">leased",
        ">dead", ">bytes", ">segments", rows=rows,
    )  # fmt: skip
