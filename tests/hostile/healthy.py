"""The healthy client, a process of its own: `python -m tests.hostile.healthy`.

It is told on standard input what to use. It uses all three listeners at a fixed rate, over
connections that it keeps and over new ones. The time of a request counts from when it was due, not
from when it got away: a node that stands still for a second is seen by all requests of that second.

What it prints, one per line: `<due> <kind> <ms> <ok or the error>`, and now and then `mark <time>`:
everything that was due before is told. Times are of CLOCK_MONOTONIC, which all processes share.
"""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

import grpc
import httpx
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.client.network.connection import Connection
from penstock.client.network.endpoints import open_connection
from penstock.model.batch import SCHEMAS, Kind
from penstock.model.ids import LeaseToken
from penstock.server._generated import penstock_pb2 as pb
from penstock.server._generated import penstock_pb2_grpc

REQUEST_S_MAX: Final = 15.0  # then a request has failed
OPEN_MAX: Final = 1000  # requests under way; the rest of a stall is not made worse by more
MARK_S: Final = 0.25
PAYLOAD: Final = b"x" * 200
_BODY: Final = SCHEMAS[Kind.ENQ].encode(1, {"payload": [PAYLOAD]})
BATCH: Final = 100
_BATCH_BODY: Final = SCHEMAS[Kind.ENQ].encode(BATCH, {"payload": [b"x" * 1000] * BATCH})
_LOCAL: Final = (("grpc.use_local_subchannel_pool", 1),)


class Healthy:
    """Requests by kind; each returns when it was answered well, and raises otherwise."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told
        self._topic: str = told["topic"]
        self._key: str | None = told["key"]
        self._pem: bytes | None = None
        self._tls: ssl.SSLContext | None = None
        if told["ca"]:
            self._tls = ssl.create_default_context(cafile=told["ca"])
            with open(told["ca"], "rb") as file:
                self._pem = file.read()
        self._metadata = (("x-api-key", self._key),) if self._key else ()
        self._headers = {"x-api-key": self._key} if self._key else {}
        self._native: Connection | None = None
        self._http = self._new_http()
        self._grpc = self._new_grpc()

    # --- connections that are kept ---

    async def native_put(self) -> None:
        await (await self._kept()).enqueue(self._topic, [(0, 1, _BODY)])

    async def native_take(self) -> None:
        connection = await self._kept()
        found = await connection.call("pop", topic=self._topic, limit=100)
        tokens = [LeaseToken.parse(message["lease_token"]) for message in found["messages"]]
        if tokens:
            await connection.settle(self._topic, tokens)

    async def native_batch(self) -> None:
        await (await self._kept()).enqueue(self._topic, [(1, BATCH, _BATCH_BODY)])

    async def http_put(self) -> None:
        await self._post(self._http)

    async def grpc_put(self) -> None:
        await self._enqueue(self._grpc)

    async def http_health(self) -> None:
        (await self._http.get("/healthz")).raise_for_status()

    async def grpc_health(self) -> None:
        request = health_pb2.HealthCheckRequest()
        answer = await health_pb2_grpc.HealthStub(self._grpc).Check(request, timeout=REQUEST_S_MAX)
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            raise RuntimeError("it does not serve")

    # --- new ones ---

    async def native_new(self) -> None:
        connection = await self._connect()
        try:
            await connection.enqueue(self._topic, [(0, 1, _BODY)])
        finally:
            await connection.close()

    async def http_new(self) -> None:
        async with self._new_http() as client:
            await self._post(client)

    async def grpc_new(self) -> None:
        async with self._new_grpc() as channel:
            await self._enqueue(channel)

    # --- how ---

    async def _kept(self) -> Connection:
        if self._native is None or not self._native.alive:
            self._native = await self._connect()
        return self._native

    async def _connect(self) -> Connection:
        return await open_connection(self._told["native"], api_key=self._key, tls=self._tls)

    def _new_http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self._told["http"], headers=self._headers, verify=self._tls or True,
            timeout=REQUEST_S_MAX, trust_env=False,
        )  # fmt: skip

    def _new_grpc(self) -> grpc.aio.Channel:
        if self._pem is None:
            return grpc.aio.insecure_channel(self._told["grpc"], options=_LOCAL)
        credentials = grpc.ssl_channel_credentials(self._pem)
        return grpc.aio.secure_channel(self._told["grpc"], credentials, options=_LOCAL)

    async def _post(self, client: httpx.AsyncClient) -> None:
        fields = {"topic": self._topic, "payload": "x" * 200}
        answer = await client.post("/v1/enqueue", json=fields)
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code} {answer.text}")

    async def _enqueue(self, channel: grpc.aio.Channel) -> None:
        stub = penstock_pb2_grpc.PenstockStub(channel)  # type: ignore[no-untyped-call]
        request = pb.EnqueueRequest(topic=self._topic, payload=PAYLOAD)
        await stub.Enqueue(request, metadata=self._metadata, timeout=REQUEST_S_MAX)


# How often a second.
RATES: Final[dict[str, float]] = {
    "native_put": 20, "http_put": 20, "grpc_put": 20, "native_take": 5, "native_batch": 2,
    "native_new": 2,
    "http_new": 2, "grpc_new": 2, "http_health": 1, "grpc_health": 1,
}  # fmt: skip


class Schedule:
    """Starts what is due and tells what became of it."""

    def __init__(self, healthy: Healthy) -> None:
        self._healthy = healthy
        self._open: dict[asyncio.Task[None], float] = {}

    async def run(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            for i, (kind, rate) in enumerate(RATES.items()):
                tasks.create_task(self._repeat(kind, 1 / rate, i / 100, stop))
            tasks.create_task(self._marks(stop))
        if self._open:
            await asyncio.wait(self._open)
        print(f"mark {time.monotonic():.4f}", flush=True)

    async def _repeat(self, kind: str, every_s: float, first_s: float, stop: asyncio.Event) -> None:
        request: Callable[[], Coroutine[Any, Any, None]] = getattr(self._healthy, kind)
        due = time.monotonic() + first_s
        while not stop.is_set():
            now = time.monotonic()
            if due > now:
                await asyncio.sleep(due - now)
            if len(self._open) < OPEN_MAX:
                task = asyncio.create_task(self._one(kind, request, due))
                self._open[task] = due
                task.add_done_callback(self._open.pop)
            due += every_s

    async def _one(
        self, kind: str, request: Callable[[], Coroutine[Any, Any, None]], due: float
    ) -> None:
        work = asyncio.ensure_future(request())
        done, _ = await asyncio.wait((work,), timeout=REQUEST_S_MAX)
        if not done:
            outcome = f"no answer in {REQUEST_S_MAX:.0f} s"
            work.cancel()  # nobody waits until it has cleaned up: that may hang as well
        elif (error := work.exception()) is not None:
            outcome = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        else:
            outcome = "ok"
        took_ms = (time.monotonic() - due) * 1000
        print(f"{due:.4f} {kind} {took_ms:.2f} {outcome}", flush=True)

    async def _marks(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await asyncio.sleep(MARK_S)
            now = time.monotonic()
            print(f"mark {min(self._open.values(), default=now):.4f}", flush=True)


async def main() -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await Schedule(Healthy(json.loads(sys.stdin.readline()))).run(stop)


if __name__ == "__main__":
    uvloop.run(main())
