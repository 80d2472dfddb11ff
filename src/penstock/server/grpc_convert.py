"""Between gRPC messages and the gateway's own requests and results.

Field names are the same on both sides, so one pair of functions serves every call. A field that
is not set is left out and takes its default, or is refused as missing, exactly as over HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, cast

import msgspec
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from penstock.client.streams import DeliveredBatch
from penstock.model.ids import LeaseToken, MessageId
from penstock.server._generated import penstock_pb2 as pb
from penstock.server.http_json import text_headers

M = TypeVar("M", bound=Message)


def fields_of(message: Message) -> dict[str, Any]:
    """The fields that are set, as builtins."""
    return {field.name: _builtin(field, value) for field, value in message.ListFields()}


def _builtin(field: FieldDescriptor, value: Any) -> Any:
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name.lower() if known else str(value)
    if field.is_repeated:
        return dict(value) if _is_map(field) else list(value)
    return value


def message_of(type: type[M], values: Mapping[str, Any]) -> M:
    """A message with those of `values` that it has fields for."""
    return type(**_known(_descriptor(type), values))


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


def _descriptor(type: type[Message]) -> Descriptor:
    found: Any = type.DESCRIPTOR
    return cast(Descriptor, found)


@cache
def _fields(descriptor: Descriptor) -> list[tuple[str, FieldDescriptor]]:
    return list(descriptor.fields_by_name.items())


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def items_of(batch: DeliveredBatch, *, topic: int) -> list[pb.PopItem]:
    """Delivered columns as messages."""
    delivery, columns = batch.delivery, batch.columns
    count = delivery.count
    sequences = columns.fixed("message").tolist()
    times = columns.fixed("time_ms").tolist()
    empty = [b""] * count
    keys, headers, payloads = (
        empty if (cell := columns.binary(name)) is None else list(cell)
        for name in ("key", "headers", "payload")
    )
    items = []
    for i, (sequence, time_ms, priority, attempts) in enumerate(
        zip(
            sequences,
            times,
            columns.fixed("priority").tolist(),
            columns.fixed("attempts").tolist(),
            strict=True,
        )
    ):
        token = LeaseToken(delivery.partition, delivery.epoch, delivery.token_first + i)
        message_id = str(MessageId(time_ms, topic, delivery.partition, sequence))
        items.append(
            pb.PopItem(
                message_id=message_id,
                partition=delivery.partition,
                sequence=sequence,
                priority=priority,
                attempts=attempts,
                time_ms=time_ms,
                key=keys[i],
                headers=text_headers(msgspec.msgpack.decode(headers[i])) if headers[i] else None,
                payload=payloads[i],
                lease_token=str(token),
                deadline_ms=delivery.deadline_ms,
                visibility_ms=delivery.visibility_ms,
            )
        )
    return items
