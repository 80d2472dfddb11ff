"""`penstock tail`: the log of a topic as it commits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.command import Answer, Invocation, TopicName, command, group
from penstock.console import preview, to_json, when

if TYPE_CHECKING:
    from penstock.client.network.connection import Connection
    from penstock.model.batch import Batch

app = group()
QUEUE_BATCHES_MAX: Final = 64  # read ahead of the printer, over all partitions
Row = dict[str, Any]


@command(app, "tail")
async def tail(
    cli: Invocation,
    topic: TopicName,
    partition: Annotated[int | None, typer.Option(help="Only this partition.")] = None,
    start: Annotated[
        int, typer.Option("--from", help="First sequence; 0: what commits from now on.", min=0)
    ] = 0,
    follow: Annotated[bool, typer.Option(help="Go on as the log grows.")] = True,
    count: Annotated[int | None, typer.Option("--count", "-n", help="Stop after these.")] = None,
    every_kind: Annotated[bool, typer.Option("--all", help="Also leases, acks, …")] = False,
) -> Answer | None:
    """Print committed entries, one per line; with --json one document per line."""
    left = count

    def show(row: Row) -> bool:
        """Print a row if it is asked for; False when that was the last one."""
        nonlocal left
        if every_kind or row["kind"] in ("enq", "prepare"):
            print(to_json(row, indent=None) if cli.json else line_of(row), flush=True)
            left = None if left is None else left - 1
        return left != 0

    async with cli.connection() as connection:
        ends = await _ends(connection, topic, partition)
        first = start if start or follow else 1
        await read_entries(connection, topic, ends, start=first, follow=follow, show=show)
    return None


async def _ends(connection: Connection, topic: str, partition: int | None) -> list[Row]:
    from penstock.errors import NotFound

    status = (await connection.call("log_status", topic=topic))["partitions"]
    chosen = [row for row in status if partition is None or row["partition"] == partition]
    if not chosen:
        raise NotFound(f"{topic} has no partition {partition}", topic=topic)
    return chosen


async def read_entries(
    connection: Connection,
    topic: str,
    ends: list[Row],
    *,
    start: int,
    follow: bool,
    show: Callable[[Row], bool],
) -> None:
    """Show the partitions' rows, each in its order, until `show` has enough; else up to now."""
    queue: asyncio.Queue[list[Row] | None] = asyncio.Queue(QUEUE_BATCHES_MAX)

    async def read(end: Row) -> None:
        last = end["sequence_committed"]
        from_sequence = max(start, end["sequence_first"]) if start else 0
        if follow or from_sequence <= last:
            stream = await connection.log_stream(
                topic,
                partition=end["partition"],
                from_sequence=from_sequence,
                through=0 if follow else last,
            )
            async for batches in stream:
                for batch in batches:
                    await queue.put(list(rows_of(batch)))
            await stream.close()
        await queue.put(None)

    async with asyncio.TaskGroup() as group:
        readers = [group.create_task(read(end)) for end in ends]
        reading = len(readers)
        while reading:
            rows = await queue.get()
            if rows is None:
                reading -= 1
            # A slice begins with the whole batch that holds the first sequence asked for.
            elif not all(show(row) for row in rows if row["sequence"] >= start):
                break
        for reader in readers:
            reader.cancel()


def rows_of(batch: Batch) -> Iterator[Row]:
    """Each entry of a batch with the columns that it has."""
    from penstock.model.columns import Domain
    from penstock.model.ids import MessageId
    from penstock.model.plain import headers_of

    columns = batch.columns()
    entries = [c for c in columns.schema.columns if c.domain is Domain.ENTRY]
    present = [c for c in entries if c.name in columns.views]
    values: dict[str, Any] = {
        c.name: list(columns.binary(c.name) or ()) if c.binary else columns.fixed(c.name).tolist()
        for c in present
    }
    sequences = values.pop("sequence", None) or range(batch.first, batch.first + batch.entries)
    kind = batch.kind.name.lower()
    for i, sequence in enumerate(sequences):
        row: Row = {
            "partition": batch.partition, "sequence": sequence, "kind": kind,
            "epoch": batch.epoch, "time_ms": batch.time_ms,
        }  # fmt: skip
        row.update((name, column[i]) for name, column in values.items())
        if kind in ("enq", "prepare"):
            where = MessageId(batch.time_ms, batch.topic, batch.partition, sequence)
            row["message_id"] = str(where)
            row["headers"] = headers_of(row.get("headers") or b"")
        yield row


def line_of(row: Row) -> str:
    head = f"{when(row['time_ms'])}  {row['partition']}/{row['sequence']:<10} {row['kind']:<8}"
    if "payload" in row:
        return f"{head} p={row.get('priority', 0):<6} {preview(row['payload'], length_max=100)}"
    shown = ("message", "token", "through", "extend_ms", "not_before_ms", "reason", "commit",
             "producer", "producer_epoch")  # fmt: skip
    return f"{head} " + " ".join(f"{name}={row[name]}" for name in shown if name in row)
