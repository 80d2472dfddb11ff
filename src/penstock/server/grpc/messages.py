"""Between gRPC messages and the gateway's own arguments and answers, and the two streams of gRPC.

Field names are the same on both sides, so one pair of functions serves every call but the enqueues.
A field that is not set is left out and takes its default, or is refused as missing, exactly as over
HTTP. The enqueues are where the time goes: they make columns straight out of repeated messages.

A PopStream is one native lease stream. The first request opens it, later ones add credit or settle
leases; deliveries go the other way. A caller that has nothing more to say may half-close and keep
receiving. When the stream ends, what was leased for it and not yet sent is given back unused.

A Subscribe is answered with released deltas. A slow caller holds its stream back, and nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import cache
from typing import Any, Final, TypeVar

import msgspec
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from penstock.client.delta.subscription import Released
from penstock.client.network.connection import DeliveredBatch, LeaseStream
from penstock.errors import InvalidArgument, Unavailable
from penstock.model.entries import EntryRun
from penstock.model.ids import MessageId
from penstock.model.plain import headers_of
from penstock.model.topic import NAME
from penstock.node.door.budget import Account
from penstock.server import vocabulary as say
from penstock.server._generated import penstock_pb2 as pb
from penstock.server.operations import ack_batch, nack_batch
from penstock.server.pool import Entry, GatewayEntries, GatewayLink, packed_headers, producer_run
from penstock.server.subscriptions import CallerSubscriptions, Positions, counted, pieces
from penstock.server.vocabulary import request_of, text_headers

M = TypeVar("M", bound=Message)


def fields_of(message: Message) -> dict[str, Any]:
    return {field.name: _builtin(field, value) for field, value in message.ListFields()}


def _builtin(field: FieldDescriptor, value: Any) -> Any:
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name.lower() if known else str(value)
    if field.is_repeated:
        of = field.message_type
        return dict(value) if of is not None and of.GetOptions().map_entry else list(value)
    return value


def message_of(type: type[M], values: Mapping[str, Any]) -> M:
    descriptor: Any = type.DESCRIPTOR
    return type(**_known(descriptor, values))


def _known(descriptor: Descriptor, values: Mapping[str, Any]) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for name, field in _fields(descriptor):
        value = values.get(name)
        if value is None:
            continue
        if field.enum_type is not None:
            value = str(value).upper()
        elif name == "headers":
            value = text_headers(value)
        elif field.message_type is not None:
            value = [_known(field.message_type, item) for item in value]
        known[name] = value
    return known


@cache
def _fields(descriptor: Descriptor) -> list[tuple[str, FieldDescriptor]]:
    return list(descriptor.fields_by_name.items())


def items_of(batch: DeliveredBatch) -> list[pb.PopItem]:
    delivery, columns = batch.delivery, batch.columns
    numbers = [
        columns.fixed(name).tolist() for name in ("message", "time_ms", "priority", "attempts")
    ]
    cells = [
        columns.binary(name) or [b""] * delivery.count for name in ("key", "headers", "payload")
    ]
    return [
        pb.PopItem(
            message_id=str(MessageId(time_ms, delivery.topic, delivery.partition, sequence)),
            partition=delivery.partition,
            sequence=sequence,
            priority=priority,
            attempts=attempts,
            time_ms=time_ms,
            key=key,
            headers=text_headers(headers_of(headers)) if headers else None,
            payload=payload,
            lease_token=str(delivery.token(row)),
            deadline_ms=delivery.deadline_ms,
            visibility_ms=delivery.visibility_ms,
        )
        for row, (sequence, time_ms, priority, attempts, key, headers, payload) in enumerate(
            zip(*numbers, *cells, strict=True)
        )
    ]


async def enqueue(link: GatewayLink, request: pb.EnqueueRequest, _: Any) -> pb.EnqueueResponse:
    entry = Entry(
        request.payload,
        request.priority,
        request.key,
        packed_headers(request.headers),
        request.delay_ms,
        request.max_retries if request.HasField("max_retries") else -1,
        _run_of(request, 1),
    )
    written = await link.put(topic_of(request.topic), entry)
    return pb.EnqueueResponse(message_id=written.message_id, duplicate=written.duplicate)


async def enqueue_batch(
    link: GatewayLink, request: pb.EnqueueBatchRequest, _: Any
) -> pb.EnqueueBatchResponse:
    written = await link.put_batch(
        topic_of(request.topic),
        entries_of(request),
        atomic=request.atomic if request.HasField("atomic") else True,
        expected_sequence=expected_of(request),
    )
    return pb.EnqueueBatchResponse(**written)


def entries_of(request: pb.EnqueueBatchRequest) -> GatewayEntries:
    messages = list(request.messages)  # holds the wrappers, which each pass would make again
    if not messages:
        raise InvalidArgument("a batch needs a message", field="messages")
    run = _run_of(request, len(messages))
    keys = [m.key for m in messages]
    headers = [m.headers for m in messages]
    delays_ms = [m.delay_ms for m in messages]
    max_retries = [m.max_retries if m.HasField("max_retries") else -1 for m in messages]
    return GatewayEntries(
        [m.payload for m in messages],
        [m.priority for m in messages],
        keys if any(keys) else None,
        [packed_headers(h) for h in headers] if any(headers) else None,
        delays_ms if any(delays_ms) else None,
        max_retries if max(max_retries) >= 0 else None,
        () if run is None else (run,),
    )


def _run_of(request: pb.EnqueueRequest | pb.EnqueueBatchRequest, count: int) -> EntryRun | None:
    seq = request.seq if request.HasField("seq") else None
    return producer_run(request.producer_id, epoch=request.epoch, seq=seq, count=count)


def expected_of(request: pb.EnqueueBatchRequest) -> int | None:
    if not request.HasField("expected_sequence"):
        return None
    expected: int = request.expected_sequence
    if expected >> 63:
        raise InvalidArgument("expected_sequence is too large", field="expected_sequence")
    return expected


def topic_of(name: str) -> str:
    if not NAME.fullmatch(name):
        raise InvalidArgument(f"topic must match {NAME.pattern}", field="topic", limit=NAME.pattern)
    return name


Write = Callable[[pb.PopStreamResponse], Awaitable[None]]
_FIRST: Final = "the first request of a PopStream is `open`"


class PopStream:
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
        opening = request_of(fields_of(first.open), say.PopOpen)
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
                stream.grant(request_of(fields_of(request.flow), say.FlowControl).credits)
            elif kind == "ack":
                acks = request_of({"topic": topic, **fields_of(request.ack)}, say.AckBatchCall)
                await self._tell_lost((await ack_batch(self._link, acks))["lost"])
            elif kind == "nack":
                nacks = request_of({"topic": topic, **fields_of(request.nack)}, say.NackBatchCall)
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
    asked = request_of(fields_of(request), say.SubscribeCall)
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
