"""Answers that nobody reads, over all three listeners."""

from __future__ import annotations

from tests.hostile import http2
from tests.hostile.crowd import frame_bytes
from tests.hostile.http2 import Ear
from tests.hostile.site import LARGE, OPEN, VECTORS, Site
from tests.hostile.stage import Stage, attack

from penstock.server._generated import penstock_pb2 as pb
from penstock.wire.frame import FrameFlag, FrameType
from penstock.wire.messages import Call, OpenLog, pack

PEEKERS = 10
PEEKS = 40  # of each
LIMITS = (1000, 12)  # more than may be answered at once, and little enough to be answered whole
FOLLOWERS = 100
STREAMS = 5
ANSWERS = 50
EVENTS = 100
CALLERS = 10
CALLS = 40
PER_S = 25  # it is about what is held; to make large answers costs time in any case
PEEK = "/penstock.v1.Penstock/Peek"


@attack(short=OPEN)
async def unread_peeks(stage: Stage) -> None:
    """ten native connections that ask for 40 large peeks each and read nothing"""
    asked = b"".join(
        frame_bytes(
            FrameType.SUBSCRIBE, i + 1,
            pack(Call("peek", {"topic": LARGE, "limit": LIMITS[i % len(LIMITS)]})),
            flags=FrameFlag.ACK_WANTED,
        )
        for i in range(PEEKS)
    )  # fmt: skip
    await stage.crowd.greeted(PEEKERS, reading=False, then=asked)
    await stage.hold()


@attack()
async def unread_streams(stage: Stage) -> None:
    """a hundred native connections with five streams of a log each, unread"""
    opened = b"".join(
        frame_bytes(
            FrameType.SUBSCRIBE, i + 1,
            pack(OpenLog(LARGE, 0, credit_entries=100_000, credit_bytes=64 << 20)),
            flags=FrameFlag.ACK_WANTED,
        )
        for i in range(STREAMS)
    )  # fmt: skip
    await stage.crowd.greeted(FOLLOWERS, reading=False, then=opened)
    await stage.hold()


@attack(short=OPEN)
async def unread_answers(stage: Stage) -> None:
    """fifty large peeks over HTTP that nobody reads"""
    asked = request(stage.site, f"/v1/peek?topic={LARGE}&limit={LIMITS[-1]}")
    await stage.crowd.open(ANSWERS, "http", first=asked, reading=False, per_s=PER_S)
    await stage.hold()


@attack()
async def unread_events(stage: Stage) -> None:
    """a hundred streams of events over HTTP that nobody reads"""
    asked = request(stage.site, f"/v1/deltas/{VECTORS}/events?from_sequence=1")
    await stage.crowd.open(EVENTS, "http", first=asked, reading=False, per_s=PER_S)
    await stage.hold()


@attack()
async def unread_calls(stage: Stage) -> None:
    """400 large peeks over gRPC whose callers give no window"""
    block = http2.call_head(stage.site, PEEK, stage.site.mallory)
    payload = pb.PeekRequest(topic=LARGE, limit=LIMITS[-1]).SerializeToString()
    calls = b"".join(http2.call(1 + 2 * i, block, payload) for i in range(CALLS))
    first = http2.opening(window=0) + calls
    for puppet in await stage.crowd.open(CALLERS, "grpc", first=first, protocols=("h2",)):
        Ear(puppet)
    await stage.hold()


def request(site: Site, target: str) -> bytes:
    key = f"X-API-Key: {site.mallory}\r\n" if site.mallory else ""
    return f"GET {target} HTTP/1.1\r\nHost: {site.authority}\r\n{key}\r\n".encode()
