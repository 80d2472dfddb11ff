"""What readers of the gateway's streams cost the node that they share a loop with."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import penstock
from penstock.client.delta.deltas import Deltas
from penstock.config import Config
from penstock.server._generated import penstock_pb2 as pb
from penstock.server._generated.penstock_pb2_grpc import PenstockStub
from penstock.server.embedded import open_embedded
from penstock.server.gateway import Gateway
from penstock.server.grpc import messages
from penstock.server.http import app
from penstock.server.serve import listen, port_of
from penstock.server.subscriptions import PIECE_BYTES, PIECE_ROWS

WIDE = 4096
VECTORS = 2000  # of 16 KiB each: 32 MiB, of which a reader's credit is a quarter
HEAD = b"GET /v1/deltas/vectors/events?from_sequence=1 HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Site:
    """A gateway before an engine of the same loop, with a topic of one partition."""

    def __init__(self, gateway: Gateway, client: Any, stub: Any, engine: Any) -> None:
        self.gateway, self._client, self.stub, self.engine = gateway, client, stub, engine

    def deltas(self, dimensions: int) -> Deltas:
        found: Deltas = self._client.deltas("vectors", dimensions=dimensions, create=True)
        return found

    async def fill(self, dimensions: int, vectors: int) -> None:
        deltas = self.deltas(dimensions)
        for at in range(0, vectors, 1000):
            names = [f"v{n}" for n in range(at, min(at + 1000, vectors))]
            await deltas.put_columns(names, np.ones((len(names), dimensions)))

    def subscription(self) -> Any:
        (found,) = self.engine.topics["vectors"].live.partitions[0].subscriptions
        return found

    def unsent(self) -> int:
        """Bytes of answers that wait for callers over HTTP."""
        connections = self.gateway._http._state.connections
        return sum(one.transport.get_write_buffer_size() for one in connections)

    async def events(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        port = self.gateway.ports["http"]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 18)
        writer.write(HEAD)
        return reader, writer

    def subscribe(self) -> Any:
        return self.stub.Subscribe(pb.SubscribeRequest(topic="vectors", from_sequence=1))


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    config = Config(data=tmp_path, native_port=-1, grpc_port=0, http_port=0, drain_s=1.0)
    async with AsyncExitStack() as stack:
        node = await open_embedded(tmp_path, config=config)
        stack.push_async_callback(node.close)
        gateway = Gateway(node.connect, config, metrics_text=node.engine.metrics.text)
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{gateway.ports['grpc']}")
        await stack.enter_async_context(channel)
        server = await listen(node.engine, host="127.0.0.1", port=0, tls=None)
        stack.callback(server.close)
        client = await stack.enter_async_context(
            penstock.connect(f"penstock://127.0.0.1:{port_of(server)}")
        )
        yield Site(gateway, client, PenstockStub(channel), node.engine)


async def names_of(reader: asyncio.StreamReader, count: int) -> list[str]:
    """The vectors of so many events."""
    found: list[str] = []
    async with asyncio.timeout(120):
        while len(found) < count:
            line = await reader.readline()
            assert line, "the stream ended"
            if line.startswith(b"data: "):
                found.append(json.loads(line[6:])["vector_id"])
    return found


async def changed(call: Any, count: int) -> list[Any]:
    found: list[Any] = []
    async with asyncio.timeout(120):
        while len(found) < count:
            found += (await call.read()).changes
    return found


def names(vectors: int) -> list[str]:
    return [f"v{n}" for n in range(vectors)]


# --- the loop ---


class Turns:
    """Counts rows by the turn of the loop in which they were made into text or messages."""

    def __init__(self) -> None:
        self.rows: Counter[int] = Counter()
        self.bytes: Counter[int] = Counter()
        self._turn = 0
        self._loop = asyncio.get_running_loop()
        self._next()

    def _next(self) -> None:
        self._turn += 1
        self._handle = self._loop.call_soon(self._next)

    def stop(self) -> None:
        self._handle.cancel()

    def counting(self, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def made(released: Any) -> Any:
            self.rows[self._turn] += 1
            self.bytes[self._turn] += released.delta.values.nbytes
            return make(released)

        return made


@pytest.fixture
async def turns(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Turns]:
    turns = Turns()
    monkeypatch.setattr(app, "event_of", turns.counting(app.event_of))
    monkeypatch.setattr(messages, "change_of", turns.counting(messages.change_of))
    yield turns
    turns.stop()


@pytest.mark.parametrize(("dimensions", "vectors"), [(4, 1000), (WIDE, 60)])
@pytest.mark.parametrize("how", ["sse", "grpc"])
async def test_a_reader_of_the_past_takes_little_of_a_turn(
    site: Site, turns: Turns, how: str, dimensions: int, vectors: int
) -> None:
    await site.fill(dimensions, vectors)
    if how == "sse":
        reader, writer = await site.events()
        assert await names_of(reader, vectors) == names(vectors)
        writer.close()
    else:
        call = site.subscribe()
        assert [change.vector_id for change in await changed(call, vectors)] == names(vectors)
        call.cancel()
    assert sum(turns.rows.values()) == vectors
    assert max(turns.rows.values()) <= PIECE_ROWS
    assert max(turns.bytes.values()) <= PIECE_BYTES


# --- those who do not read ---


async def at_rest(site: Site) -> int:
    """Deltas that were sent to the gateway when it takes no more; others are served meanwhile."""
    sent, rounds = -1, 0
    async with asyncio.timeout(120):
        while rounds < 100 or not sent:
            await site.deltas(WIDE).get("v0")
            live = site.engine.topics["vectors"].live
            now = 0 if live is None or not live.subscribers else site.subscription().delivered
            sent, rounds = now, rounds + 1 if now == sent else 0
    return sent


async def test_a_browser_that_does_not_read_costs_little_and_loses_nothing(site: Site) -> None:
    await site.fill(WIDE, VECTORS)
    reader, writer = await site.events()
    assert 0 < await at_rest(site) < VECTORS
    assert site.unsent() < 1 << 20
    assert await names_of(reader, VECTORS) == names(VECTORS)
    writer.close()


async def test_a_grpc_caller_that_does_not_read_costs_little_and_loses_nothing(site: Site) -> None:
    await site.fill(WIDE, VECTORS)
    call = site.subscribe()
    assert 0 < await at_rest(site) < VECTORS
    assert [change.vector_id for change in await changed(call, VECTORS)] == names(VECTORS)
    call.cancel()
