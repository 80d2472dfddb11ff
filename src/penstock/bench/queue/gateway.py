"""Stages through the gateway: gRPC in batches, HTTP one by one.

HTTP gets the leanest load that asyncio allows: fixed requests on kept-alive connections. A general
client costs more per request than the server under test and would measure itself.
"""

from __future__ import annotations

import asyncio
import json
from typing import Final, cast
from urllib.parse import urlsplit

from penstock.bench.queue.server import TOPIC, Meter, fresh_server
from penstock.bench.stages import BATCH, PAYLOAD_BYTES, Run, Values, at_once, batches
from penstock.errors import Unavailable

GRPC_MESSAGES: Final = 200_000
GRPC_IN_FLIGHT: Final = 16
HTTP_MESSAGES: Final = 20_000
HTTP_CONNECTIONS: Final = 64
_LENGTH: Final = b"content-length:"
_END: Final = b"\r\n\r\n"
_METHOD: Final = "/penstock.v1.Penstock/EnqueueBatch"


async def grpc_enqueue(run: Run) -> Values:
    import grpc

    count = run.count(GRPC_MESSAGES)
    requests = _grpc_requests()
    async with fresh_server(run) as server, grpc.aio.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary(_METHOD, None, None)  # bytes in, bytes out: no client-side cost
        await call(requests[0])
        with Meter(server) as meter:
            await at_once(
                GRPC_IN_FLIGHT, count // BATCH, lambda turn: call(requests[turn % len(requests)])
            )
    return {"grpc_enqueue_batch100_per_s": count / meter.seconds}


def _grpc_requests() -> list[bytes]:
    """A few encoded requests of 100 messages each."""
    from penstock.server._generated import penstock_pb2 as pb

    return [
        pb.EnqueueBatchRequest(
            topic=TOPIC,
            messages=[
                pb.NewMessage(payload=payload, priority=i % 10)
                for i, payload in enumerate(batch["payload"])
            ],
        ).SerializeToString()
        for batch in batches()
    ]


async def http_put(run: Run) -> Values:
    count = run.count(HTTP_MESSAGES)
    text = "x" * PAYLOAD_BYTES
    body = json.dumps({"topic": TOPIC, "payload": text, "priority": 1}).encode()
    async with fresh_server(run) as server:
        request = request_bytes(server.http, "/v1/enqueue", body)
        await post_many(server.http, request, count=100, connections=4)
        with Meter(server) as meter:
            await post_many(server.http, request, count=count, connections=HTTP_CONNECTIONS)
    return {"http_put_single_per_s": count / meter.seconds}


def request_bytes(url: str, path: str, body: bytes) -> bytes:
    host = urlsplit(url).netloc
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Caller(asyncio.Protocol):
    """Keeps `depth` requests under way until its share is answered."""

    def __init__(self, request: bytes, *, count: int, depth: int) -> None:
        self._request, self._unsent, self._depth = request, count, depth
        self._unanswered = count
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # not isinstance: uvloop's transports only behave like asyncio's
        self._transport = cast(asyncio.Transport, transport)
        self._send(self._depth)

    def _send(self, requests: int) -> None:
        assert self._transport is not None
        requests = min(requests, self._unsent)
        if requests:
            self._unsent -= requests
            self._transport.write(self._request * requests)

    def data_received(self, data: bytes) -> None:
        answered = self._count_answers(self._received + data)
        self._unanswered -= answered
        if self.done.done():
            return
        if self._unanswered <= 0:
            self.done.set_result(None)
        else:
            self._send(answered)

    def _count_answers(self, data: bytes) -> int:
        answered = at = 0
        while (end := data.find(_END, at)) >= 0:
            head = data[at:end].lower()
            if not head.startswith(b"http/1.1 2"):
                self._fail(head.split(b"\r\n", 1)[0].decode(errors="replace"))
                break
            length = int(head.split(_LENGTH, 1)[1].split(b"\r\n", 1)[0])
            if len(data) < end + 4 + length:
                break
            at = end + 4 + length
            answered += 1
        self._received = data[at:]
        return answered

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(str(exc or "the connection was closed"))

    def _fail(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_exception(Unavailable(f"HTTP load stopped: {reason}"))


async def post_many(
    url: str, request: bytes, *, count: int, connections: int, depth: int = 1
) -> None:
    """Send `request` `count` times over `connections`; returns when all are answered."""
    loop = asyncio.get_running_loop()
    split = urlsplit(url)
    host, port = split.hostname or "127.0.0.1", split.port or 80
    transports: list[asyncio.Transport] = []
    callers: list[_Caller] = []
    try:
        for i in range(connections):
            share = count // connections + (i < count % connections)
            if share:
                transport, caller = await loop.create_connection(
                    lambda share=share: _Caller(request, count=share, depth=depth),  # type: ignore[misc]
                    host,
                    port,
                )
                transports.append(transport)
                callers.append(caller)
        await asyncio.gather(*(caller.done for caller in callers))
    finally:
        for transport in transports:
            transport.close()
