import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from penstock.config import Config
from penstock.errors import Unavailable
from penstock.server import operations
from penstock.server.gateway import Gateway


async def exchange(port: int, *chunks: bytes, pause: float = 0.0) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for chunk in chunks:
            writer.write(chunk)
            await asyncio.sleep(pause)
        async with asyncio.timeout(60):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def refused(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and b"connection: close" in head
    return dict(json.loads(body))


HEALTH = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
HEAD = b"POST /v1/enqueue HTTP/1.1\r\nhost: localhost\r\n"


async def test_headers_over_the_limit_are_refused(gateway: Gateway) -> None:
    request = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx-big: " + b"a" * 70_000 + b"\r\n\r\n"
    answer = await exchange(gateway.ports["http"], request)
    assert refused(answer)["field"] == "headers"


async def test_endless_headers_are_refused_while_they_arrive(gateway: Gateway) -> None:
    chunks = [b"GET /healthz HTTP/1.1\r\nx-big: ", *[b"a" * 8_000] * 10]
    answer = await exchange(gateway.ports["http"], *chunks, pause=0.01)
    assert refused(answer)["limit"] == 64 << 10


async def test_a_body_over_the_limit_is_refused_unread(gateway: Gateway, node: Any) -> None:
    request = HEAD + b"content-length: 99999999999\r\n\r\n{"
    answer = await exchange(gateway.ports["http"], request)
    assert refused(answer)["field"] == "body"
    assert not node.calls
    small = b"POST /v1/ack HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1048577\r\n\r\n"
    assert refused(await exchange(gateway.ports["http"], small))["limit"] == 1 << 20


async def test_a_chunked_body_over_the_limit_is_refused(gateway: Gateway) -> None:
    head = b"POST /v1/ack HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    chunk = b"80000\r\n" + b" " * 0x80000 + b"\r\n"
    answer = await exchange(gateway.ports["http"], head, chunk, chunk, chunk)
    assert refused(answer)["field"] == "body"


async def test_what_is_not_http_gets_an_error(gateway: Gateway) -> None:
    assert refused(await exchange(gateway.ports["http"], b"\x00\x01nonsense\r\n\r\n"))


@pytest.mark.parametrize(
    ("changes", "request_bytes", "answer"),
    [
        ({"HEAD_S": 0.05}, b"GET /healthz HTTP/1.1\r\nhost", b""),
        ({"frame_s": 0.05}, HEAD + b"content-length: 9\r\n\r\n{", b""),
        ({"idle_s": 0.05}, HEALTH, b"HTTP/1.1 200"),
        ({"REQUESTS_MAX": 0}, HEALTH, b"HTTP/1.1 429"),
        ({"connections_max": 0}, HEALTH, b"HTTP/1.1 429"),
    ],
)
async def test_slow_and_many_callers_are_bounded(
    node: Any,
    options: Config,
    changes: Any,
    request_bytes: bytes,
    answer: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = dict(changes)
    for name in changes.keys() & {"HEAD_S", "REQUESTS_MAX"}:
        monkeypatch.setattr(operations, name, changes.pop(name))
    limits = msgspec.structs.replace(options.limits, **{"idle_s": 0.2, **changes})
    gateway = Gateway(node.connect, msgspec.structs.replace(options, limits=limits))
    await gateway.start()
    try:
        found = await exchange(gateway.ports["http"], request_bytes)
    finally:
        await gateway.stop()
    assert found.startswith(answer) and bool(found) == bool(answer)


async def test_pipelined_requests_are_not_taken_for_headers(gateway: Gateway, node: Any) -> None:
    body = b'{"topic":"jobs","payload":"' + b"x" * 20_000 + b'"}'
    one = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    last = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    answer = await exchange(gateway.ports["http"], one[:15_000], one[15_000:] + one + last)
    assert answer.count(b"HTTP/1.1 200") == 3


async def test_a_taken_port_is_told_and_nothing_listens(
    gateway: Gateway, node: Any, options: Config
) -> None:
    taken = msgspec.structs.replace(options, http_port=gateway.ports["http"])
    with pytest.raises(Unavailable):
        await Gateway(node.connect, taken).start()


async def test_stopping_lets_a_call_finish(
    node: Any, options: Config, eventually: Callable[..., Any]
) -> None:
    gateway = Gateway(node.connect, options)
    await gateway.start()
    node.held = asyncio.Event()
    body = b'{"topic":"jobs","payload":1}'
    request = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    call = asyncio.ensure_future(exchange(gateway.ports["http"], request))
    await eventually(lambda: bool(node.enqueues))
    stopping = asyncio.ensure_future(gateway.stop())
    await asyncio.sleep(0.01)
    node.held.set()
    assert (await call).startswith(b"HTTP/1.1 200")
    await stopping
