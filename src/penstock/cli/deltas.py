"""`penstock deltas`: change vectors, look at them, and follow their changes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.command import (
    Answer,
    Invocation,
    Where,
    command,
    group,
    listed,
    pairs_of,
    time_of,
)
from penstock.cli.question import condition, parsed
from penstock.console import Columns, cell, listing, progress, table, to_json, when
from penstock.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from penstock.client.delta.deltas import Deltas
    from penstock.client.delta.subscription import Released
    from penstock.model.delta import Delta

app = group()

Topic = Annotated[str, typer.Argument(help="The delta topic's name.")]
VectorId = Annotated[str, typer.Argument(help="The vector's id.")]
Namespace = Annotated[str, typer.Option(help="The vector's namespace.")]
SHOWN_MAX: Final = 8  # components that a table shows
PUT_DELTAS_MAX: Final = 1000  # written at once
LIVE: Final[Columns] = {
    "topic": "topic", "partition": "partition", "name": "name", "state": "state",
    "position": "position", "lag": "lag_entries", "sent": "delivered", "rate/s": "rate",
}  # fmt: skip
CURSOR: Final[Columns] = {
    "name": "name", "partition": "partition", "position": "position",
    "moved": lambda cursor: when(cursor["time_ms"]),
}  # fmt: skip


@asynccontextmanager
async def _deltas(
    cli: Invocation, topic: str, *, namespace: str = "default", origin: str | None = None
) -> AsyncIterator[Deltas]:
    async with cli.client() as client:
        yield await client.deltas(topic, namespace=namespace, origin=origin)


@command(app, "put")
async def put(
    cli: Invocation,
    topic: Topic,
    vector_id: Annotated[str | None, typer.Argument(help="The vector; none: JSON lines.")] = None,
    op: Annotated[
        str, typer.Option(help="create, dense, sparse, scale, offset, delete or metadata.")
    ] = "create",
    values: Annotated[str | None, typer.Option(help="Numbers, as 0.5,1,0.")] = None,
    component: Annotated[
        list[str] | None, typer.Option("--set", metavar="INDEX=VALUE", help="May be repeated.")
    ] = None,
    metadata: Annotated[str | None, typer.Option(help="A JSON object.")] = None,
    namespace: Namespace = "default",
    origin: Annotated[str | None, typer.Option(help="Who writes; a fresh name else.")] = None,
    priority: Annotated[str, typer.Option(help="critical, high, normal or low.")] = "normal",
) -> Answer:
    """Write one delta, or one for each JSON line of stdin; returns when they are durable.

    A line has vector_id, op, and what the op takes: values, indices, metadata; namespace and
    priority if they are not those of the options.
    """
    common = {"op": op, "namespace": namespace, "priority": priority}
    if vector_id is None:
        rows = [common | _object(line, "stdin") for line in sys.stdin if line.strip()]
    else:
        rows = [common | {"vector_id": vector_id} | _one(values, component, metadata)]
    changes = [_change_of(row) for row in rows]
    written: list[Delta] = []
    async with _deltas(cli, topic, namespace=namespace, origin=origin) as deltas:
        with progress("deltas", total=len(changes), unit="deltas") as advance:
            for at in range(0, len(changes), PUT_DELTAS_MAX):
                written += await _write(deltas, changes[at : at + PUT_DELTAS_MAX])
                advance(len(written))
    shown = [document_of(delta) for delta in written]
    return Answer(
        {"topic": topic, "count": len(written), "deltas": shown},
        shown[0]["delta_id"] if len(shown) == 1 else f"{cell(len(shown))} deltas are durable",
    )


def _one(values: str | None, component: list[str] | None, metadata: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    pairs = pairs_of(component, option="set")
    try:
        if values is not None:
            found["values"] = [float(text) for text in values.split(",")]
        if pairs:
            ordered = sorted((int(index), float(value)) for index, value in pairs.items())
            found["indices"] = [index for index, _ in ordered]
            found["values"] = [value for _, value in ordered]
    except ValueError as error:
        raise InvalidArgument(f"not a number: {error}", field="values") from error
    if metadata is not None:
        found["metadata"] = _object(metadata, "metadata")
    return found


def _object(text: str, field: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"{field} is not JSON: {error}", field=field) from error
    if not isinstance(found, dict):
        raise InvalidArgument(f"{field} is not a JSON object", field=field)
    return found


async def _write(deltas: Deltas, changes: list[dict[str, Any]]) -> list[Delta]:
    """Write some at once. Their vectors are known by then, so that each finds its place in turn."""
    from penstock.model.delta import vector_hash

    await deltas.folds.look_up(vector_hash(c["namespace"], c["vector_id"]) for c in changes)
    return await asyncio.gather(*(deltas.change(**change) for change in changes))


def _change_of(row: dict[str, Any]) -> dict[str, Any]:
    from penstock.model.delta import Op, PriorityClass

    known = {"vector_id", "op", "values", "indices", "metadata", "namespace", "priority"}
    if unknown := row.keys() - known:
        raise InvalidArgument(f"no such field of a delta: {min(unknown)}", field=min(unknown))
    if not isinstance(row.get("vector_id"), str):
        raise InvalidArgument("a delta names its vector_id", field="vector_id")
    op = _member(Op, row["op"], "op")
    return row | {"op": op, "priority": _member(PriorityClass, row["priority"], "priority")}


def _member(kind: Any, name: Any, field: str) -> Any:
    try:
        return kind[str(name).upper()]
    except KeyError:
        names = ", ".join(member.name.lower() for member in kind)
        raise InvalidArgument(f"{field} must be one of {names}", field=field) from None


@command(app, "get")
async def get(
    cli: Invocation,
    topic: Topic,
    vector_id: VectorId,
    at: Annotated[str | None, typer.Option(help="As of this time (ISO 8601).")] = None,
    namespace: Namespace = "default",
) -> Answer:
    """Show a vector. Exit code 3 when there is none."""
    async with _deltas(cli, topic, namespace=namespace) as deltas:
        vector = await deltas.get(vector_id, time_of(at, field="at"))
    if vector is None:
        raise NotFound(f"no vector {vector_id} in {topic}", vector_id=vector_id)
    document = {
        "namespace": vector.namespace, "vector_id": vector.vector_id,
        "values": vector.values.tolist(), "metadata": vector.metadata,
        "revision": vector.revision, "time": vector.time, "sequence": vector.sequence,
    }  # fmt: skip
    rows = [(name, _short(value)) for name, value in document.items()]
    return Answer(document, lambda _: table("", "", rows=rows))


@command(app, "history")
async def history(
    cli: Invocation, topic: Topic, vector_id: VectorId, namespace: Namespace = "default"
) -> Answer:
    """Show a vector's deltas in causal order."""
    async with _deltas(cli, topic, namespace=namespace) as deltas:
        found = await deltas.history(vector_id)
    names = ("delta_id", "op", "origin", "time_ms", "indices", "values", "metadata")
    documents = [document_of(delta) for delta in found]
    rows = [[_short(document.get(name)) for name in names] for document in documents]
    return Answer({"deltas": documents}, lambda _: table(*names, rows=rows))


