"""Stages through the gateway: gRPC in batches, HTTP one by one."""

from __future__ import annotations

import asyncio
import json
from typing import Final

from penstock.cli.bench.http_load import post_many, request_bytes
from penstock.cli.bench.stages import BATCH, TOPIC, Meter, Run, Values, fresh_server, payloads

GRPC_MESSAGES: Final = 200_000
GRPC_IN_FLIGHT: Final = 16
HTTP_MESSAGES: Final = 20_000
HTTP_CONNECTIONS: Final = 64
_METHOD: Final = "/penstock.v1.Penstock/EnqueueBatch"


async def grpc_enqueue(run: Run) -> list[Values]:
    import grpc

    count = run.count(GRPC_MESSAGES)
    requests = _grpc_requests()
    turns = iter(range(count // BATCH))
    async with fresh_server(run) as server, grpc.aio.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary(_METHOD, None, None)  # bytes in, bytes out: no client-side cost

        async def worker() -> None:
            for turn in turns:
                await call(requests[turn % len(requests)])

        await call(requests[0])
        with Meter(server) as meter:
            async with asyncio.TaskGroup() as group:
                for _ in range(GRPC_IN_FLIGHT):
                    group.create_task(worker())
    return [{"grpc_enqueue_batch100_per_s": count / meter.seconds}]


def _grpc_requests() -> list[bytes]:
    """A few encoded requests of 100 messages each."""
    from penstock.server._generated import penstock_pb2 as pb

    pool = payloads()
    return [
        pb.EnqueueBatchRequest(
            topic=TOPIC,
            messages=[
                pb.NewMessage(payload=payload, priority=i % 10)
                for i, payload in enumerate(pool[at : at + BATCH])
            ],
        ).SerializeToString()
        for at in range(0, len(pool), BATCH)
    ]


async def http_put(run: Run) -> list[Values]:
    count = run.count(HTTP_MESSAGES)
    text = "x" * 200
    body = json.dumps({"topic": TOPIC, "payload": text, "priority": 1}).encode()
    async with fresh_server(run) as server:
        request = request_bytes(server.http, "/v1/enqueue", body)
        await post_many(server.http, request, count=100, connections=4)
        with Meter(server) as meter:
            await post_many(server.http, request, count=count, connections=HTTP_CONNECTIONS)
    return [{"http_put_single_per_s": count / meter.seconds}]
