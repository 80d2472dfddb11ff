"""Text that is no text, documents without a bottom, and headers of every kind, over both listeners.

What is wrong with a request is the caller's mistake: it gets an error that names the argument and
that repeating cannot help, and the node's log has nothing to say.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
import pytest

from penstock.client.network.connection import Connection
from penstock.config import Config
from penstock.model.batch import SCHEMAS, Kind
from penstock.server._generated import penstock_pb2 as pb
from penstock.server._generated.penstock_pb2_grpc import PenstockStub
from penstock.server.embedded import open_embedded
from penstock.server.gateway import Gateway

DEEP = b"[" * 100_000 + b"]" * 100_000


class Site:
    def __init__(self, gateway: Gateway, connection: Connection) -> None:
        self.connection = connection
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.ports['http']}")
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{gateway.ports['grpc']}")
        self.stub: Any = PenstockStub(self.channel)  # type: ignore[no-untyped-call]

    async def put(self, payload: bytes, headers: Any) -> None:
        """A message as a native client may have written it."""
        packed = b"" if headers is None else msgspec.msgpack.encode(headers)
        values = {"payload": [payload], "headers": [packed]}
        body = SCHEMAS[Kind.ENQ].encode(1, values)
        await self.connection.enqueue("jobs", [(0, 1, body)])


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    config = Config(data=tmp_path, native_port=-1, grpc_port=0, http_port=0, drain_s=1.0)
    async with AsyncExitStack() as stack:
        node = await open_embedded(tmp_path, config=config)
        stack.push_async_callback(node.close)
        connection = await node.connect()
        stack.push_async_callback(connection.close)
        for name, kind in (("jobs", "queue"), ("vectors", "delta")):
            shape = {"dimensions": 2} if kind == "delta" else {}
            await connection.call("topic_create", config={"name": name, "kind": kind, **shape})
        gateway = Gateway(node.connect, config, metrics_text=node.engine.metrics.text)
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        site = Site(gateway, connection)
        stack.push_async_callback(site.http.aclose)
        stack.push_async_callback(site.channel.close)
        yield site


def refused(answer: httpx.Response) -> str:
    told = answer.json()
    assert (answer.status_code, told["code"]) == (400, "invalid_argument"), told
    assert not told["retryable"]
    return str(told["field"])


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/enqueue", b'{"topic": "jobs", "payload": 1, "key": "\xff"}', "key"),
        ("/v1/enqueue", b'{"topic": "jobs", "payload": "\xff"}', "payload"),
        ("/v1/enqueue", b'{"topic": "jobs", "payload": 1, "headers": {"a": "\xc3"}}', "headers"),
        ("/v1/enqueue", b'{"topic": "jobs", "pay\xffload": 1}', "body"),
        ("/v1/enqueue:batch", b'{"topic": "jobs", "messages": [{"key": "\xff"}]}', "messages"),
        ("/v1/keys", b'{"name": "\xed\xa0\x80"}', "name"),
        ("/v1/purge?force=true", b'{"topic": "\xff"}', "topic"),
        ("/v1/enqueue", b'{"topic": "jobs", "payload": ' + DEEP + b"}", "body"),
        ("/v1/enqueue", b'{"topic": "jobs", "payload": 1, "headers": ' + DEEP + b"}", "headers"),
        ("/v1/keys", DEEP, "body"),
        ("/v1/purge?force=true", b'{"topic": ' + DEEP + b"}", "body"),
    ],
)
async def test_a_body_that_cannot_be_read_is_the_callers_mistake(
    site: Site, path: str, body: bytes, field: str
) -> None:
    """Before, eight of these answered a retryable 503 and left a traceback."""
    assert refused(await site.http.post(path, content=body)) == field


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/heaps/%ff", "topic"),
        ("/v1/heaps/j%ED%A0%80", "topic"),
        ("/v1/peek?topic=%ff", "query"),
        ("/v1/peek?topic=jobs&limit=%D9%A1x", "limit"),
        ("/v1/deltas/%ff/events", "topic"),
        ("/v1/deltas/vectors/events?namespace=%ff", "query"),
    ],
)
async def test_a_path_or_a_query_that_is_no_text_is_refused(
    site: Site, path: str, field: str
) -> None:
    assert refused(await site.http.get(path)) == field


async def test_headers_that_are_no_text_are_refused(site: Site) -> None:
    got = await site.http.get("/v1/heaps", headers=[(b"x-api-key", b"pk_\xff_\xfe")])
    assert got.status_code == 401
    long = await site.http.get("/v1/heaps", headers={"x-api-key": "k" * 20_000})
    assert long.status_code == 401
    path = "/v1/deltas/vectors/events"
    assert refused(await site.http.get(path, headers=[(b"last-event-id", b"\xff")])) == "positions"


async def test_json_that_is_nested_too_deeply_for_http_is_shown_as_bytes(site: Site) -> None:
    """Before, such a payload, which the native protocol takes, made each pop answer 503 while the
    messages were leased."""
    await site.put(DEEP, None)
    popped = await site.http.post("/v1/pop", json={"topic": "jobs"})
    assert popped.status_code == 200, popped.text
    assert "payload_base64" in popped.json()["messages"][0]


async def test_headers_are_values_and_not_what_python_prints(site: Site) -> None:
    """Before, `[1, "a"]` came out as the text `[1, 'a']`, and `True` as `True`."""
    headers = {"n": 1, "f": 0.5, "t": True, "z": None, "l": [1, "a"], "m": {"x": "y"}, "s": "text",
               "b": b"bytes", "r": b"\xff"}  # fmt: skip
    await site.put(b"1", headers)
    expected = {n: v for n, v in headers.items() if n not in "br"}
    expected |= {"b": "bytes", "r_base64": "/w=="}
    (message,) = (await site.http.get("/v1/peek?topic=jobs")).json()["messages"]
    assert message["headers"] == expected
    (peeked,) = (await site.stub.Peek(pb.PeekRequest(topic="jobs"))).messages
    shown = {n: v if isinstance(v, str) else json.dumps(v, separators=(",", ":"))
             for n, v in expected.items()}  # fmt: skip
    assert dict(peeked.headers) == shown
    (popped,) = (await site.http.post("/v1/pop", json={"topic": "jobs"})).json()["messages"]
    assert popped["headers"] == expected
