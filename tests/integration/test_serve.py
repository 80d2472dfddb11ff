"""`penstock serve` as a process: what it refuses to start on, and how it says so."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.crashing import OPTIONS, server_in
from tests.integration.harness import Caller, Node

from penstock.client.connection import open_connection

ENV = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}


async def refused(data: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the error of a server that does not start."""
    command = [sys.executable, "-m", "penstock.cli", "serve", "--data", str(data), "--json"]
    ports = ["--port", "0", "--grpc-port", "-1", "--http-port", "-1"]
    found = await asyncio.to_thread(
        subprocess.run, [*command, *ports, *options], capture_output=True, env=ENV, timeout=200,
        check=False,
    )  # fmt: skip
    return found.returncode, json.loads(found.stdout)["error"]


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


@pytest.mark.parametrize("option", ["--port", "--grpc-port", "--http-port"])
async def test_a_taken_port_is_named(tmp_path: Path, option: str, taken: str) -> None:
    code, error = await refused(tmp_path / "data", option, taken)
    assert (code, error["code"]) == (5, "unavailable")
    assert taken in error["message"]


async def test_damaged_data_is_refused_until_an_operator_says_so(small_node: Node) -> None:
    node = small_node
    topic = await node.topic()
    for i in range(40):
        await node.put(topic, b"%d" % i + b"x" * 8000)
    await node.stop()
    oldest = min(node.path.rglob("*.seg"))
    data = bytearray(oldest.read_bytes())
    data[40_000] ^= 1
    oldest.write_bytes(data)
    code, error = await refused(node.path)
    assert (code, error["code"], error["file"]) == (1, "corruption", str(oldest))
    server = server_in(node.path, "")
    server.options = OPTIONS | {"accept_rot": "true", "upkeep.retention_s": 3600}
    await server.start()
    caller = Caller(await open_connection(server.url))
    kept = (await caller.counts(topic))[0]
    assert 0 < kept < 40
    assert [int(p.split(b"x")[0]) for p in await caller.popped(topic)] == list(range(kept))
    assert await server.stop() == 0
    assert list(node.path.rglob("*.rot"))


async def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "FORMAT").write_text('{"format": 99}')
    code, error = await refused(tmp_path)
    assert (code, error["code"]) == (4, "failed_precondition")


async def test_a_stopped_server_loses_nothing_and_says_goodbye(tmp_path: Path) -> None:
    server = server_in(tmp_path / "data", "")
    await server.start()
    caller = Caller(await open_connection(server.url))
    topic = await caller.topic(visibility_ms=60_000)
    puts = [asyncio.create_task(caller.put(topic, b"%d" % i)) for i in range(50)]
    waiting = asyncio.create_task(caller.pop(topic, 1, wait_ms=50_000))
    await asyncio.wait(puts, return_when=asyncio.FIRST_COMPLETED)
    os.kill(server.pid, signal.SIGTERM)
    answered = [a for a in await asyncio.gather(*puts, return_exceptions=True) if type(a) is list]
    await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(30):
        assert await server.ended() == 0
    await server.start()
    caller = Caller(await open_connection(server.url))
    ready, _, leased, _ = await caller.counts(topic)
    assert ready + leased >= len(answered) > 0
    assert await server.stop() == 0
