"""Callers that mean ill, over real sockets, and what tests look at meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from tests.integration.harness import Caller

from penstock.client.network.endpoints import open_connection
from penstock.testing.process import ServerProcess
from penstock.wire.frame import HEADER, MAGIC, VERSION, FrameFlag, FrameType, encode
from penstock.wire.messages import Hello, pack

MIB = 1 << 20
GREETING = b"".join(encode(FrameType.HEARTBEAT, 0, pack(Hello([1]))))


@asynccontextmanager
async def healthy(server: ServerProcess) -> AsyncIterator[Caller]:
    connection = await open_connection(server.url)
    try:
        yield Caller(connection)
    finally:
        await connection.close()


class Attacker:
    """Connections that send what they are told to, and read nothing unless they are told to."""

    def __init__(self, server: ServerProcess, tls: ssl.SSLContext | None = None) -> None:
        self._server, self._tls = server, tls
        self.ends: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._floods: list[asyncio.Task[None]] = []

    async def open(
        self, count: int, first: bytes, *, listener: str = "native", local: str = "127.0.0.1"
    ) -> None:
        for _ in range(count):
            port = self._server.ports[listener]
            # A reader with a small limit reads a little and leaves the rest to the kernel.
            end = await asyncio.open_connection(
                "127.0.0.1", port, limit=1024, local_addr=(local, 0), ssl=self._tls
            )
            end[1].write(first)
            self.ends.append(end)

    async def greet(self, count: int, then: bytes = b"", *, local: str = "127.0.0.1") -> None:
        """Open connections that are greeted back before they send anything large."""
        known = len(self.ends)
        await self.open(count, GREETING, local=local)
        for reader, writer in self.ends[known:]:
            await reader.readexactly(1)
            writer.write(then)

    async def send(self, data: bytes, *, within_s: float) -> None:
        """The same on all connections, as far as the node takes it in that time."""

        async def drained(writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                writer.write(data)
                await writer.drain()

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await asyncio.gather(*(drained(writer) for _, writer in self.ends))

    def flood(self, data: bytes) -> None:
        """Send the same again and again, and read what is answered."""

        async def write(writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while True:
                    writer.write(data)
                    await writer.drain()

        async def read(reader: asyncio.StreamReader) -> None:
            with contextlib.suppress(OSError):
                while await reader.read(1 << 20):
                    pass

        for reader, writer in self.ends:
            self._floods += [asyncio.create_task(write(writer)), asyncio.create_task(read(reader))]

    async def ended(self) -> int:
        """How many connections the node has ended by now."""

        async def over(reader: asyncio.StreamReader) -> bool:
            try:
                async with asyncio.timeout(0.1):
                    while await reader.read(1 << 20):
                        pass
            except TimeoutError:
                return False
            except OSError:
                pass
            return True

        return sum(await asyncio.gather(*(over(reader) for reader, _ in self.ends)))

    async def close(self) -> None:
        for task in self._floods:
            task.cancel()
        await asyncio.gather(*self._floods, return_exceptions=True)
        for _, writer in self.ends:
            writer.transport.abort()
        closing = (writer.wait_closed() for _, writer in self.ends)
        await asyncio.gather(*closing, return_exceptions=True)


def resident_mib(server: ServerProcess) -> float:
    pages = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])
    return pages * 4096 / MIB


async def slowest_put_s(caller: Caller, *, for_s: float) -> float:
    """The longest that a small enqueue took."""
    worst, deadline = 0.0, time.monotonic() + for_s
    while time.monotonic() < deadline:
        began = time.monotonic()
        await caller.put("jobs", b"x")
        worst = max(worst, time.monotonic() - began)
    return worst


def unfinished(size: int, sent: int) -> bytes:
    head = HEADER.pack(MAGIC, VERSION, FrameType.BATCH, FrameFlag.ACK_WANTED, 1, size)
    return head + bytes(sent)


async def held(server: ServerProcess, kind: str = "") -> float:
    """The bytes that the node says it holds for callers."""
    async with httpx.AsyncClient(base_url=server.http) as http:
        text = (await http.get("/metrics")).text
    lines = [
        line
        for line in text.splitlines()
        if line.startswith("penstock_held_bytes{") and kind in line
    ]
    return sum(float(line.split()[-1]) for line in lines)
