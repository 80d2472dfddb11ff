"""Streams that a connection receives: leased messages, the committed log, released deltas.

A stream is a queue whose length the peer's credit bounds: it sends only what was granted. A lease
stream's credit comes back at the server when a lease ends; a log stream's credit is returned here,
slice by slice, when the reader takes one.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Generic, NotRequired, TypedDict, TypeVar

import msgspec

from penstock.client.network.exchange import Exchange, Receiver
from penstock.errors import Corruption, PenstockError, Unavailable
from penstock.model.batch import Batch, decode_all
from penstock.model.columns import Columns
from penstock.model.delivery import DELIVERY
from penstock.wire.frame import FrameType
from penstock.wire.messages import (
    Changes,
    Delivery,
    Grant,
    LogSlice,
    OpenSubscription,
    pack,
    unpack,
)

ACKNOWLEDGE_S: Final = 0.05  # how long an acknowledgement may wait for the next one
Item = TypeVar("Item")


class SubscriptionStart(TypedDict):
    """The answer to a subscription, as far as it is used."""

    position: int  # what comes is after it
    topic: NotRequired[int]  # the id of the topic


class DeliveredBatch(msgspec.Struct, frozen=True, gc=False):
    """Messages of one partition, leased together; entry *i* has token `token_first + i`."""

    delivery: Delivery
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
        """An item that is already here, or None."""
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
        """The item that the reader takes."""
        return arrived


class LeaseStream(Stream[DeliveredBatch]):
    """Leased messages as they become ready, best first."""

    def grant(self, messages: int) -> None:
        """Let `messages` more be out at once. An ended lease returns its credit by itself."""
        if messages <= 0:
            raise ValueError(f"a grant of {messages} messages is not a grant")
        if not self.ended:
            self._exchange.send(FrameType.ACK, self.number, pack(Grant(messages)))

    def _decode(self, payload: memoryview) -> DeliveredBatch:
        delivery, data = unpack(payload, Delivery)
        return DeliveredBatch(delivery, DELIVERY.decode(data, delivery.count))


class LogStream(Stream[list[Batch]]):
    """The committed batches of one partition, in order and without a gap."""

    sequence_committed = 0  # as of the last slice taken
    topic = 0  # the id of the topic that has the log

    def _decode(self, payload: memoryview) -> tuple[LogSlice, memoryview]:
        return unpack(payload, LogSlice)

    def _take(self, arrived: tuple[LogSlice, memoryview]) -> list[Batch]:
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
            grant = Grant(head.last - head.first + 1, len(data))
            self._exchange.send(FrameType.ACK, self.number, pack(grant))
        return found


class ChangeStream(Receiver):
    """One open subscription. Credit goes back when a quarter of it has gathered."""

    def __init__(
        self,
        exchange: Exchange,
        number: int,
        *,
        request: OpenSubscription,
        arrived: Callable[[ChangeStream, Changes, memoryview], None],
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
            grant = Grant(self._entries, self._bytes, self._position)
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
        self._arrived(self, *unpack(payload, Changes))

    def on_end(self, error: PenstockError | None) -> None:
        if not self.ended.done():
            self.ended.set_result(error)
