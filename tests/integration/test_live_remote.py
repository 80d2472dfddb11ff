"""A node whose own sink writes to the topics of another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.client.delta.deltas import Deltas
from penstock.config import Config
from penstock.errors import InvalidArgument
from penstock.propagation.options import LiveOptions
from penstock.server.embedded import open_embedded
from penstock.server.serve import listen, port_of
from penstock.testing.process import free_ports

OPTIONS = penstock.Options(retry_wait_s=0.01)


@asynccontextmanager
async def running(
    folder: Path, *, port: int, sink: dict[str, Any] | None = None
) -> AsyncIterator[Deltas]:
    """A node with a delta topic, and the topic through a client."""
    live = LiveOptions(sink=() if sink is None else ({"topic": "v", "batch_ms": 0, **sink},))
    node = await open_embedded(folder, config=Config(data=folder, drain_s=1.0, live=live))
    server = await listen(node.engine, host="127.0.0.1", port=port, tls=None)
    try:
        async with penstock.connect(
            f"penstock://127.0.0.1:{port_of(server)}", options=OPTIONS
        ) as client:
            yield await client.deltas("v", dimensions=2, create=True, partitions=2, origin="w")
    finally:
        server.close()
        await node.close()


def remote(port: int, **more: Any) -> dict[str, Any]:
    patience = {"backoff_s_base": 0.01, "backoff_s_cap": 0.1, "breaker_open_s": 0.1}
    return {"kind": "remote", "url": f"penstock://127.0.0.1:{port}", **patience, **more}


async def until(look: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(90):
        while not await look():
            await asyncio.sleep(0.01)


async def logged(deltas: Deltas) -> list[bytes]:
    """All deltas in the topic's log, duplicates too."""
    found = []
    for end in (await deltas.topic.ask("log_status"))["partitions"]:
        connection = await deltas.topic.link.connection()
        stream = await connection.log_stream(
            "v", partition=end["partition"], through=end["sequence_committed"]
        )
        async for batches in stream:
            for batch in batches:
                columns = batch.columns()
                if batch.kind.name == "ENQ":
                    found += columns.binary("payload").tolist()
    return sorted(found)


async def test_the_other_node_gets_every_delta_once(tmp_path: Path) -> None:
    [port] = free_ports(1)
    async with running(tmp_path / "a", port=0, sink=remote(port)) as source:
        async with running(tmp_path / "b", port=port) as copy:
            for number in range(20):
                await source.create(f"v{number}", [number, 0])
            await until(lambda: same(source, copy))
        for number in range(20):
            await source.set(f"v{number}", {1: number})
        await until(lambda: failed(source))  # nobody is there
        async with running(tmp_path / "b", port=port) as copy:
            await until(lambda: same(source, copy))
            vector = await copy.get("v7")
            assert vector is not None and vector.values.tolist() == [7, 7]


async def failed(source: Deltas) -> bool:
    status = await source.topic.ask("live_status")
    return bool(status["topics"][0]["sinks"][0]["retries"])


async def same(source: Deltas, copy: Deltas) -> bool:
    """Whether both logs hold the same deltas, each once."""
    ours, theirs = await logged(source), await logged(copy)
    assert len(set(theirs)) == len(theirs)
    return ours == theirs


async def test_a_url_that_will_not_do_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="url"):
        async with running(tmp_path, port=0, sink=remote(0, url="http://elsewhere")):
            pass
