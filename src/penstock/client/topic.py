"""A topic as a Python object, and its consumers: leased messages one by one, or in the batches in
which they arrive.

A consumer opens one lease stream whose credit is what it may hold: its concurrency (or batches) and
a small prefetch. The node leases the best messages first, so whatever is prefetched is order that
was decided early; that is why prefetch is small unless asked for.

When the stream is lost, what has arrived stays held and is handed out; then a new stream is opened,
at another node if need be. Stopping gives back what waited, and counts no attempt for it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import contextmanager, nullcontext
from heapq import heappop, heappush
from itertools import count
from typing import Any, Final, Generic, Self, TypeVar

import msgspec

from penstock.client.network.connection import Connection, DeliveredBatch, LeaseStream
from penstock.client.network.link import Link, passing
from penstock.client.options import Duration, deadline, milliseconds, optional_ms
from penstock.client.queue.entries import Item, check_map, checked, chunked, encode_headers
from penstock.client.queue.leases import (
    TRACING,
    Keeper,
    LeasedMessage,
    MessageBatch,
    Returnable,
    popped,
)
from penstock.client.queue.messages import DeadLetters, LogReader, Message, TopicHandle, fields_of
from penstock.errors import InvalidArgument, PenstockError
from penstock.model.ids import LeaseToken
from penstock.model.topic import Mode, TopicConfig

T = TypeVar("T")
Out = TypeVar("Out", bound=Returnable)
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
                    if found.hand_out():
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
            for token in unit.take_tokens():
                tokens[token.partition].append(token)
        await asyncio.gather(*map(self._give_back, tokens.values()))

    async def _give_back(self, tokens: list[LeaseToken]) -> None:
        try:
            await self._topic.settler.give_back(tokens, counted=False, delay_ms=0)
        except PenstockError as error:
            # They come back by themselves when their leases run out.
            log.warning("%d leases were not given back: %s", len(tokens), error)

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

    def _released(self, batch: MessageBatch[Any], leases: int) -> None:
        self._ended(leases)


class BatchConsumer(Consumer[T, MessageBatch[T]]):
    """One delivery at a time; at most `held_max` of them are with handlers."""

    def __init__(self, topic: TopicHandle[T], **how: Any) -> None:
        super().__init__(topic, **how)
        self._waiting: deque[MessageBatch[T]] = deque()

    def _store(self, batch: MessageBatch[T]) -> None:
        self._waiting.append(batch)

    def _best(self) -> MessageBatch[T] | None:
        return self._waiting.popleft() if self._waiting else None

    def _released(self, batch: MessageBatch[Any], leases: int) -> None:
        if not batch.held:
            self._ended(1)


C = TypeVar("C", bound=Consumer[Any, Any])
UNTRACED: Final = nullcontext()


@contextmanager
def _put_span(topic: str) -> Iterator[dict[str, str]]:
    """A producer span, and the headers that carry its context."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    with trace.get_tracer("penstock").start_as_current_span(
        f"put {topic}",
        kind=trace.SpanKind.PRODUCER,
        attributes={
            "messaging.system": "penstock",
            "messaging.destination.name": topic,
            "messaging.batch.message_count": 1,
        },
    ):
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier)
        yield carrier


class PartitionStats(msgspec.Struct, frozen=True):
    partition: int
    epoch: int = 0
    sequence_first: int = 0
    sequence_last: int = 0
    sequence_committed: int = 0
    ready: int = 0
    delayed: int = 0
    leased: int = 0
    dead: int = 0
    bytes: int = 0
    segments: int = 0
    snapshot_sequence: int | None = None
    snapshot_bytes: int | None = None
    snapshot_age_ms: int | None = None
    coordinator: str = ""


class TopicStats(msgspec.Struct, frozen=True):
    """Counts of now, totals since the topic was created."""

    name: str
    ready: int = 0
    delayed: int = 0
    leased: int = 0
    dead: int = 0
    backlog: int = 0
    oldest_age_ms: int | None = None
    enqueued_total: int = 0
    acked_total: int = 0
    retried_total: int = 0
    dead_total: int = 0
    expired_total: int = 0
    rank_error_max: int = 0
    partitions: list[PartitionStats] = []


