"""`penstock put`, `pop`, `ack`, `nack` and `peek`: messages in hand; `penstock dlq`: dead ones;
`penstock tail`: the log of a topic as it commits."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.command import Answer, Force, Invocation, TopicName, command, group, pairs_of
from penstock.console import Columns, cell, listing, preview, progress, to_json, when
from penstock.errors import InvalidArgument, LeaseLost, NotFound

if TYPE_CHECKING:
    from penstock.client.network.connection import Connection
    from penstock.model.batch import Batch

app = group()
dead_letters = group()

PUT_ENTRIES_MAX: Final = 10_000  # between two steps of the progress bar
Count = Annotated[int, typer.Option("--count", "-n", min=1)]
Tokens = Annotated[list[str], typer.Argument(help="Tokens that `pop --no-ack` gave.")]
Ids = Annotated[list[str] | None, typer.Argument(help="Message ids.")]
All = Annotated[bool, typer.Option("--all", help="Every dead letter of the topic.")]
MESSAGE: Final[Columns] = {
    "message": "message_id", ">priority": "priority", ">attempts": "attempts",
    "enqueued": lambda m: when(m["time_ms"]), "key": lambda m: preview(m["key"]),
    "payload": lambda m: preview(m["payload"]),
}  # fmt: skip
LEASED: Final[Columns] = {**MESSAGE, "lease token": "lease_token"}
DEAD: Final[Columns] = {
    "message": "message_id", ">priority": "priority", ">attempts": "attempts",
    "dead since": lambda m: when(m["dead_ms"]), "reason": "reason",
    "detail": lambda m: m["detail"] or "", "payload": lambda m: preview(m["payload"]),
}  # fmt: skip
QUEUE_BATCHES_MAX: Final = 64  # read ahead of the printer, over all partitions
Row = dict[str, Any]


@command(app, "put")
async def put(
    cli: Invocation,
    topic: TopicName,
    value: Annotated[str | None, typer.Argument(help="The payload; - or nothing: stdin.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the payload from this file.")] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line is a message.")] = False,
    priority: Annotated[int, typer.Option("--priority", "-p")] = 0,
    key: Annotated[str | None, typer.Option(help="Equal keys share a partition.")] = None,
    delay: Annotated[float, typer.Option(help="Seconds until it becomes ready.")] = 0.0,
    header: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="NAME=VALUE")
    ] = None,
    max_retries: Annotated[int | None, typer.Option(help="Instead of the topic's.")] = None,
    count: Annotated[int, typer.Option(help="Put it this many times.", min=1)] = 1,
) -> Answer:
    """Enqueue messages; returns when they are durable."""
    from penstock import Item

    data = _payload(value, file)
    headers, ids = pairs_of(header, option="header"), list[str]()
    items = [
        Item(p, priority=priority, key=key, delay=delay, headers=headers, max_retries=max_retries)
        for p in (data.splitlines() if lines else [data]) * count
    ]
    async with cli.client(retry_s=0) as client:
        messages = client.topic(topic, bytes, create=False)
        with progress("put", total=len(items), unit="messages") as advance:
            for at in range(0, len(items), PUT_ENTRIES_MAX):
                some = items[at : at + PUT_ENTRIES_MAX]
                ids += await messages.put_many(some, atomic=False, timeout=0)
                advance(len(ids))
    return Answer(
        {"topic": topic, "count": len(ids), "message_ids": ids},
        "\n".join(ids) if len(ids) <= 20 else f"{cell(len(ids))} messages are durable",
    )


@command(app, "pop")
async def pop(
    cli: Invocation,
    topic: TopicName,
    count: Count = 1,
    ack: Annotated[bool, typer.Option(help="Acknowledge; else only lease.")] = True,
    wait: Annotated[float, typer.Option(help="Seconds to wait for a first message.")] = 0.0,
    visibility: Annotated[float | None, typer.Option(help="Seconds the lease lasts.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Write the bare payloads.")] = False,
) -> Answer | None:
    """Take the best messages. Exit code 3 when there is none."""
    from penstock.client.options import milliseconds, optional_ms
    from penstock.model.ids import LeaseToken

    async with cli.connection() as connection:
        asked = {
            "topic": topic, "limit": count, "wait_ms": milliseconds(wait, field="wait"),
            "visibility_ms": optional_ms(visibility, field="visibility"),
        }  # fmt: skip
        messages = (await connection.call("pop", **asked))["messages"]
        if not messages:
            raise NotFound(f"no message is ready in {topic}", topic=topic)
        if ack:
            texts = [message["lease_token"] for message in messages]
            lost = await connection.settle(topic, [LeaseToken.parse(text) for text in texts])
            _reject_lost(topic, texts, lost)
    if raw and not cli.json:
        for message in messages:
            sys.stdout.buffer.write(message["payload"] + b"\n")
        sys.stdout.buffer.flush()
        return None
    columns = MESSAGE if ack else LEASED
    return Answer(
        {"topic": topic, "acked": ack, "messages": messages}, lambda _: listing(messages, columns)
    )


@command(app, "ack")
async def ack(cli: Invocation, topic: TopicName, lease_token: Tokens) -> Answer:
    """Acknowledge leased messages by their lease tokens."""
    from penstock.model.ids import LeaseToken

    tokens = [LeaseToken.parse(text) for text in lease_token]
    async with cli.connection() as connection:
        lost = await connection.settle(topic, tokens)
    _reject_lost(topic, lease_token, lost)
    return Answer({"acked": len(tokens)}, f"{len(tokens)} acknowledged")


@command(app, "nack")
async def nack(
    cli: Invocation,
    topic: TopicName,
    lease_token: Tokens,
    delay: Annotated[float | None, typer.Option(help="Seconds until the retry.")] = None,
    reject: Annotated[bool, typer.Option("--reject", help="To the dead letters now.")] = False,
    reason: Annotated[str, typer.Option(help="Kept with the dead letter.")] = "",
) -> Answer:
    """Give leased messages back for a retry, or reject them."""
    from penstock.client.options import optional_ms
    from penstock.model.ids import LeaseToken

    tokens = [LeaseToken.parse(text) for text in lease_token]
    delay_ms = optional_ms(delay, field="delay")
    async with cli.connection() as connection:
        lost = await connection.give_back(
            topic, tokens, delay_ms=delay_ms, reject=reject, reason=reason
        )
    _reject_lost(topic, lease_token, lost)
    return Answer({"returned": len(tokens)}, f"{len(tokens)} given back")


@command(app, "peek")
async def peek(cli: Invocation, topic: TopicName, count: Count = 10) -> Answer:
    """Look at the best ready messages without taking them."""
    messages = (await cli.call("peek", topic=topic, limit=count))["messages"]
    return Answer({"topic": topic, "messages": messages}, lambda _: listing(messages, MESSAGE))


def _reject_lost(topic: str, tokens: list[str], lost: list[int]) -> None:
    if lost:
        names = ", ".join(tokens[i] for i in lost)
        raise LeaseLost(f"lease no longer held: {names}", topic=topic, lost=lost)


def _payload(value: str | None, file: Path | None) -> bytes:
    if file is not None:
        if value is not None:
            raise InvalidArgument("give a value or --file, not both", field="value")
        try:
            return file.read_bytes()
        except OSError as error:
            raise NotFound(f"cannot read {file}: {error.strerror}", file=str(file)) from error
    if value is not None and value != "-":
        return value.encode()
    if value is None and sys.stdin.isatty():
        raise InvalidArgument("nothing to put: give a value, --file or stdin", field="value")
    return sys.stdin.buffer.read()


@command(dead_letters, "list")
async def list_dead(
    cli: Invocation,
    topic: TopicName,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1)] = 100,
    after: Annotated[str | None, typer.Option(help="Go on at this cursor.")] = None,
) -> Answer:
    """List dead letters with the reason of their death."""
    found = await cli.call("dlq_list", topic=topic, limit=limit, after=after)
    return Answer({"topic": topic, **found}, dead_table)


@command(dead_letters, "replay")
async def replay(
    cli: Invocation,
    topic: TopicName,
    ids: Ids = None,
    everything: All = False,
    limit: Annotated[int | None, typer.Option(help="At most this many.", min=1)] = None,
) -> Answer:
    """Make dead letters ready again, with their attempts at zero."""
    asked = _chosen(ids, everything)
    found = await cli.call("dlq_replay", topic=topic, limit=limit, **asked)
    return Answer(found, f"{cell(found['replayed'])} messages are ready again")


@command(dead_letters, "delete")
async def delete(
    cli: Invocation,
    topic: TopicName,
    ids: Ids = None,
    everything: All = False,
    force: Force = False,
) -> Answer:
    """Delete dead letters for good."""
    asked = _chosen(ids, everything)
    which = f"{len(ids)} dead letters" if ids else "every dead letter"
    question = f"Delete {which} of {topic}?"
    found = await cli.destroy("dlq_delete", topic=topic, question=question, force=force, **asked)
    return Answer(found, f"{cell(found['deleted'])} dead letters are gone")


def _chosen(ids: list[str] | None, everything: bool) -> dict[str, Any]:
    if bool(ids) == everything:
        raise InvalidArgument("name message ids, or say --all", field="message_ids")
    return {"message_ids": ids} if ids else {}


def dead_table(found: dict[str, Any]) -> Any:
    made = listing(found["messages"], DEAD)
    if found.get("next"):
        made.caption = f"more: --after {found['next']}"
    return made


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
