"""A node that follows a script: the real connection at one end, made-up answers at the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest

from penstock.client.network.connection import Connection
from penstock.client.network.exchange import memory_pair
from penstock.config import Config
from penstock.errors import NotFound, PenstockError, Unauthenticated
from penstock.model.batch import SCHEMAS, Kind
from penstock.model.entries import DELIVERY
from penstock.model.topic import TopicConfig
from penstock.server.gateway import Gateway
from penstock.server.pool import GatewayLink
from penstock.wire import frame
from penstock.wire.frame import FrameDecoder, FrameType
from penstock.wire.messages import (
    Call,
    Delivery,
    Enqueue,
    Enqueued,
    Extend,
    Grant,
    Hello,
    OpenLease,
    Placed,
    Return,
    Settle,
    Settled,
    Welcome,
    pack,
    unpack,
)

GOOD_KEY = "pk_good_secret"


class ScriptedNode:
    """What the node answers and what it heard. Tests change the attributes."""

    def __init__(self) -> None:
        self.topics = {"jobs": TopicConfig(name="jobs", id=7)}
        self.answers: dict[str, dict[str, Any] | PenstockError] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.request_ids: list[str] = []  # of the calls
        self.enqueues: list[tuple[Enqueue, Any]] = []
        self.refuse_enqueue: Callable[[Enqueue, Any], PenstockError | None] = lambda *_: None
        self.settlements: list[Any] = []
        self.lost: list[int] = []
        self.grants: list[int] = []
        self.streams: list[OpenLease] = []
        self.unsubscribed = 0
        self.deliver = 0  # messages sent when a stream opens
        self.key_required = False
        self.held: asyncio.Event | None = None  # enqueues are answered once it is set
        self.sessions: list[ScriptedSession] = []
        self.sequence = 0

    async def connect(self, api_key: str | None = None) -> Connection:
        connection = Connection(api_key=api_key)
        memory_pair(connection, ScriptedSession(self))
        await connection.greeted()
        return connection

    def call(self, method: str, arguments: dict[str, Any]) -> dict[str, Any] | PenstockError:
        self.request_ids.append(arguments.pop("request_id"))
        self.calls.append((method, arguments))
        if method in self.answers:
            return self.answers[method]
        if method == "topic_get":
            found = self.topics.get(arguments["topic"])
            return msgspec.to_builtins(found) if found else NotFound("no such topic")
        return {}


class ScriptedSession(asyncio.Protocol):
    def __init__(self, node: ScriptedNode) -> None:
        self.node = node
        self.decoder = FrameDecoder()
        node.sessions.append(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        for item in self.decoder.feed(data):
            self.on_frame(item)

    def send(self, type: FrameType, number: int, control: Any, *data: bytes) -> None:
        self.transport.writelines(frame.encode(type, number, pack(control), *data))

    def answer(self, number: int, result: Any) -> None:
        if isinstance(result, PenstockError):
            self.send(FrameType.NACK, number, result.to_wire())
        else:
            self.send(FrameType.ACK, number, result)

    def on_frame(self, item: frame.Frame) -> None:
        handler = {
            FrameType.HEARTBEAT: self.on_heartbeat,
            FrameType.BATCH: self.on_enqueue,
            FrameType.ACK: self.on_ack,
            FrameType.NACK: self.on_return,
            FrameType.SUBSCRIBE: self.on_subscribe,
            FrameType.UNSUBSCRIBE: self.on_unsubscribe,
        }[item.type]
        handler(item)

    def on_heartbeat(self, item: frame.Frame) -> None:
        if item.sequence:
            self.node.settlements.append(unpack(item.payload, Extend)[0])
            self.answer(item.sequence, Settled(self.node.lost))
            return
        hello, _ = unpack(item.payload, Hello)
        wrong = hello.api_key not in (None, GOOD_KEY)
        if wrong or (self.node.key_required and hello.api_key is None):
            self.answer(0, Unauthenticated("the API key is not valid"))
            self.transport.close()
        else:
            self.send(FrameType.HEARTBEAT, 0, Welcome(1, "scripted", "n1", 0, 64 << 20))

    def on_enqueue(self, item: frame.Frame) -> None:
        request, data = unpack(item.payload, Enqueue)
        count = request.parts[0].count
        columns = SCHEMAS[Kind.ENQ].decode(bytes(data), count)
        self.node.enqueues.append((request, columns))
        first = self.node.sequence + 1
        self.node.sequence += count
        placed = [Placed(0, count, request.parts[0].partition, first, 1_000)]
        result = self.node.refuse_enqueue(request, columns) or Enqueued(7, placed)
        if self.node.held is None:
            self.answer(item.sequence, result)
        else:
            waiting = asyncio.ensure_future(self.node.held.wait())
            waiting.add_done_callback(lambda _: self.answer(item.sequence, result))

    def on_ack(self, item: frame.Frame) -> None:
        if not item.flags:
            self.node.grants.append(unpack(item.payload, Grant)[0].entries)
            return
        self.node.settlements.append(unpack(item.payload, Settle)[0])
        self.answer(item.sequence, Settled(self.node.lost))

    def on_return(self, item: frame.Frame) -> None:
        self.node.settlements.append(unpack(item.payload, Return)[0])
        self.answer(item.sequence, Settled(self.node.lost))

    def on_subscribe(self, item: frame.Frame) -> None:
        control, _ = unpack(item.payload, OpenLease | Call)  # type: ignore[arg-type]
        if isinstance(control, Call):
            self.answer(item.sequence, self.node.call(control.method, control.arguments))
            return
        self.node.streams.append(control)
        self.answer(item.sequence, {})
        for i in range(self.node.deliver):
            body = DELIVERY.encode(
                1,
                {
                    "message": [i + 1],
                    "time_ms": [1_000],
                    "priority": [-5],
                    "headers": [msgspec.msgpack.encode({"a": "b"})],
                    "payload": [b"p%d" % i],
                },
            )
            delivery = Delivery(3, 2, 9 + i, 1, 5_000, 30_000, 7)
            self.send(FrameType.BATCH, item.sequence, delivery, body)

    def on_unsubscribe(self, item: frame.Frame) -> None:
        self.node.unsubscribed += 1
        self.answer(item.sequence, {})


@pytest.fixture
def node() -> ScriptedNode:
    return ScriptedNode()


@pytest.fixture
async def link(node: ScriptedNode) -> AsyncIterator[GatewayLink]:
    link = GatewayLink(await node.connect())
    yield link
    await link.connection.close()


@pytest.fixture
def options(tmp_path: Any) -> Config:
    return Config(data=tmp_path, native_port=-1, grpc_port=0, http_port=0, drain_s=0.5)


@pytest.fixture
async def gateway(node: ScriptedNode, options: Config) -> AsyncIterator[Gateway]:
    gateway = Gateway(node.connect, options, metrics_text=lambda: b"penstock_up 1\n")
    await gateway.start()
    yield gateway
    await gateway.stop()


@pytest.fixture
def unused(gateway: Gateway, eventually: Callable[..., Any]) -> Callable[[], Awaitable[None]]:
    """Waits until the gateway serves nobody."""

    async def wait() -> None:
        links = gateway._pool._links.values()
        await eventually(lambda: not any(link.users for link in links))

    return wait


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.ports['http']}") as client:
        yield client


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.001)

    return wait
