"""Released deltas over gRPC and as Server-Sent Events, before the real engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

import penstock
from penstock.client.client import Client
from penstock.client.delta.deltas import Deltas
from penstock.config import Config, HttpOptions
from penstock.node.engine import Engine
from penstock.server._generated import penstock_pb2 as pb
from penstock.server._generated.penstock_pb2_grpc import PenstockStub
from penstock.server.embedded import open_embedded
from penstock.server.gateway import Gateway
from penstock.server.http import app
from penstock.server.serve import listen, port_of
from penstock.server.subscriptions import WINDOW_BYTES

PAGE = "https://app.example.com"


class Site:
    def __init__(
        self, http: httpx.AsyncClient, stub: Any, deltas: Deltas, *, engine: Engine
    ) -> None:
        self.http, self.stub, self.deltas, self.engine = http, stub, deltas, engine

    async def opened(self) -> None:
        """Until all partitions are subscribed to."""
        while (live := self.engine.topics["vectors"].live) is None or live.subscribers < 2:
            await asyncio.sleep(0.001)

    async def closed(self) -> None:
        """Until nobody is subscribed any more."""
        while (live := self.engine.topics["vectors"].live) is not None and live.subscribers:
            await asyncio.sleep(0.001)

    async def fill(self) -> list[str]:
        """Vectors in every partition, and their names."""
        names = [f"v{number}" for number in range(20)]
        await self.deltas.put_columns(names, np.ones((len(names), 4)))
        return names

    async def apart(self) -> list[str]:
        """A vector of each partition."""
        names = await self.fill()
        found: dict[int, str] = {}
        async with self.events("from_sequence=1") as events:
            while len(found) < 2:
                one = (await anext(events)).document
                if one["vector_id"] in names:
                    found[one["partition"]] = one["vector_id"]
        return [found[partition] for partition in sorted(found)]

    @asynccontextmanager
    async def away(self, partition: int) -> AsyncIterator[None]:
        """Nobody coordinates a partition meanwhile."""
        topic = self.engine.topics["vectors"]
        tenure = topic.here(partition)
        topic.unserve(partition)
        yield
        topic.serve(tenure)

    async def touch(self, names: list[str]) -> None:
        for name in names:
            await self.deltas.set(name, {0: 7.0})

    @asynccontextmanager
    async def events(self, query: str = "", **headers: str) -> AsyncIterator[AsyncIterator[Event]]:
        path = f"/v1/deltas/vectors/events?{query}"
        async with self.http.stream("GET", path, headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            assert answer.headers["content-type"] == "text/event-stream"
            yield events_of(answer.aiter_lines())

    async def first_id(self, query: str = "", **headers: str) -> str:
        """What a browser has that is cut off before its first event."""
        path = f"/v1/deltas/vectors/events?{query}"
        async with self.http.stream("GET", path, headers=headers) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("id: "):
                    return line.removeprefix("id: ")
        raise AssertionError("the stream ended without an id")


class Event(dict[str, str]):
    @property
    def document(self) -> dict[str, Any]:
        return json.loads(self["data"])  # type: ignore[no-any-return]


async def events_of(lines: AsyncIterator[str]) -> AsyncIterator[Event]:
    event = Event()
    async for line in lines:
        if line:
            name, _, value = line.partition(": ")
            event[name] = value
        else:
            if "data" in event:
                yield event
            event = Event()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    http_options = HttpOptions(cors_origins=(PAGE,))
    config = Config(
        data=tmp_path, native_port=-1, grpc_port=0, http_port=0, drain_s=1.0, http=http_options
    )
    async with AsyncExitStack() as stack:
        node = await open_embedded(tmp_path, config=config)
        stack.push_async_callback(node.close)
        gateway = Gateway(node.connect, config, metrics_text=node.engine.metrics.text)
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        server = await listen(node.engine, host="127.0.0.1", port=0, tls=None)
        stack.callback(server.close)
        http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.ports['http']}", timeout=60.0)
        await stack.enter_async_context(http)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{gateway.ports['grpc']}")
        await stack.enter_async_context(channel)
        client: Client = await stack.enter_async_context(
            penstock.connect(f"penstock://127.0.0.1:{port_of(server)}")
        )
        deltas = client.deltas("vectors", dimensions=4, create=True, partitions=2)
        await deltas.create("a", [1, 2, 3, 4])
        await deltas.create("b", [1, 2, 3, 4], metadata={"name": "B"})
        yield Site(http, PenstockStub(channel), deltas, engine=node.engine)


async def test_a_browser_gets_what_is_released_as_events(site: Site) -> None:
    async with site.events("from_sequence=1") as events:
        first = [(await anext(events)).document for _ in range(2)]
        assert {one["vector_id"]: one["op"] for one in first} == {"a": "create", "b": "create"}
        assert {one.get("metadata", {}).get("name") for one in first} == {None, "B"}
        await site.deltas.set("a", {1: 0.5})
        change = (await anext(events)).document
        assert (change["op"], change["indices"], change["values"]) == ("sparse", [1], [0.5])


async def test_a_page_of_a_named_site_reads_events(site: Site) -> None:
    path = "/v1/deltas/vectors/events?from_sequence=1"
    async with site.http.stream("GET", path, headers={"origin": PAGE}) as answer:
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert (await anext(events_of(answer.aiter_lines()))).document["op"] == "create"
    async with site.http.stream("GET", path, headers={"origin": "https://other"}) as answer:
        assert answer.status_code == 401


async def test_who_comes_back_goes_on_where_it_was(site: Site) -> None:
    async with site.events("from_sequence=1&vector_id=a") as events:
        seen = await anext(events)
    await site.deltas.set("a", {0: 7.0})
    await site.deltas.set("b", {0: 7.0})
    async with site.events("from_sequence=1", **{"last-event-id": seen["id"]}) as events:
        came = [(await anext(events)).document for _ in range(3)]
    missed = {(one["vector_id"], one["op"]) for one in came}
    assert missed == {("a", "sparse"), ("b", "create"), ("b", "sparse")}


async def test_who_comes_back_gets_nothing_of_the_past(site: Site) -> None:
    names = await site.fill()
    async with site.events() as events:
        await site.opened()
        await site.touch(["a"])
        seen = await anext(events)
    await site.touch(names)
    async with site.events(**{"last-event-id": seen["id"]}) as events:
        came = [(await anext(events)).document for _ in names]
    assert {(one["vector_id"], one["op"]) for one in came} == {(name, "sparse") for name in names}


async def test_who_is_cut_off_before_the_first_event_misses_nothing(site: Site) -> None:
    names = await site.fill()
    begun = await site.first_id()
    await site.touch(names)
    async with site.events(**{"last-event-id": begun}) as events:
        came = [(await anext(events)).document for _ in names]
    assert {(one["vector_id"], one["op"]) for one in came} == {(name, "sparse") for name in names}
    assert await site.first_id("from_sequence=1") == "1@0:0,1:0"


async def test_a_partition_without_a_position_begins_where_the_request_says(site: Site) -> None:
    names = await site.fill()
    known = await site.first_id()
    alone = known.partition(",")[0]
    assert await site.first_id(**{"last-event-id": alone}) == known
    assert await site.first_id("from_sequence=3", **{"last-event-id": alone}) == f"{alone},1:2"
    async with site.events(**{"last-event-id": alone}) as events:
        await site.opened()
        await site.touch(names)
        came = [(await anext(events)).document for _ in names]
    assert {one["op"] for one in came} == {"sparse"}


async def test_a_partition_that_is_away_holds_nothing_else_back(site: Site) -> None:
    here, there = await site.apart()
    known = await site.first_id()
    async with asyncio.timeout(30), AsyncExitStack() as stack:
        async with site.away(1):
            again = site.events(**{"last-event-id": known})
            events = await stack.enter_async_context(again)
            await site.touch([here])
            seen = await anext(events)
            assert seen.document["vector_id"] == here
            assert seen["id"].partition(",")[2] == known.partition(",")[2]
        await site.touch([there])
        assert (await anext(events)).document["vector_id"] == there


async def test_who_comes_back_is_not_sent_to_the_time_of_its_start(site: Site) -> None:
    async with site.events("from_time_ms=0") as events:
        seen = [await anext(events) for _ in range(2)][-1]
    await site.touch(["a"])
    async with site.events("from_time_ms=0", **{"last-event-id": seen["id"]}) as events:
        assert (await anext(events)).document["op"] == "sparse"


async def test_events_are_routed(site: Site) -> None:
    query = "from_sequence=1&routes=vector%3Ddefault/b&routes=op%3Ddelete"
    async with site.events(query) as events:
        await site.deltas.set("a", {0: 7.0})
        await site.deltas.delete("a")
        found = {
            (e["vector_id"], e["op"])
            for e in [(await anext(events)).document, (await anext(events)).document]
        }
    assert found == {("b", "create"), ("a", "delete")}


@pytest.mark.parametrize(
    ("path", "status", "field"),
    [
        ("/v1/deltas/vectors/events?op=turn", 400, "op"),
        ("/v1/deltas/vectors/events?routes=moon", 400, "route"),
        ("/v1/deltas/vectors/events?speed=1", 400, "speed"),
        ("/v1/deltas/vectors/events?positions=x", 400, "positions"),
        ("/v1/deltas/vectors/events?positions=0:-1", 400, "positions"),
        ("/v1/deltas/vectors/events?positions=0:99999999999999999999", 400, "positions"),
        ("/v1/deltas/vectors/events?cursor=sink-memory", 400, "cursor"),
        ("/v1/deltas/none/events", 404, None),
    ],
)
async def test_a_wrong_question_is_refused(
    site: Site, path: str, status: int, field: str | None
) -> None:
    answer = await site.http.get(path)
    assert (answer.status_code, answer.json().get("field")) == (status, field)


async def test_what_takes_longer_to_open_has_its_head_at_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "REFUSED_S", 0.0)
    assert await site.first_id("from_sequence=1") == "1@0:0,1:0"
    async with site.events("cursor=sink-memory") as events:
        end = await anext(events)
    assert (end["event"], end.document["field"]) == ("end", "cursor")


async def test_a_gateway_that_stops_ends_its_streams(tmp_path: Path) -> None:
    config = Config(data=tmp_path, native_port=-1, grpc_port=-1, http_port=0, drain_s=60.0)
    node = await open_embedded(tmp_path, config=config)
    gateway = Gateway(node.connect, config, metrics_text=node.engine.metrics.text)
    await gateway.start()
    connection = await node.connect()
    topic = {"name": "vectors", "kind": "delta", "dimensions": 4}
    await connection.call("topic_create", config=topic)
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.ports['http']}") as http,
        http.stream("GET", "/v1/deltas/vectors/events") as answer,
    ):
        assert answer.status_code == 200
        async with asyncio.timeout(30):
            await gateway.stop()
            async for _ in answer.aiter_lines():
                pass
    await connection.close()
    await node.close()


async def test_a_stream_holds_half_a_mebibyte_on_its_way(site: Site) -> None:
    """Before, it was 8 MiB."""
    async with site.events("from_sequence=1&credits=100000"):
        await site.opened()
        status = await site.deltas.topic.link.call("live_status")
        windows = [one["credit_bytes"] for one in status["topics"][0]["subscriptions"]]
    assert windows
    assert max(windows) <= WINDOW_BYTES


async def test_grpc_streams_what_is_released(site: Site) -> None:
    call = site.stub.Subscribe(pb.SubscribeRequest(topic="vectors", from_sequence=1))
    changes: list[Any] = []
    while len(changes) < 2:
        response = await call.read()
        changes += response.changes
    assert {(c.vector_id, c.op, tuple(c.values)) for c in changes} == {
        ("a", "create", (1, 2, 3, 4)), ("b", "create", (1, 2, 3, 4)),
    }  # fmt: skip
    await site.deltas.scale("b", 2.0)
    (change,) = (await call.read()).changes
    assert (change.op, list(change.values), len(change.parent)) == ("scale", [2.0], 16)
    call.cancel()


async def test_grpc_goes_on_where_it_was(site: Site) -> None:
    names = await site.fill()
    call = site.stub.Subscribe(pb.SubscribeRequest(topic="vectors"))
    await site.opened()
    await site.touch(["a"])
    positions = (await call.read()).positions
    call.cancel()
    assert len(positions.split(",")) == 2
    await site.touch(names)
    again = site.stub.Subscribe(pb.SubscribeRequest(topic="vectors", positions=positions))
    came: list[Any] = []
    while len(came) < len(names):
        came += (await again.read()).changes
    assert {(c.vector_id, c.op) for c in came} == {(name, "sparse") for name in names}
    again.cancel()


async def test_grpc_waits_for_no_partition_whose_position_is_known(site: Site) -> None:
    here, there = await site.apart()
    known = await site.first_id()
    async with asyncio.timeout(30):
        async with site.away(1):
            call = site.stub.Subscribe(pb.SubscribeRequest(topic="vectors", positions=known))
            await site.touch([here])
            response = await call.read()
            assert [change.vector_id for change in response.changes] == [here]
            assert response.positions.partition(",")[2] == known.partition(",")[2]
        await site.touch([there])
        assert [change.vector_id for change in (await call.read()).changes] == [there]
    call.cancel()


async def test_grpc_keeps_a_cursor(site: Site) -> None:
    asked = pb.SubscribeRequest(topic="vectors", from_sequence=1, cursor="reader", vector_id="a")
    call = site.stub.Subscribe(asked)
    await call.read()
    await site.deltas.set("a", {0: 1.0})
    await call.read()
    call.cancel()
    await site.closed()  # what is sent before the node hears of it counts as taken
    await site.deltas.set("a", {0: 2.0})
    again = site.stub.Subscribe(asked)
    seen: list[float] = []
    while not seen or seen[-1] != 2.0:  # at least once: what was not known to be taken comes again
        seen += [c.values[0] for c in (await again.read()).changes]
    assert len(seen) <= 2
    again.cancel()


@pytest.mark.parametrize("wrong", [{"op": "turn"}, {"cursor": "sink-memory"}])
async def test_grpc_refuses_by_name(site: Site, wrong: dict[str, str]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await site.stub.Subscribe(pb.SubscribeRequest(topic="vectors", **wrong)).read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    trailing = dict(refused.value.trailing_metadata() or ())
    assert [trailing["penstock-field"]] == list(wrong)


async def test_an_id_of_a_deleted_topic_is_no_place_in_its_successor(site: Site) -> None:
    """Before, a browser that came back was not told: its stream was opened on the successor."""
    await site.fill()
    known = await site.first_id()
    await site.deltas.topic.delete(force=True)
    await site.engine.administration.create_topic(
        {"name": "vectors", "kind": "delta", "dimensions": 4, "partitions": 2}, exists_ok=False
    )
    for how in ({"headers": {"last-event-id": known}}, {"params": {"positions": known}}):
        answer = await site.http.get("/v1/deltas/vectors/events", **how)
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    with pytest.raises(grpc.aio.AioRpcError, match="made again"):
        await site.stub.Subscribe(pb.SubscribeRequest(topic="vectors", positions=known)).read()
    assert (await site.first_id("from_sequence=1")).startswith("2@")
