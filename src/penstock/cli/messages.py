"""`penstock put`, `pop` and `peek`: messages one has in hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from penstock.cli.command import Answer, Invocation, command, group
from penstock.cli.output import cell, preview, progress, table, when
from penstock.cli.pairs import pairs_of
from penstock.errors import InvalidArgument, NotFound

app = group("Messages.")

Topic = Annotated[str, typer.Argument(help="The topic's name.")]
PUT_ENTRIES_MAX: Final = 1000  # in one request
PUT_BYTES_MAX: Final = 4 << 20


@command(app, "put")
async def put(
    cli: Invocation,
    topic: Topic,
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
    data = _payload(value, file)
    payloads = (data.splitlines() if lines else [data]) * count
    from penstock.cli.enqueue import Attributes, enqueue

    attributes = Attributes(
        priority=priority,
        key=key.encode() if key else b"",
        delay_ms=round(delay * 1000),
        headers=pairs_of(header, option="header"),
        max_retries=max_retries,
    )
    ids: list[str] = []
    async with cli.connection() as connection:
        with progress("put", total=len(payloads), unit="messages") as advance:
            for chunk in _requests(payloads):
                ids += await enqueue(connection, topic, chunk, attributes)
                advance(len(ids))
    return Answer(
        document={"topic": topic, "count": len(ids), "message_ids": ids},
        view="\n".join(ids) if len(ids) <= 20 else f"{cell(len(ids))} messages are durable",
    )


@command(app, "pop")
async def pop(
    cli: Invocation,
    topic: Topic,
    count: Annotated[int, typer.Option("--count", "-n", min=1)] = 1,
    ack: Annotated[bool, typer.Option(help="Acknowledge; else only lease.")] = True,
    wait: Annotated[float, typer.Option(help="Seconds to wait for a first message.")] = 0.0,
    visibility: Annotated[float | None, typer.Option(help="Seconds the lease lasts.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Write the bare payloads.")] = False,
) -> Answer | None:
    """Take the best messages. Exit code 3 when there is none."""
    asked: dict[str, Any] = {"topic": topic, "limit": count, "wait_ms": round(wait * 1000)}
    if visibility is not None:
        asked["visibility_ms"] = round(visibility * 1000)
    async with cli.connection() as connection:
        messages = (await connection.call("pop", **asked))["messages"]
        if not messages:
            raise NotFound(f"no message is ready in {topic}", topic=topic)
        if ack:
            await _settle(connection, topic, messages)
    if raw and not cli.json:
        _write_raw(messages)
        return None
    return Answer(
        document={"topic": topic, "acked": ack, "messages": messages},
        view=lambda: message_table(messages, leased=not ack),
    )


@command(app, "ack")
async def ack(
    cli: Invocation,
    topic: Topic,
    lease_token: Annotated[list[str], typer.Argument(help="Tokens that `pop --no-ack` gave.")],
) -> Answer:
    """Acknowledge leased messages by their lease tokens."""
    from penstock.model.ids import LeaseToken

    tokens = [LeaseToken.parse(text) for text in lease_token]
    async with cli.connection() as connection:
        lost = await connection.settle(topic, tokens)
    _reject_lost(topic, lease_token, lost)
    return Answer(document={"acked": len(tokens)}, view=f"{len(tokens)} acknowledged")


@command(app, "nack")
async def nack(
    cli: Invocation,
    topic: Topic,
    lease_token: Annotated[list[str], typer.Argument(help="Tokens that `pop --no-ack` gave.")],
    delay: Annotated[float | None, typer.Option(help="Seconds until the retry.")] = None,
    reject: Annotated[bool, typer.Option("--reject", help="To the dead letters now.")] = False,
    reason: Annotated[str, typer.Option(help="Kept with the dead letter.")] = "",
) -> Answer:
    """Give leased messages back for a retry, or reject them."""
    from penstock.model.ids import LeaseToken

    tokens = [LeaseToken.parse(text) for text in lease_token]
    delay_ms = None if delay is None else round(delay * 1000)
    async with cli.connection() as connection:
        lost = await connection.give_back(
            topic, tokens, delay_ms=delay_ms, reject=reject, reason=reason
        )
    _reject_lost(topic, lease_token, lost)
    return Answer(document={"returned": len(tokens)}, view=f"{len(tokens)} given back")


@command(app, "peek")
async def peek(
    cli: Invocation,
    topic: Topic,
    count: Annotated[int, typer.Option("--count", "-n", min=1)] = 10,
) -> Answer:
    """Look at the best ready messages without taking them."""
    async with cli.connection() as connection:
        messages = (await connection.call("peek", topic=topic, limit=count))["messages"]
    return Answer(
        document={"topic": topic, "messages": messages}, view=lambda: message_table(messages)
    )


async def _settle(connection: Any, topic: str, messages: list[dict[str, Any]]) -> None:
    from penstock.model.ids import LeaseToken

    texts = [message["lease_token"] for message in messages]
    lost = await connection.settle(topic, [LeaseToken.parse(text) for text in texts])
    _reject_lost(topic, texts, lost)


def _reject_lost(topic: str, tokens: list[str], lost: list[int]) -> None:
    from penstock.errors import LeaseLost

    if lost:
        names = ", ".join(tokens[i] for i in lost)
        raise LeaseLost(f"lease no longer held: {names}", topic=topic, lost=lost)


def _requests(payloads: list[bytes]) -> Iterator[list[bytes]]:
    """The payloads in requests that stay below the frame limit."""
    chunk: list[bytes] = []
    room = PUT_BYTES_MAX
    for payload in payloads:
        if chunk and (len(chunk) == PUT_ENTRIES_MAX or len(payload) > room):
            yield chunk
            chunk, room = [], PUT_BYTES_MAX
        chunk.append(payload)
        room -= len(payload)
    if chunk:
        yield chunk


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


def _write_raw(messages: list[dict[str, Any]]) -> None:
    for message in messages:
        sys.stdout.buffer.write(message["payload"] + b"\n")
    sys.stdout.buffer.flush()


def message_table(messages: list[dict[str, Any]], *, leased: bool = False) -> Any:
    columns = ["message", ">priority", ">attempts", "enqueued", "key", "payload"]
    rows = [
        [
            m["message_id"], m["priority"], m["attempts"], when(m["time_ms"]),
            preview(m["key"]), preview(m["payload"]),
        ]
        for m in messages
    ]  # fmt: skip
    if leased:
        columns.append("lease token")
        for row, message in zip(rows, messages, strict=True):
            row.append(message["lease_token"])
    return table(*columns, rows=rows)