class Topic(TopicHandle[T]):
    """One topic. It is opened (and created, if asked) at its first use, or by awaiting it."""

    def __init__(self, link: Link, name: str, **how: Any) -> None:
        super().__init__(link, name, **how)
        self.dlq: DeadLetters[T] = DeadLetters(self)
        self._consumers: set[Consumer[Any, Any]] = set()
        self._keepers: dict[int, Keeper] = {}  # by visibility; they stop when the client ends

    def __await__(self) -> Generator[Any, None, Self]:
        return self.opened().__await__()

    @property
    def id(self) -> int:
        return self.config.id

    # --- producing ---

    async def put(
        self,
        value: T,
        *,
        priority: int = 0,
        key: str | bytes | None = None,
        delay: Duration | None = None,
        headers: Mapping[str, Any] | None = None,
        max_retries: int | None = None,
    ) -> str:
        """Enqueue one message; returns its id once it is durable. Concurrent puts share requests. A
        retry never enqueues twice."""
        producer = self.producer
        if producer is None or not producer.ready:
            producer = await self.open_producer()
            await producer.room()
        with _put_span(self.name) if TRACING in sys.modules else UNTRACED as context:
            if context:
                check_map(headers)
                headers = {**context, **(headers or {})}
            entry = checked(
                self.content.encode(value),
                priority=priority,
                key=key,
                delay=delay,
                headers=headers,
                max_retries=max_retries,
                limit=producer.config.payload_bytes_max,
            )
            return await producer.add(entry)

    async def put_many(
        self,
        items: Iterable[T | Item],
        *,
        atomic: bool = True,
        expected_sequence: int | None = None,
        timeout: Duration | None = None,
    ) -> list[str]:
        """Enqueue many messages; their ids in order. Atomic: all of them or none.
        `expected_sequence`: only if the partition's last sequence is this one. `timeout`: how long
        a node without room is tried again before `Backpressure` is raised; 0: not at all."""
        self.link.raise_if_closed()
        room_by = deadline(timeout)
        producer = await self.open_producer()
        ids: list[str] = []
        with _put_span(self.name) if TRACING in sys.modules else UNTRACED as context:
            for entries in chunked(
                items, self.content, producer.config, context=encode_headers(context), atomic=atomic
            ):
                ids += await producer.put_many(
                    entries, atomic=atomic, expected_sequence=expected_sequence, room_by=room_by
                )
        return ids

    # --- consuming ---

    def consume(
        self,
        *,
        concurrency: int = 1,
        visibility: Duration | None = None,
        prefetch: int = 1,
        consumer: str = "",
    ) -> MessageConsumer[T]:
        """Messages, best first, as an async iterator; settle each one (`async with message`). At
        most `concurrency` messages are with you unsettled; `prefetch` more wait here."""
        if prefetch < 0:
            raise InvalidArgument("prefetch must not be negative", field="prefetch")
        most = concurrency + prefetch
        wanted = {"credits": most, "batch_max": min(most, 100), "consumer": consumer}
        return self._consuming(
            MessageConsumer[T], wanted, visibility=visibility, held_max=concurrency
        )

    def consume_batches(
        self,
        size: int = 100,
        *,
        concurrency: int = 1,
        visibility: Duration | None = None,
        prefetch: int = 1,
        consumer: str = "",
    ) -> BatchConsumer[T]:
        """Messages in batches of up to `size`, for throughput; settle each batch. `concurrency` and
        `prefetch` count batches here."""
        _at_least_one(size, "size")
        most = size * (concurrency + prefetch)
        wanted = {"credits": most, "batch_max": size, "consumer": consumer}
        return self._consuming(
            BatchConsumer[T], wanted, visibility=visibility, held_max=concurrency
        )

    def _consuming(
        self, kind: type[C], wanted: dict[str, Any], *, visibility: Duration | None, held_max: int
    ) -> C:
        _at_least_one(held_max, "concurrency")
        made = kind(
            self,
            wanted=wanted | {"visibility_ms": optional_ms(visibility, field="visibility")},
            held_max=held_max,
            keeper_of=self._keeper,
            ended=self._consumers.discard,
        )
        self._consumers.add(made)
        return made

    async def pop(
        self,
        limit: int = 1,
        *,
        wait: Duration = 0,
        visibility: Duration | None = None,
        consumer: str = "",
    ) -> list[LeasedMessage[T]]:
        """Lease up to `limit` messages now, or as soon as there is one within `wait`."""
        await self.opened()
        visibility_ms = optional_ms(visibility, field="visibility")
        wanted = {"limit": limit, "visibility_ms": visibility_ms, "consumer": consumer}
        wait_ms, began = milliseconds(wait, field="wait"), time.monotonic()

        async def lease(connection: Connection) -> dict[str, Any]:
            left_ms = max(0, wait_ms - round((time.monotonic() - began) * 1000))
            return await connection.call("pop", topic=self.name, wait_ms=left_ms, **wanted)

        answer = await self.link.request(lease, repeatable=False)
        return [popped(self, fields, self._keep) for fields in answer["messages"]]

    def _keep(self, batch: MessageBatch[Any]) -> None:
        """A handler works on a popped message: keep its lease as long as it does."""
        self._keeper(batch.visibility_ms).keep(batch)

    def _keeper(self, visibility_ms: int) -> Keeper:
        keeper = self._keepers.get(visibility_ms)
        if keeper is None:
            keeper = Keeper(self, visibility_ms)
            self._keepers[visibility_ms] = keeper
        return keeper

    def log(
        self,
        partition: int = 0,
        from_sequence: int = 1,
        *,
        credit_entries: int = 1000,
        credit_bytes: int = 8 << 20,
    ) -> LogReader[T]:
        """Committed messages of one partition in log order, following it; 0: only new ones."""
        return LogReader(
            self,
            partition=partition,
            from_sequence=from_sequence,
            credit_entries=credit_entries,
            credit_bytes=credit_bytes,
        )

    async def close(self) -> None:
        """Stop consuming, then wait for every put and acknowledgement under way."""
        for consumer in list(self._consumers):
            await consumer.aclose()
        if self.producer is not None:
            await self.producer.drain()
        await self.settler.drain()
        for keeper in self._keepers.values():
            keeper.stop()

    # --- looking at it, changing it, emptying it ---

    async def peek(self, limit: int = 10) -> list[Message[T]]:
        """The best ready messages, without leasing them."""
        await self.opened()
        answer = await self.ask("peek", limit=limit)
        return [Message(self.content, **fields_of(m)) for m in answer["messages"]]

    async def stats(self) -> TopicStats:
        answer = await self.ask("stats")
        return msgspec.convert(answer["topics"][0], TopicStats)

    async def update(self, /, **changes: Any) -> TopicConfig:
        """Change the topic's attributes while it runs."""
        config = msgspec.convert(await self.ask("topic_update", changes=changes), TopicConfig)
        if self.producer is not None:
            self.producer.config = config
        return config

    async def pause(self) -> None:
        """No deliveries until `resume`; puts and settling go on."""
        await self.update(paused=True)

    async def resume(self) -> None:
        await self.update(paused=False)

    async def move_to_dlq(self, message: str | Message[T], reason: str = "") -> None:
        """Move a message to the dead letters, whatever its state."""
        message_id = message if isinstance(message, str) else message.id
        await self.ask("move_to_dlq", message_id=message_id, reason=reason)

    async def purge(self, *, force: bool = False) -> int:
        """Drop all ready and delayed messages. Needs `force=True`."""
        purged: int = (await self.confirmed("purge", force=force))["purged"]
        return purged

    async def delete(self, *, force: bool = False) -> None:
        """Delete the topic with everything in it. Needs `force=True`."""
        await self.confirmed("topic_delete", force=force)
        self.producer = None


def _at_least_one(value: int, field: str) -> None:
    if value < 1:
        raise InvalidArgument(f"{field} must be at least 1", field=field)
