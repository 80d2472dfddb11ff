"""Callers that mean ill, against a real node that serves somebody else meanwhile."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import trustme
from tests.integration.attacker import (
    GREETING,
    MIB,
    Attacker,
    healthy,
    held,
    resident_mib,
    slowest_put_s,
    unfinished,
)
from tests.integration.harness import Caller

from penstock.errors import Backpressure
from penstock.model.delta import Delta, Op
from penstock.model.delta import encode as encode_delta
from penstock.testing.process import ServerProcess, server_process
from penstock.wire.frame import HEADER, OVERHEAD, FrameFlag, FrameType, encode
from penstock.wire.messages import Call, OpenLease, OpenLog, Settle, TokenPart, pack

HEARTBEAT = b"".join(encode(FrameType.HEARTBEAT, 1))
HEAD = b"POST /v1/enqueue HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ServerProcess]:
    async with server_process(tmp_path / "data") as started:
        yield started


@pytest.fixture
async def attacker(server: ServerProcess) -> AsyncIterator[Attacker]:
    made = Attacker(server)
    yield made
    await made.close()


# --- floods ---


def frames(type: FrameType, payload: bytes, count: int, *, flags: int = 0) -> bytes:
    return b"".join(encode(type, 1, payload, flags=flags)) * count


def many_parts() -> bytes:
    """One frame with as many parts as there may be, all of them wrong."""
    parts = pack(Settle("jobs", [TokenPart(0, 1, 1, 1)] * 16_384))
    return frames(FrameType.ACK, parts + bytes(8 * 16_384), 1, flags=FrameFlag.ACK_WANTED)


FLOODS: dict[str, Callable[[], bytes]] = {
    "heartbeats": lambda: HEARTBEAT * 10_000,
    "calls": lambda: frames(FrameType.SUBSCRIBE, pack(Call("stats", {"topic": "jobs"})), 2000),
    "streams": lambda: frames(FrameType.SUBSCRIBE, pack(OpenLease("nothing", 1)), 2000),
    "tokens": lambda: frames(
        FrameType.ACK,
        pack(Settle("jobs", [TokenPart(0, 1, 1, 1)])) + bytes(8),
        2000,
        flags=FrameFlag.ACK_WANTED,
    ),
    "parts": many_parts,
}


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_flood_slows_its_sender_and_nobody_else(
    server: ServerProcess, attacker: Attacker, kind: str
) -> None:
    """Before, four connections that send heartbeats of 20 bytes held others up for seconds."""
    async with healthy(server) as caller:
        await caller.topic()
        await attacker.open(4, GREETING)
        attacker.flood(FLOODS[kind]())
        worst = await slowest_put_s(caller, for_s=2.0)
    assert worst < 2.5  # it was more than five; other processes may hold the node up as well


# --- what is held ---


async def test_unfinished_frames_leave_room_for_others(
    server: ServerProcess, attacker: Attacker
) -> None:
    """Before, eight frames of 64 MiB that lacked a byte each were all that a node would hold, and
    every enqueue was refused for as long as they stayed."""
    async with healthy(server) as caller:
        await caller.topic()
        await caller.put("jobs", b"x")
        before = resident_mib(server)
        await attacker.greet(8, unfinished(64 * MIB - OVERHEAD, 0))
        await attacker.send(bytes(64 * MIB - HEADER.size - 1), within_s=10.0)
        for size in (1, 1000, 200_000, 1_000_000):
            await caller.put("jobs", bytes(size))
        assert resident_mib(server) - before < 150


async def test_a_frame_that_never_ends_is_cut_off(tmp_path: Path) -> None:
    """Before, a byte now and then kept a frame, and what it held, for ever."""
    options = {"limits.frame_s": 1, "limits.bytes_per_s_min": 100_000}
    async with server_process(tmp_path / "data", options=options) as server:
        attacker = Attacker(server)
        async with healthy(server) as caller:
            await caller.topic()
            await attacker.greet(2, unfinished(MIB, 50_000))
            async with asyncio.timeout(20):
                while await attacker.ended() < 2:
                    await attacker.send(b"x", within_s=1.0)
            await caller.put("jobs", b"x")
        await attacker.close()


async def test_slow_frames_have_the_time_that_their_bytes_take(tmp_path: Path) -> None:
    """At a thousand bytes a second, fifty thousand bytes may take long."""
    options = {"limits.frame_s": 0.1, "limits.bytes_per_s_min": 1000}
    async with server_process(tmp_path / "data", options=options) as server:
        attacker = Attacker(server)
        await attacker.greet(1, unfinished(MIB, 50_000))
        await attacker.greet(1, unfinished(MIB, 0))
        async with asyncio.timeout(20):
            while not await attacker.ended():
                await attacker.send(b"x", within_s=1.0)
        assert await attacker.ended() == 1
        await attacker.close()


async def test_a_smaller_budget_holds_less(tmp_path: Path) -> None:
    small = {"limits.frame_bytes_max": 4 * MIB, "limits.raw_bytes_max": 4 * MIB}
    async with server_process(
        tmp_path / "data", options=small | {"limits.held_bytes_max": 7 * MIB}
    ) as server:
        attacker = Attacker(server)
        async with healthy(server) as caller:
            await caller.topic()
            await attacker.greet(8, unfinished(4 * MIB - OVERHEAD, 0))
            await attacker.send(bytes(4 * MIB - HEADER.size - 1), within_s=3.0)
            assert 0 < await held(server, "frames") <= 7 * MIB
            await caller.put("jobs", b"x")
        await attacker.close()


async def test_pipelined_requests_slow_their_sender_and_nobody_else(
    server: ServerProcess, attacker: Attacker
) -> None:
    """Before, all requests of a chunk were parsed and kept: eight connections cost 310 MiB."""
    async with healthy(server) as caller:
        await caller.topic()
        before = resident_mib(server)
        request = b"GET /v1/status HTTP/1.1\r\nhost: localhost\r\n\r\n"
        await attacker.open(4, request, listener="http")
        attacker.flood(request * 4000)
        unread = Attacker(server)
        await unread.open(4, b"", listener="http")
        await unread.send(request * 20_000, within_s=2.0)
        await slowest_put_s(caller, for_s=1.0)
        assert resident_mib(server) - before < 100
        await unread.close()


async def test_http_bodies_leave_room_for_others(server: ServerProcess, attacker: Attacker) -> None:
    """Before, forty bodies that were not whole cost over 400 MiB within the three seconds."""
    async with healthy(server) as caller, httpx.AsyncClient(base_url=server.http) as http:
        await caller.topic()
        put = {"topic": "jobs", "payload": "x"}
        assert (await http.post("/v1/enqueue", json=put)).status_code == 200
        before = resident_mib(server)
        await attacker.open(40, HEAD % (60 * MIB), listener="http")
        await attacker.send(b" " * (59 * MIB), within_s=3.0)
        assert (await http.post("/v1/enqueue", json=put)).status_code == 200
        large = {"topic": "jobs", "payload": "x" * 200_000}
        assert (await http.post("/v1/enqueue", json=large)).status_code == 200
        assert resident_mib(server) - before < 150


async def large_messages(caller: Caller) -> None:
    await caller.topic("large")
    for _ in range(50):
        await caller.put("large", bytes(900_000))


def peeks(count: int) -> bytes:
    call = pack(Call("peek", {"topic": "large", "limit": 1000}))
    made = (encode(FrameType.SUBSCRIBE, n, call, flags=1) for n in range(1, count + 1))
    return b"".join(part for parts in made for part in parts)


async def test_unread_answers_leave_room_for_others(
    server: ServerProcess, attacker: Attacker
) -> None:
    """Before, twenty connections that do not read their peeks cost over 3 GiB."""
    async with healthy(server) as caller:
        await caller.topic()
        await large_messages(caller)
        await caller.call("peek", topic="large", limit=3)
        before = resident_mib(server)
        await attacker.open(20, GREETING + peeks(100))
        await slowest_put_s(caller, for_s=2.0)
        assert len(await peeked(caller)) == 1
        grown = resident_mib(server) - before
        assert grown < 150


async def peeked(caller: Caller) -> list[Any]:
    """A message, asked for again while there is no room for the answer: those who do not read are
    cut off one after the other."""
    async with asyncio.timeout(30):
        while True:
            try:
                return list((await caller.call("peek", topic="large", limit=1))["messages"])
            except Backpressure as refused:
                await asyncio.sleep(refused.retry_after_s)


def log_readers(count: int) -> bytes:
    """Requests for streams of the log of large messages, with more credit than there is memory."""
    asked = pack(OpenLog("large", 0, credit_entries=100_000, credit_bytes=64 * MIB))
    made = (encode(FrameType.SUBSCRIBE, n, asked, flags=1) for n in range(1, count + 1))
    return b"".join(part for parts in made for part in parts)


async def test_unread_streams_leave_room_for_others(
    server: ServerProcess, attacker: Attacker
) -> None:
    """Before, each was sent a batch whatever was held already, of which the part that the kernel
    had taken did not count though the memory was not free: a hundred cost 183 MB and more."""
    async with healthy(server) as caller:
        await caller.topic()
        await caller.topic("large")
        for _ in range(10):
            await caller.enqueue("large", [{"payload": bytes(250_000)}] * 20)
        before = resident_mib(server)
        await attacker.open(100, GREETING + log_readers(5))
        await slowest_put_s(caller, for_s=2.0)
        assert resident_mib(server) - before < 120
        stream = await caller.connection.log_stream("large", partition=0)
        async with asyncio.timeout(15):
            first = 1
            while first < 201:
                first = (await anext(stream))[-1].last + 1
        assert resident_mib(server) - before < 120


def vector(number: int) -> bytes:
    return encode_delta(
        Delta(
            delta_id=b"%016d" % number, namespace="n", vector_id=f"v{number}", op=Op.CREATE,
            origin=f"w{number}", time=1, clock={f"w{number}": 1}, values=np.full(1000, 0.123),
        ),
        dimensions=1000,
    )  # fmt: skip


async def test_unread_events_leave_room_for_others(
    server: ServerProcess, attacker: Attacker
) -> None:
    """Before, half a megabyte of deltas waited for each, and counted nowhere: 110 MiB for a
    hundred of them."""
    async with healthy(server) as caller:
        await caller.topic()
        await caller.topic("vectors", kind="delta", dimensions=1000)
        for first in range(0, 1000, 200):
            rows = [{"payload": vector(first + i)} for i in range(200)]
            await caller.enqueue("vectors", rows)
        events = (
            b"GET /v1/deltas/vectors/events?from_sequence=1 HTTP/1.1\r\nhost: localhost\r\n\r\n"
        )
        await attacker.open(1, events, listener="http")
        await slowest_put_s(caller, for_s=1.0)  # so that the deltas are folded
        before = resident_mib(server)
        await attacker.open(100, events, listener="http")
        async with asyncio.timeout(20):
            while await held(server, "reads") < 100 * (64 << 10):
                await slowest_put_s(caller, for_s=0.2)
        assert resident_mib(server) - before < 85


async def test_unread_http_answers_leave_room_and_end(tmp_path: Path) -> None:
    """Fifty connections stay within the budget, and end after the deadline for writing. Before,
    they cost over 500 MiB."""
    async with server_process(tmp_path / "data", options={"limits.write_s": 2}) as server:
        attacker = Attacker(server)
        async with healthy(server) as caller:
            await caller.topic()
            await large_messages(caller)
            before = resident_mib(server)
            peek = b"GET /v1/peek?topic=large&limit=1000 HTTP/1.1\r\nhost: localhost\r\n\r\n"
            await attacker.open(50, peek * 10, listener="http")
            await slowest_put_s(caller, for_s=2.0)
            grown = resident_mib(server) - before
            assert grown < 150
            async with asyncio.timeout(30):
                while await held(server):
                    await asyncio.sleep(0.1)
        await attacker.close()


async def test_an_unread_http_answer_counts_as_a_whole(server: ServerProcess) -> None:
    """A part of it keeps all of it. Before, what the kernel had taken did not count: of four
    megabytes that was most."""
    async with healthy(server) as caller:
        await caller.topic("large")
        await caller.enqueue("large", [{"payload": bytes(250_000)}] * 12)
    with socket.socket() as asking:
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        asking.connect(("127.0.0.1", server.ports["http"]))
        asking.sendall(b"GET /v1/peek?topic=large&limit=12 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        async with asyncio.timeout(20):
            while await held(server, "answers") < 12 * 250_000 * 4 // 3:
                await asyncio.sleep(0.1)


# --- TLS ---


def tls_of(folder: Path) -> tuple[dict[str, Path], ssl.SSLContext]:
    """Options for a node, and what its callers trust."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    tls = ssl.create_default_context()
    authority.configure_trust(tls)
    return {"tls.cert": folder / "cert.pem", "tls.key": folder / "key.pem"}, tls


async def test_a_connection_by_tls_costs_little_beside_what_it_sent(tmp_path: Path) -> None:
    """Before, 60 KiB of a frame cost 180 KiB and more."""
    options, tls = tls_of(tmp_path)
    async with server_process(tmp_path / "data", options=options) as server:
        attacker = Attacker(server, tls)
        try:
            await attacker.greet(20, unfinished(1 << 20, 60 << 10))
            before = resident_mib(server)
            await attacker.greet(200, unfinished(1 << 20, 60 << 10))
            await asyncio.sleep(1.0)
            assert resident_mib(server) - before < 200 * 110 / 1024
        finally:
            await attacker.close()


@pytest.mark.parametrize("listener", ["native", "http"])
async def test_every_handshake_is_gone_into(tmp_path: Path, listener: str) -> None:
    """One in five hung before: its first bytes came before the handshake had begun, and were kept
    from it."""
    options, tls = tls_of(tmp_path)
    async with server_process(tmp_path / "data", options=options) as server:
        for _ in range(50):
            async with asyncio.timeout(15):
                _, writer = await asyncio.open_connection(
                    "127.0.0.1", server.ports[listener], ssl=tls
                )
            writer.transport.abort()
