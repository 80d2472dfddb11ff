"""Native frames of somebody who is let in: far too many tiny ones, and large ones without end."""

from __future__ import annotations

import asyncio

from tests.hostile.crowd import Puppet, frame_bytes
from tests.hostile.site import CLOSED, CLUSTER, OPEN
from tests.hostile.stage import Stage, attack

from penstock.wire import frame
from penstock.wire.frame import FrameFlag, FrameType
from penstock.wire.messages import Call, Enqueue, pack

CHUNK_BYTES = 64 << 10
SLOW = 8
SLOW_BYTES = 64 << 20  # of a whole frame; so many of them are all that the node lets be under way
SLOW_LACK = 4096  # bytes that never come, or too late
SLOW_EVERY_S = 3.0
SLOW_TRIES = 4
FED_S_MAX = 10.0
TAKEN_S = 1.0  # in which the node takes what the kernel has
PARTIAL = 2500
PARTIAL_BYTES = 60 << 10
GREETED_S_MAX = 5.0
TINY = (
    frame_bytes(FrameType.UNSUBSCRIBE, 7),
    frame_bytes(FrameType.ACK, 8),
    frame_bytes(FrameType.NACK, 9, b"\xc1"),
    frame_bytes(FrameType.BATCH, 10, b"\0" * 8),
    frame_bytes(FrameType.BATCH, 10, pack(Enqueue("none", [])), flags=FrameFlag.ACK_WANTED),
    frame_bytes(FrameType.BACKPRESSURE, 11),
    frame_bytes(FrameType.SUBSCRIBE, 12, pack(Call("none", {})), flags=FrameFlag.ACK_WANTED),
    frame_bytes(FrameType.HEARTBEAT, 13),
)


@attack(OPEN, CLOSED, CLUSTER, short=OPEN)
async def heartbeats(stage: Stage) -> None:
    """heartbeats of 20 bytes on one connection, as fast as they are taken"""
    await _flood(stage, frame_bytes(FrameType.HEARTBEAT, 0))


@attack(OPEN, CLOSED, CLUSTER, short=CLOSED)
async def tiny_frames(stage: Stage) -> None:
    """eight kinds of tiny frames, most of them wrong, on one connection"""
    await _flood(stage, b"".join(TINY))


async def _flood(stage: Stage, unit: bytes) -> None:
    puppets = await stage.crowd.greeted(1)
    for puppet in puppets:
        puppet.heard = _ignore
        puppet.repeat(unit * (CHUNK_BYTES // len(unit)))
    await stage.hold()


@attack(OPEN, CLOSED, CLUSTER, short=OPEN)
async def slow_frames(stage: Stage) -> None:
    """eight frames of 64 MiB that lack a little, and get a byte every 3 s"""
    head = frame.HEADER.pack(
        frame.MAGIC, frame.VERSION, FrameType.BATCH, FrameFlag.ACK_WANTED, 1,
        SLOW_BYTES - frame.OVERHEAD,
    )  # fmt: skip
    holding: list[Puppet] = []
    for _ in range(SLOW_TRIES):  # one that is refused is tried again: others may be done by then
        puppets = await stage.crowd.greeted(SLOW - len(holding))
        await _greeted(puppets)
        welcomes = {puppet: puppet.received for puppet in puppets}
        for puppet in puppets:
            puppet.write(head)
            puppet.feed(SLOW_BYTES - len(head) - SLOW_LACK)
        await stage.crowd.fed(FED_S_MAX)
        await asyncio.sleep(TAKEN_S)
        holding += [p for p, size in welcomes.items() if p.alive and p.received == size]
        if len(holding) == SLOW:
            break
    stage.tally.note("frames_held", len(holding))
    dribble = asyncio.create_task(_dribble(holding))
    await stage.hold()
    dribble.cancel()


def _ignore(_: bytes) -> None:
    """Answers are read and forgotten."""


async def _dribble(puppets: list[Puppet]) -> None:
    while True:
        await asyncio.sleep(SLOW_EVERY_S)
        for puppet in puppets:
            puppet.write(b"\0")


@attack()
async def partial_frames(stage: Stage) -> None:
    """2500 connections with 60 KiB of a frame each, too little to be counted one by one"""
    head = frame.HEADER.pack(
        frame.MAGIC, frame.VERSION, FrameType.BATCH, FrameFlag.ACK_WANTED, 1, PARTIAL_BYTES + 64
    )
    await stage.crowd.greeted(PARTIAL, then=head + bytes(PARTIAL_BYTES))
    await stage.hold()


async def _greeted(puppets: list[Puppet]) -> None:
    """Until each has heard something: before, the node takes small frames only."""
    async with asyncio.timeout(GREETED_S_MAX):
        while not all(puppet.received or not puppet.alive for puppet in puppets):
            await asyncio.sleep(0.01)
