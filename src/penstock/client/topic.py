"""A topic as a Python object."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, Final, Generic, TypeVar

import msgspec

from penstock.client import spans
from penstock.client.network.connection import Connection
from penstock.client.network.link import Link
from penstock.client.options import Duration, deadline, milliseconds, optional_ms
from penstock.client.queue.consumer import BatchConsumer, Consumer, MessageConsumer
from penstock.client.queue.entries import (
    Item,
    ProducerIdentity,
    check_map,
    checked,
    chunked,
    content_of,
    encode_headers,
)
from penstock.client.queue.handle import TopicHandle
from penstock.client.queue.leases import Keeper, LeasedMessage, MessageBatch, popped
from penstock.client.queue.messages import DeadLetters, LogReader, Message, fields_of
from penstock.client.queue.producer import Producer
from penstock.errors import InvalidArgument
from penstock.model.topic import TopicConfig

T = TypeVar("T")
C = TypeVar("C", bound=Consumer[Any, Any])


UNTRACED: Final = nullcontext()


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


class Topic(Generic[T]):
    """One topic. It is opened (and created, if asked) at its first use, or by awaiting it."""

    def __init__(
        self,
        link: Link,
        name: str,
        *,
        of: Any,
        identity: ProducerIdentity,
        create: bool,
        config: dict[str, Any],
    ) -> None:
        self.link, self.name = link, name
        self.handle: TopicHandle[T] = TopicHandle(
            link, name, content=content_of(of), identity=identity, create=create, wanted=config
        )
        self.dlq: DeadLetters[T] = DeadLetters(self.handle)
        self._consumers: set[Consumer[Any, Any]] = set()
        self._keepers: dict[int, Keeper] = {}  # by visibility; they stop when the client ends

    def __await__(self) -> Generator[Any, None, Topic[T]]:
        return self.opened().__await__()

    async def opened(self) -> Topic[T]:
        """Make sure that the topic exists and that its configuration is known."""
        await self.handle.opened()
        return self

    @property
    def config(self) -> TopicConfig:
        """The configuration as last heard of."""
        return self.handle.config

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
        """Enqueue one message; returns its id once it is durable.

        Concurrent puts share requests. A retry never enqueues twice.
        """
        producer = self.handle.producer
        if producer is None or not producer.ready:
            producer = await self._admitted()
        with spans.putting(self.name) if spans.API in sys.modules else UNTRACED as context:
            if context:
                check_map(headers)
                headers = {**context, **(headers or {})}
            entry = checked(
                self.handle.content.encode(value),
                priority=priority,
                key=key,
                delay=delay,
                headers=headers,
                max_retries=max_retries,
                limit=producer.config.payload_bytes_max,
            )
            return await producer.add(entry)

    async def _admitted(self, room_by: float | None = None) -> Producer:
        producer = await self.handle.opened()
        await producer.room(room_by)
        return producer

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
        ids: list[str] = []
        with spans.putting(self.name) if spans.API in sys.modules else UNTRACED as context:
            for entries in chunked(
                items,
                self.handle.content,
                producer.config,
                context=encode_headers(context),
                atomic=atomic,
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
        """Messages, best first, as an async iterator; settle each one (`async with message`).

        At most `concurrency` messages are with you unsettled; `prefetch` more wait here.
        """
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
        """Messages in batches of up to `size`, for throughput; settle each batch.

        `concurrency` and `prefetch` count batches here.
        """
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
            self.handle,
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
        await self.handle.opened()
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
        return [popped(self.handle, fields, self._keep) for fields in answer["messages"]]

    def _keep(self, batch: MessageBatch[Any]) -> None:
        """A handler works on a popped message: keep its lease as long as it does."""
        self._keeper(batch.visibility_ms).keep(batch)

    def _keeper(self, visibility_ms: int) -> Keeper:
        keeper = self._keepers.get(visibility_ms)
        if keeper is None:
            keeper = Keeper(self.handle, visibility_ms)
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
            self.handle,
            partition=partition,
            from_sequence=from_sequence,
            credit_entries=credit_entries,
            credit_bytes=credit_bytes,
        )

    async def close(self) -> None:
        """Stop consuming, then wait for every put and acknowledgement under way."""
        for consumer in list(self._consumers):
            await consumer.aclose()
        if self.handle.producer is not None:
            await self.handle.producer.drain()
        await self.handle.settler.drain()
        for keeper in self._keepers.values():
            keeper.stop()

    # --- looking at it, changing it, emptying it ---

    async def peek(self, limit: int = 10) -> list[Message[T]]:
        """The best ready messages, without leasing them."""
        await self.handle.opened()
        answer = await self.handle.ask("peek", limit=limit)
        return [Message(self.handle.content, **fields_of(m)) for m in answer["messages"]]

    async def stats(self) -> TopicStats:
        answer = await self.handle.ask("stats")
        return msgspec.convert(answer["topics"][0], TopicStats)

    async def update(self, /, **changes: Any) -> TopicConfig:
        """Change the topic's attributes while it runs."""
        config = msgspec.convert(
            await self.handle.ask("topic_update", changes=changes), TopicConfig
        )
        if self.handle.producer is not None:
            self.handle.producer.config = config
        return config

    async def pause(self) -> None:
        """No deliveries until `resume`; puts and settling go on."""
        await self.update(paused=True)

    async def resume(self) -> None:
        await self.update(paused=False)

    async def move_to_dlq(self, message: str | Message[T], reason: str = "") -> None:
        """Move a message to the dead letters, whatever its state."""
        message_id = message if isinstance(message, str) else message.id
        await self.handle.ask("move_to_dlq", message_id=message_id, reason=reason)

    async def purge(self, *, force: bool = False) -> int:
        """Drop all ready and delayed messages. Needs `force=True`."""
        purged: int = (await self.handle.confirmed("purge", force=force))["purged"]
        return purged

    async def delete(self, *, force: bool = False) -> None:
        """Delete the topic with everything in it. Needs `force=True`."""
        await self.handle.confirmed("topic_delete", force=force)
        self.handle.producer = None


def _at_least_one(value: int, field: str) -> None:
    if value < 1:
        raise InvalidArgument(f"{field} must be at least 1", field=field)
