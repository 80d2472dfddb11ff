"""The node's end of TLS over real sockets: what comes, what is kept, what is told, how it ends."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trustme

from penstock.config import Limits
from penstock.node.door import tls as module
from penstock.node.door.doorway import READ_BYTES, TURN_BYTES, Doorway, Guest, TlsIntake
from penstock.node.door.tls import TlsLink

MIB = 1 << 20
LARGE = bytes(range(256)) * (6 * MIB // 256)
SMALL_BUFFER = 64 << 10  # of the kernel


class Served(asyncio.Protocol):
    """Whom the connection serves, once TLS is agreed on."""

    def __init__(self, *, reading: bool = True) -> None:
        self._reading = reading
        self.link: TlsLink | None = None
        self.received = bytearray()
        self.told: list[str] = []
        self.made, self.lost = asyncio.Event(), asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, TlsLink)
        self.link = transport
        if not self._reading:
            transport.pause_reading()
        self.made.set()

    def linked(self) -> TlsLink:
        assert self.link is not None
        return self.link

    def data_received(self, data: bytes) -> None:
        self.received += data

    def eof_received(self) -> None:
        self.told.append("eof")

    def pause_writing(self) -> None:
        self.told.append("full")

    def resume_writing(self) -> None:
        self.told.append("room")

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


class Door(Doorway):
    """Has connections until their handshake is done."""

    def __init__(self, served: Served, *, within_s: float = 10.0) -> None:
        super().__init__(Limits(greeting_s=within_s))
        self.served, self.agreed = served, False
        self.connected, self.ended = asyncio.Event(), asyncio.Event()

    def enter(self, guest: Guest) -> None:
        super().enter(guest)
        self.connected.set()

    def serve(self) -> asyncio.Protocol:
        self.agreed = True
        return self.served

    def leave(self, guest: Guest) -> None:
        super().leave(guest)
        if not self.agreed:
            self.ended.set()


class Site:
    """A listener, and what its callers trust."""

    def __init__(self) -> None:
        authority = trustme.CA()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(self.context)
        self.trust = ssl.create_default_context()
        authority.configure_trust(self.trust)
        self._callers: list[asyncio.StreamWriter] = []
        self.port = 0

    @asynccontextmanager
    async def listening(self, door: Door) -> AsyncIterator[None]:
        def accept() -> TlsLink:
            return TlsLink(self.context, door.serve, door)

        server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            for writer in self._callers:
                writer.transport.abort()
                with suppress(OSError):
                    await writer.wait_closed()
            if door.connected.is_set():
                await until(lambda: door.ended.is_set() or door.served.lost.is_set())
            server.close()

    async def call(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A caller with little room for what it does not read."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        return await self._open(sock=sock, ssl=self.trust, server_hostname="127.0.0.1", limit=1024)

    async def call_plainly(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await self._open(host="127.0.0.1", port=self.port)

    async def _open(self, **how: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(**how)
        self._callers.append(writer)
        return reader, writer


@pytest.fixture
def site() -> Site:
    return Site()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_bytes_arrive_whole_and_in_order_both_ways(site: Site) -> None:
    served = Served()
    async with site.listening(Door(served)):
        reader, writer = await site.call()
        writer.write(LARGE)
        await until(lambda: len(served.received) == len(LARGE))
        served.linked().writelines([b"head", b"", memoryview(LARGE), b"tail"])
        answer = await reader.readexactly(len(LARGE) + 8)
    assert served.received == LARGE and answer == b"head" + LARGE + b"tail"


async def test_what_is_not_read_is_told_and_counted(site: Site) -> None:
    """The loop's own TLS says that nothing is left of it."""
    served = Served()
    async with site.listening(Door(served)):
        reader, _ = await site.call()
        await served.made.wait()
        link = served.linked()
        for _ in range(4):
            link.write(LARGE)
        assert served.told == ["full"]
        await asyncio.sleep(0.1)
        assert link.get_write_buffer_size() > 2 * len(LARGE)
        await reader.readexactly(4 * len(LARGE))
        await until(lambda: served.told == ["full", "room"])
        assert link.get_write_buffer_size() == 0


async def test_nothing_is_read_while_reading_is_paused(site: Site) -> None:
    """The loop's own TLS goes on for half a megabyte, and copies it."""
    served = Served(reading=False)
    async with site.listening(Door(served)):
        _, writer = await site.call()
        writer.write(LARGE)
        await served.made.wait()
        await asyncio.sleep(0.2)
        link = served.linked()
        assert not link._reading
        assert not served.received and len(link._kept) <= READ_BYTES
        assert not link._incoming.pending
        link.resume_reading()
        await until(lambda: len(served.received) == len(LARGE))
    assert served.received == LARGE


