"""Stored bytes that nobody can read: refused at the door, and harmless where they are in a log."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import httpx
import msgspec
import numpy as np
import pytest
from tests.integration.harness import Node, delivered_payloads

from penstock.client.network.connection import Connection
from penstock.errors import InvalidArgument
from penstock.model.batch import SCHEMAS, Kind
from penstock.model.plain import DEPTH_MAX, UNREADABLE
from penstock.node.serve.partition import Partition
from penstock.server._generated import penstock_pb2 as pb
from penstock.server._generated.penstock_pb2_grpc import PenstockStub
from penstock.server.gateway import Gateway
from verification.malformed_maps import MALFORMED_MAPS

ENQ = SCHEMAS[Kind.ENQ]
FINE = b"\x81\xa1a\xa1b"  # {"a": "b"}


def body_with(headers: Sequence[bytes], payloads: Sequence[bytes]) -> bytes:
    return ENQ.encode(len(headers), {"headers": headers, "payload": payloads})


def local(node: Node, topic: str, index: int = 0) -> Partition:
    found = node.engine.topics[topic].partitions[index]
    assert isinstance(found, Partition)
    return found


async def write_below_the_door(
    node: Node, topic: str, headers: Sequence[bytes], payloads: Sequence[bytes]
) -> None:
    """Into the log, past every check: as a version without the check would have done."""
    partition = local(node, topic)
    body = body_with(headers, payloads)
    batch = partition.append(Kind.ENQ, body, len(headers))
    node.engine.topics[topic].wake()
    await partition.committed(batch.last)


# --- the door ---


@pytest.mark.parametrize("name", MALFORMED_MAPS)
async def test_headers_that_nobody_can_read_are_refused(node: Node, name: str) -> None:
    """Before, every one of them was accepted, and most ended the node at the next pop."""
    topic = await node.topic(partitions=2)
    body = body_with([FINE, MALFORMED_MAPS[name]], [b"good", b"bad"])
    for how in ({"partitioned": False}, {"partitioned": True}, {"atomic": True}):
        with pytest.raises(InvalidArgument, match="headers") as refused:
            await node.connection.enqueue(topic, [(0, 2, body)], **how)
        assert refused.value.field == "headers" and refused.value.details["index"] == 1
        if "deep" in name:
            assert refused.value.limit == DEPTH_MAX
    assert await node.counts() == (0, 0, 0, 0)


async def test_a_refused_part_of_an_atomic_batch_changes_nothing(node: Node) -> None:
    topic = await node.topic(partitions=2)
    good, bad = body_with([FINE], [b"x"]), body_with([MALFORMED_MAPS["array"]], [b"y"])
    with pytest.raises(InvalidArgument, match="headers"):
        await node.connection.enqueue(topic, [(0, 1, good), (1, 1, bad)], atomic=True)
    await node.settled()
    assert await node.counts() == (0, 0, 0, 0)
    assert all(not p.heap.prepared for p in node.engine.topics[topic].local)


# --- what is in a log all the same ---


@pytest.mark.parametrize("name", MALFORMED_MAPS)
async def test_a_message_that_cannot_be_read_becomes_a_dead_letter(node: Node, name: str) -> None:
    """Before, the pop ended the node for most of them, and did so again after each restart."""
    topic = await node.topic(partitions=1)
    headers = [FINE, MALFORMED_MAPS[name], FINE]
    await write_below_the_door(node, topic, headers, [b"first", b"bad", b"last"])
    peeked = (await node.call("peek", topic=topic))["messages"]
    assert [m["payload"] for m in peeked] == [b"first", b"bad", b"last"]
    assert set(peeked[1]["headers"]) == {UNREADABLE}
    assert await node.popped(topic) == [b"first", b"last"]
    await node.settled()
    (dead,) = await node.dead()
    assert (dead["payload"], dead["reason"]) == (b"bad", "unreadable")
    assert dead["detail"].startswith("headers: ")
    assert node.engine.fatal_error is None and node.engine.damage is None


async def test_unreadable_messages_do_not_keep_a_pop_from_what_is_behind_them(node: Node) -> None:
    topic = await node.topic(partitions=1)
    bad = list(MALFORMED_MAPS.values())
    headers = [*bad, FINE]
    await write_below_the_door(node, topic, headers, [b"bad"] * len(bad) + [b"good"])
    assert await node.popped(topic, 1) == [b"good"]
    await node.settled()
    assert await node.counts() == (0, 0, 1, len(bad))


async def test_a_pop_that_waits_gets_what_comes_after_an_unreadable_one(node: Node) -> None:
    topic = await node.topic(partitions=1)
    await write_below_the_door(node, topic, [MALFORMED_MAPS["980-deep"]], [b"bad"])
    waiting = asyncio.create_task(node.popped(topic, 1, wait_ms=60_000))
    await node.settled()
    await node.put(topic, b"good")
    assert await waiting == [b"good"]


async def test_a_stream_delivers_the_neighbours_and_gets_its_credit_back(node: Node) -> None:
    topic = await node.topic(partitions=1)
    stream = await node.stream(topic, credits=2, batch_max=2)
    for name in ("980-deep", "array", "cut-short"):
        await write_below_the_door(node, topic, [MALFORMED_MAPS[name]] * 2, [b"bad"] * 2)
    await write_below_the_door(node, topic, [FINE, b""], [b"x", b"y"])
    assert delivered_payloads(await node.delivered(stream)) == [b"x", b"y"]
    assert await node.counts() == (0, 0, 2, 6)


async def test_an_unreadable_message_survives_a_restart_and_a_replay(node: Node) -> None:
    topic = await node.topic(partitions=1)
    await write_below_the_door(node, topic, [MALFORMED_MAPS["10000-deep"], FINE], [b"bad", b"good"])
    await node.crash()
    assert await node.popped(topic) == [b"good"]
    await node.settled()
    await node.crash()
    (dead,) = await node.dead()
    assert (dead["payload"], dead["reason"]) == (b"bad", "unreadable")
    assert (await node.call("dlq_replay", topic=topic))["replayed"] == 1
    assert await node.popped(topic) == []
    await node.settled()
    assert [d["reason"] for d in await node.dead()] == ["unreadable"]
    assert node.engine.fatal_error is None


async def test_a_body_that_holds_no_columns_is_a_dead_letter_too(node: Node) -> None:
    """What the log holds is what was written, as its CRC says, and is no body. Before, the message
    came back every few seconds, and each pop that got it failed with Corruption."""
    topic = await node.topic(partitions=1)
    columns = ENQ.decode(body_with([b"", b""], [b"a", b"b"]), 2)
    partition = local(node, topic)
    batch = partition.append(Kind.ENQ, b"nonsense", 2, columns=columns)
    node.engine.topics[topic].wake()
    await partition.committed(batch.last)
    await node.put(topic, b"good")
    assert len((await node.call("peek", topic=topic))["messages"]) == 3
    assert await node.popped(topic) == [b"good"]
    await node.settled()
    dead = await node.dead()
    assert [(d["reason"], d["payload"]) for d in dead] == [("unreadable", b"")] * 2
    assert all(d["detail"].startswith("body: ") for d in dead)


async def test_a_dead_letter_of_an_unknown_reason_is_listed(node: Node) -> None:
    """A later version may have written one. Before, its record could not be taken in."""
    topic = await node.topic(partitions=1)
    await node.put(topic, b"x")
    partition = local(node, topic)
    sequences = partition.heap.select(1, node.clock.now_ms())
    values: dict[str, Any] = {"message": np.array(sequences), "reason": [200]}
    batch = partition.append_record(Kind.DEAD, 1, values)
    node.engine.topics[topic].wake()
    await partition.committed(batch.last)
    assert [d["reason"] for d in await node.dead()] == ["200"]


@pytest.mark.parametrize("name", MALFORMED_MAPS)
async def test_the_gateway_goes_on_past_unreadable_messages(node: Node, name: str) -> None:
    """Before, a stream over gRPC broke off at such a message, a pop over HTTP ended the node, and a
    look at the queue or its dead letters was an internal error."""
    topic = await node.topic(partitions=1)
    config = msgspec.structs.replace(node.config, native_port=-1, grpc_port=0, http_port=0)

    async def connect(api_key: str | None = None) -> Connection:
        return (await node.connect(api_key)).connection

    gateway = Gateway(connect, config, metrics_text=node.engine.metrics.text)
    await gateway.start()
    try:
        bad = MALFORMED_MAPS[name]
        await write_below_the_door(node, topic, [bad, FINE], [b"1", b"2"])
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.ports['http']}") as http:
            peeked = (await http.get("/v1/peek?topic=jobs")).json()["messages"]
            assert [UNREADABLE in m["headers"] for m in peeked] == [True, False]
            popped = (await http.post("/v1/pop", json={"topic": topic, "limit": 9})).json()
            assert [m["payload"] for m in popped["messages"]] == [2]
            await node.settled()
            dead = (await http.get("/v1/dlq?topic=jobs")).json()["messages"]
            assert [(m["payload"], m["reason"]) for m in dead] == [(1, "unreadable")]
        await write_below_the_door(node, topic, [bad, FINE], [b"3", b"4"])
        async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.ports['grpc']}") as channel:
            stream = PenstockStub(channel).PopStream()
            await stream.write(pb.PopStreamRequest(open=pb.PopOpen(topic=topic, credits=5)))
            found = await stream.read()
            assert [item.payload for item in found.items] == [b"4"]
            stream.cancel()
    finally:
        await gateway.stop()
    assert node.engine.fatal_error is None
