"""PopStream: one gRPC stream is one native lease stream.

The first request opens it, later ones add credit or settle leases; deliveries go the other way. A
caller that has nothing more to say may half-close and keep receiving. When the stream ends, what
was leased for it and not yet sent is given back unused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from penstock.client.streams import DeliveredBatch, LeaseStream
from penstock.errors import InvalidArgument, Unavailable
from penstock.model.ids import LeaseToken
from penstock.server import requests as ask
from penstock.server._generated import penstock_pb2 as pb
from penstock.server.fields import request_of
from penstock.server.grpc_convert import fields_of, items_of
from penstock.server.operations import ack_batch, nack_batch
from penstock.server.pool import Link

Write = Callable[[pb.PopStreamResponse], Awaitable[None]]
_FIRST: Final = "the first request of a PopStream is `open`"


class PopStream:
    """One consumer's stream."""

    def __init__(self, link: Link, write: Write) -> None:
        self._link = link
        self._write = write
        self._writing = asyncio.Lock()  # gRPC takes one write at a time
        self._unsent: list[DeliveredBatch] = []  # taken from the node, not known to be sent

    async def run(self, requests: AsyncIterator[pb.PopStreamRequest]) -> None:
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("kind") != "open":
            raise InvalidArgument(_FIRST, field="open")
        opening = request_of(fields_of(first.open), ask.PopOpen)
        config = await self._link.config(opening.topic)
        stream = await self._link.connection.lease_stream(
            opening.topic,
            credits=opening.credits,
            consumer=opening.consumer,
            visibility_ms=opening.visibility_ms,
            batch_max=opening.batch_max,
        )
        hearing = asyncio.ensure_future(self._hear(opening.topic, stream, requests))
        sending = asyncio.ensure_future(self._deliver(stream, config.id))
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
                acks = request_of({"topic": topic, **fields_of(request.ack)}, ask.AckBatch)
                await self._tell_lost((await ack_batch(self._link, acks))["lost"])
            elif kind == "nack":
                nacks = request_of({"topic": topic, **fields_of(request.nack)}, ask.NackBatch)
                await self._tell_lost((await nack_batch(self._link, nacks))["lost"])
            else:
                raise InvalidArgument("a PopStream is opened once", field=kind or "kind")

    async def _deliver(self, stream: LeaseStream, topic: int) -> None:
        async for batch in stream:
            self._unsent = [batch]
            response = pb.PopStreamResponse(items=items_of(batch, topic=topic))
            async with self._writing:
                await self._write(response)
            self._unsent = []
        raise Unavailable("the node ended the stream")

    async def _tell_lost(self, lost: list[str]) -> None:
        if lost:
            async with self._writing:
                await self._write(pb.PopStreamResponse(lost=lost))

    async def _give_back(self, topic: str, untaken: list[DeliveredBatch]) -> None:
        tokens = [
            LeaseToken(d.partition, d.epoch, d.token_first + i)
            for d in (batch.delivery for batch in untaken)
            for i in range(d.count)
        ]
        if tokens and self._link.connection.alive:
            await self._link.connection.give_back(topic, tokens, delay_ms=0, counted=False)
