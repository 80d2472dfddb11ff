"""What a reader that does not read its socket makes a node hold that passes a stream on to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from tests.integration.raw_peer import WANTED, RawPeer, raw_peer
from tests.unit.node.conftest import Cluster
from tests.unit.node.live.subscribing import TOPIC, put

from penstock.model.delta import Delta, Op, encode
from penstock.node.session.session import Session
from penstock.node.session.stream_table import RELAY_BYTES_MAX
from penstock.wire.frame import FrameType
from penstock.wire.messages import (
    Changes,
    Grant,
    LogSlice,
    OpenLog,
    OpenSubscription,
    pack,
    unpack,
)

MIB = 1 << 20
DIMENSIONS = 4096
DELTAS = 1200  # of 16 KiB each
PAYLOAD = 256 << 10
MESSAGES = 100
STREAM_BYTES = 6 * MIB  # that one stream may make a node hold, with the frames under way
CONNECTION_BYTES = 60 * MIB  # that thirty may


@asynccontextmanager
async def deaf(cluster: Cluster, name: str) -> AsyncIterator[tuple[RawPeer, Session]]:
    """A greeted peer of a node, which reads when it is asked to, and the node's end of it."""
    engine = cluster[name].engine
    known = set(engine.connections)
    async with raw_peer(engine) as peer:
        await peer.greet()
        (session,) = engine.connections - known
        assert isinstance(session, Session)
        yield peer, session


def held(session: Session) -> int:
    return 0 if session._transport is None else session._transport.get_write_buffer_size()


async def full(session: Session) -> None:
    async with asyncio.timeout(60):
        while not session.streams.blocked:
            await asyncio.sleep(0)


async def most_held(cluster: Cluster, session: Session) -> int:
    """Once its socket is full, while others are served for as long as sending it all would take."""
    await full(session)
    most = 0
    for _ in range(300):
        await asyncio.gather(*(cluster[name].call("topic_list") for name in "ab"))
        most = max(most, held(session))
    return most


async def read(peer: RawPeer, type: Any, *, streams: int, entries: int) -> dict[int, list[Any]]:
    """The controls of all frames, by stream, until each stream has brought so many entries."""
    found: dict[int, list[Any]] = {number: [] for number in range(1, streams + 1)}
    left = streams * entries
    while left > 0:
        frame = await peer.frame()
        assert frame is not None, "the node hung up"
        assert frame.type is not FrameType.NACK, bytes(frame.payload)
        if frame.type is FrameType.BATCH:
            control, _ = unpack(frame.payload, type)
            found[frame.sequence].append(control)
            left -= count_of(control)
    return found


def count_of(control: Any) -> int:
    if isinstance(control, Changes):
        return control.count
    assert isinstance(control, LogSlice)
    return control.last - control.first + 1


@pytest.fixture
async def wide(cluster: Cluster) -> str:
    """A delta topic of 20 MiB, served by b."""
    await cluster.topic(TOPIC, "b", kind="delta", dimensions=DIMENSIONS)
    values = np.ones(DIMENSIONS, np.float32)
    payloads = [
        encode(
            Delta(
                delta_id=number.to_bytes(16), namespace="n", vector_id=f"v{number}", op=Op.CREATE,
                origin="o", clock={"o": 1}, time=number, values=values,
            ),
            dimensions=DIMENSIONS,
        )
        for number in range(1, DELTAS + 1)
    ]  # fmt: skip
    await put(cluster["b"], payloads)
    return TOPIC


@pytest.fixture
async def jobs(cluster: Cluster) -> str:
    """A queue whose log has 25 MiB, served by b."""
    await cluster.topic("jobs", "b")
    for _ in range(MESSAGES):
        await cluster["b"].put("jobs", bytes(PAYLOAD))
    return "jobs"


async def test_a_deaf_subscriber_costs_a_relaying_node_little(cluster: Cluster, wide: str) -> None:
    async with deaf(cluster, "a") as (peer, session):
        request = OpenSubscription(
            wide, 0, start="sequence", at=1, credit_entries=100_000, credit_bytes=256 * MIB
        )
        peer.send(FrameType.SUBSCRIBE, 1, pack(request), flags=WANTED)
        assert await most_held(cluster, session) < STREAM_BYTES
        found = await read(peer, Changes, streams=1, entries=DELTAS)
        assert found[1][-1].position == DELTAS + 1  # behind the barrier


