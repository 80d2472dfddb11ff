"""Whom a keyless gateway on loopback answers: not a web page whose name points to 127.0.0.1."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.client.network.connection import Connection
from penstock.config import ClusterOptions, Config, HttpOptions
from penstock.server.embedded import open_embedded
from penstock.server.gateway import Gateway
from penstock.server.http.routes import document, routes

ROUTES = [
    (method.upper(), path.replace("{topic}", "jobs").replace("{id}", "k"))
    for path, item in document(routes().all)["paths"].items()
    for method in item
]
REBOUND = "evil.example:7442"


class Door:
    """The HTTP port of a gateway, spoken to in plain bytes."""

    def __init__(self, port: int, connection: Connection) -> None:
        self.port, self.connection = port, connection

    async def send(self, line: str, *headers: str, body: str = "") -> tuple[int, Any]:
        """The status, and the document that comes with it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            head = [line, *headers, "connection: close", f"content-length: {len(body)}"]
            writer.write("\r\n".join([*head, "", body]).encode())
            async with asyncio.timeout(60):
                status = int((await reader.readline()).split()[1])
                if status == 200 and "events" in line:
                    return status, None  # it has no end
                answer = await reader.read()
        finally:
            writer.close()
        content = answer.partition(b"\r\n\r\n")[2]
        return status, json.loads(content) if content.startswith(b"{") else None

    async def put(self, *headers: str) -> tuple[int, Any]:
        body = json.dumps({"topic": "jobs", "payload": 1})
        return await self.send("POST /v1/enqueue HTTP/1.1", *headers, body=body)

    async def ready(self) -> int:
        (stats,) = (await self.connection.call("stats", topic="jobs"))["topics"]
        return int(stats["ready"])


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    config = Config(
        data=tmp_path, native_port=-1, grpc_port=-1, http_port=0, drain_s=1.0,
        http=HttpOptions(hosts=("queue.example",)),
        cluster=ClusterOptions(advertise="n1.example:7440"),
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        node = await open_embedded(tmp_path, config=config)
        stack.push_async_callback(node.close)
        connection = await node.connect()
        stack.push_async_callback(connection.close)
        await connection.call("topic_create", config={"name": "jobs"})
        gateway = Gateway(node.connect, config, metrics_text=node.engine.metrics.text)
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        yield Door(gateway.ports["http"], connection)


async def test_a_page_whose_name_points_here_can_do_nothing(door: Door) -> None:
    """Before, `Origin` was compared with `Host`, which such a page chooses as well: the message was
    enqueued and the API key was made."""
    page = (f"host: {REBOUND}", f"origin: http://{REBOUND}")
    assert (await door.put(*page))[0] == 421
    key = json.dumps({"name": "theirs"})
    status, told = await door.send("POST /v1/keys HTTP/1.1", *page, body=key)
    assert status == 421
    assert told["code"] == "misdirected" and told["host"] == REBOUND and "request_id" in told
    assert not told["retryable"]
    assert await door.ready() == 0
    assert (await door.connection.call("key_list"))["keys"] == []


@pytest.mark.parametrize(("method", "path"), [*ROUTES, ("OPTIONS", "/v1/enqueue"), ("GET", "/no")])
async def test_no_route_answers_to_another_name(door: Door, method: str, path: str) -> None:
    """Before, every route did, with all that it had to tell."""
    line = f"{method} {path} HTTP/1.1"
    assert (await door.send(line, f"host: {REBOUND}"))[0] == 421
    for headers in ((), ("host: localhost", "host: localhost"), ("host: a b",)):
        status, told = await door.send(line, *headers)
        assert (status, told["code"], told["field"]) == (400, "invalid_argument", "host")


async def test_the_names_it_has_are_answered(door: Door) -> None:
    for name in ("localhost", "127.0.0.1", "[::1]", "queue.example", "n1.example"):
        for host in (name, f"{name}:{door.port}", f"{name}:1"):
            assert (await door.put(f"host: {host}", f"origin: http://{host}"))[0] == 200
    other = await door.put("host: localhost", "origin: http://localhost:3000")
    assert other[0] == 401  # another server's page on this machine is another site


async def test_an_old_or_an_absolute_request_needs_the_name_as_well(door: Door) -> None:
    """Before, HTTP/1.0 without a name was served, and a whole URL was not looked at."""
    assert (await door.send("GET /healthz HTTP/1.0"))[0] == 400
    assert (await door.send("GET /healthz HTTP/1.0", "host: localhost"))[0] == 200
    whole = "GET http://{}/healthz HTTP/1.1"
    assert (await door.send(whole.format("localhost"), "host: localhost"))[0] == 200
    assert (await door.send(whole.format(REBOUND), f"host: {REBOUND}"))[0] == 421
    for target in (REBOUND, "user@localhost", ""):
        assert (await door.send(whole.format(target), "host: localhost"))[0] == 400
