"""gRPC before anybody has shown a key."""

from __future__ import annotations

import asyncio

from tests.hostile import http2
from tests.hostile.http2 import Ear
from tests.hostile.site import OPEN
from tests.hostile.stage import Stage, attack

ENQUEUE = "/penstock.v1.Penstock/Enqueue"
WATCH = "/grpc.health.v1.Health/Watch"
MESSAGES = 20
MESSAGE_BYTES = 62 << 20
SAID_BYTES = 63 << 20
WATCHERS = 45
WATCHES = 100  # of each
CONNECTIONS = 6000


@attack(short=OPEN)
async def grpc_messages(stage: Stage) -> None:
    """twenty calls without a key whose messages of 63 MiB never end"""
    block = http2.call_head(stage.site, ENQUEUE)
    puppets = await stage.crowd.open(MESSAGES, "grpc", first=http2.opening(), protocols=("h2",))
    for puppet in puppets:
        Ear(puppet).send_unfinished(1, block, says=SAID_BYTES, sends=MESSAGE_BYTES)
    await stage.hold()


@attack(short=OPEN)
async def grpc_watches(stage: Stage) -> None:
    """4500 calls of Health/Watch, which have no end, without a key"""
    block = http2.call_head(stage.site, WATCH)
    calls = b"".join(http2.call(1 + 2 * i, block, b"") for i in range(WATCHES))
    ears = []
    for _ in range(WATCHERS):
        first = http2.opening()
        for puppet in await stage.crowd.open(1, "grpc", first=first, protocols=("h2",)):
            ears.append(Ear(puppet))
            puppet.write(calls)
            await asyncio.sleep(0.01)
    await stage.hold()
    stage.tally.note("calls", WATCHERS * WATCHES)
    stage.tally.note("calls_answered", sum(len(ear.answered - ear.reset) for ear in ears))


@attack(short=OPEN)
async def grpc_connections(stage: Stage) -> None:
    """6000 connections that open HTTP/2, or nothing, and stay"""
    half = CONNECTIONS // 2
    await stage.crowd.open(half, "grpc", first=http2.opening(), secure=False)
    await stage.crowd.open(CONNECTIONS - half, "grpc", secure=False)
    await stage.hold()