async def test_what_was_written_before_the_end_arrives(site: Site) -> None:
    served = Served()
    async with site.listening(Door(served)):
        reader, _ = await site.call()
        await served.made.wait()
        served.linked().write(LARGE)
        served.linked().close()
        served.linked().write(b"too late")
        assert await reader.read(-1) == LARGE  # and then the farewell of TLS
        await served.lost.wait()


async def test_who_does_not_read_the_rest_is_not_waited_for(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "END_S", 0.1)
    served = Served()
    async with site.listening(Door(served)):
        await site.call()
        await served.made.wait()
        for _ in range(4):
            served.linked().write(LARGE)
        served.linked().close()
        async with asyncio.timeout(5):
            await served.lost.wait()


async def test_who_says_farewell_is_left(site: Site) -> None:
    served = Served()
    async with site.listening(Door(served)):
        _, writer = await site.call()
        await served.made.wait()
        writer.close()
        async with asyncio.timeout(5):
            await served.lost.wait()
    assert served.told == ["eof"]


async def test_what_is_no_tls_gets_an_alert_and_the_end(site: Site) -> None:
    door = Door(Served())
    async with site.listening(door):
        reader, writer = await site.call_plainly()
        writer.write(b"\x16\x03\x01\x00\x05hello")
        async with asyncio.timeout(5):
            assert (await reader.read(-1))[0] == 21  # an alert
            await door.ended.wait()
    assert not door.served.made.is_set()


async def test_a_handshake_has_its_time(site: Site) -> None:
    door = Door(Served(), within_s=0.1)
    async with site.listening(door):
        reader, _ = await site.call_plainly()
        async with asyncio.timeout(5):
            await door.ended.wait()
            assert await reader.read(-1) == b""


# --- what comes with the end of the handshake ---


class Tcp(asyncio.Transport):
    """Takes all that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def abort(self) -> None: ...

    def is_closing(self) -> bool:
        return False


async def agreed(site: Site, served: Served, then: bytes) -> None:
    """A handshake by hand, whose last message comes at once with what the caller sends then."""
    tcp, door = Tcp(), Door(served)
    intake = door.intake
    link = TlsLink(site.context, door.serve, door)
    link.connection_made(tcp)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = site.trust.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with pytest.raises(ssl.SSLWantReadError):
        caller.do_handshake()
    for last in (False, True):
        sent = outgoing.read()
        intake.received[: len(sent)] = sent
        link.buffer_updated(len(sent))
        if not last:
            incoming.write(tcp.written)
            caller.do_handshake()
            caller.write(then)
    await served.made.wait()


async def test_what_comes_with_the_handshake_is_delivered(site: Site) -> None:
    served = Served()
    await agreed(site, served, b"first")
    assert served.received == b"first"


async def test_what_comes_with_the_handshake_waits_until_it_is_read(site: Site) -> None:
    served = Served(reading=False)
    await agreed(site, served, b"first")
    assert not served.received
    served.linked().resume_reading()
    await asyncio.sleep(0)
    assert served.received == b"first"


async def test_who_ends_the_connection_at_once_is_given_nothing(site: Site) -> None:
    class Ending(Served):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.linked().abort()

    served = Ending()
    await agreed(site, served, b"first")
    assert not served.received


# --- turns ---


class Sender:
    """A connection that always has more, and is read whenever it may be."""

    def __init__(self, intake: TlsIntake) -> None:
        self._intake = intake
        self.bytes = 0
        self.resting = False

    def come(self) -> None:
        while not self.resting:
            self.bytes += READ_BYTES
            self.resting = self._intake.spend(READ_BYTES, self.go_on)

    def go_on(self) -> None:
        self.resting = False


async def test_all_connections_share_what_is_decrypted_in_a_turn() -> None:
    """Before, each was read until it had nothing more."""
    intake = TlsIntake()
    senders = [Sender(intake) for _ in range(20)]
    turns = 100
    for _ in range(turns):
        for sender in senders:
            sender.come()
        await asyncio.sleep(0)
    came = [sender.bytes for sender in senders]
    assert turns / 2 < sum(came) / TURN_BYTES < turns + len(senders)
    assert max(came) < 2 * min(came)
