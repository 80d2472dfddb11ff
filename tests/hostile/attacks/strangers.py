"""Connections that never say who they are, and bodies that never end."""

from __future__ import annotations

import ssl

from tests.hostile.crowd import NEAR
from tests.hostile.site import CLOSED, CLUSTER, JOBS, OPEN
from tests.hostile.stage import Stage, attack

from penstock.wire import frame
from penstock.wire.frame import FrameType

HALF_OPEN = 6000
GREETINGS = 4000
GREETING_BYTES = 60 << 10
HANDSHAKES = {"native": 4500, "http": 750, "grpc": 750}
ANSWERED = 500  # of each listener
BODIES = 40
BODY_BYTES = 60 << 20
FED_S_MAX = 10.0


@attack(OPEN, CLOSED, CLUSTER)
async def half_open(stage: Stage) -> None:
    """6000 native connections that never greet"""
    await stage.crowd.open(HALF_OPEN, "native", secure=False)
    await stage.hold()


@attack(short=OPEN, sources=NEAR)
async def half_open_near(stage: Stage) -> None:
    """the same, from the address that the healthy client has"""
    await stage.crowd.open(HALF_OPEN, "native", secure=False)
    await stage.hold()


@attack(OPEN)
async def half_open_http(stage: Stage) -> None:
    """6000 HTTP connections with half a head"""
    first = b"GET /healthz HTTP/1.1\r\nHost: 127"
    await stage.crowd.open(HALF_OPEN, "http", first=first, secure=False)
    await stage.hold()


@attack(OPEN)
async def greetings(stage: Stage) -> None:
    """4000 native connections with 60 KiB of a greeting that never ends"""
    head = frame.HEADER.pack(
        frame.MAGIC, frame.VERSION, FrameType.HEARTBEAT, 0, 0, GREETING_BYTES + 64
    )
    await stage.crowd.open(GREETINGS, "native", first=head + bytes(GREETING_BYTES))
    await stage.hold()


@attack(CLOSED, short=CLOSED)
async def handshakes(stage: Stage) -> None:
    """6000 TLS handshakes that stop half-way"""
    half = client_hello()[:100]
    for listener, count in HANDSHAKES.items():
        await stage.crowd.open(count, listener, first=half, secure=False)
    await stage.hold()


@attack(CLOSED)
async def answered_handshakes(stage: Stage) -> None:
    """1500 TLS handshakes whose answers are never gone into"""
    hello = client_hello()
    for listener in HANDSHAKES:
        await stage.crowd.open(
            ANSWERED, listener, first=hello, secure=False, reading=False, per_s=500
        )
    await stage.hold()


@attack(short=OPEN)
async def http_bodies(stage: Stage) -> None:
    """forty bodies of 62 MiB over HTTP that never end"""
    site = stage.site
    key = f"X-API-Key: {site.mallory}\r\n" if site.mallory else ""
    head = (
        f"POST /v1/enqueue HTTP/1.1\r\nHost: {site.authority}\r\n{key}"
        f"Content-Type: application/json\r\nContent-Length: {BODY_BYTES + (2 << 20)}\r\n\r\n"
        f'{{"topic": "{JOBS}", "payload": "'
    )
    for puppet in await stage.crowd.open(BODIES, "http", first=head.encode()):
        puppet.feed(BODY_BYTES)
    await stage.crowd.fed(FED_S_MAX)
    await stage.hold()


def client_hello() -> bytes:
    """The first bytes of a client's handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        pass
    return outgoing.read()