@command(app, "tail")
async def tail(
    cli: Invocation,
    topic: Topic,
    start: Annotated[
        int, typer.Option("--from", help="First sequence; 0: what is released from now on.", min=0)
    ] = 0,
    since: Annotated[str | None, typer.Option(help="From this time on (ISO 8601).")] = None,
    namespace: Annotated[str | None, typer.Option(help="Only of this namespace.")] = None,
    vector_id: Annotated[str | None, typer.Option("--vector", help="Only of this one.")] = None,
    op: Annotated[str | None, typer.Option(help="Only of this kind.")] = None,
    route: Annotated[
        list[str] | None, typer.Option(help="Such as header:tenant=a; any of several.")
    ] = None,
    cursor: Annotated[
        str | None, typer.Option(help="Go on where the last reader of this name stopped.")
    ] = None,
    coalesce: Annotated[
        float, typer.Option(help="Seconds within which a vector's changes become one.", min=0)
    ] = 0.0,
    count: Annotated[int | None, typer.Option("--count", "-n", help="Stop after these.")] = None,
) -> Answer | None:
    """Print deltas in causal order as they are released, one per line."""
    from penstock.client.options import milliseconds
    from penstock.model.delta import Op

    wanted = None if op is None else _member(Op, op, "op")
    left = count
    async with _deltas(cli, topic) as deltas:
        source = deltas.subscribe(
            namespace=namespace, vector_id=vector_id, op=wanted, routes=route or (),
            from_sequence=start or "now", from_time=time_of(since, field="since"),
            cursor=cursor, coalesce_ms=milliseconds(coalesce, field="coalesce"),
        )  # fmt: skip
        try:
            while left != 0:
                released = await anext(source)
                print(line_of(released, as_json=cli.json), flush=True)
                left = None if left is None else left - 1
        finally:
            await source.aclose()
    return None


