"""Server-Sent Events: a live subscription as a browser reads it.

Each delta is an event `delta` with a JSON document. The last one of a batch carries an id, the
positions reached; a browser that connects again sends it back as `Last-Event-ID`, and goes on from
there. The first id, the positions behind which it all begins, comes before any event. The
connection's own flow control holds back who reads slowly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar
from urllib.parse import unquote

import msgspec

from penstock.client.delta.subscription import Released
from penstock.errors import InvalidArgument, PenstockError
from penstock.model.delta import document_of
from penstock.model.plain import plain
from penstock.node.door.budget import Account
from penstock.server import arguments as ask
from penstock.server.answers import json_headers
from penstock.server.arguments import request_of
from penstock.server.http.routes import query_fields
from penstock.server.subscriptions import CallerSubscriptions, Positions, counted, pieces

PATH: Final = ("/v1/deltas/", "/events")
QUIET_S: Final = 15.0  # without an event a comment is sent, so that nobody between closes it
REFUSED_S: Final = 1.0  # so long the head waits: who is refused by then is told by a status
RETRY_MS: Final = 1000  # after which a browser connects again

T = TypeVar("T")
Write = Callable[[bytes], Awaitable[None]]
_json: Final = msgspec.json.Encoder(enc_hook=str)


def topic_of(raw_path: bytes) -> str | None:
    path = raw_path.decode("ascii", "replace")
    head, tail = PATH
    inside = path[len(head) : -len(tail)]
    if path.startswith(head) and path.endswith(tail) and inside and "/" not in inside:
        return unquote(inside)
    return None


def parse(topic: str, query: bytes, last_id: str | None) -> ask.SubscribeCall:
    fields = query_fields(query, "routes")
    if "topic" in fields:
        raise InvalidArgument("topic is given twice", field="topic")
    if last_id:
        fields["positions"] = last_id
    return request_of({"topic": topic, **fields}, ask.SubscribeCall, text=True)


async def stream(
    subscriptions: CallerSubscriptions,
    api_key: str | None,
    request: ask.SubscribeCall,
    *,
    begin: Callable[[], Awaitable[Write]],
    account: Account,
) -> None:
    """Send events until the caller goes away; `begin` answers with the head of the response."""
    async with subscriptions.open(api_key, request) as following:
        try:
            async with asyncio.timeout(REFUSED_S):
                await following.began()
        except TimeoutError:
            pass  # a log is folded, or a partition moves: that takes what it takes
        write = await begin()
        await write(b"retry: %d\n\n" % RETRY_MS)
        try:
            positions = await _waited_for(Positions.of(request, following), write)
            await write(b"id: %b\n\n" % str(positions).encode())
            while True:
                batch = await _waited_for(anext(following), write)
                async with counted(batch, account):
                    async for rows, last in pieces(batch, subscriptions.turns):
                        await write(events_of(rows, positions.after(batch) if last else None))
        except PenstockError as error:
            await write(b"event: end\ndata: %b\n\n" % _json.encode(error.to_wire()))


async def _waited_for(work: Awaitable[T], write: Write) -> T:
    """What comes of it; whoever waits for it hears that the connection is alive."""
    waiting = asyncio.ensure_future(work)
    try:
        while not waiting.done():
            done, _ = await asyncio.wait((waiting,), timeout=QUIET_S)
            if not done:
                await write(b": quiet\n\n")
        return waiting.result()
    finally:
        waiting.cancel()


def events_of(rows: list[Released], reached: str | None) -> bytes:
    """Rows as text; only the end of a batch is a place to come back to."""
    events = [b"event: delta\ndata: %b\n" % _json.encode(event_of(one)) for one in rows]
    end = b"\n" if reached is None else b"id: %b\n\n" % reached.encode()
    return b"\n".join(events) + end


def event_of(released: Released) -> dict[str, Any]:
    place = {
        "partition": released.partition,
        "sequence": released.sequence,
        "position": released.position,
        "ordinal": released.ordinal,
        "log_time_ms": released.time_ms,
        "headers": json_headers(released.headers),
    }
    document = document_of(released.delta)
    if "metadata" in document:
        document["metadata"] = plain(document["metadata"])
    return document | place
