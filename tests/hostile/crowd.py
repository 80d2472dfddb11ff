"""Attackers' connections: many, cheap, all in one event loop.

The bytes that they send are made beforehand, and what they are sent is at most counted: the
attacker shares the machine with the node and its healthy client, and must not slow these down by
itself.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from tests.hostile.site import HOST, Site

from penstock.wire import frame
from penstock.wire.frame import FrameType
from penstock.wire.messages import Hello, pack

FAR: Final = tuple(f"127.0.0.{last}" for last in range(2, 10))  # where attackers call from
NEAR: Final = (HOST,)  # as the healthy client does
OPENING_MAX: Final = 100  # connections that are opened at the same time
CONNECT_S_MAX: Final = 5.0
KEPT_BYTES_MAX: Final = 64 << 10  # of what is received, to look at
CHUNK: Final = bytes(256 << 10)
SMALL_BUFFER: Final = 4096  # of the kernel, for those who do not read


@dataclass
class Tally:
    """What was tried."""

    tried: int = 0
    refused: int = 0  # connections that were not opened, or were closed by the node
    bytes_sent: int = 0
    notes: dict[str, int] = field(default_factory=dict)

    def note(self, name: str, count: int = 1) -> None:
        self.notes[name] = self.notes.get(name, 0) + count

    @property
    def accepted(self) -> int:
        return self.tried - self.refused


class Puppet(asyncio.Protocol):
    """One connection of an attacker. It sends what it is given; then, if it is to, so many zeros as
    fast as the node takes them, or the same chunk again and again."""

    def __init__(self, tally: Tally, *, first: bytes, reading: bool) -> None:
        self._tally, self._first, self._reading = tally, first, reading
        self.transport: asyncio.Transport | None = None
        self.received = 0
        self.kept = b""
        self.local_port = 0
        self._left = 0  # zeros still to send
        self._again = b""  # sent again and again
        self._writable = True
        self.ending = False  # by us
        self.heard: Callable[[bytes], None] | None = None
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.local_port = transport.get_extra_info("sockname")[1]
        if not self._reading:
            self.transport.pause_reading()
        if self._first:
            self.write(self._first)

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        if self.heard is not None:
            self.heard(data)
        elif len(self.kept) < KEPT_BYTES_MAX:
            self.kept += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.lost.set()
        if not self.ending:
            self._tally.refused += 1

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._go_on()

    # --- sending ---

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self._tally.bytes_sent += len(data)
            self.transport.write(data)

    def feed(self, zeros: int) -> None:
        self._left = zeros
        self._go_on()

    def repeat(self, chunk: bytes) -> None:
        """Until it is closed."""
        self._again = chunk
        self._go_on()

    def _go_on(self) -> None:
        while self._writable and self.transport is not None and not self.transport.is_closing():
            if self._again:
                self.write(self._again)
            elif self._left:
                size = min(self._left, len(CHUNK))
                self._left -= size
                self.write(CHUNK if size == len(CHUNK) else CHUNK[:size])
            else:
                return

    @property
    def fed(self) -> bool:
        """All zeros are with the kernel."""
        return not self._left and (
            self.transport is None or not self.transport.get_write_buffer_size()
        )

    def stop(self) -> None:
        """Send no more."""
        self._again, self._left = b"", 0

    def close(self) -> None:
        self.ending = True
        self.stop()
        if self.transport is not None:
            self.transport.abort()

    @property
    def alive(self) -> bool:
        return self.transport is not None


class Crowd:
    """All connections of an attack; `close` ends them."""

    def __init__(self, site: Site, tally: Tally, sources: Sequence[str] = FAR) -> None:
        self.site, self.tally = site, tally
        self.sources = sources
        self._next = itertools.cycle(sources)
        self.puppets: list[Puppet] = []
        self.local_ports: set[int] = set()

    async def open(
        self,
        count: int,
        listener: str,
        *,
        first: bytes = b"",
        reading: bool = True,
        secure: bool = True,
        protocols: Sequence[str] = (),
        per_s: float = 1500.0,
    ) -> list[Puppet]:
        """Open so many, not faster than that; with `secure` by TLS where the node asks for it."""
        tls = self.site.tls(*protocols) if secure else None
        made: list[Puppet] = []
        at_once = max(1, min(OPENING_MAX, round(per_s / 10)))
        for at in range(0, count, at_once):
            pause = asyncio.sleep(at_once / per_s)
            ones = (
                self._one(listener, tls, first=first, reading=reading)
                for _ in range(min(at_once, count - at))
            )
            *found, _ = await asyncio.gather(*ones, pause)
            made += [puppet for puppet in found if puppet is not None]
        self.puppets += made
        return made

    async def _one(
        self, listener: str, tls: ssl.SSLContext | None, *, first: bytes, reading: bool
    ) -> Puppet | None:
        self.tally.tried += 1
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        sock.setblocking(False)
        puppet = Puppet(self.tally, first=first, reading=reading)
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                sock.bind((next(self._next), 0))
                if not reading:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
                await loop.sock_connect(sock, (HOST, self.site.ports[listener]))
                await loop.create_connection(
                    lambda: puppet, sock=sock, ssl=tls, server_hostname=HOST if tls else None
                )
        except (OSError, TimeoutError, ssl.SSLError):
            sock.close()
            if not puppet.lost.is_set():  # else it is counted
                self.tally.refused += 1
            return None
        self.local_ports.add(puppet.local_port)
        return puppet

    async def greeted(self, count: int, *, reading: bool = True, then: bytes = b"") -> list[Puppet]:
        """Native connections that are let in; `then` follows their greeting at once."""
        return await self.open(
            count, "native", first=hello(self.site.mallory) + then, reading=reading
        )

    def held(self) -> int:
        """How many of them the node has, by the kernel."""
        return self.site.held(self.sources, self.local_ports)

    async def fed(self, within_s: float) -> None:
        """Wait until the node has taken all, or takes no more."""
        deadline = asyncio.get_running_loop().time() + within_s
        while asyncio.get_running_loop().time() < deadline:
            if all(puppet.fed for puppet in self.puppets):
                return
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        for i, puppet in enumerate(self.puppets):
            puppet.close()
            if i % 200 == 199:
                await asyncio.sleep(0.05)
        for puppet in self.puppets:
            await puppet.lost.wait()
        self.puppets.clear()


def hello(key: str | None) -> bytes:
    return frame_bytes(FrameType.HEARTBEAT, 0, pack(Hello([1], key, "mallory")))


def frame_bytes(type: FrameType, number: int, *payload: bytes, flags: int = 0) -> bytes:
    return b"".join(frame.encode(type, number, *payload, flags=flags))
