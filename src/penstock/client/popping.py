"""Messages leased by a call, as a batch of one each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.client.leases import MessageBatch, Origin
from penstock.client.streams import DeliveredBatch
from penstock.model.delivery import DELIVERY
from penstock.model.ids import LeaseToken
from penstock.wire.messages import Delivery


def popped(
    origin: Origin, fields: dict[str, Any], entered: Callable[[MessageBatch[Any]], None]
) -> MessageBatch[Any]:
    """A message out of a `pop` call; `entered` is called when a handler begins with it."""
    token = LeaseToken.parse(fields["lease_token"])
    headers = fields.get("headers")
    body = DELIVERY.encode(
        1,
        {
            "message": [fields["sequence"]],
            "time_ms": [fields["time_ms"]],
            "priority": [fields.get("priority", 0)],
            "attempts": [fields.get("attempts", 0)],
            "key": [fields.get("key") or b""],
            "headers": [msgspec.msgpack.encode(headers) if headers else b""],
            "payload": [fields["payload"]],
        },
    )
    delivery = Delivery(
        token.partition, token.epoch, token.sequence, 1,
        fields.get("deadline_ms", 0), fields.get("visibility_ms", 30_000),
    )  # fmt: skip
    batch: MessageBatch[Any] = MessageBatch(
        origin, DeliveredBatch(delivery, DELIVERY.decode(body, 1))
    )
    batch.hand_out()
    batch.entered = entered
    return batch
