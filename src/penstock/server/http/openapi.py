"""The OpenAPI 3.1 document, made from the route table and the types of requests and responses."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any, Final

import msgspec

from penstock.errors import STATUS_TABLE
from penstock.server import answers as tell
from penstock.server import arguments as ask
from penstock.server.http.routes import HttpRoute

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
    types += [ask.SubscribeCall, ask.Destructive, tell.ErrorAnswer, tell.HealthAnswer]
    unique = list(dict.fromkeys(types))
    refs, named = msgspec.json.schema_components(unique, ref_template=REF)
    ref_of = dict(zip(unique, _public(refs), strict=True))
    schemas = {_public_name(name): _public(schema) for name, schema in named.items()}
    paths: dict[str, Any] = _plain_paths(ref_of[tell.HealthAnswer])
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
            "responses": {
                name: _error_response(name, ref_of[tell.ErrorAnswer]) for name in _ERRORS
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
        },
    }


def _public_name(name: str) -> str:
    """What a type, or a reference to it, is called in the document."""
    return name.removesuffix("Call").removesuffix("Answer")


def _public(value: Any) -> Any:
    """Parts of schemas with the names that the document has for the types."""
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
