import re
from typing import Any

import httpx
import pytest

from penstock.errors import STATUS_TABLE
from penstock.server.http.routes import document, routes

ROUTES = routes().all
DOCUMENT = document(ROUTES)
OPERATIONS = [
    (path, method, operation)
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
]


def resolve(reference: str) -> Any:
    found: Any = DOCUMENT
    for step in reference.removeprefix("#/").split("/"):
        found = found[step]
    return found


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        inner = [r for v in value.values() for r in references(v)]
        return inner + ([value["$ref"]] if isinstance(value.get("$ref"), str) else [])
    return [r for v in value for r in references(v)] if isinstance(value, list) else []


def test_every_reference_resolves() -> None:
    found = references(DOCUMENT)
    assert found
    for reference in found:
        assert resolve(reference)


def test_every_route_is_described_once() -> None:
    described = {(method.upper(), path) for path, method, _ in OPERATIONS}
    assert {(r.method, r.path) for r in ROUTES} <= described
    names = [operation["operationId"] for _, _, operation in OPERATIONS]
    assert len(names) == len(set(names)) == len(ROUTES) + 5


@pytest.mark.parametrize(("path", "method", "operation"), OPERATIONS)
def test_an_operation_has_the_shape_of_openapi(
    path: str, method: str, operation: dict[str, Any]
) -> None:
    assert operation["summary"] and "200" in operation["responses"]
    parameters = operation.get("parameters", [])
    places = {(p["in"], p["name"]) for p in parameters}
    assert len(places) == len(parameters)
    in_path = {name for place, name in places if place == "path"}
    assert in_path == set(re.findall(r"\{(\w+)\}", path))
    assert all(p["required"] for p in parameters if p["in"] == "path")
    assert all("schema" in p for p in parameters)
    assert ("requestBody" in operation) == (method in ("post", "patch"))
    for response in operation["responses"].values():
        assert "description" in (resolve(response["$ref"]) if "$ref" in response else response)


def test_every_status_of_the_table_is_documented_with_the_error() -> None:
    answers = DOCUMENT["paths"]["/v1/enqueue"]["post"]["responses"]
    assert {str(status) for _, status in STATUS_TABLE.values()} < set(answers)
    for name in STATUS_TABLE:
        schema = DOCUMENT["components"]["responses"][name]["content"]["application/json"]["schema"]
        assert resolve(schema["$ref"])["required"] == ["code", "status", "message", "retryable"]


def test_limits_and_refusal_of_unknown_fields_are_in_the_schemas() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert schemas["Enqueue"]["additionalProperties"] is False
    assert schemas["MakeHeap"]["properties"]["k"]["maximum"] == 100_000
    patch = DOCUMENT["paths"]["/v1/heaps/{topic}"]["patch"]["requestBody"]
    assert "topic" not in patch["content"]["application/json"]["schema"]["properties"]


async def test_the_gateway_serves_it(http: httpx.AsyncClient) -> None:
    assert (await http.get("/openapi.json")).json() == DOCUMENT
