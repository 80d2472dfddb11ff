"""Writing to a cluster and reading back what it holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.client.network.connection import Connection
from penstock.client.network.endpoints import open_connection
from penstock.errors import PenstockError, Unavailable
from penstock.model.batch import SCHEMAS, Kind
from penstock.testing.cluster import ClusterProcesses, cluster_processes

WITHIN_S = 90.0
SOON_S = 20.0  # for what takes a second or two on a quiet machine


class Asking:
    """A cluster's processes, and connections to its nodes that are kept while they live."""

    def __init__(self, processes: ClusterProcesses) -> None:
        self.processes = processes
        self._connections: dict[str, Connection] = {}

    async def connection(self, node: str) -> Connection:
        found = self._connections.get(node)
        if found is None or not found.alive:
            found = await open_connection(self.processes.url_of(node))
            self._connections[node] = found
        return found

    async def close(self) -> None:
        for connection in self._connections.values():
            await connection.close()

    async def call(self, method: str, /, *, at: str = "", **arguments: Any) -> dict[str, Any]:
        async with asyncio.timeout(WITHIN_S):
            connection = await self.connection(at or self.processes.running[0])
            return await connection.call(method, **arguments)

    async def destroy(self, method: str, topic: str, *, at: str = "") -> dict[str, Any]:
        """A call that needs a confirmation."""
        given = await self.call("confirm", at=at, method=method, subject=topic)
        return await self.call(method, at=at, topic=topic, force=True, confirm=given["confirm"])

    async def create(self, name: str, **config: Any) -> None:
        """Make a topic; if all nodes are there, its partitions have gone where they belong."""
        await self.call("topic_create", config={"name": name, "replication_factor": 3, **config})
        if len(self.processes.running) == len(self.processes.nodes):
            await self.at_home(name)

    async def at_home(self, topic: str) -> None:
        """Until the preferred replicas of a topic coordinate."""
        await self.until(lambda: self._at_home(topic))

    async def _at_home(self, topic: str) -> bool:
        status = await self.call("cluster_status")
        found = [p for p in status["partitions"] if p["topic"] == topic]
        return bool(found) and all(p["coordinator"] == p["voters"][0] for p in found)

    # --- writing and reading ---

    async def put(
        self, topic: str, payload: bytes, *, at: str, partition: int = 0, within_s: float = WITHIN_S
    ) -> int:
        """Write one message through a node; its sequence."""
        body = SCHEMAS[Kind.ENQ].encode(1, {"payload": [payload]})
        connection = await self.connection(at)
        async with asyncio.timeout(within_s):
            answer = await connection.enqueue(topic, [(partition, 1, body)])
        return answer.placed[0].sequence

    async def put_somehow(self, topic: str, payload: bytes) -> float:
        """Write one message through whichever node takes it; how long that took in seconds."""
        began = time.monotonic()
        refusals: dict[str, Exception] = {}
        while True:
            for node in self.processes.running:
                try:
                    await self.put(topic, payload, at=node, within_s=5)
                    return time.monotonic() - began
                except (PenstockError, TimeoutError) as error:
                    refusals[node] = error
            if time.monotonic() - began > WITHIN_S:
                raise Unavailable(f"nobody takes a message any more: {refusals}")
            await asyncio.sleep(0.02)

    @asynccontextmanager
    async def writing(self, topic: str) -> AsyncIterator[list[tuple[bytes, float]]]:
        """Keep writing inside the block: what was acknowledged, and how long each took."""
        acknowledged: list[tuple[bytes, float]] = []

        async def write() -> None:
            for number in range(1_000_000):
                payload = b"%d" % number
                acknowledged.append((payload, await self.put_somehow(topic, payload)))

        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(write())
            yield acknowledged
            task.cancel()

    async def payloads(self, topic: str, *, partition: int = 0) -> list[bytes]:
        """All committed messages of a partition, in the order of its log."""
        coordinator = await self.coordinator(topic, partition)
        connection = await self.connection(coordinator)
        [status] = [
            p
            for p in (await connection.call("log_status", topic=topic))["partitions"]
            if p["partition"] == partition
        ]
        stream = await connection.log_stream(
            topic, partition=partition, through=status["sequence_committed"]
        )
        found: list[bytes] = []
        async for batches in stream:
            for batch in batches:
                if batch.kind is Kind.ENQ:
                    found += batch.columns().binary("payload").tolist()
        return found

    # --- how it is ---

    async def partition(self, topic: str, partition: int = 0, *, at: str = "") -> dict[str, Any]:
        status = await self.call("cluster_status", at=at)
        [found] = [
            p for p in status["partitions"] if (p["topic"], p["partition"]) == (topic, partition)
        ]
        return dict(found)

    async def coordinator(self, topic: str, partition: int = 0) -> str:
        async def known() -> str:
            return str((await self.partition(topic, partition))["coordinator"])

        return await self.until(known)

    async def followers(self, topic: str, partition: int = 0) -> list[str]:
        """The voters that do not coordinate."""
        found = await self.partition(topic, partition)
        return [node for node in found["voters"] if node != found["coordinator"]]

    async def has_all(self, topic: str, node: str, partition: int = 0) -> None:
        """Wait until a node follows and has everything, or coordinates."""

        async def done() -> bool:
            found = await self.partition(topic, partition)
            if found["coordinator"] == node:
                return True
            told = {f["node"]: f for f in found["followers"]}
            return node in told and told[node]["connected"] and told[node]["lag"] == 0

        await self.until(done)

    async def until(self, look: Callable[[], Awaitable[Any]], within_s: float = WITHIN_S) -> Any:
        return await until(look, within_s)

    async def restore(self) -> None:
        """Start what a test has ended, and wait until every partition is served."""
        for node, process in self.processes.nodes.items():
            process.resume()
            if not process.running:
                await self.processes.start(node)
        await self.processes.wait_ready()


async def until(look: Callable[[], Awaitable[Any]], within_s: float = WITHIN_S) -> Any:
    """Look until there is something to see."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            if found := await look():
                return found
        except (PenstockError, TimeoutError) as error:
            failed: Exception | None = error
        else:
            failed = None
        if time.monotonic() > deadline:
            raise AssertionError(f"not so within {within_s:.0f} s: {look.__qualname__}") from failed
        await asyncio.sleep(0.05)


@asynccontextmanager
async def asking(folder: Path, options: dict[str, Any]) -> AsyncIterator[Asking]:
    """Three nodes with these options, for the tests of a module."""
    async with cluster_processes(folder, nodes=3, options=options) as processes:
        made = Asking(processes)
        try:
            yield made
        finally:
            await made.close()
