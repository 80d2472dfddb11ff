"""`penstock put`, `pop`, `ack`, `nack` and `peek`: messages in hand; `penstock dlq`: dead ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.command import Answer, Force, Invocation, command, destroyed, group, pairs_of
from penstock.cli.output import preview, table, when
from penstock.console import cell, progress
from penstock.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from penstock.client.network.connection import Connection


@dataclass(frozen=True, kw_only=True)
class Attributes:
    """What a command's messages have in common."""

    priority: int = 0
    key: bytes = b""
    delay_ms: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    max_retries: int | None = None


def body_of(payloads: Sequence[bytes], attributes: Attributes) -> bytes:
    """One ENQ body; an attribute that has its default costs no column."""
    from penstock.client.queue.entries import encode_headers
    from penstock.model.entries import ENQ

    count = len(payloads)
    columns: dict[str, Any] = {"payload": payloads}
    if attributes.priority:
        columns["priority"] = [attributes.priority] * count
    if attributes.delay_ms:
        columns["delay_ms"] = [attributes.delay_ms] * count
    if attributes.max_retries is not None:
        columns["max_retries"] = [attributes.max_retries] * count
    if attributes.key:
        columns["key"] = [attributes.key] * count
    if attributes.headers:
        columns["headers"] = [encode_headers(attributes.headers)] * count
    return ENQ.encode(count, columns)


async def enqueue(
    connection: Connection, topic: str, payloads: Sequence[bytes], attributes: Attributes
) -> list[str]:
    """Enqueue the payloads wherever the node puts them; their ids once they are durable."""
    part = (0, len(payloads), body_of(payloads, attributes))
    answer = await connection.enqueue(topic, [part], partitioned=False)
    return answer.ids(len(payloads))


app = group()

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
    from penstock.client.options import milliseconds
    from penstock.client.queue.entries import check, encode_key

    attributes = Attributes(
        priority=priority,
        key=encode_key(key),
        delay_ms=milliseconds(delay, field="delay"),
        headers=pairs_of(header, option="header"),
        max_retries=max_retries,
    )
    check(b"", priority, delay_ms=attributes.delay_ms, max_retries=max_retries, limit=0)
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
    from penstock.client.options import milliseconds

    asked: dict[str, Any] = {"topic": topic, "limit": count}
    asked["wait_ms"] = milliseconds(wait, field="wait")
    if visibility is not None:
        asked["visibility_ms"] = milliseconds(visibility, field="visibility")
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
    from penstock.client.options import milliseconds
    from penstock.model.ids import LeaseToken

    tokens = [LeaseToken.parse(text) for text in lease_token]
    delay_ms = None if delay is None else milliseconds(delay, field="delay")
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


# --- dead letters ---

dead_letters = group()
Ids = Annotated[list[str] | None, typer.Argument(help="Message ids.")]
All = Annotated[bool, typer.Option("--all", help="Every dead letter of the topic.")]


@command(dead_letters, "list")
async def list_dead(
    cli: Invocation,
    topic: Topic,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1)] = 100,
    after: Annotated[str | None, typer.Option(help="Go on at this cursor.")] = None,
) -> Answer:
    """List dead letters with the reason of their death."""
    page = {"limit": limit} if after is None else {"limit": limit, "after": after}
    async with cli.connection() as connection:
        found = await connection.call("dlq_list", topic=topic, **page)
    return Answer(document={"topic": topic, **found}, view=lambda: dead_table(found))


@command(dead_letters, "replay")
async def replay(
    cli: Invocation,
    topic: Topic,
    ids: Ids = None,
    everything: All = False,
    limit: Annotated[int | None, typer.Option(help="At most this many.", min=1)] = None,
) -> Answer:
    """Make dead letters ready again, with their attempts at zero."""
    asked: dict[str, Any] = _chosen(ids, everything)
    if limit is not None:
        asked["limit"] = limit
    async with cli.connection() as connection:
        result = await connection.call("dlq_replay", topic=topic, **asked)
    return Answer(document=result, view=f"{cell(result['replayed'])} messages are ready again")


@command(dead_letters, "delete")
async def delete(
    cli: Invocation,
    topic: Topic,
    ids: Ids = None,
    everything: All = False,
    force: Force = False,
) -> Answer:
    """Delete dead letters for good."""
    asked = _chosen(ids, everything)
    which = f"{len(ids)} dead letters" if ids else "every dead letter"
    question = f"Delete {which} of {topic}?"
    result = await destroyed(cli, "dlq_delete", topic, question=question, force=force, **asked)
    return Answer(document=result, view=f"{cell(result['deleted'])} dead letters are gone")


def _chosen(ids: list[str] | None, everything: bool) -> dict[str, Any]:
    if bool(ids) == everything:
        raise InvalidArgument("name message ids, or say --all", field="message_ids")
    return {"message_ids": ids} if ids else {}


def dead_table(found: dict[str, Any]) -> Any:
    rows = [
        [
            m["message_id"], m["priority"], m["attempts"], when(m["dead_ms"]),
            m["reason"], m["detail"] or "", preview(m["payload"]),
        ]
        for m in found["messages"]
    ]  # fmt: skip
    made = table(
        "message", ">priority", ">attempts", "dead since", "reason", "detail", "payload", rows=rows
    )
    if found.get("next"):
        made.caption = f"more: --after {found['next']}"
    return made
