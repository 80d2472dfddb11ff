"""The HTTP routes: which path is which call, and where its arguments stand.

Arguments of GET and DELETE stand in the path and the query, of the others in the path and the body.
`force` and `confirm` of a destructive call may stand in the query of any of them.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote

import msgspec
from msgspec import UNSET, Raw

from penstock.errors import InvalidArgument, NotFound
from penstock.server import answers as tell
from penstock.server import arguments as ask
from penstock.server.answers import json_headers
from penstock.server.arguments import decoded, request_of
from penstock.server.entries import Entry, GatewayEntries, packed_headers, producer_run
from penstock.server.operations import OPERATIONS, GatewayOperation, Result
from penstock.server.pool import GatewayLink

BODY_BYTES_MAX: Final = 1 << 20
QUERY_FIELDS_MAX: Final = 32
_raw: Final = msgspec.json.Decoder(Raw)
_JSON_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])


async def enqueue(link: GatewayLink, request: ask.EnqueueCall) -> Result:
    return (await link.put(request.topic, entry_of(request)))._asdict()


async def enqueue_batch(link: GatewayLink, request: ask.EnqueueBatchCall) -> Result:
    return await link.put_batch(
        request.topic,
        entries_of(request),
        atomic=request.atomic,
        expected_sequence=request.expected_sequence,
    )


ENQUEUES: Final = {
    "Enqueue": GatewayOperation("POST /v1/enqueue", ask.EnqueueCall, tell.EnqueuedAnswer, enqueue,
                                "Enqueue one message"),
    "EnqueueBatch": GatewayOperation("POST /v1/enqueue:batch", ask.EnqueueBatchCall,
                                     tell.BatchEnqueuedAnswer, enqueue_batch,
                                     "Enqueue many, all or none"),
}  # fmt: skip


class HttpRoute:
    def __init__(self, name: str, operation: GatewayOperation) -> None:
        self.name, self.operation = name, operation
        self.method, _, self.path = operation.route.partition(" ")
        self.parameters = re.findall(r"\{(\w+)\}", self.path)
        self.in_body = self.method in ("POST", "PATCH")
        self.destructive = issubclass(self.operation.request, ask.Destructive)
        # None: the gateway's own limit. The results of enqueues need no conversion to be sent.
        self.body_bytes_max = None if name in ENQUEUES else BODY_BYTES_MAX
        self._decoder = msgspec.json.Decoder(self.operation.request)

    def parse(
        self, *, parameters: dict[str, str], query: bytes, body: bytes | bytearray
    ) -> msgspec.Struct:
        """The call's arguments; raises `InvalidArgument` with the name of a wrong one."""
        if not self.in_body:
            fields = {**query_fields(query), **parameters}
            return request_of(fields, self.operation.request, text=True)
        if not parameters and not query:
            return decoded(self._decoder, body)
        fields = decoded(_JSON_OBJECT, body)
        return self._merged(fields, parameters, query_fields(query))

    def _merged(
        self, fields: dict[str, Any], parameters: dict[str, str], query: dict[str, Any]
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

    def encode(self, result: Result) -> bytes:
        if self.name in ENQUEUES:
            return msgspec.json.encode(result)
        if "messages" in result:
            result = {**result, "messages": [message_json(m) for m in result["messages"]]}
        return msgspec.json.encode(msgspec.convert(result, self.operation.response))


class Match(NamedTuple):
    route: HttpRoute
    parameters: dict[str, str]


class RouteTable:
    def __init__(self, routes: list[HttpRoute]) -> None:
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


def query_fields(query: bytes, *lists: str) -> dict[str, Any]:
    """The arguments in a query, of which those in `lists` may be given more than once."""
    try:
        pairs = parse_qsl(
            query.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=bool(query),
            max_num_fields=QUERY_FIELDS_MAX,
            errors="strict",
        )
    except ValueError as error:
        raise InvalidArgument(f"malformed query: {error}", field="query") from error
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in lists:
            fields.setdefault(name, []).append(value)
        elif name in fields:
            raise InvalidArgument(f"{name} is given twice", field=name)
        else:
            fields[name] = value
    return fields


def routes() -> RouteTable:
    return RouteTable([HttpRoute(*named) for named in (OPERATIONS | ENQUEUES).items()])


def payload_of(message: ask.NewMessage, *, place: str = "") -> bytes:
    """The bytes to store; `place` is where the message stands in the request."""
    text = message.payload_base64
    if isinstance(message.payload, Raw):
        if text is not UNSET:
            raise InvalidArgument(
                "give payload or payload_base64, not both", field=f"{place}payload_base64"
            )
        payload = bytes(message.payload)
        # The decoder checked the syntax of what it did not decode, but not the text in its strings.
        if not payload.isascii() and not _is_utf8(payload):
            raise InvalidArgument("payload is not UTF-8", field=f"{place}payload")
        return payload
    if not isinstance(text, str):
        raise InvalidArgument("a message needs a payload", field=f"{place}payload")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        name = f"{place}payload_base64"
        raise InvalidArgument(f"{name} is not base64: {error}", field=name) from error


def entry_of(request: ask.EnqueueCall) -> Entry:
    return Entry(
        payload_of(request),
        request.priority,
        request.key.encode(),
        packed_headers(request.headers),
        request.delay_ms,
        -1 if request.max_retries is None else request.max_retries,
        producer_run(request.producer_id, epoch=request.epoch, seq=request.seq, count=1),
    )


def entries_of(request: ask.EnqueueBatchCall) -> GatewayEntries:
    messages = request.messages
    run = producer_run(
        request.producer_id, epoch=request.epoch, seq=request.seq, count=len(messages)
    )
    return GatewayEntries(
        [payload_of(m, place=f"messages[{i}].") for i, m in enumerate(messages)],
        [m.priority for m in messages],
        [m.key.encode() for m in messages],
        [packed_headers(m.headers) for m in messages],
        [m.delay_ms for m in messages],
        [-1 if m.max_retries is None else m.max_retries for m in messages],
        () if run is None else (run,),
    )


def message_json(message: dict[str, Any]) -> dict[str, Any]:
    """A message of the engine in the form of `MessageAnswer` and its kin."""
    shown = dict(message)
    payload, key = bytes(shown.pop("payload", b"")), bytes(shown.pop("key", b""))
    if _is_json(payload):
        shown["payload"] = Raw(payload)
    else:
        shown["payload_base64"] = base64.b64encode(payload).decode()
    if key and _is_utf8(key):
        shown["key"] = key.decode()
    elif key:
        shown["key_base64"] = base64.b64encode(key).decode()
    shown["headers"] = json_headers(shown.get("headers"))
    return shown


def _is_json(payload: bytes) -> bool:
    if not payload.isascii() and not _is_utf8(payload):
        return False
    try:
        _raw.decode(payload)
    except (msgspec.DecodeError, RecursionError):  # what is nested too deeply is shown as bytes
        return False
    return True


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
