"""Stages over the native protocol: batches in, batches out, single puts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.bench.queue.server import TOPIC, Meter, fresh_server
from penstock.bench.stages import (
    BATCH,
    Run,
    Values,
    at_once,
    batches,
    expect_empty,
    expect_payloads,
    payloads,
)

if TYPE_CHECKING:
    from penstock.client.network.connection import Connection

ENQUEUE_MESSAGES: Final = 600_000
POP_MESSAGES: Final = 400_000
PUT_MESSAGES: Final = 60_000
WARM_MESSAGES: Final = 20_000  # connections, allocator, first segment
PUT_CONCURRENT: Final = 256
ENQUEUE_IN_FLIGHT: Final = 32  # requests
POP_CREDITS: Final = 3200


async def fill(connection: Connection, count: int) -> None:
    """Enqueue `count` messages in batches of 100, several requests under way at once."""
    from penstock.model.batch import SCHEMAS, Kind

    columns, schema = batches(), SCHEMAS[Kind.ENQ]

    async def enqueue_batch(turn: int) -> None:
        body = schema.encode(BATCH, columns[turn % len(columns)])
        await connection.enqueue(TOPIC, [(0, BATCH, body)])

    await at_once(ENQUEUE_IN_FLIGHT, count // BATCH, enqueue_batch)


async def drain(connection: Connection, count: int) -> int:
    """Lease in batches and acknowledge each; returns how many messages came."""
    stream = await connection.lease_stream(TOPIC, credits=POP_CREDITS, batch_max=BATCH)
    seen = 0
    async with asyncio.TaskGroup() as group:
        async for batch in stream:
            delivery = batch.delivery
            first = delivery.token_first
            tokens = np.arange(first, first + delivery.count, dtype=np.uint64)
            expect_payloads(batch.columns)
            group.create_task(connection.settle_range(TOPIC, delivery.token(0), tokens))
            seen += delivery.count
            if seen >= count:
                break
    await stream.close()
    return seen


async def enqueue(run: Run) -> Values:
    from penstock.client.network.endpoints import open_connection

    count = run.count(ENQUEUE_MESSAGES)
    async with fresh_server(run) as server:
        connection = await open_connection(server.url)
        await fill(connection, run.count(WARM_MESSAGES))
        with Meter(server) as meter:
            await fill(connection, count)
        await connection.close()
    return {
        "enqueue_batch100_per_s": count / meter.seconds,
        "server_cpu_us_per_enqueue": meter.cpu_seconds / count * 1e6,
    }


async def pop(run: Run) -> Values:
    from penstock.client.network.endpoints import open_connection

    count = run.count(POP_MESSAGES)
    async with fresh_server(run) as server:
        connection = await open_connection(server.url)
        await fill(connection, count)
        with Meter(server) as meter:
            seen = await drain(connection, count)
        await expect_empty(connection.call, TOPIC)
        await connection.close()
    return {
        "pop_ack_batch100_per_s": seen / meter.seconds,
        "server_cpu_us_per_pop_ack": meter.cpu_seconds / seen * 1e6,
    }


async def put(run: Run) -> Values:
    import penstock

    count, pool = run.count(PUT_MESSAGES), payloads()
    async with fresh_server(run) as server, penstock.connect(server.url) as client:
        topic = await client.topic(TOPIC, of=bytes)
        with Meter(server) as meter:
            await at_once(PUT_CONCURRENT, count, lambda turn: topic.put(pool[turn % len(pool)]))
    return {"put_single_per_s": count / meter.seconds}
