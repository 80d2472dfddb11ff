"""Between gRPC messages and the gateway's own arguments and answers.

Field names are the same on both sides, so one pair of functions serves every call but the enqueues.
A field that is not set is left out and takes its default, or is refused as missing, exactly as over
HTTP. The enqueues are where the time goes: they make columns straight out of repeated messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from penstock.client.network.connection import DeliveredBatch
from penstock.errors import InvalidArgument
from penstock.model.ids import MessageId
from penstock.model.plain import headers_of
from penstock.model.topic import NAME
from penstock.server._generated import penstock_pb2 as pb
from penstock.server.answers import text_headers
from penstock.server.entries import Entry, GatewayEntries, packed_headers, producer_run
from penstock.server.pool import GatewayLink

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
    run = producer_run(
        request.producer_id,
        epoch=request.epoch,
        seq=request.seq if request.HasField("seq") else None,
        count=1,
    )
    entry = Entry(
        request.payload,
        request.priority,
        request.key,
        packed_headers(request.headers),
        request.delay_ms,
        request.max_retries if request.HasField("max_retries") else -1,
        run,
    )
    written = await link.put(topic_of(request.topic), entry)
    return pb.EnqueueResponse(**written._asdict())


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
    run = producer_run(
        request.producer_id,
        epoch=request.epoch,
        seq=request.seq if request.HasField("seq") else None,
        count=len(messages),
    )
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
