"""A partition that another node serves, or nobody yet: requests for it are sent on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.model.columns import Buffer
from penstock.node.partition import Partition
from penstock.node.requests import (
    EnqueuePart,
    ExtendRequest,
    ReturnRequest,
    TokenRequest,
    stretches,
)
from penstock.node.routing.forwarding import Errand, Forwarder, Kind
from penstock.node.routing.ports import Key, PartitionPort
from penstock.wire.frame import FrameType
from penstock.wire.messages import Duplicate, Outcome, Placed


class RemotePartition:
    """The port of a partition that is not served here."""

    def __init__(self, topic: str, key: Key, *, forwarder: Forwarder) -> None:
        self.topic, self.key = topic, key
        self.index = key[1]
        self._forwarder = forwarder

    @property
    def enqueueing(self) -> RemotePartition:
        return self

    @property
    def settling(self) -> RemotePartition:
        return self

    def enqueue(self, part: EnqueuePart) -> None:
        def here(port: PartitionPort) -> bool:
            if isinstance(port, Partition):
                port.enqueueing.enqueue(part)
            return isinstance(port, Partition)

        self._forwarder.send(
            Errand(
                Kind(FrameType.BATCH, self.topic, (part.codec, part.expected_sequence)),
                self.key,
                count=part.count,
                data=part.body,
                raw_length=len(part.columns.body),
                here=here,
                succeed=lambda outcome: part.request.part_placed(*in_request(part, outcome)),
                fail=part.request.part_failed,
            )
        )

    def settle(self, request: TokenRequest) -> None:
        kind = Kind(FrameType.ACK, self.topic)
        self._send_tokens(kind, request, lambda p: p.settling.settle(request))

    def give_back(self, request: ReturnRequest) -> None:
        reason = request.reason.decode(errors="replace")
        how = (request.delay_ms, request.reject, request.counted, reason)
        kind = Kind(FrameType.NACK, self.topic, how)
        self._send_tokens(kind, request, lambda p: p.settling.give_back(request))

    def extend(self, request: ExtendRequest) -> None:
        kind = Kind(FrameType.HEARTBEAT, self.topic, (request.extend_ms,))
        self._send_tokens(kind, request, lambda p: p.settling.extend(request))

    def _send_tokens(
        self, kind: Kind, request: TokenRequest, act: Callable[[Partition], None]
    ) -> None:
        def here(port: PartitionPort) -> bool:
            if isinstance(port, Partition):
                act(port)
            return isinstance(port, Partition)

        data: Buffer = np.ascontiguousarray(request.tokens, "<u8").tobytes()
        self._forwarder.send(
            Errand(
                kind,
                self.key,
                count=len(request.tokens),
                data=data,
                here=here,
                succeed=lambda outcome: request.reply(outcome.lost),
                fail=request.reply,
            )
        )


def in_request(part: EnqueuePart, outcome: Outcome) -> tuple[list[Placed], list[Duplicate]]:
    """An outcome counts entries of its part; the request counts those of all parts."""
    indices = part.indices
    placed: list[Placed] = []
    for p in outcome.placed:
        if isinstance(indices, range):
            start = indices.start + p.index
            placed.append(Placed(start, p.count, p.partition, p.sequence, p.time_ms))
        else:
            mine = indices[p.index : p.index + p.count]
            sequences = np.arange(p.sequence, p.sequence + p.count)
            placed += stretches(mine, sequences, p.partition, p.time_ms)
    duplicates = [
        Duplicate(int(indices[d.index]), d.partition, d.sequence, d.time_ms)
        for d in outcome.duplicates
    ]
    return placed, duplicates