async def test_a_deaf_log_reader_costs_a_relaying_node_little(cluster: Cluster, jobs: str) -> None:
    async with deaf(cluster, "a") as (peer, session):
        request = OpenLog(jobs, 0, 1, credit_entries=100_000, credit_bytes=256 * MIB)
        peer.send(FrameType.SUBSCRIBE, 1, pack(request), flags=WANTED)
        assert await most_held(cluster, session) < STREAM_BYTES
        slices = (await read(peer, LogSlice, streams=1, entries=MESSAGES + 1))[1]
        assert [one.first for one in slices] == [1, *(one.last + 1 for one in slices[:-1])]


async def test_deaf_readers_of_many_streams_share_what_a_node_holds_for_them(
    cluster: Cluster, jobs: str
) -> None:
    async with deaf(cluster, "a") as (peer, session):
        request = OpenLog(jobs, 0, 1, credit_entries=100_000, credit_bytes=256 * MIB)
        for number in range(1, 31):
            peer.send(FrameType.SUBSCRIBE, number, pack(request), flags=WANTED)
        assert await most_held(cluster, session) < CONNECTION_BYTES
        found = await read(peer, LogSlice, streams=30, entries=MESSAGES + 1)
        assert {slices[-1].last for slices in found.values()} == {MESSAGES + 1}


async def test_a_stream_that_is_opened_while_nothing_is_read_waits(
    cluster: Cluster, jobs: str
) -> None:
    async with deaf(cluster, "b") as (peer, session):  # which has the log itself
        request = pack(OpenLog(jobs, 0, 1, credit_entries=100_000, credit_bytes=256 * MIB))
        peer.send(FrameType.SUBSCRIBE, 1, request, flags=WANTED)
        await full(session)
        peer.send(FrameType.SUBSCRIBE, 2, request, flags=WANTED)
        assert await most_held(cluster, session) < STREAM_BYTES
        found = await read(peer, LogSlice, streams=2, entries=MESSAGES + 1)
        assert {slices[-1].last for slices in found.values()} == {MESSAGES + 1}


async def test_a_window_bounds_what_comes_although_the_other_node_has_less_of_it(
    cluster: Cluster, jobs: str
) -> None:
    stream = await cluster["a"].connection.log_stream(
        jobs, partition=0, credit_entries=1000, credit_bytes=6 * MIB
    )
    (source,) = cluster["b"].engine.topics[jobs].log_streams
    assert source.credit.bytes_window == RELAY_BYTES_MAX
    entries = 6 * MIB // PAYLOAD
    async with asyncio.timeout(60):
        while source.cursor < entries:  # more than the other node may send by itself
            await asyncio.sleep(0)
    for _ in range(100):
        await cluster["b"].stats(jobs)
    assert source.cursor <= entries + 1
    seen = 0
    async with asyncio.timeout(60):
        while seen < MESSAGES + 1:
            seen = (await anext(stream))[-1].last


async def test_who_returns_more_than_came_is_refused(cluster: Cluster, jobs: str) -> None:
    async with deaf(cluster, "a") as (peer, _):
        request = OpenLog(jobs, 0, 1, credit_entries=2, credit_bytes=MIB)
        peer.send(FrameType.SUBSCRIBE, 1, pack(request), flags=WANTED)
        await peer.answer(1)
        peer.send(FrameType.ACK, 1, pack(Grant(MESSAGES, 0)))
        while (frame := await peer.frame()) is not None:
            if frame.type is FrameType.UNSUBSCRIBE:
                break
        assert frame is not None and unpack(frame.payload, dict)[0]["code"] == "invalid_argument"


async def test_a_cursor_moves_although_the_connection_is_full(cluster: Cluster, wide: str) -> None:
    async with deaf(cluster, "a") as (peer, session):
        request = OpenSubscription(
            wide, 0, start="sequence", at=1, cursor="mine", credit_bytes=256 * MIB
        )
        peer.send(FrameType.SUBSCRIBE, 1, pack(request), flags=WANTED)
        await full(session)
        while (frame := await peer.frame()) is None or frame.type is not FrameType.BATCH:
            pass
        position = unpack(frame.payload, Changes)[0].position
        peer.send(FrameType.ACK, 1, pack(Grant(0, 0, position)))
        live = cluster["b"].engine.topics[wide].live
        assert live is not None
        async with asyncio.timeout(60):
            while live.partitions[0].subscriptions[0].acknowledged < position:
                await asyncio.sleep(0)