@command(app, "search")
async def search(
    cli: Invocation,
    topic: Topic,
    vector: Annotated[str, typer.Argument(help="The numbers, as 0.5,1,0.")],
    limit: Annotated[int, typer.Option("--limit", "-k", help="How many neighbours.")] = 10,
    namespace: Annotated[str | None, typer.Option(help="Only of this namespace.")] = None,
    where: Where = None,
    sink: Annotated[str | None, typer.Option(help="Of several indexes, this one.")] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Do not wait for a full index.")
    ] = False,
) -> Answer:
    """Find the nearest vectors by the index that the node itself hosts."""
    async with _deltas(cli, topic) as deltas:
        found = await deltas.search(
            parsed(vector),
            limit,
            namespace=namespace,
            where=condition(where),
            sink=sink,
            partial=partial,
        )
    names = ("namespace", "vector_id", "distance", "revision", "metadata")
    columns = {name: name for name in names}
    return Answer({"neighbours": found}, lambda _: listing(found, columns))


@command(app, "live")
async def live(
    cli: Invocation,
    topic: Annotated[str | None, typer.Argument(help="Only this delta topic.")] = None,
) -> Answer:
    """Show who is sent what a topic releases: subscribers, hosted sinks, and how far they are."""
    found = await cli.listed("live_status", "topics", topic=topic)
    found["topics"] = whole_topics(found["topics"])
    rows = [
        {"topic": one["topic"], **row}
        for one in found["topics"]
        for row in (*one["subscriptions"], *one["sinks"])
    ]
    return Answer(found, lambda _: listing(rows, LIVE))


@command(app, "cursors")
async def cursors(
    cli: Invocation,
    topic: Topic,
    delete: Annotated[str | None, typer.Option(help="Forget the cursor of this name.")] = None,
) -> Answer:
    """Show the durable cursors of a delta topic, or forget one."""
    async with cli.connection() as connection:
        if delete is not None:
            await connection.call("cursor_delete", topic=topic, name=delete)
        found = (await listed(connection, "cursor_list", "cursors", topic=topic))["cursors"]
    return Answer({"cursors": found}, lambda _: listing(found, CURSOR))


def whole_topics(topics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each topic of `live_status` once, also where it goes on over several pages."""
    found: dict[str, dict[str, Any]] = {}
    for one in topics:
        known = found.setdefault(one["topic"], one)
        if known is not one:
            for name in ("ingest", "partitions", "subscriptions", "sinks"):
                known[name] += one[name]
    return list(found.values())


def line_of(released: Released, *, as_json: bool) -> str:
    delta = released.delta
    if as_json:
        place = {
            "partition": released.partition, "sequence": released.sequence,
            "position": released.position, "log_time_ms": released.time_ms,
            "headers": released.headers,
        }  # fmt: skip
        return to_json(place | document_of(delta), indent=None)
    head = f"{when(released.time_ms)}  {released.partition}/{released.sequence:<10}"
    what = " ".join(
        f"{name}={_short(value)}"
        for name in ("indices", "values", "metadata")
        if (value := document_of(delta).get(name)) is not None
    )
    return f"{head} {delta.op.name.lower():<8} {delta.namespace}/{delta.vector_id}  {what}"


def document_of(delta: Delta) -> dict[str, Any]:
    from penstock.model import delta as model

    return model.document_of(delta)


def _short(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    numbers = ", ".join(f"{number:g}" for number in value[:SHOWN_MAX])
    return f"[{numbers}, … {len(value)}]" if len(value) > SHOWN_MAX else f"[{numbers}]"
