"""A small peer that speaks the native protocol, for tests of the client alone.

It keeps one queue per topic in memory, first in first out, and can be told to misbehave: to drop
the connection after a request was taken in, or to refuse requests with given errors.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import pytest

from penstock.client.client import Client
from penstock.client.network.connection import Connection
from penstock.client.network.endpoints import open_connection
from penstock.client.network.exchange import memory_pair
from penstock.client.options import Options
from penstock.errors import NotFound, PenstockError
from penstock.model.batch import SCHEMAS, Kind, seal
from penstock.model.entries import DELIVERY
from penstock.wire import frame
from penstock.wire.frame import Frame, FrameDecoder, FrameType
from penstock.wire.messages import (
    Call,
    Delivery,
    Duplicate,
    Enqueue,
    Enqueued,
    Extend,
    Grant,
    Hello,
    LogSlice,
    OpenLease,
    OpenLog,
    Placed,
    Return,
    Settle,
    Settled,
    Welcome,
    pack,
    unpack,
)

TIME_MS = 1_700_000_000_000


class Broker:
    """What all sessions share."""

    def __init__(self) -> None:
        self.topic = 7
        self.partitions = 1
        self.visibility_ms = 30_000
        self.ready: list[tuple[int, int, dict[str, Any]]] = []  # partition, sequence, fields
        self.leases: dict[int, tuple[tuple[int, int, dict[str, Any]], Session, int]] = {}
        self.token = 100
        self.last = Counter[int]()
        self.written: dict[tuple[bytes, int, int], tuple[int, int]] = {}  # producer key → place
        self.requests: list[tuple[Enqueue, bytes]] = []
        self.takers: list[str] = []  # the node that took each of them
        self.settlers: list[str] = []
        self.calls: list[Call] = []
        self.returned: list[Return] = []
        self.extended: list[Extend] = []
        self.settles: list[int] = []  # tokens in each settlement
        self.acked: list[int] = []
        self.logs: dict[int, list[Any]] = {}
        self.sessions: list[Session] = []
        self.drops = 0  # enqueues that are taken in but whose connection is then cut
        self.refusals: list[PenstockError] = []  # answers to the next enqueues
        self.half_refusals: list[
            PenstockError
        ] = []  # the same, and all but the last part is written
        self.settle_drops = 0
        self.hold: asyncio.Event | None = None  # enqueues are answered once it is set
        self.greeting: PenstockError | None = None
        self.results: dict[str, Any] = {}
        self.lost: set[str] = set()  # calls that are taken in but whose connection is then cut
        self.mute: set[str] = set()  # nodes that show signs of life and take nothing in
        self.unwell: dict[str, PenstockError] = {}  # how a node answers all calls but `routes`
        self.unreached: set[int] = set()  # partitions whose leases cannot be extended or ended

    def enqueue(self, request: Enqueue, data: memoryview) -> Enqueued:
        placed, duplicates, index, at = [], [], 0, 0
        for part in request.parts:
            columns = SCHEMAS[Kind.ENQ].decode(data[at : at + part.length], part.count)
            columns.validate()
            at += part.length
            for i, key in enumerate(self.keys(columns)):
                if key in self.written:
                    duplicates.append(Duplicate(index, *self.written[key], TIME_MS))
                else:
                    self.last[part.partition] += 1
                    place = (part.partition, self.last[part.partition])
                    self.written[key] = place
                    self.ready.append((*place, self.fields(columns, i)))
                    placed.append(Placed(index, 1, *place, TIME_MS))
                index += 1
        for session in self.sessions:
            session.deliver()
        return Enqueued(self.topic, placed, duplicates)

    @staticmethod
    def keys(columns: Any) -> list[tuple[bytes, int, int]]:
        runs = zip(
            columns.binary("run_producer"),
            columns.fixed("run_epoch").tolist(),
            columns.fixed("run_sequence").tolist(),
            columns.fixed("run_count").tolist(),
            strict=True,
        )
        return [(p, e, s + i) for p, e, s, n in runs for i in range(n)]

    @staticmethod
    def fields(columns: Any, i: int) -> dict[str, Any]:
        binary = {n: columns.binary(n) for n in ("key", "headers", "payload")}
        fixed = {n: int(columns.fixed(n)[i]) for n in ("priority", "delay_ms", "max_retries")}
        return fixed | {n: b"" if c is None else c[i] for n, c in binary.items()} | {"attempts": 0}

    def lease(self, session: Session, credits: int) -> tuple[int, list[Any]]:
        first = self.token
        taken, self.ready = self.ready[:credits], self.ready[credits:]
        for item in taken:
            self.leases[self.token] = (item, session, 0)
            self.token += 1
        return first, taken

    def end(self, tokens: list[int]) -> Settled:
        lost = [i for i, token in enumerate(tokens) if token not in self.leases]
        for token in tokens:
            held = self.leases.pop(token, None)
            if held is not None:
                held[1].credits += 1
        return Settled(lost)


class Session(asyncio.Protocol):
    def __init__(self, broker: Broker, *, node: str = "n1", cluster: str = "") -> None:
        self.broker, self.node, self.cluster = broker, node, cluster
        self.decoder = FrameDecoder()
        self.stream: tuple[int, OpenLease] | None = None
        self.credits = 0
        self.tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.broker.sessions.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.broker.sessions.remove(self)

    def data_received(self, data: bytes) -> None:
        for item in self.decoder.feed(data):
            if self.node in self.broker.mute and item.sequence:
                continue
            getattr(self, "on_" + item.type.name.lower())(item)

    def send(self, type: FrameType, number: int, control: Any, *data: Any) -> None:
        self.transport.writelines(frame.encode(type, number, pack(control), *data))

    def refuse(self, number: int, error: PenstockError) -> None:
        self.send(FrameType.NACK, number, error.to_wire())

    def on_heartbeat(self, item: Frame) -> None:
        if not item.payload:
            self.transport.writelines(frame.encode(FrameType.HEARTBEAT, 0))
            return
        if self.broker.greeting is not None:
            self.refuse(item.sequence, self.broker.greeting)
            self.transport.close()
        elif item.sequence == 0:
            unpack(item.payload, Hello)
            welcome = Welcome(frame.VERSION, "peer", self.node, 40, 64 << 20, self.cluster)
            self.send(FrameType.HEARTBEAT, 0, welcome)
        else:
            request, data = unpack(item.payload, Extend)
            self.broker.extended.append(request)
            if self.broker.unreached & {part.partition for part in request.parts}:
                return
            tokens = np.frombuffer(data, "<u8").tolist()
            lost = [i for i, token in enumerate(tokens) if token not in self.broker.leases]
            self.send(FrameType.ACK, item.sequence, Settled(lost))

    def on_batch(self, item: Frame) -> None:
        request, data = unpack(item.payload, Enqueue)
        self.broker.requests.append((request, bytes(data)))
        self.broker.takers.append(self.node)
        if self.broker.refusals:
            self.refuse(item.sequence, self.broker.refusals.pop(0))
            return
        if self.broker.half_refusals:
            request.parts.pop()
            self.broker.enqueue(request, data)
            self.refuse(item.sequence, self.broker.half_refusals.pop(0))
            return
        answer = self.broker.enqueue(request, data)
        if self.broker.drops:
            self.broker.drops -= 1
            self.transport.abort()
        elif self.broker.hold is None:
            self.send(FrameType.ACK, item.sequence, answer)
        else:
            task = asyncio.get_running_loop().create_task(self.answer(item.sequence, answer))
            self.tasks.add(task)

    async def answer(self, number: int, answer: Enqueued) -> None:
        assert self.broker.hold is not None
        await self.broker.hold.wait()
        self.send(FrameType.ACK, number, answer)

    def on_ack(self, item: Frame) -> None:
        if self.stream is not None and item.sequence == self.stream[0]:
            self.credits += unpack(item.payload, Grant)[0].entries
            self.deliver()
            return
        if item.sequence in self.broker.logs:
            self.broker.logs[item.sequence].append(unpack(item.payload, Grant)[0])
            return
        _, data = unpack(item.payload, Settle)
        self.broker.settlers.append(self.node)
        tokens = np.frombuffer(data, "<u8").tolist()
        self.broker.settles.append(len(tokens))
        self.broker.acked += [t for t in tokens if t in self.broker.leases]
        settled = self.broker.end(tokens)
        if self.broker.settle_drops:
            self.broker.settle_drops -= 1
            self.transport.abort()
            return
        self.send(FrameType.ACK, item.sequence, settled)
        self.deliver()

    def on_nack(self, item: Frame) -> None:
        request, data = unpack(item.payload, Return)
        self.broker.returned.append(request)
        if self.broker.unreached & {part.partition for part in request.parts}:
            return
        settled = self.broker.end(np.frombuffer(data, "<u8").tolist())
        self.send(FrameType.ACK, item.sequence, settled)
        self.deliver()

    def on_unsubscribe(self, item: Frame) -> None:
        self.stream = None
        self.send(FrameType.ACK, item.sequence, {})

    def on_subscribe(self, item: Frame) -> None:
        request, _ = unpack(item.payload, OpenLease | OpenLog | Call)  # type: ignore[arg-type]
        if isinstance(request, Call):
            self.on_call(item.sequence, request)
        elif isinstance(request, OpenLog):
            self.on_log(item.sequence, request)
        elif request.topic == "missing":
            self.refuse(item.sequence, NotFound("no such topic"))
        else:
            self.stream, self.credits = (item.sequence, request), request.credits
            self.send(FrameType.ACK, item.sequence, {})
            self.deliver()

    def on_call(self, number: int, call: Call) -> None:
        self.broker.calls.append(call)
        found = self.broker.results.get(call.method)
        if call.method in self.broker.lost:
            self.transport.abort()
        elif self.node in self.broker.unwell and call.method != "routes":
            self.refuse(number, self.broker.unwell[self.node])
        elif isinstance(found, PenstockError):
            self.refuse(number, found)
        elif found is not None:
            self.send(FrameType.ACK, number, found)
        elif call.method in ("topic_create", "topic_get"):
            asked = call.arguments.get("config", call.arguments)
            name = asked.get("name") or asked["topic"]
            config = {"name": name, "id": self.broker.topic, "partitions": self.broker.partitions}
            self.send(FrameType.ACK, number, config | {"visibility_ms": self.broker.visibility_ms})
        else:
            self.send(FrameType.ACK, number, {"method": call.method, **call.arguments})

    def on_log(self, number: int, request: OpenLog) -> None:
        self.broker.logs[number] = []
        self.send(FrameType.ACK, number, {})
        body = SCHEMAS[Kind.ENQ].encode(2, {"payload": [b"a", b"b"], "priority": [5, 6]})
        batch = seal(
            Kind.ENQ, body, topic=self.broker.topic, partition=request.partition, epoch=1,
            epoch_previous=0, first=request.from_sequence, count=2, time_ms=TIME_MS,
            chain_previous=0,
        )  # fmt: skip
        first = request.from_sequence
        data = batch.encode() + bytes(-batch.size & 7)
        self.send(FrameType.BATCH, number, LogSlice(request.partition, first, first + 1, 9), data)

    def deliver(self) -> None:
        if self.stream is None or not self.credits:
            return
        number, request = self.stream
        while self.credits and self.broker.ready:
            partition = self.broker.ready[0][0]
            together = next(groupby(self.broker.ready, key=itemgetter(0)))[1]
            room = min(self.credits, request.batch_max)
            first, taken = self.broker.lease(self, min(room, sum(1 for _ in together)))
            self.credits -= len(taken)
            assert self.credits >= 0
            body = DELIVERY.encode(
                len(taken),
                {
                    "message": [sequence for _, sequence, _ in taken],
                    "time_ms": [TIME_MS] * len(taken),
                    **{
                        name: [fields[name] for *_, fields in taken]
                        for name in ("priority", "attempts", "key", "headers", "payload")
                    },
                },
            )
            visibility = request.visibility_ms or self.broker.visibility_ms
            head = Delivery(partition, 3, first, len(taken), TIME_MS + visibility, visibility, 1)
            self.send(FrameType.BATCH, number, head, body)


@pytest.fixture
def broker() -> Broker:
    return Broker()


@pytest.fixture
def session_type() -> type[Session]:
    return Session


@pytest.fixture
async def connection(broker: Broker) -> AsyncIterator[Connection]:
    """A greeted connection to the peer, in memory."""
    connection = Connection()
    memory_pair(connection, Session(broker))
    await connection.greeted()
    yield connection
    await connection.close()


@pytest.fixture
async def url(broker: Broker) -> AsyncIterator[str]:
    """The peer on a real socket."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Session(broker), "127.0.0.1", 0)
    yield f"penstock://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    for session in list(broker.sessions):
        session.transport.abort()
    await asyncio.sleep(0)


@pytest.fixture
async def wired(url: str) -> AsyncIterator[Connection]:
    """A greeted connection to the peer, over TCP."""
    connection = await open_connection(url)
    yield connection
    await connection.close()


class InMemory:
    """Connections of a client to the peer."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.closed = False

    async def connect(self) -> Connection:
        connection = Connection()
        memory_pair(connection, Session(self.broker))
        await connection.greeted()
        return connection

    async def close(self) -> None:
        self.closed = True


def quick(**changes: Any) -> Options:
    return Options(**{"retry_wait_s": 0.001, "retry_wait_s_max": 0.01, "retry_s": 5.0, **changes})


@pytest.fixture
async def client(broker: Broker) -> AsyncIterator[Client]:
    """A client of the peer that retries without waiting long."""
    async with Client(InMemory(broker), quick()) as client:
        yield client


@pytest.fixture
def make_client(broker: Broker) -> Any:
    """Make a client with other options; enter it yourself."""
    return lambda **changes: Client(InMemory(broker), quick(**changes))
