"""Consumers: leased messages one by one, or in the batches in which they arrive.

A consumer opens one lease stream whose credit is what it may hold: its concurrency (or batches) and
a small prefetch. The node leases the best messages first, so whatever is prefetched is order that
was decided early; that is why prefetch is small unless asked for.

When the stream is lost, what has arrived stays held and is handed out; then a new stream is opened,
at another node if need be. Stopping gives back what waited, and counts no attempt for it.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any, Generic, Self, TypeVar

from penstock.client.network.connection import DeliveredBatch, LeaseStream
from penstock.client.network.link import passing
from penstock.client.queue.handle import TopicHandle
from penstock.client.queue.leases import Keeper, LeasedMessage, MessageBatch
from penstock.errors import PenstockError
from penstock.model.ids import LeaseToken
from penstock.model.topic import Mode

T = TypeVar("T")
Out = TypeVar("Out")
log = logging.getLogger("penstock.client")


class Consumer(ABC, Generic[T, Out]):
    """An async iterator over leases. Leave its loop, its `async with`, or call `aclose` to stop."""

    def __init__(
        self,
        topic: TopicHandle[T],
        *,
        wanted: dict[str, Any],
        held_max: int,
        keeper_of: Callable[[int], Keeper],
        ended: Callable[[Consumer[Any, Any]], None],
    ) -> None:
        self._topic, self._link = topic, topic.link
        self._keeper_of, self._on_ended = keeper_of, ended
        self._wanted = wanted  # what `Connection.lease_stream` is told
        self._held_max = held_max  # units (messages or batches) handed out at once
        self._handed = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()  # set when fewer units are out, or when it stops
        self._stream: LeaseStream | None = None
        self._lost: PenstockError | None = None  # why the stream before this one ended
        self._entered = self._stopping = False
        self._closed = asyncio.Event()
        self._keeper: Keeper | None = None

    # --- iteration ---

    def __aiter__(self) -> AsyncIterator[Out]:
        # A generator closes itself when its loop is left; inside `async with` that would be early.
        return self if self._entered else self._iterate()

    async def __anext__(self) -> Out:
        found = await self._next()
        if found is None:
            raise StopAsyncIteration
        return found

    async def _iterate(self) -> AsyncGenerator[Out, None]:
        try:
            while (found := await self._next()) is not None:
                yield found
        finally:
            await self.aclose()

    async def _next(self) -> Out | None:
        async with self._turn:  # several workers may share one consumer
            while not self._stopping:
                while self._handed >= self._held_max and not self._stopping:
                    self._freed.clear()
                    await self._freed.wait()
                self._absorb()
                while (found := self._best()) is not None:
                    if self._hand_out(found):
                        self._handed += 1
                        return found
                if not self._stopping:
                    await self._receive()
            return None

    @abstractmethod
    def _best(self) -> Out | None:
        """The next of what waits."""

    async def _receive(self) -> None:
        """Wait for a delivery; open the stream if there is none, or if it was lost."""
        if self._stream is None:
            await self._subscribe()
        if self._stream is None:
            return
        try:
            self._admit(await anext(self._stream))
        except StopAsyncIteration:
            self._stream = None
        except PenstockError as error:
            if not passing(error):
                raise
            log.warning("a consumer of %s lost its stream: %s", self._topic.name, error)
            self._stream, self._lost = None, error

    async def _subscribe(self) -> None:
        await self._topic.opened()
        lost, self._lost = self._lost, None
        self._stream = await self._link.request(
            lambda connection: connection.lease_stream(self._topic.name, **self._wanted),
            failed=lost,
        )
        if self._keeper is None:
            visibility_ms = self._wanted["visibility_ms"] or self._topic.config.visibility_ms
            self._keeper = self._keeper_of(visibility_ms)
            self._keeper.start(self._absorb)
        if self._stopping:  # The consumer was closed while its stream was being opened.
            await self._close()

    def _absorb(self) -> None:
        """Take in what has arrived, so that its leases are kept."""
        stream = self._stream
        if stream is None or stream.awaited:
            return
        while (delivered := stream.take_nowait()) is not None:
            self._admit(delivered)

    def _admit(self, delivered: DeliveredBatch) -> None:
        batch: MessageBatch[T] = MessageBatch(
            self._topic, delivered.delivery, delivered.columns, released=self._released
        )
        if self._keeper is not None:
            self._keeper.keep(batch)
        self._store(batch)

    @abstractmethod
    def _store(self, batch: MessageBatch[T]) -> None:
        """Let the units of a delivery wait for their turn."""

    @abstractmethod
    def _hand_out(self, unit: Out) -> bool:
        """False if its lease was lost while it waited."""

    @abstractmethod
    def _released(self, batch: MessageBatch[Any], leases: int) -> None:
        """So many leases of `batch` that were out have ended."""

    def _ended(self, units: int) -> None:
        """So many units that were handed out need no slot any longer."""
        self._handed -= units
        if self._handed < 0:
            raise RuntimeError(f"a consumer of {self._topic.name} holds {self._handed} units")
        self._freed.set()

    # --- stopping ---

    async def aclose(self) -> None:
        """Stop: messages handed out stay yours to settle, the prefetched ones go back."""
        if self._stopping:
            await self._closed.wait()
            return
        self._stopping = True
        self._freed.set()
        try:
            await self._close()
        finally:
            self._closed.set()
            self._on_ended(self)

    async def _close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            try:
                for delivered in await stream.close():
                    self._admit(delivered)
            except PenstockError as error:
                log.warning("a stream of %s was not closed: %s", self._topic.name, error)
        await self._return_waiting()
        if self._keeper is not None:
            self._keeper.finish(self._absorb)
            self._keeper = None

    async def _return_waiting(self) -> None:
        """Of each partition by itself: some may be out of reach."""
        tokens: dict[int, list[LeaseToken]] = defaultdict(list)
        while (unit := self._best()) is not None:
            for token in self._take(unit):
                tokens[token.partition].append(token)
        await asyncio.gather(*map(self._give_back, tokens.values()))

    async def _give_back(self, tokens: list[LeaseToken]) -> None:
        try:
            await self._topic.settler.give_back(tokens, counted=False, delay_ms=0)
        except PenstockError as error:
            # They come back by themselves when their leases run out.
            log.warning("%d leases were not given back: %s", len(tokens), error)

    @abstractmethod
    def _take(self, unit: Out) -> list[LeaseToken]:
        """Mark a unit that waited as settled; the leases that end with it."""

    async def __aenter__(self) -> Self:
        self._entered = True
        return self

    async def __aexit__(self, *exited: object) -> None:
        await self.aclose()


class MessageConsumer(Consumer[T, LeasedMessage[T]]):
    """One message at a time; at most `held_max` of them are with handlers."""

    def __init__(self, topic: TopicHandle[T], **how: Any) -> None:
        super().__init__(topic, **how)
        # A heap by priority: deliveries arrive in the order of their commits, which differs from
        # that of priority between partitions, and for what was prefetched early.
        self._waiting: list[tuple[int, int, int, int, LeasedMessage[T]]] = []
        self._arrivals = count()  # breaks ties: a message may be here twice, once with a lost lease

    def _store(self, batch: MessageBatch[T]) -> None:
        sign = -1 if self._topic.config.mode is Mode.MAX else 1
        for m in batch:
            rank = (sign * m.priority, m.time_ms, m.sequence, next(self._arrivals), m)
            heappush(self._waiting, rank)

    def _best(self) -> LeasedMessage[T] | None:
        return heappop(self._waiting)[-1] if self._waiting else None

    def _hand_out(self, unit: LeasedMessage[T]) -> bool:
        unit.hand_out()
        return unit.held

    def _released(self, batch: MessageBatch[Any], leases: int) -> None:
        self._ended(leases)

    def _take(self, unit: LeasedMessage[T]) -> list[LeaseToken]:
        return [unit.take()] if unit.held else []


class BatchConsumer(Consumer[T, MessageBatch[T]]):
    """One delivery at a time; at most `held_max` of them are with handlers."""

    def __init__(self, topic: TopicHandle[T], **how: Any) -> None:
        super().__init__(topic, **how)
        self._waiting: deque[MessageBatch[T]] = deque()

    def _store(self, batch: MessageBatch[T]) -> None:
        self._waiting.append(batch)

    def _best(self) -> MessageBatch[T] | None:
        return self._waiting.popleft() if self._waiting else None

    def _hand_out(self, unit: MessageBatch[T]) -> bool:
        unit.hand_out()
        return unit.held > 0

    def _released(self, batch: MessageBatch[Any], leases: int) -> None:
        if not batch.held:
            self._ended(1)

    def _take(self, unit: MessageBatch[T]) -> list[LeaseToken]:
        return [unit.token(row) for row in unit.take().tolist()]
