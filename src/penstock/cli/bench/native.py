"""Stages over the native protocol: batches in, batches out, single puts, latency."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.cli.bench.stages import (
    BATCH,
    TOPIC,
    Meter,
    Run,
    Values,
    fresh_server,
    payloads,
)
from penstock.errors import Corruption

if TYPE_CHECKING:
    from penstock.client.connection import Connection

ENQUEUE_MESSAGES: Final = 600_000
POP_MESSAGES: Final = 400_000
PUT_MESSAGES: Final = 60_000
PUT_CONCURRENT: Final = 256
ENQUEUE_IN_FLIGHT: Final = 32  # requests
POP_CREDITS: Final = 3200


async def fill(connection: Connection, count: int, *, in_flight: int = ENQUEUE_IN_FLIGHT) -> None:
    """Enqueue `count` messages in batches of 100, several requests under way at once."""
    from penstock.model.batch import SCHEMAS, Kind

    pool = payloads()
    chunks = [pool[at : at + BATCH] for at in range(0, len(pool), BATCH)]
    priorities = np.random.default_rng(7).integers(0, 10, BATCH)
    schema = SCHEMAS[Kind.ENQ]
    turns = iter(range(count // BATCH))

    async def worker() -> None:
        for turn in turns:
            chunk = chunks[turn % len(chunks)]
            body = schema.encode(BATCH, {"payload": chunk, "priority": priorities})
            await connection.enqueue(TOPIC, [(0, BATCH, body)])

    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(worker())


async def drain(connection: Connection, count: int) -> int:
    """Lease in batches and acknowledge each; returns how many messages came."""
    stream = await connection.lease_stream(TOPIC, credits=POP_CREDITS, batch_max=BATCH)
    seen = 0
    async with asyncio.TaskGroup() as group:
        async for batch in stream:
            delivery = batch.delivery
            first = delivery.token_first
            tokens = np.arange(first, first + delivery.count, dtype=np.uint64)
            _touch(batch.columns)
            group.create_task(
                connection.settle_range(
                    TOPIC, partition=delivery.partition, epoch=delivery.epoch, tokens=tokens
                )
            )
            seen += delivery.count
            if seen >= count:
                break
    await stream.close()
    return seen


def _touch(columns: object) -> None:
    """A consumer that never looks at a payload would flatter the server."""
    cell = columns.binary("payload")  # type: ignore[attr-defined]
    if cell is None or len(cell.blob) == 0:
        raise Corruption("a delivery came without payloads")


async def enqueue(run: Run) -> list[Values]:
    from penstock.client.connection import open_connection

    count = run.count(ENQUEUE_MESSAGES)
    async with fresh_server(run) as server:
        connection = await open_connection(server.url)
        await fill(connection, run.count(20_000))  # warm: connections, allocator, first segment
        with Meter(server) as meter:
            await fill(connection, count)
        await connection.close()
    return [
        {
            "enqueue_batch100_per_s": count / meter.seconds,
            "server_cpu_us_per_enqueue": meter.cpu_seconds / count * 1e6,
        }
    ]


async def pop(run: Run) -> list[Values]:
    from penstock.client.connection import open_connection

    count = run.count(POP_MESSAGES)
    async with fresh_server(run) as server:
        connection = await open_connection(server.url)
        await fill(connection, count)
        with Meter(server) as meter:
            seen = await drain(connection, count)
        await _expect_empty(connection)
        await connection.close()
    return [
        {
            "pop_ack_batch100_per_s": seen / meter.seconds,
            "server_cpu_us_per_pop_ack": meter.cpu_seconds / seen * 1e6,
        }
    ]


async def _expect_empty(connection: Connection) -> None:
    stats = (await connection.call("stats", topic=TOPIC))["topics"][0]
    left = stats["ready"] + stats["leased"] + stats["delayed"]
    if left:
        raise Corruption(f"{left} messages are left after all were acknowledged")


async def put(run: Run) -> list[Values]:
    import penstock

    count = run.count(PUT_MESSAGES)
    pool = payloads()
    async with fresh_server(run) as server, penstock.connect(server.url) as client:
        topic = await client.topic(TOPIC, of=bytes)
        turns = iter(range(count))

        async def worker() -> None:
            for turn in turns:
                await topic.put(pool[turn % len(pool)])

        with Meter(server) as meter:
            async with asyncio.TaskGroup() as group:
                for _ in range(PUT_CONCURRENT):
                    group.create_task(worker())
    return [{"put_single_per_s": count / meter.seconds}]
