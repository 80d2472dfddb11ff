"""Connections that say nothing, or do not read what they asked for."""

import asyncio
from typing import Any

import grpc
import pytest

from penstock.config import Config
from penstock.server import operations
from penstock.server._generated import penstock_pb2 as pb
from penstock.server._generated.penstock_pb2_grpc import PenstockStub
from penstock.server.gateway import Gateway
from verification.fuzz.gateway_corpus import PREFACE, frame, grpc_headers, literal


async def test_half_a_preface_is_not_waited_for(
    node: Any, options: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "HEAD_S", 0.1)
    gateway = Gateway(node.connect, options)
    await gateway.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.ports["grpc"])
        writer.write(PREFACE[:10])
        async with asyncio.timeout(60):
            await reader.read()
        writer.close()
    finally:
        await gateway.stop()


async def test_metadata_that_is_no_text_leaves_no_traceback(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, the library logged one for each."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.ports["grpc"])
    head = grpc_headers("/penstock.v1.Penstock/ListHeaps") + literal(b"x-note", b"\xf2\xc2D")
    call = frame(1, 0x4, 1, head) + frame(0, 0x1, 1, bytes(5))
    writer.write(PREFACE + frame(4, 0, 0) + call)
    async with asyncio.timeout(60):
        while True:
            got = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(got[:3], "big"))
            if got[3] in (1, 3):  # it was answered
                break
    writer.close()
    assert "Invalid encoding" not in caplog.text


async def test_nothing_is_left_of_a_connection_that_is_gone(gateway: Gateway) -> None:
    front = gateway._grpc._front  # type: ignore[union-attr]
    assert front is not None
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.ports['grpc']}") as channel:
        stub: Any = PenstockStub(channel)  # type: ignore[no-untyped-call]
        await stub.Enqueue(pb.EnqueueRequest(topic="jobs", payload=b"x" * 200_000))
        assert len(front.connections) == len(front.named) == 1
        assert gateway.budget.held == 0
    async with asyncio.timeout(60):
        while front.connections:
            await asyncio.sleep(0.001)
    assert not front.named


async def test_answers_that_are_not_read_are_watched_when_a_message_is_whole(
    gateway: Gateway,
) -> None:
    front = gateway._grpc._front  # type: ignore[union-attr]
    assert front is not None
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.ports['grpc']}") as channel:
        await channel.channel_ready()
        (connection,) = front.connections
        connection.pause_writing()
        data = frame(1, 0x4, 1, b"") + frame(0, 0, 1, b"\x00" + (9).to_bytes(4, "big"))
        for piece, held in ((data, 5), (frame(0, 0, 1, bytes(9)), 0)):
            connection.data_received(piece)
            assert connection._requests.held == held
            assert connection in gateway.budget._watched
