"""One native connection: what may be asked of a node, and the streams that come of it.

A connection is made over TCP or TLS by `open_connection`; inside a process it is handed to
`memory_pair` with the session that answers it, and is ready once `greeted`.

A stream of leased messages, of the committed log or of released deltas is a queue whose length the
peer's credit bounds: it sends only what was granted. A lease stream's credit comes back at the
server when a lease ends; a log stream's credit is returned here, slice by slice, when the reader
takes one.
"""

from __future__ import annotations

import asyncio
import math
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Generic, NotRequired, TypedDict, TypeVar, Unpack, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.client.network.exchange import Exchange, Receiver
from penstock.errors import Corruption, PenstockError, Unavailable
from penstock.model.batch import Batch, decode_all
from penstock.model.columns import Buffer, Columns
from penstock.model.entries import DELIVERY
from penstock.model.ids import LeaseToken
from penstock.wire import messages as wire
from penstock.wire.frame import FrameFlag, FrameType, Outbox
from penstock.wire.messages import pack, traits_of, unpack

ACKNOWLEDGE_S: Final = 0.05  # how long an acknowledgement may wait for the next one
Item = TypeVar("Item")


class SubscriptionStart(TypedDict):
    position: int  # what comes is after it
    topic: NotRequired[int]  # the id of the topic


class DeliveredBatch(msgspec.Struct, frozen=True, gc=False):
    """Messages of one partition, leased together; entry *i* has token `token_first + i`."""

    delivery: wire.Delivery
    columns: Columns


class Stream(Receiver, ABC, Generic[Item]):
    """One open stream, read once. It ends by `close`, by the server, or with an error."""

    def __init__(self, exchange: Exchange, number: int) -> None:
        self._exchange = exchange
        self.number = number
        self._arrived: deque[Any] = deque()  # as `_decode` made them
        self._waiter: asyncio.Future[None] | None = None
        self.ended = False
        self._error: PenstockError | None = None

    @property
    def awaited(self) -> bool:
        """Somebody waits for the next item right now, and must be the one who gets it."""
        return self._waiter is not None

    def __aiter__(self) -> Stream[Item]:
        return self

    async def __anext__(self) -> Item:
        while not self._arrived:
            if self._error is not None:
                raise self._error
            if self.ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        item: Item = self._take(self._arrived.popleft())
        return item

    def take_nowait(self) -> Item | None:
        return self._take(self._arrived.popleft()) if self._arrived else None

    async def close(self) -> list[Item]:
        """End the stream; returns the items that nobody took, also those on their way here."""
        if not self.ended:
            await self._exchange.unsubscribe(self.number)
            self.on_end(None)
        untaken = [self._take(item) for item in self._arrived]
        self._arrived.clear()
        return untaken

    # --- called by the connection ---

    def on_batch(self, payload: memoryview) -> None:
        self._arrived.append(self._decode(payload))
        self._wake()

    def on_end(self, error: PenstockError | None) -> None:
        if not self.ended:
            self.ended, self._error = True, error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @abstractmethod
    def _decode(self, payload: memoryview) -> Any:
        """On arrival: cheap, for the reader may never come."""

    def _take(self, arrived: Any) -> Any:
        return arrived


class LeaseStream(Stream[DeliveredBatch]):
    def grant(self, messages: int) -> None:
        """Let `messages` more be out at once. An ended lease returns its credit by itself."""
        if messages <= 0:
            raise ValueError(f"a grant of {messages} messages is not a grant")
        if not self.ended:
            self._exchange.send(FrameType.ACK, self.number, pack(wire.Grant(messages)))

    def _decode(self, payload: memoryview) -> DeliveredBatch:
        delivery, data = unpack(payload, wire.Delivery)
        return DeliveredBatch(delivery, DELIVERY.decode(data, delivery.count))


