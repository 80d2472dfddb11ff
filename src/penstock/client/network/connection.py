"""One native connection: what may be asked of a node, over any asyncio transport.

It is made over TCP or TLS by `open_connection`; inside a process it is handed to `memory_pair` with
the session that answers it, and is ready once `greeted`.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypedDict, Unpack, cast

import numpy as np
from numpy.typing import NDArray

from penstock.client.network.exchange import Exchange, Receiver
from penstock.client.network.streams import ChangeStream, LeaseStream, LogStream, SubscriptionStart
from penstock.model.ids import LeaseToken
from penstock.wire.calls import traits_of
from penstock.wire.frame import Buffer, FrameFlag, FrameType
from penstock.wire.messages import (
    Call,
    Changes,
    Enqueue,
    Enqueued,
    Extend,
    OpenLease,
    OpenLog,
    OpenSubscription,
    Part,
    Return,
    Settle,
    Settled,
    Tell,
    TokenPart,
    Told,
    pack,
)
from penstock.wire.outbox import Outbox


class HowReturned(TypedDict, total=False):
    """How leases are given back; by default for a retry after the topic's backoff."""

    delay_ms: int | None  # until the retry
    reject: bool  # to the dead letters
    counted: bool  # as an attempt; False: they were not used
    reason: str


class Connection(Exchange):
    """The calls, the enqueues and the streams of one client's end."""

    async def call(self, method: str, /, **arguments: Any) -> dict[str, Any]:
        """One administrative call; the result map, or the error it was refused with."""
        result: dict[str, Any] = await self._request(
            FrameType.SUBSCRIBE,
            dict,
            pack(Call(method, arguments)),
            wait_s=_wait_s(method, arguments.get("wait_ms")),
        )
        return result

    async def enqueue(
        self,
        topic: str,
        parts: Sequence[tuple[int, int, Buffer]],
        *,
        atomic: bool = False,
        expected_sequence: int | None = None,
        partitioned: bool = True,
        codec: int = 0,
        raw_lengths: list[int] | None = None,
    ) -> Enqueued:
        """Append ENQ bodies, given as (partition, entries, body); answered when durable."""
        lengths = [Part(partition, count, len(body)) for partition, count, body in parts]
        request = Enqueue(
            topic, lengths, atomic, expected_sequence, codec, raw_lengths, partitioned
        )
        enqueued: Enqueued = await self._request(
            FrameType.BATCH, Enqueued, pack(request), *(body for _, _, body in parts)
        )
        return enqueued

    async def settle(self, topic: str, tokens: Sequence[LeaseToken]) -> list[int]:
        """Acknowledge leases; returns the positions of those that were no longer held."""
        return await self._end(FrameType.ACK, tokens, lambda parts: Settle(topic, parts))

    async def settle_range(
        self, topic: str, first: LeaseToken, tokens: NDArray[np.uint64]
    ) -> list[int]:
        """`settle` for sequences of tokens that have all else in common with `first`."""
        parts = [_part(first, len(tokens))]
        settled: Settled = await self._request(
            FrameType.ACK, Settled, pack(Settle(topic, parts)), tokens.astype("<u8").tobytes()
        )
        return settled.lost

    async def give_back(
        self, topic: str, tokens: Sequence[LeaseToken], **how: Unpack[HowReturned]
    ) -> list[int]:
        """End leases unfinished; returns the positions of lost ones."""
        return await self._end(FrameType.NACK, tokens, lambda parts: Return(topic, parts, **how))

    async def extend(self, topic: str, tokens: Sequence[LeaseToken], extend_ms: int) -> list[int]:
        """Let leases run `extend_ms` from now; returns the positions of lost ones."""
        return await self._end(
            FrameType.HEARTBEAT, tokens, lambda parts: Extend(topic, parts, extend_ms)
        )

    async def _end(
        self,
        type: FrameType,
        tokens: Sequence[LeaseToken],
        request_of: Callable[[list[TokenPart]], Settle | Return | Extend],
    ) -> list[int]:
        """Tell the node about leases; the positions of those that were no longer held."""
        parts, data, order = grouped(tokens)
        settled: Settled = await self._request(type, Settled, pack(request_of(parts)), data)
        return settled.lost if order is None else sorted(order[i] for i in settled.lost)

    # --- streams ---

    async def lease_stream(
        self,
        topic: str,
        *,
        credits: int,
        consumer: str = "",
        visibility_ms: int | None = None,
        batch_max: int = 100,
    ) -> LeaseStream:
        """Open a stream of leased messages."""
        stream = LeaseStream(self, self._next())
        request = OpenLease(topic, credits, consumer, visibility_ms, batch_max)
        await self._open(stream, request)
        return stream

    async def log_stream(
        self,
        topic: str,
        *,
        partition: int,
        from_sequence: int = 1,
        credit_entries: int = 1000,
        credit_bytes: int = 8 << 20,
        through: int = 0,
        topic_id: int = 0,
    ) -> LogStream:
        """Open a stream of committed batches; with `through` it ends there by itself. With the id
        of a topic, `NotFound` is raised if another one has its name by now."""
        stream = LogStream(self, self._next())
        request = OpenLog(
            topic, partition, from_sequence, credit_entries, credit_bytes, through, topic_id
        )
        stream.topic = (await self._open(stream, request)).get("topic", 0)
        return stream

    async def subscribe(
        self,
        request: OpenSubscription,
        arrived: Callable[[ChangeStream, Changes, memoryview], None],
    ) -> tuple[ChangeStream, SubscriptionStart]:
        """Open a stream of released deltas, handed on as they come; and where it starts."""
        stream = ChangeStream(self, self._next(), request=request, arrived=arrived)
        opened: SubscriptionStart = await self._open(stream, request, SubscriptionStart)
        return stream, opened

    async def _open(
        self,
        stream: LeaseStream | LogStream | ChangeStream,
        request: OpenLease | OpenLog | OpenSubscription,
        answer: Any = dict,
    ) -> Any:
        number = stream.number
        self._streams[number] = stream
        # Readers of a log may have to wait until somebody serves it, or has folded it.
        wait_s = 0.0 if isinstance(request, OpenLease) else math.inf
        try:
            return await self.ask(
                FrameType.SUBSCRIBE, answer, pack(request), number=number, wait_s=wait_s
            )
        except BaseException:
            # A caller that gave up waiting must not leave a stream behind that leases messages.
            if number in self._streams:
                self.send(FrameType.UNSUBSCRIBE, number)
            self._let_go(number)
            raise


