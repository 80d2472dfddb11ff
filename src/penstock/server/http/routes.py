"""The HTTP routes: which path is which call, where its arguments stand, and the OpenAPI 3.1
document that tells of them.

Arguments of GET and DELETE stand in the path and the query, of the others in the path and the body.
`force` and `confirm` of a destructive call may stand in the query of any of them.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote

import msgspec
from msgspec import UNSET, Raw

from penstock.errors import STATUS_TABLE, InvalidArgument, NotFound
from penstock.server import vocabulary as say
from penstock.server.operations import OPERATIONS, GatewayOperation, Result
from penstock.server.pool import Entry, GatewayEntries, GatewayLink, packed_headers, producer_run
from penstock.server.vocabulary import decoded, json_headers, request_of

BODY_BYTES_MAX: Final = 1 << 20
QUERY_FIELDS_MAX: Final = 32
_raw: Final = msgspec.json.Decoder(Raw)
_JSON_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])


async def enqueue(link: GatewayLink, request: say.EnqueueCall) -> say.EnqueuedAnswer:
    entry = Entry(
        payload_of(request),
        request.priority,
        request.key.encode(),
        packed_headers(request.headers),
        request.delay_ms,
        -1 if request.max_retries is None else request.max_retries,
        producer_run(request.producer_id, epoch=request.epoch, seq=request.seq, count=1),
    )
    return await link.put(request.topic, entry)


async def enqueue_batch(link: GatewayLink, request: say.EnqueueBatchCall) -> Result:
    return await link.put_batch(
        request.topic,
        entries_of(request),
        atomic=request.atomic,
        expected_sequence=request.expected_sequence,
    )


ENQUEUES: Final = {
    "Enqueue": GatewayOperation("POST /v1/enqueue", say.EnqueueCall, say.EnqueuedAnswer, enqueue,
                                "Enqueue one message"),
    "EnqueueBatch": GatewayOperation("POST /v1/enqueue:batch", say.EnqueueBatchCall,
                                     say.BatchEnqueuedAnswer, enqueue_batch,
                                     "Enqueue many, all or none"),
}  # fmt: skip


class HttpRoute:
    def __init__(self, name: str, operation: GatewayOperation) -> None:
        self.name, self.operation = name, operation
        self.method, _, self.path = operation.route.partition(" ")
        self.parameters = re.findall(r"\{(\w+)\}", self.path)
        self.in_body = self.method in ("POST", "PATCH")
        self.destructive = issubclass(self.operation.request, say.Destructive)
        self.enqueues = name in ENQUEUES  # whose results need no conversion to be sent
        self.body_bytes_max = None if self.enqueues else BODY_BYTES_MAX  # None: the gateway's own
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
                {"force": query["force"]}, say.Destructive, text=True
            ).force
        return request_of(fields, self.operation.request)

    def encode(self, result: Result) -> bytes:
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


def payload_of(message: say.NewMessage, *, place: str = "") -> bytes:
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


def entries_of(request: say.EnqueueBatchCall) -> GatewayEntries:
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


EVENTS: Final = "/v1/deltas/{topic}/events"
REF: Final = "#/components/schemas/{name}"
_ERRORS: Final = {
    "INVALID_ARGUMENT": "A field is malformed or over its limit; `field` names it.",
    "UNAUTHENTICATED": "No API key, an unknown one, or a revoked one.",
    "NOT_FOUND": "No such heap, message or key.",
    "FAILED_PRECONDITION": "The call needs something that is not so.",
    "ABORTED": "Decided against; the caller's knowledge is out of date.",
    "RESOURCE_EXHAUSTED": "A bound is reached; `Retry-After` says when to come back.",
    "UNAVAILABLE": "The node starts, stops, or has no quorum.",
    "MISDIRECTED": "The `Host` of the request is not a name of this listener.",
}
_REQUEST_ID: Final = {
    "description": "The caller's X-Request-Id, or one made for this request.",
    "schema": {"type": "string"},
}


def document(routes: list[HttpRoute]) -> dict[str, Any]:
    types = [t for r in routes for t in (r.operation.request, r.operation.response)]
    types += [say.SubscribeCall, say.Destructive, say.ErrorAnswer, say.HealthAnswer]
    unique = list(dict.fromkeys(types))
    refs, named = msgspec.json.schema_components(unique, ref_template=REF)
    ref_of = dict(zip(unique, _public(refs), strict=True))
    schemas = {_public_name(name): _public(schema) for name, schema in named.items()}
    paths: dict[str, Any] = _plain_paths(ref_of[say.HealthAnswer])
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas, ref_of)
    paths[EVENTS] = {"get": _events(schemas["Subscribe"])}
    schemas["Error"]["additionalProperties"] = True
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock",
            "version": version("penstock"),
            "description": "Priority topics with leases, retries and dead letters.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"bearer": []}, {"apiKey": []}, {}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {name: _error_response(name, ref_of[say.ErrorAnswer]) for name in _ERRORS},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
        },
    }


def _public_name(name: str) -> str:
    return name.removesuffix("Call").removesuffix("Answer")


def _public(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_public(item) for item in value]
    if not isinstance(value, dict):
        return value
    names = {n: _public_name(value[n]) for n in ("$ref", "title") if isinstance(value.get(n), str)}
    return {name: _public(item) for name, item in value.items()} | names


def _operation(
    route: HttpRoute, schemas: dict[str, Any], ref_of: dict[Any, dict[str, Any]]
) -> dict[str, Any]:
    request = schemas[_public_name(route.operation.request.__name__)]
    in_query = ["force", "confirm"] if route.destructive else []
    if not route.in_body:
        in_query = [name for name in request["properties"] if name not in route.parameters]
    described: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.operation.summary,
        "parameters": _parameters(request, route.parameters, in_query),
        "responses": {"200": _result(ref_of[route.operation.response]), **_failures()},
    }
    if route.in_body:
        body: dict[str, Any] = ref_of[route.operation.request]
        if route.parameters:
            body = _without(request, route.parameters)
        content = {"application/json": {"schema": body}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _events(request: dict[str, Any]) -> dict[str, Any]:
    in_query = [name for name in request["properties"] if name != "topic"]
    content = {"text/event-stream": {"schema": {"type": "string"}}}
    events = {**_result({}), "description": "An event for each delta.", "content": content}
    return {
        "operationId": "Subscribe",
        "summary": "Deltas as they are released",
        "parameters": _parameters(request, ["topic"], in_query),
        "responses": {"200": events, **_failures()},
    }


def _parameters(
    request: dict[str, Any], in_path: list[str], in_query: list[str]
) -> list[dict[str, Any]]:
    found = []
    for name in (*in_path, *in_query):
        schema = dict(request["properties"][name])
        place = "path" if name in in_path else "query"
        required = name in request.get("required", [])
        one = {"name": name, "in": place, "required": required, "schema": schema}
        if "description" in schema:
            one["description"] = schema.pop("description")
        found.append(one)
    return found


def _without(request: dict[str, Any], names: list[str]) -> dict[str, Any]:
    properties = {n: s for n, s in request["properties"].items() if n not in names}
    required = [n for n in request.get("required", []) if n not in names]
    return {**request, "properties": properties, "required": required}


def _result(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "description": "Done.",
        "headers": {"X-Request-Id": _REQUEST_ID},
        "content": {"application/json": {"schema": schema}},
    }


def _failures(names: Iterable[str] = _ERRORS) -> dict[str, Any]:
    return {
        str(STATUS_TABLE[name][1]): {"$ref": f"#/components/responses/{name}"} for name in names
    }


def _error_response(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    response = {**_result(schema), "description": _ERRORS[name]}
    if name == "RESOURCE_EXHAUSTED":
        retry = {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}
        response["headers"] = {**response["headers"], "Retry-After": retry}
    return response


def _plain_paths(health: dict[str, Any]) -> dict[str, Any]:
    """What is not a call: liveness, readiness, metrics and this document."""

    def get(name: str, summary: str, content: dict[str, Any], **more: Any) -> dict[str, Any]:
        answers = {"200": {"description": "Done.", "content": content}}
        refusals = _failures(
            ("INVALID_ARGUMENT", "MISDIRECTED", "RESOURCE_EXHAUSTED", "UNAVAILABLE")
        )
        found = {"operationId": name, "summary": summary, "responses": answers | refusals}
        return {"get": found | more}

    in_json = {"application/json": {"schema": health}}
    in_text = {"text/plain": {"schema": {"type": "string"}}}
    itself = {"application/json": {"schema": {"type": "object"}}}
    public: dict[str, Any] = {"security": []}
    return {
        "/healthz": get("Health", "The process answers", in_json, **public),
        "/readyz": get("Ready", "The engine answers", in_json, **public),
        "/openapi.json": get("OpenApi", "This document", itself, **public),
        "/metrics": get("Metrics", "Prometheus metrics", in_text),
    }