class LogStream(Stream[list[Batch]]):
    """The committed batches of one partition, in order and without a gap."""

    sequence_committed = 0  # as of the last slice taken
    topic = 0  # the id of the topic that has the log

    def _decode(self, payload: memoryview) -> tuple[wire.LogSlice, memoryview]:
        return unpack(payload, wire.LogSlice)

    def _take(self, arrived: tuple[wire.LogSlice, memoryview]) -> list[Batch]:
        """Every batch, CRC-verified; raises `Corruption` unless they cover the slice gaplessly."""
        head, data = arrived
        found, expected = decode_all(data), head.first
        for batch in found:
            if batch.first != expected:
                raise Corruption(f"a log slice jumps from {expected} to {batch.first}")
            expected = batch.last + 1
        if expected != head.last + 1:
            raise Corruption(f"a log slice ends at {expected - 1}, not {head.last}")
        self.sequence_committed = head.sequence_committed
        if not self.ended:
            grant = wire.Grant(head.last - head.first + 1, len(data))
            self._exchange.send(FrameType.ACK, self.number, pack(grant))
        return found


class ChangeStream(Receiver):
    """One open subscription. Credit goes back when a quarter of it has gathered."""

    def __init__(
        self,
        exchange: Exchange,
        number: int,
        *,
        request: wire.OpenSubscription,
        arrived: Callable[[ChangeStream, wire.Changes, memoryview], None],
    ) -> None:
        self._exchange, self.number, self._arrived = exchange, number, arrived
        self._durable = bool(request.cursor)
        self._entries_due = max(1, request.credit_entries // 4)
        self._bytes_due = max(1, request.credit_bytes // 4)
        self._entries = self._bytes = self._position = 0  # to be told
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.ended: asyncio.Future[PenstockError | None] = self._loop.create_future()

    def took(self, entries: int, size: int) -> None:
        """The reader has them: their credit comes back."""
        self._entries += entries
        self._bytes += size
        if self._entries >= self._entries_due or self._bytes >= self._bytes_due:
            self._tell()

    def acknowledge(self, position: int) -> None:
        """The reader is done with everything up to there, which a cursor remembers."""
        if not self._durable:
            return
        self._position = max(self._position, position)
        if self._timer is None:
            self._timer = self._loop.call_later(ACKNOWLEDGE_S, self._tell)

    def _tell(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.ended.done():
            grant = wire.Grant(self._entries, self._bytes, self._position)
            self._exchange.send(FrameType.ACK, self.number, pack(grant))
        self._entries = self._bytes = self._position = 0

    async def close(self) -> None:
        if self._timer is not None:
            self._tell()
        if not self.ended.done():
            with suppress(Unavailable):  # There is nothing to close if the connection is gone.
                await self._exchange.unsubscribe(self.number)
            self.on_end(None)

    # --- called by the connection ---

    def on_batch(self, payload: memoryview) -> None:
        self._arrived(self, *unpack(payload, wire.Changes))

    def on_end(self, error: PenstockError | None) -> None:
        if not self.ended.done():
            self.ended.set_result(error)


class HowReturned(TypedDict, total=False):
    """How leases are given back; by default for a retry after the topic's backoff."""

    delay_ms: int | None  # until the retry
    reject: bool  # to the dead letters
    counted: bool  # as an attempt; False: they were not used
    reason: str


class Connection(Exchange):
    async def call(self, method: str, /, **arguments: Any) -> dict[str, Any]:
        """One administrative call; the result map, or the error it was refused with."""
        result: dict[str, Any] = await self._request(
            FrameType.SUBSCRIBE,
            dict,
            pack(wire.Call(method, arguments)),
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
    ) -> wire.Enqueued:
        """Append ENQ bodies, given as (partition, entries, body); answered when durable."""
        lengths = [wire.Part(partition, count, len(body)) for partition, count, body in parts]
        request = wire.Enqueue(
            topic, lengths, atomic, expected_sequence, codec, raw_lengths, partitioned
        )
        enqueued: wire.Enqueued = await self._request(
            FrameType.BATCH, wire.Enqueued, pack(request), *(body for _, _, body in parts)
        )
        return enqueued

    async def settle(self, topic: str, tokens: Sequence[LeaseToken]) -> list[int]:
        """Acknowledge leases; returns the positions of those that were no longer held."""
        return await self._end(FrameType.ACK, tokens, lambda parts: wire.Settle(topic, parts))

    async def settle_range(
        self, topic: str, first: LeaseToken, tokens: NDArray[np.uint64]
    ) -> list[int]:
        """`settle` for sequences of tokens that have all else in common with `first`."""
        parts = [_part(first, len(tokens))]
        settled: wire.Settled = await self._request(
            FrameType.ACK,
            wire.Settled,
            pack(wire.Settle(topic, parts)),
            tokens.astype("<u8").tobytes(),
        )
        return settled.lost

    async def give_back(
        self, topic: str, tokens: Sequence[LeaseToken], **how: Unpack[HowReturned]
    ) -> list[int]:
        """End leases unfinished; returns the positions of lost ones."""
        return await self._end(
            FrameType.NACK, tokens, lambda parts: wire.Return(topic, parts, **how)
        )

    async def extend(self, topic: str, tokens: Sequence[LeaseToken], extend_ms: int) -> list[int]:
        """Let leases run `extend_ms` from now; returns the positions of lost ones."""
        return await self._end(
            FrameType.HEARTBEAT, tokens, lambda parts: wire.Extend(topic, parts, extend_ms)
        )

    async def _end(
        self,
        type: FrameType,
        tokens: Sequence[LeaseToken],
        request_of: Callable[[list[wire.TokenPart]], wire.Settle | wire.Return | wire.Extend],
    ) -> list[int]:
        parts, data, order = grouped(tokens)
        settled: wire.Settled = await self._request(
            type, wire.Settled, pack(request_of(parts)), data
        )
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
        request = wire.OpenLease(topic, credits, consumer, visibility_ms, batch_max)
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
        request = wire.OpenLog(
            topic, partition, from_sequence, credit_entries, credit_bytes, through, topic_id
        )
        stream.topic = (await self._open(stream, request)).get("topic", 0)
        return stream

    async def subscribe(
        self,
        request: wire.OpenSubscription,
        arrived: Callable[[ChangeStream, wire.Changes, memoryview], None],
    ) -> tuple[ChangeStream, SubscriptionStart]:
        """Open a stream of released deltas, handed on as they come; and where it starts."""
        stream = ChangeStream(self, self._next(), request=request, arrived=arrived)
        opened: SubscriptionStart = await self._open(stream, request, SubscriptionStart)
        return stream, opened

    async def _open(
        self,
        stream: LeaseStream | LogStream | ChangeStream,
        request: wire.OpenLease | wire.OpenLog | wire.OpenSubscription,
        answer: Any = dict,
    ) -> Any:
        number = stream.number
        self._streams[number] = stream
        # Readers of a log may have to wait until somebody serves it, or has folded it.
        wait_s = 0.0 if isinstance(request, wire.OpenLease) else math.inf
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

    def tell(self, told: list[wire.Told]) -> None:
        # The frame has a number, so that a refusal is not taken for one of the whole connection.
        self.send(FrameType.SUBSCRIBE, self._next(), pack(wire.Tell(told)))

    def open(self, control: Any, stream: Receiver) -> int:
        """Subscribe; returns the stream's number. What comes goes to `stream`, a refusal too."""
        if not self.alive:
            raise self._over()
        number = self._next()
        self._streams[number] = stream
        self.send(FrameType.SUBSCRIBE, number, pack(control), flags=FrameFlag.ACK_WANTED)
        return number

    def close_stream(self, number: int) -> None:
        if self._streams.pop(number, None) is not None:
            self.send(FrameType.UNSUBSCRIBE, number)


def _wait_s(method: str, wait_ms: object) -> float:
    """How much longer than others a call may take."""
    if traits_of(method).lengthy:
        return math.inf
    return wait_ms / 1000 if isinstance(wait_ms, int) else 0.0


_U64: Final = struct.Struct("<Q")


def grouped(tokens: Sequence[LeaseToken]) -> tuple[list[wire.TokenPart], bytes, list[int] | None]:
    """Tokens as parts of one (topic, partition, epoch) each; `order` maps back unless nothing
    moved."""
    if len(tokens) == 1:
        token = tokens[0]
        return [_part(token, 1)], _U64.pack(token[3]), None
    order = sorted(range(len(tokens)), key=lambda i: tokens[i][:3])
    parts: list[wire.TokenPart] = []
    start = 0
    for end in range(1, len(order) + 1):
        head = tokens[order[start]]
        if end == len(order) or tokens[order[end]][:3] != head[:3]:
            parts.append(_part(head, end - start))
            start = end
    data = np.fromiter((tokens[i][3] for i in order), dtype="<u8", count=len(order)).tobytes()
    return parts, data, order


def _part(token: LeaseToken, count: int) -> wire.TokenPart:
    return wire.TokenPart(token.partition, token.epoch, count, token.topic)


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
