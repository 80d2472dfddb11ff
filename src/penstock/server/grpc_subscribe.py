"""Subscribe: released deltas over gRPC. A slow caller holds the stream back, and nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from penstock.client.delta_subscription import Released
from penstock.server import requests as ask
from penstock.server._generated import penstock_pb2 as pb
from penstock.server.fields import request_of
from penstock.server.grpc_convert import fields_of
from penstock.server.http_json import text_headers
from penstock.server.pool import Pool
from penstock.server.subscribing import Positions, pieces, subscribed

Write = Callable[[pb.SubscribeResponse], Awaitable[None]]


async def subscribe(
    pool: Pool, api_key: str | None, request: pb.SubscribeRequest, *, write: Write
) -> None:
    asked = request_of(fields_of(request), ask.Subscribe)
    async with subscribed(pool, api_key, asked) as following:
        positions = await Positions.of(asked, following)
        async for batch in following:
            for rows, last in pieces(batch):
                reached = positions.reached(batch) if last else str(positions)
                changes = [change_of(one) for one in rows]
                await write(pb.SubscribeResponse(changes=changes, positions=reached))
                await asyncio.sleep(0)


def change_of(released: Released) -> pb.Change:
    delta = released.delta
    return pb.Change(
        partition=released.partition,
        sequence=released.sequence,
        position=released.position,
        ordinal=released.ordinal,
        time_ms=released.time_ms,
        headers=text_headers(released.headers),
        delta_id=delta.delta_id,
        parent=delta.parent or b"",
        namespace=delta.namespace,
        vector_id=delta.vector_id,
        op=delta.op.name.lower(),
        origin=delta.origin,
        time=delta.time,
        priority=delta.priority.name.lower(),
        source=delta.source.name.lower(),
        indices=[] if delta.indices is None else delta.indices.tolist(),
        values=[] if delta.values is None else delta.values.tolist(),
        metadata=b"" if delta.metadata is None else msgspec.msgpack.encode(delta.metadata),
        clock=delta.clock,
    )
