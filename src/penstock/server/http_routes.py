"""The HTTP routes: which path is which call, and where its arguments stand.

Arguments of GET and DELETE stand in the path and the query, of the others in the path and the body.
`force` and `confirm` of a destructive call may stand in the query of any of them.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import msgspec

from penstock.errors import InvalidArgument, NotFound
from penstock.server import requests as ask
from penstock.server import responses as tell
from penstock.server.fields import invalid, request_of
from penstock.server.http_json import entries_of, entry_of, message_json
from penstock.server.http_query import query_pairs
from penstock.server.operations import OPERATIONS, Operation, Result
from penstock.server.pool import Link
from penstock.server.puts import put, put_batch

BODY_BYTES_MAX: Final = 1 << 20
_JSON_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])


async def enqueue(link: Link, request: ask.Enqueue) -> Result:
    written = await put(link, request.topic, entry_of(request))
    return {"message_id": written.message_id, "duplicate": written.duplicate}


async def enqueue_batch(link: Link, request: ask.EnqueueBatch) -> Result:
    written = await put_batch(
        link,
        request.topic,
        entries_of(request),
        atomic=request.atomic,
        expected_sequence=request.expected_sequence,
    )
    return written._asdict()


ENQUEUES: Final = {
    "Enqueue": Operation(ask.Enqueue, tell.Enqueued, enqueue, "Enqueue one message"),
    "EnqueueBatch": Operation(
        ask.EnqueueBatch, tell.BatchEnqueued, enqueue_batch, "Enqueue many, all or none"
    ),
}
_PLAIN: Final = frozenset(ENQUEUES)  # results that need no conversion to be sent


class Route:
    """One call over HTTP."""

    def __init__(self, method: str, path: str, name: str, *, body_bytes_max: int | None = None):
        self.method, self.path, self.name = method, path, name
        self.operation = (OPERATIONS | ENQUEUES)[name]
        self.parameters = re.findall(r"\{(\w+)\}", path)
        self.in_body = method in ("POST", "PATCH")
        self.destructive = issubclass(self.operation.request, ask.Destructive)
        self.body_bytes_max = body_bytes_max  # None: the gateway's own limit
        self._decoder = msgspec.json.Decoder(self.operation.request)
        self._run: Callable[[Link, Any], Awaitable[Result]] = self.operation.run

    def parse(self, *, parameters: dict[str, str], query: bytes, body: bytes) -> msgspec.Struct:
        """The call's arguments; raises `InvalidArgument` with the name of a wrong one."""
        if not self.in_body:
            fields = {**query_fields(query), **parameters}
            return request_of(fields, self.operation.request, text=True)
        try:
            if not parameters and not query:
                return self._decoder.decode(body)
            fields = _JSON_OBJECT.decode(body)
        except msgspec.DecodeError as error:
            raise invalid(error) from error
        return self._merged(fields, parameters, query_fields(query))

    def _merged(
        self, fields: dict[str, Any], parameters: dict[str, str], query: dict[str, str]
    ) -> msgspec.Struct:
        for name in parameters.keys() & fields.keys():
            raise InvalidArgument(f"{name} stands in the path", field=name)
        for name in query:
            if not self.destructive or name not in ("force", "confirm"):
                raise InvalidArgument(f"no such query argument: {name}", field=name)
        fields |= parameters | query
        if "force" in query:
            fields["force"] = request_of(
                {"force": query["force"]}, ask.Destructive, text=True
            ).force
        return request_of(fields, self.operation.request)

    async def answer(self, link: Link, request: msgspec.Struct) -> bytes:
        """Run the call; its result in JSON."""
        result = await self._run(link, request)
        if self.name in _PLAIN:
            return msgspec.json.encode(result)
        if "messages" in result:
            result = {**result, "messages": [message_json(m) for m in result["messages"]]}
        return msgspec.json.encode(msgspec.convert(result, self.operation.response))


class Match(NamedTuple):
    route: Route
    parameters: dict[str, str]


class Routes:
    """All routes, found by method and path."""

    def __init__(self, routes: list[Route]) -> None:
        self.all = routes
        self._exact = {(r.method, r.path): Match(r, {}) for r in routes if not r.parameters}
        self._under = {(r.method, r.path.rpartition("/")[0]): r for r in routes if r.parameters}

    def find(self, method: str, path: str, raw_path: bytes) -> Match:
        found = self._exact.get((method, path))
        if found is not None:
            return found
        folder, _, last = raw_path.decode("ascii", "replace").rpartition("/")
        route = self._under.get((method, folder))
        if route is None or not last:
            raise NotFound(f"no such route: {method} {path}")
        return Match(route, {route.parameters[0]: unquote(last)})


def query_fields(query: bytes) -> dict[str, str]:
    fields: dict[str, str] = {}
    for name, value in query_pairs(query):
        if name in fields:
            raise InvalidArgument(f"{name} is given twice", field=name)
        fields[name] = value
    return fields


def routes() -> Routes:
    def small(method: str, path: str, name: str) -> Route:
        return Route(method, path, name, body_bytes_max=BODY_BYTES_MAX)

    return Routes(
        [
            small("POST", "/v1/heaps", "MakeHeap"),
            small("GET", "/v1/heaps", "ListHeaps"),
            small("GET", "/v1/heaps/{topic}", "GetHeap"),
            small("PATCH", "/v1/heaps/{topic}", "UpdateHeapConfig"),
            small("DELETE", "/v1/heaps/{topic}", "DeleteHeap"),
            small("GET", "/v1/stats", "Stats"),
            Route("POST", "/v1/enqueue", "Enqueue"),
            Route("POST", "/v1/enqueue:batch", "EnqueueBatch"),
            small("POST", "/v1/pop", "Pop"),
            small("POST", "/v1/ack", "Ack"),
            small("POST", "/v1/ack:batch", "AckBatch"),
            small("POST", "/v1/nack", "Nack"),
            small("POST", "/v1/nack:batch", "NackBatch"),
            small("POST", "/v1/extend", "Extend"),
            small("GET", "/v1/peek", "Peek"),
            small("POST", "/v1/purge", "Purge"),
            small("POST", "/v1/move-to-dlq", "MoveToDLQ"),
            small("GET", "/v1/dlq", "DlqList"),
            small("POST", "/v1/dlq:replay", "DlqReplay"),
            small("POST", "/v1/dlq:delete", "DlqDelete"),
            small("POST", "/v1/confirm", "Confirm"),
            small("GET", "/v1/keys", "ListKeys"),
            small("POST", "/v1/keys", "CreateKey"),
            small("DELETE", "/v1/keys/{id}", "RevokeKey"),
            small("GET", "/v1/status", "Status"),
        ]
    )
