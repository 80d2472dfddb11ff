"""Every call of both listeners: without a key, with a revoked one, and with each argument wrong.

The cases are made from the OpenAPI document and the service's descriptor. A call that is added
without a valid example below, or an argument that nothing can be wrong with, fails here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
import pytest
import pytest_asyncio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from penstock.client.network.connection import Connection
from penstock.config import Config
from penstock.server._generated import penstock_pb2 as pb
from penstock.server.embedded import open_embedded
from penstock.server.gateway import Gateway
from penstock.server.grpc.listener import SERVICE
from penstock.server.http.routes import document, routes
from penstock.server.vocabulary import PopOpen

pytestmark = pytest.mark.asyncio(loop_scope="module")

DOCUMENT = document(routes().all)
CALLS = [
    (path, method, operation["operationId"])
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
]
PUBLIC = {"Health", "Ready", "OpenApi"}
ID = "01M7GJXPV1000G008000000002"
TOKEN = "1.0.1.99"
# One valid set of arguments for every call; a new call needs one here.
VALID: dict[str, dict[str, Any]] = {
    "Metrics": {},
    "MakeHeap": {"topic": "made"},
    "ListHeaps": {},
    "GetHeap": {"topic": "jobs"},
    "UpdateHeapConfig": {"topic": "jobs", "k": 100},
    "DeleteHeap": {"topic": "jobs", "force": True, "confirm": "no"},
    "Stats": {},
    "Enqueue": {"topic": "jobs", "payload": "x", "producer_id": "p", "seq": 1},
    "EnqueueBatch": {"topic": "jobs", "messages": [{"payload": "x"}]},
    "Pop": {"topic": "empty"},
    "PopStream": {"topic": "empty", "credits": 1},
    "Subscribe": {"topic": "vectors"},
    "Ack": {"topic": "jobs", "lease_token": TOKEN},
    "AckBatch": {"topic": "jobs", "lease_tokens": [TOKEN]},
    "Nack": {"topic": "jobs", "lease_token": TOKEN},
    "NackBatch": {"topic": "jobs", "lease_tokens": [TOKEN]},
    "Extend": {"topic": "jobs", "lease_token": TOKEN, "extend_ms": 100},
    "Peek": {"topic": "jobs"},
    "Purge": {"topic": "jobs", "force": True, "confirm": "no"},
    "MoveToDLQ": {"topic": "jobs", "message_id": ID},
    "DlqList": {"topic": "jobs"},
    "DlqReplay": {"topic": "jobs", "message_ids": [ID]},
    "DlqDelete": {"topic": "jobs", "force": True, "confirm": "no"},
    "Confirm": {"method": "purge", "topic": "jobs"},
    "ListKeys": {},
    "CreateKey": {"name": "made"},
    "RevokeKey": {"id": "nobody", "force": True, "confirm": "no"},
    "Status": {},
}
HARMLESS = {"OK", "NOT_FOUND", "FAILED_PRECONDITION"}  # what a valid call may answer here


class Site:
    """A node that wants keys, its gateway, and the keys."""

    def __init__(self, gateway: Gateway, connection: Connection, keys: dict[str, str]) -> None:
        self.connection, self.keys = connection, keys
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.ports['http']}")
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{gateway.ports['grpc']}")

    async def state(self) -> Any:
        """All that a call could have changed."""
        topics = await self.connection.call("topic_list")
        counts = (await self.connection.call("stats"))["topics"]
        keys = (await self.connection.call("key_list"))["keys"]
        places = [(p["sequence_last"], p["ready"]) for t in counts for p in t["partitions"]]
        return topics, places, [(k["id"], k["revoked_ms"]) for k in keys]

    async def over_http(
        self, call: tuple[str, str, str], fields: dict[str, Any], key: str | None
    ) -> tuple[str, str]:
        """The canonical status and the field it complains about."""
        path, method, _ = call
        rest = dict(fields)
        for name in ("topic", "id"):
            if f"{{{name}}}" in path:
                value = httpx.QueryParams({"v": rest.pop(name)})
                path = path.replace(f"{{{name}}}", str(value)[2:].replace("+", "%20"))
        given: dict[str, Any] = {"json": rest} if method in ("post", "patch") else {"params": rest}
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with self.http.stream(method.upper(), path, headers=headers, **given) as answer:
            if answer.status_code == 200:  # the body may have no end
                return "OK", ""
            await answer.aread()
        assert "request_id" in answer.json()
        return answer.json()["status"], answer.json().get("field", "")

    async def over_grpc(self, name: str, request: Any, key: str | None) -> tuple[str, str]:
        method = SERVICE.methods_by_name[name]
        output = GetMessageClass(method.output_type)
        metadata = (("x-api-key", key),) if key else ()
        try:
            if name == "PopStream":
                await self._stream(request, output, metadata)
            elif name == "Subscribe":
                await self._subscribe(request, output, metadata)
            else:
                call = self.channel.unary_unary(
                    f"/{SERVICE.full_name}/{name}",
                    request_serializer=type(request).SerializeToString,
                    response_deserializer=output.FromString,
                )
                await call(request, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            trailing = dict(error.trailing_metadata() or ())
            assert "penstock-code" in trailing and "x-request-id" in trailing
            return error.code().name, str(trailing.get("penstock-field", ""))
        return "OK", ""

    async def _subscribe(self, request: Any, output: Any, metadata: Any) -> None:
        stream = self.channel.unary_stream(
            f"/{SERVICE.full_name}/Subscribe",
            request_serializer=pb.SubscribeRequest.SerializeToString,
            response_deserializer=output.FromString,
        )(request, metadata=metadata)
        await self._first(stream)

    async def _stream(self, requests: list[Any], output: Any, metadata: Any) -> None:
        stream = self.channel.stream_stream(
            f"/{SERVICE.full_name}/PopStream",
            request_serializer=pb.PopStreamRequest.SerializeToString,
            response_deserializer=output.FromString,
        )(metadata=metadata)
        try:
            for request in requests:
                await stream.write(request)
        except grpc.aio.AioRpcError:
            pass  # the read below tells why
        await self._first(stream)

    async def _first(self, stream: Any) -> None:
        try:
            async with asyncio.timeout(1.5):
                await stream.read()
        except TimeoutError:
            stream.cancel()  # open, with nothing to deliver


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    data: Path = tmp_path_factory.mktemp("security")
    config = Config(data=data, native_port=-1, grpc_port=0, http_port=0, require_key=True)
    async with AsyncExitStack() as stack:
        node = await open_embedded(data, config=config)
        stack.push_async_callback(node.close)
        good = (await node.engine.keys.create("good")).text
        connection = await node.connect(good)
        stack.push_async_callback(connection.close)
        gateway = Gateway(node.connect, config, metrics_text=node.engine.metrics.text)
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        site = Site(gateway, connection, {"good": good})
        stack.push_async_callback(site.http.aclose)
        stack.push_async_callback(site.channel.close)
        for topic in ("jobs", "empty"):
            await connection.call("topic_create", config={"name": topic, "payload_bytes_max": 1000})
        vectors = {"name": "vectors", "kind": "delta", "dimensions": 4}
        await connection.call("topic_create", config=vectors)
        site.keys["revoked"] = await revoked_key(site)
        yield site


async def revoked_key(site: Site) -> str:
    """A key that worked, on a connection that is still open, until it was revoked."""
    good = {"x-api-key": site.keys["good"]}
    made = (await site.http.post("/v1/keys", json={"name": "brief"}, headers=good)).json()
    brief = {"x-api-key": made["key"]}
    assert (await site.http.get("/v1/heaps", headers=brief)).status_code == 200
    subject = {"method": "key_revoke", "key_id": made["id"]}
    granted = (await site.http.post("/v1/confirm", json=subject, headers=good)).json()
    query = {"force": "true", "confirm": granted["confirm"]}
    answer = await site.http.delete(f"/v1/keys/{made['id']}", params=query, headers=good)
    assert answer.status_code == 200
    return str(made["key"])


# --- wrong values, made from schemas ---


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without references, and without the alternative of null."""
    if "$ref" in schema:
        return resolved(DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return resolved(next(s for s in schema["anyOf"] if s.get("type") != "null"))
    return schema


def out_of_bounds(schema: dict[str, Any]) -> Iterator[Any]:
    """Values of the right type that break each constraint in turn."""
    if "maximum" in schema:
        yield schema["maximum"] + 1
        yield schema["minimum"] - 1
    if "maxLength" in schema:
        yield "x" * (schema["maxLength"] + 1)
    if "pattern" in schema:
        yield "not/this one"
    if "enum" in schema:
        yield "neither"
    if schema.get("type") == "array":
        items = resolved(schema["items"])
        for wrong in out_of_bounds(items):
            yield [wrong]
        if schema.get("minItems"):
            yield []


WRONG_TYPE: dict[str, Any] = {
    "string": 5, "integer": "many", "boolean": "maybe", "object": [], "array": {},
}  # fmt: skip


def wrong_in_json(schema: dict[str, Any]) -> Iterator[Any]:
    if "type" in schema:
        yield WRONG_TYPE[schema["type"]]
    elif "enum" in schema:
        yield 5
    yield from out_of_bounds(schema)


def wrong_in_text(schema: dict[str, Any]) -> Iterator[Any]:
    """For a query or a path, where every value is text."""
    if schema.get("type") in ("integer", "boolean"):
        yield "maybe"
    yield from out_of_bounds(schema)


def arguments(path: str, method: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Name and schema of each argument, and whether it is written in JSON."""
    operation = DOCUMENT["paths"][path][method]
    in_body = "requestBody" in operation
    for parameter in operation.get("parameters", []):
        if parameter["in"] == "path" or not in_body:
            yield parameter["name"], resolved(parameter["schema"]), False
    if in_body:
        body = resolved(operation["requestBody"]["content"]["application/json"]["schema"])
        for name, schema in body["properties"].items():
            yield name, resolved(schema), True


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[2])
async def test_http_refuses_each_wrong_argument_by_name(site: Site, call: Any) -> None:
    path, method, name = call
    key = site.keys["good"]
    before = await site.state()
    tried = 0
    for argument, schema, in_json in arguments(path, method):
        wrongs = list((wrong_in_json if in_json else wrong_in_text)(schema))
        assert wrongs or argument == "payload", f"nothing can be wrong with {argument}"
        for wrong in wrongs:
            found = await site.over_http(call, {**VALID[name], argument: wrong}, key)
            assert found[0] == "INVALID_ARGUMENT", (argument, wrong, found)
            assert found[1].partition("[")[0] == argument, (argument, wrong, found)
            tried += 1
    assert tried or name in PUBLIC | {"Metrics", "ListHeaps", "ListKeys", "Status"}
    assert await site.state() == before


@pytest.mark.parametrize("call", [c for c in CALLS if c[2] not in PUBLIC], ids=lambda call: call[2])
async def test_http_refuses_unknown_and_missing_arguments(site: Site, call: Any) -> None:
    path, method, name = call
    key = site.keys["good"]
    before = await site.state()
    if name != "Metrics":
        found = await site.over_http(call, {**VALID[name], "colour": 1}, key)
        assert found == ("INVALID_ARGUMENT", "colour")
    operation = DOCUMENT["paths"][path][method]
    needed = [p["name"] for p in operation.get("parameters", []) if p["required"]]
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        needed = resolved(schema).get("required", [])
    for argument in needed:
        if f"{{{argument}}}" not in path:
            fields = {n: v for n, v in VALID[name].items() if n != argument}
            assert await site.over_http(call, fields, key) == ("INVALID_ARGUMENT", argument)
    assert await site.state() == before


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[2])
async def test_http_wants_a_living_key(site: Site, call: Any) -> None:
    before = await site.state()
    for key in (None, site.keys["revoked"], "pk_unknown_secret", "nonsense"):
        status, _ = await site.over_http(call, VALID.get(call[2], {}), key)
        assert status == ("OK" if call[2] in PUBLIC else "UNAUTHENTICATED"), key
    assert await site.state() == before


@pytest.mark.parametrize("call", [c for c in CALLS if c[2] not in PUBLIC], ids=lambda call: call[2])
async def test_the_examples_are_valid_over_http(site: Site, call: Any) -> None:
    status, _ = await site.over_http(call, VALID[call[2]], site.keys["good"])
    assert status in HARMLESS


# --- gRPC ---


def struct_schema(name: str) -> dict[str, Any]:
    """The arguments of a call as HTTP describes them: same names, same limits."""
    known = "PopOpen" if name == "PopStream" else name
    if known == "PopOpen":
        return dict(msgspec.json.schema(PopOpen)["$defs"]["PopOpen"]["properties"])
    return next(
        {argument: schema for argument, schema, _ in arguments(path, method)}
        for path, method, found in CALLS
        if found == known
    )


BYTES = {"payload": b"x" * 1001, "key": b"k" * 1025}


def wrong_in_grpc(field: FieldDescriptor, schema: dict[str, Any]) -> Iterator[Any]:
    if field.type == field.TYPE_BYTES:
        yield BYTES[field.name]
    elif field.name == "headers":
        yield {"h": "x" * (17 << 10)}
    elif field.type == field.TYPE_ENUM:
        yield 99
    elif field.name == "messages":
        yield []
    elif field.type not in (field.TYPE_BOOL, field.TYPE_MESSAGE):
        for wrong in out_of_bounds(schema):
            if not (field.is_repeated and wrong == []) and fits(field, wrong):
                yield wrong


def fits(field: FieldDescriptor, value: Any) -> bool:
    """Whether the wire can carry it at all; if not, it cannot be sent wrongly."""
    bounds = {
        field.TYPE_UINT32: (0, (1 << 32) - 1),
        field.TYPE_UINT64: (0, (1 << 64) - 1),
        field.TYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    }
    low, high = bounds.get(field.type, (None, None))
    return low is None or low <= value <= high


def in_grpc(fields: dict[str, Any]) -> dict[str, Any]:
    """HTTP's example as gRPC writes it: payloads are bytes."""
    shown = dict(fields)
    if "payload" in shown and isinstance(shown["payload"], str):
        shown["payload"] = shown["payload"].encode()
    if "messages" in shown:
        shown["messages"] = [in_grpc(m) for m in shown["messages"]]
    return shown


def request_for(name: str, fields: dict[str, Any]) -> Any:
    if name == "PopStream":
        return [pb.PopStreamRequest(open=pb.PopOpen(**fields))]
    return GetMessageClass(SERVICE.methods_by_name[name].input_type)(**in_grpc(fields))


# Every int64 is a priority, and the wire knows no bool but true and false.
NEVER_WRONG = {"priority"}
METHODS = [m.name for m in SERVICE.methods]


@pytest.mark.parametrize("name", METHODS)
async def test_grpc_refuses_each_wrong_argument_by_name(site: Site, name: str) -> None:
    opening = pb.PopOpen.DESCRIPTOR
    input_type = opening if name == "PopStream" else SERVICE.methods_by_name[name].input_type
    schemas = struct_schema(name)
    before = await site.state()
    for field in input_type.fields:
        wrongs = list(wrong_in_grpc(field, resolved(schemas[field.name])))
        unfailing = field.type == field.TYPE_BOOL or field.name in NEVER_WRONG
        assert wrongs or unfailing, f"nothing can be wrong with {field.name}"
        for wrong in wrongs:
            request = request_for(name, {**VALID[name], field.name: wrong})
            found = await site.over_grpc(name, request, site.keys["good"])
            assert found[0] == "INVALID_ARGUMENT", (field.name, wrong, found)
            assert found[1].partition("[")[0] == field.name, (field.name, wrong, found)
    assert await site.state() == before


@pytest.mark.parametrize(
    "field", [f.name for f in pb.NewMessage.DESCRIPTOR.fields if f.name != "priority"]
)
async def test_grpc_names_the_wrong_message_of_a_batch(site: Site, field: str) -> None:
    descriptor = pb.NewMessage.DESCRIPTOR.fields_by_name[field]
    schema = resolved(DOCUMENT["components"]["schemas"]["NewMessage"]["properties"][field])
    for wrong in wrong_in_grpc(descriptor, schema):
        bad = {"payload": b"x", field: wrong}
        request = pb.EnqueueBatchRequest(topic="jobs", messages=[{"payload": b"x"}, bad])
        found = await site.over_grpc("EnqueueBatch", request, site.keys["good"])
        assert found == ("INVALID_ARGUMENT", f"messages[1].{field}")


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.PopStreamRequest(flow=pb.FlowControl()), "credits"),
        (pb.PopStreamRequest(flow=pb.FlowControl(credits=1_000_001)), "credits"),
        (pb.PopStreamRequest(ack=pb.AckBatchRequest()), "lease_tokens"),
        (pb.PopStreamRequest(ack=pb.AckBatchRequest(lease_tokens=["?"])), "lease_tokens[0]"),
        (pb.PopStreamRequest(nack=pb.NackBatchRequest(lease_tokens=["?"])), "lease_tokens[0]"),
        (pb.PopStreamRequest(open=pb.PopOpen(topic="empty", credits=1)), "open"),
        (pb.PopStreamRequest(), "kind"),
    ],
)
async def test_grpc_refuses_wrong_requests_on_an_open_stream(
    site: Site, request_: pb.PopStreamRequest, field: str
) -> None:
    requests = [*request_for("PopStream", VALID["PopStream"]), request_]
    found = await site.over_grpc("PopStream", requests, site.keys["good"])
    assert found == ("INVALID_ARGUMENT", field)


@pytest.mark.parametrize("name", METHODS)
async def test_grpc_wants_a_living_key(site: Site, name: str) -> None:
    before = await site.state()
    for key in (None, site.keys["revoked"], "pk_unknown_secret"):
        status, _ = await site.over_grpc(name, request_for(name, VALID[name]), key)
        assert status == "UNAUTHENTICATED", key
    assert await site.state() == before


@pytest.mark.parametrize("name", METHODS)
async def test_the_examples_are_valid_over_grpc(site: Site, name: str) -> None:
    request = request_for(name, VALID[name])
    status, _ = await site.over_grpc(name, request, site.keys["good"])
    assert status in HARMLESS
