"""The two streams of gRPC.

A PopStream is one native lease stream. The first request opens it, later ones add credit or settle
leases; deliveries go the other way. A caller that has nothing more to say may half-close and keep
receiving. When the stream ends, what was leased for it and not yet sent is given back unused.

A Subscribe is answered with released deltas. A slow caller holds its stream back, and nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import msgspec

from penstock.client.delta.subscription import Released
from penstock.client.network.connection import DeliveredBatch, LeaseStream
from penstock.errors import InvalidArgument, Unavailable
from penstock.node.door.budget import Account
from penstock.server import arguments as ask
from penstock.server._generated import penstock_pb2 as pb
from penstock.server.answers import text_headers
from penstock.server.arguments import request_of
from penstock.server.grpc.messages import fields_of, items_of
from penstock.server.operations import ack_batch, nack_batch
from penstock.server.pool import GatewayLink
from penstock.server.subscriptions import CallerSubscriptions, Positions, counted, pieces

Write = Callable[[pb.PopStreamResponse], Awaitable[None]]
_FIRST: Final = "the first request of a PopStream is `open`"


class PopStream:
    """The stream of one consumer, from its first request to its end."""

    def __init__(self, link: GatewayLink, write: Write) -> None:
        self._link = link
        self._write = write
        self._writing = asyncio.Lock()  # gRPC takes one write at a time
        self._unsent: list[DeliveredBatch] = []  # taken from the node, not known to be sent

    async def run(
        self, first: pb.PopStreamRequest, requests: AsyncIterator[pb.PopStreamRequest]
    ) -> None:
        if first.WhichOneof("kind") != "open":
            raise InvalidArgument(_FIRST, field="open")
        opening = request_of(fields_of(first.open), ask.PopOpen)
        stream = await self._link.connection.lease_stream(
            opening.topic,
            credits=opening.credits,
            consumer=opening.consumer,
            visibility_ms=opening.visibility_ms,
            batch_max=opening.batch_max,
        )
        hearing = asyncio.ensure_future(self._hear(opening.topic, stream, requests))
        sending = asyncio.ensure_future(self._deliver(stream))
        try:
            await asyncio.wait((hearing, sending), return_when=asyncio.FIRST_EXCEPTION)
            if hearing.done():
                hearing.result()
            await sending
        finally:
            hearing.cancel()
            sending.cancel()
            await self._give_back(opening.topic, self._unsent + await stream.close())

    async def _hear(
        self, topic: str, stream: LeaseStream, requests: AsyncIterator[pb.PopStreamRequest]
    ) -> None:
        async for request in requests:
            kind = request.WhichOneof("kind")
            if kind == "flow":
                stream.grant(request_of(fields_of(request.flow), ask.FlowControl).credits)
            elif kind == "ack":
                acks = request_of({"topic": topic, **fields_of(request.ack)}, ask.AckBatchCall)
                await self._tell_lost((await ack_batch(self._link, acks))["lost"])
            elif kind == "nack":
                nacks = request_of({"topic": topic, **fields_of(request.nack)}, ask.NackBatchCall)
                await self._tell_lost((await nack_batch(self._link, nacks))["lost"])
            else:
                raise InvalidArgument("a PopStream is opened once", field=kind or "kind")

    async def _deliver(self, stream: LeaseStream) -> None:
        async for batch in stream:
            self._unsent = [batch]
            response = pb.PopStreamResponse(items=items_of(batch))
            async with self._writing:
                await self._write(response)
            self._unsent = []
        raise Unavailable("the node ended the stream")

    async def _tell_lost(self, lost: list[str]) -> None:
        if lost:
            async with self._writing:
                await self._write(pb.PopStreamResponse(lost=lost))

    async def _give_back(self, topic: str, untaken: list[DeliveredBatch]) -> None:
        tokens = [batch.delivery.token(i) for batch in untaken for i in range(batch.delivery.count)]
        if tokens and self._link.connection.alive:
            await self._link.connection.give_back(topic, tokens, delay_ms=0, counted=False)


async def subscribe(
    subscriptions: CallerSubscriptions,
    api_key: str | None,
    request: pb.SubscribeRequest,
    *,
    write: Callable[[pb.SubscribeResponse], Awaitable[None]],
    account: Account,
) -> None:
    asked = request_of(fields_of(request), ask.SubscribeCall)
    async with subscriptions.open(api_key, asked) as following:
        positions = await Positions.of(asked, following)
        async for batch in following:
            async with counted(batch, account):
                async for rows, last in pieces(batch, subscriptions.turns):
                    reached = positions.after(batch) if last else str(positions)
                    changes = [change_of(one) for one in rows]
                    await write(pb.SubscribeResponse(changes=changes, positions=reached))


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
