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

from penstock.client.network.endpoints import open_connection
from penstock.errors import PenstockError
from penstock.testing.process import server_process

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


async def test_nobody_has_to_guess_what_a_server_did_that_stops(tmp_path: Path) -> None:
    """Whatever a client has under way is answered, or refused as not done. Before, the server
    closed the connection on requests that were on their way: it was reset, and with it went the
    answers to requests that had been done."""
    async with server_process(tmp_path / "data", options=OPTIONS) as server:
        callers = [Caller(await open_connection(server.url)) for _ in range(4)]
        topic = await callers[0].topic()
        errors: list[PenstockError] = []

        async def put(caller: Caller) -> None:
            try:
                while True:
                    await caller.put(topic, b"x" * 2000)
            except PenstockError as error:
                errors.append(error)

        async with asyncio.TaskGroup() as tasks:
            for caller in callers * 50:
                tasks.create_task(put(caller))
            await asyncio.sleep(0.5)
            os.kill(server.pid, signal.SIGTERM)
        assert await server.ended() == 0
    assert len(errors) == 200
    doubtful = [
        e for e in errors if not (e.details.get("elsewhere") or e.details.get("sent") is False)
    ]
    assert not doubtful, doubtful[0]


@pytest.mark.parametrize("content", [b"", b"{", b'{"node":"\xff","replica_uuid":"x"}'])
async def test_a_damaged_node_file_is_named(tmp_path: Path, content: bytes) -> None:
    """Before, the process ended with a traceback and the exit code of a defect."""
    async with server_process(tmp_path / "data", options=OPTIONS) as server:
        assert await server.stop() == 0
    (tmp_path / "data" / "node.json").write_bytes(content)
    code, error = await refused(tmp_path / "data")
    assert (code, error["code"]) == (1, "corruption")
    assert error["file"] == str(tmp_path / "data" / "node.json")


async def test_what_a_node_writes_is_its_users_alone(tmp_path: Path) -> None:
    """Before, `meta/store.bin` was 0644 and the folder 0755, or 0666 and 0777 under this umask."""
    before = os.umask(0)
    try:
        async with server_process(tmp_path / "data", options=OPTIONS) as server:
            caller = Caller(await open_connection(server.url))
            topic = await caller.topic(partitions=2)
            for _ in range(5):
                await caller.put(topic, b"x" * 100_000)
            await caller.call("snapshot", topic=topic)
            await caller.call("key_create", name="somebody")
            found = [tmp_path / "data", *(tmp_path / "data").rglob("*")]
            modes = {each: each.stat().st_mode & 0o777 for each in found}
            assert await server.stop() == 0
    finally:
        os.umask(before)
    names = {each.name for each in found}
    assert {"store.bin", "FORMAT", "LOCK", "node.json", "audit.jsonl", "floor"} <= names
    assert {each: mode for each, mode in modes.items() if mode not in (0o700, 0o600)} == {}


async def test_a_node_goes_on_when_its_terminal_hangs_up(tmp_path: Path) -> None:
    """Before, SIGHUP ended the process at once, without a clean stop."""
    async with server_process(tmp_path / "data", options=OPTIONS) as server:
        caller = Caller(await open_connection(server.url))
        topic = await caller.topic()
        os.kill(server.pid, signal.SIGHUP)
        assert len(await caller.put(topic, b"x")) == 1
        assert await server.stop() == 0
        assert "SIGHUP is ignored" in server.log_path.read_text()