class PeerConnection(Connection):
    """What one node may ask of another. Its streams are handed what comes from within the frame's
    arrival: a follower acts on it at once and in order."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        outbox = Outbox(cast(asyncio.Transport, transport), self._loop.call_soon)
        super().connection_made(cast(asyncio.Transport, outbox))

    @property
    def node(self) -> str:
        """Who the other one says it is."""
        return self.welcome.node

    def tell(self, told: list[Told]) -> None:
        # The frame has a number, so that a refusal is not taken for one of the whole connection.
        self.send(FrameType.SUBSCRIBE, self._next(), pack(Tell(told)))

    def open(self, control: Any, stream: Receiver) -> int:
        """Subscribe; returns the stream's number. What comes goes to `stream`, a refusal too."""
        if not self.alive:
            raise self._over()
        number = self._next()
        self._streams[number] = stream
        self.send(FrameType.SUBSCRIBE, number, pack(control), flags=FrameFlag.ACK_WANTED)
        return number

    def close_stream(self, number: int) -> None:
        """Unsubscribe; nothing comes any more."""
        if self._streams.pop(number, None) is not None:
            self.send(FrameType.UNSUBSCRIBE, number)


def _wait_s(method: str, wait_ms: object) -> float:
    """How much longer than others a call may take."""
    if traits_of(method).lengthy:
        return math.inf
    return wait_ms / 1000 if isinstance(wait_ms, int) else 0.0


_U64: Final = struct.Struct("<Q")


def grouped(tokens: Sequence[LeaseToken]) -> tuple[list[TokenPart], bytes, list[int] | None]:
    """Tokens as parts of one (topic, partition, epoch) each; `order` maps back unless nothing
    moved."""
    if len(tokens) == 1:
        token = tokens[0]
        return [_part(token, 1)], _U64.pack(token[3]), None
    order = sorted(range(len(tokens)), key=lambda i: tokens[i][:3])
    parts: list[TokenPart] = []
    start = 0
    for end in range(1, len(order) + 1):
        head = tokens[order[start]]
        if end == len(order) or tokens[order[end]][:3] != head[:3]:
            parts.append(_part(head, end - start))
            start = end
    data = np.fromiter((tokens[i][3] for i in order), dtype="<u8", count=len(order)).tobytes()
    return parts, data, order


def _part(token: LeaseToken, count: int) -> TokenPart:
    return TokenPart(token.partition, token.epoch, count, token.topic)


async def all_pages(
    call: Callable[..., Awaitable[dict[str, Any]]], method: str, field: str, /, **arguments: Any
) -> dict[str, Any]:
    """The answer to a call with the rows of all pages under `field`."""
    answer = await call(method, **arguments)
    rows = answer[field]
    while after := answer.get("next"):
        answer = await call(method, **arguments, after=after)
        rows += answer[field]
    return {name: value for name, value in answer.items() if name != "next"} | {field: rows}
