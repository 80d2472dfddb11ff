"""Connections whose callers are not known, against a real node: they have places of their own."""

from __future__ import annotations

import asyncio
import ssl
import time
from pathlib import Path

import pytest
import trustme
from tests.integration.attacker import GREETING, Attacker, healthy

from penstock.client.network.endpoints import open_connection
from penstock.testing.process import ServerProcess, server_process
from penstock.wire.frame import HEADER, MAGIC, VERSION, FrameType


class Authority:
    """Certificates for a node, and what its clients trust."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1")
        self.ca = folder / "ca.pem"
        cert, key = folder / "cert.pem", folder / "key.pem"
        issued.cert_chain_pems[0].write_to_path(cert)
        issued.private_key_pem.write_to_path(key)
        authority.cert_pem.write_to_path(self.ca)
        self.options = {"tls.cert": cert, "tls.key": key}

    async def greeted_s(self, server: ServerProcess) -> float:
        """How long a newcomer takes to be greeted."""
        began = time.monotonic()
        url = server.url.replace("penstock:", "penstocks:")
        await (await open_connection(url, tls=self.ca)).close()
        return time.monotonic() - began


def client_hello() -> bytes:
    """How a TLS handshake begins."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("a handshake needs an answer")


async def test_handshakes_that_stop_half_way_make_way(tmp_path: Path) -> None:
    """Before, nobody counted them: each stayed for a minute, however many there were."""
    authority = Authority(tmp_path)
    async with server_process(tmp_path / "data", options=authority.options) as server:
        attacker = Attacker(server)
        try:
            await attacker.open(300, b"")
            await attacker.open(300, client_hello())
            assert await authority.greeted_s(server) < 5.0
            # An address has 256 places, and for a moment twice as many.
            async with asyncio.timeout(10):
                while await attacker.ended() < 600 - 512:
                    pass
        finally:
            await attacker.close()


async def test_who_never_greets_shuts_nobody_out(tmp_path: Path) -> None:
    """Before, they took the places of callers: with all of them taken, newcomers were refused until
    the first had been silent for ten seconds."""
    async with server_process(tmp_path / "data", options={"limits.connections_max": 20}) as server:
        attacker = Attacker(server)
        await attacker.open(60, b"")
        async with healthy(server) as caller:
            await caller.topic()
        await attacker.close()


@pytest.mark.parametrize(
    "options",
    [
        {"limits.strangers_max": 10},
        {"limits.address_strangers_max": 10},
        {"limits.greeting_s": 0.5},
    ],
)
async def test_bounds_of_strangers(tmp_path: Path, options: dict[str, float]) -> None:
    """The default has room for all of these, and ten seconds."""
    async with server_process(tmp_path / "data", options=options) as server:
        attacker = Attacker(server)
        await attacker.open(40, b"")
        async with asyncio.timeout(5):
            while await attacker.ended() < 20:
                pass
        await attacker.close()


async def test_what_strangers_send_is_bounded(tmp_path: Path) -> None:
    head = HEADER.pack(MAGIC, VERSION, FrameType.HEARTBEAT, 0, 1, 60_000)
    options = {"limits.strangers_bytes_max": 64 << 10}
    async with server_process(tmp_path / "data", options=options) as server:
        attacker = Attacker(server)
        await attacker.open(10, head + bytes(16_000))
        async with asyncio.timeout(5):
            while await attacker.ended() < 6:
                pass
        await attacker.close()


async def test_one_address_has_a_part_of_the_places(tmp_path: Path) -> None:
    """Before, one address could take all of them."""
    options = {"limits.address_connections_max": 5}
    async with server_process(tmp_path / "data", options=options) as server:
        attacker = Attacker(server)
        await attacker.greet(5, local="127.0.0.9")
        more = Attacker(server)
        await more.open(1, GREETING, local="127.0.0.9")
        async with asyncio.timeout(5):
            while not await more.ended():
                pass
        async with healthy(server) as caller:  # from 127.0.0.1
            await caller.topic()
        await more.close()
        await attacker.close()
