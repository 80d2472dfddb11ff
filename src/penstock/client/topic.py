"""A topic as a Python object."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Iterable, Mapping
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import msgspec

from penstock.client import tracing
from penstock.client.administration import Administration
from penstock.client.connection import Connection
from penstock.client.consumer import BatchConsumer, Consumer, MessageConsumer
from penstock.client.content import content_of
from penstock.client.deadletters import DeadLetters
from penstock.client.entries import Identity, Item, check, chunked, encode_headers, encode_key
from penstock.client.keeping import Keeper
from penstock.client.leases import LeasedMessage, MessageBatch
from penstock.client.link import Link
from penstock.client.logreader import LogReader
from penstock.client.options import Duration, deadline, milliseconds
from penstock.client.popping import popped
from penstock.client.producer import Producer
from penstock.client.settling import Settler
from penstock.errors import InvalidArgument
from penstock.model.topic import TopicConfig

T = TypeVar("T")


class Owner(Protocol):
    """What a topic needs of its client."""

    link: Link

    def identity(self, topic: str) -> Identity: ...


class Topic(Administration[T]):
    """One topic. It is opened (and created, if asked) at its first use, or by awaiting it."""

    def __init__(
        self, client: Owner, name: str, *, of: Any, create: bool, config: dict[str, Any]
    ) -> None:
        super().__init__(client.link, name, content_of(of))
        self._client = client
        self.settler = Settler(self.link, name)
        self.dlq: DeadLetters[T] = DeadLetters(self)
        self._create, self._wanted = create, config
        self._opening = asyncio.Lock()
        self._producer: Producer | None = None
        self._consumers: set[Consumer[Any, Any]] = set()
        self._keepers: dict[int, Keeper] = {}  # of popped messages, by visibility
        self._adopted: WeakSet[Keeper] = WeakSet()  # those that may have work to stop

    # --- opening ---

    def __await__(self) -> Generator[Any, None, Topic[T]]:
        return self.opened().__await__()

    async def opened(self) -> Topic[T]:
        """Make sure that the topic exists and that its configuration is known."""
        if self._producer is None:
            async with self._opening:
                if self._producer is None:
                    config = await self._configured()
                    self._producer = Producer(self.link, config, self._client.identity(self.name))
        return self

    async def _configured(self) -> TopicConfig:
        if self._create:
            wanted = {"name": self.name, **self._wanted}
            answer = await self.call("topic_create", config=wanted, exists_ok=True)
        else:
            answer = await self.ask("topic_get")
        return msgspec.convert(answer, TopicConfig)

    @property
    def config(self) -> TopicConfig:
        """The configuration as last heard of."""
        if self._producer is None:
            raise RuntimeError(f"topic {self.name} was not opened yet: await it first")
        return self._producer.config

    def _configure(self, config: TopicConfig | None) -> None:
        if config is None:
            self._producer = None
        elif self._producer is not None:
            self._producer.config = config

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
        """Enqueue one message; returns its id once it is durable.

        Concurrent puts share requests. A retry never enqueues twice.
        """
        producer = self._producer
        if producer is None or not producer.ready:
            producer = await self._admitted()
        span = None
        if tracing.active():
            span, headers = tracing.begin_put(self.name, headers)
        try:
            payload = self.content.encode(value)
            delay_ms = 0 if delay is None else milliseconds(delay, field="delay")
            retries = -1 if max_retries is None else max_retries
            limit = producer.config.payload_bytes_max
            check(payload, priority, delay_ms=delay_ms, max_retries=retries, limit=limit)
            waiter = producer.add(
                payload,
                priority,
                key=b"" if key is None else encode_key(key),
                headers=b"" if headers is None else encode_headers(headers),
                delay_ms=delay_ms,
                max_retries=retries,
            )
            message_id = await waiter
        except BaseException as error:
            if span is not None:
                span.end(error)
            raise
        if span is not None:
            span.end(None)
        return message_id

    async def producer(self) -> Producer:
        """The enqueueing half, for whoever lays out columns."""
        await self.opened()
        assert self._producer is not None
        return self._producer

    async def _admitted(self, room_by: float | None = None) -> Producer:
        await self.opened()
        assert self._producer is not None
        await self._producer.room(room_by)
        return self._producer

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
        a node without room is tried again before `Backpressure` is raised; 0: not at all.
        """
        room_by = deadline(timeout)
        producer = await self._admitted(room_by)
        span, headers = None, b""
        if tracing.active():
            span, context = tracing.begin_put(self.name, None)
            headers = encode_headers(context)
        try:
            chunks = chunked(items, self.content, self.config, context=headers, atomic=atomic)
            ids = [
                await producer.put_many(
                    c, atomic=atomic, expected_sequence=expected_sequence, room_by=room_by
                )
                for c in chunks
            ]
        except BaseException as error:
            if span is not None:
                span.end(error)
            raise
        if span is not None:
            span.end(None)
        return ids[0] if len(ids) == 1 else [one for chunk in ids for one in chunk]

    # --- consuming ---

    def consume(
        self,
        *,
        concurrency: int = 1,
        visibility: Duration | None = None,
        prefetch: int = 1,
        consumer: str = "",
    ) -> MessageConsumer[T]:
        """Messages, best first, as an async iterator; settle each one (`async with message`).

        At most `concurrency` messages are with you unsettled; `prefetch` more wait here.
        """
        _at_least_one(concurrency, "concurrency")
        if prefetch < 0:
            raise InvalidArgument("prefetch must not be negative", field="prefetch")
        made: MessageConsumer[T] = MessageConsumer(
            self,
            credits=concurrency + prefetch,
            batch_max=min(concurrency + prefetch, 100),
            held_max=concurrency,
            visibility_ms=_visibility(visibility),
            name=consumer,
        )
        self._consumers.add(made)
        return made

    def consume_batches(
        self,
        size: int = 100,
        *,
        concurrency: int = 1,
        visibility: Duration | None = None,
        prefetch: int = 1,
        consumer: str = "",
    ) -> BatchConsumer[T]:
        """Messages in batches of up to `size`, for throughput; settle each batch.

        `concurrency` and `prefetch` count batches here.
        """
        _at_least_one(size, "size")
        _at_least_one(concurrency, "concurrency")
        made: BatchConsumer[T] = BatchConsumer(
            self,
            credits=size * (concurrency + prefetch),
            batch_max=size,
            held_max=concurrency,
            visibility_ms=_visibility(visibility),
            name=consumer,
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
        arguments: dict[str, Any] = {"topic": self.name, "limit": limit}
        if visibility is not None:
            arguments["visibility_ms"] = milliseconds(visibility, field="visibility")
        if consumer:
            arguments["consumer"] = consumer
        wait_ms, began = milliseconds(wait, field="wait"), time.monotonic()

        async def lease(connection: Connection) -> dict[str, Any]:
            waited_ms = round((time.monotonic() - began) * 1000)
            left_ms = max(0, wait_ms - waited_ms)
            return await connection.call("pop", wait_ms=left_ms, **arguments)

        answer = await self.link.request(lease, repeatable=False)
        return [popped(self, fields, self._keep)[0] for fields in answer["messages"]]

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

    # --- for consumers and the client ---

    def forget(self, consumer: Consumer[Any, Any]) -> None:
        self._consumers.discard(consumer)

    def _keep(self, batch: MessageBatch[Any]) -> None:
        """A handler works on a popped message: keep its lease as long as it does."""
        keeper = self._keepers.get(batch.visibility_ms)
        if keeper is None:
            keeper = Keeper(self.link, self.settler, batch.visibility_ms)
            self._keepers[batch.visibility_ms] = keeper
            self.adopt(keeper)
        keeper.keep(batch)

    def adopt(self, keeper: Keeper) -> None:
        """Stop `keeper` when the client ends."""
        self._adopted.add(keeper)

    async def close(self) -> None:
        """Stop consuming, then wait for every put and acknowledgement under way."""
        for consumer in list(self._consumers):
            await consumer.aclose()
        if self._producer is not None:
            await self._producer.drain()
        await self.settler.drain()
        for keeper in self._adopted:
            keeper.stop()


def _at_least_one(value: int, field: str) -> None:
    if value < 1:
        raise InvalidArgument(f"{field} must be at least 1", field=field)


def _visibility(value: Duration | None) -> int | None:
    return None if value is None else milliseconds(value, field="visibility")
