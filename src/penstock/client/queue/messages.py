"""A topic as all its parts know it, and its messages as a reader sees them: peeked, among the dead
letters, or read from the log.

A topic's consumers, readers and dead letters know it as a `TopicHandle`: the link, the type of the
values, the configuration as last heard of, the calls about the topic, and a `Settler`. The topic of
the SDK is one, with what may be done beside that.

The log has messages of an atomic batch from its PREPARE on, but they exist only if its DECIDE says
so: a reader of the log holds them back until then and yields them where the decision stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Generic, Self, TypeVar, Unpack

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.client.network.connection import Connection, HowReturned, LogStream, grouped
from penstock.client.network.link import Link, Where
from penstock.client.queue.entries import Content, ProducerIdentity
from penstock.client.queue.producer import Producer
from penstock.errors import LeaseLost, LimitExceeded, Unavailable
from penstock.model.batch import Batch, Kind
from penstock.model.columns import Columns
from penstock.model.ids import LeaseToken, MessageId
from penstock.model.plain import headers_of
from penstock.model.topic import TopicConfig
from penstock.wire.frame import FrameType
from penstock.wire.messages import Settle, Settled, pack

T = TypeVar("T")


Ack = tuple[LeaseToken, asyncio.Future[None]]  # and who waits for it


class Settler:
    """Ends and extends the leases of one topic.

    Acks of one turn of the loop share a request; all of them survive a reconnect. At a cluster they
    share one only with others of their partition. A request is answered once, and repeated as a
    whole: had one of its partitions trouble, the acks of the others would take effect, be sent
    again, and be told as lost.
    """

    def __init__(self, link: Link, topic: str) -> None:
        self._link, self._topic = link, topic
        self._loop = asyncio.get_running_loop()
        self._acks: list[Ack] = []  # of this turn
        self._under_way = 0
        self._idle: asyncio.Event = asyncio.Event()
        self._idle.set()

    async def ack(self, token: LeaseToken) -> None:
        """Acknowledge one lease, together with all others of this turn."""
        self._link.raise_if_closed()
        if not self._acks:
            self._loop.call_soon(self._flush)
            self._idle.clear()
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._acks.append((token, waiter))
        await waiter

    def _flush(self) -> None:
        acks, self._acks = self._acks, []
        if self._link.fleet is None:
            self._send(acks)
            return
        apart: dict[int, list[Ack]] = {}
        for ack in acks:
            apart.setdefault(ack[0].partition, []).append(ack)
        for some in apart.values():
            self._send(some)

    def _send(self, acks: list[Ack]) -> None:
        self._under_way += 1
        tokens, waiters = zip(*acks, strict=True)
        parts, data, order = grouped(tokens)
        self._link.begin(
            (FrameType.ACK, Settled, pack(Settle(self._topic, parts)), data),
            at=(self._topic, tokens[0].partition),
            ended=partial(self._on_answer, waiters, order),
        )

    def _on_answer(
        self,
        waiters: Sequence[asyncio.Future[None]],
        order: list[int] | None,
        answer: asyncio.Future[Settled],
    ) -> None:
        error: Exception | None = None
        try:
            for at in answer.result().lost:
                lost = LeaseLost("the lease ran out before the message was done")
                _end(waiters[at if order is None else order[at]], lost)
        except Exception as failed:  # noqa: BLE001 - it is told to those who wait for it
            error = failed
        for waiter in waiters:
            _end(waiter, error)
        self._under_way -= 1
        if not self._under_way and not self._acks:
            self._idle.set()

    async def ack_range(self, first: LeaseToken, tokens: NDArray[np.uint64]) -> list[int]:
        """Acknowledge leases by sequences of tokens that have all else in common with `first`;
        positions of lost ones."""
        return await self._link.request(
            lambda c: c.settle_range(self._topic, first, tokens), at=(self._topic, first.partition)
        )

    async def give_back(
        self, tokens: Sequence[LeaseToken], **how: Unpack[HowReturned]
    ) -> list[int]:
        """End leases unfinished; positions of lost ones."""
        return await self._link.request(
            lambda c: c.give_back(self._topic, tokens, **how), at=self._where(tokens)
        )

    async def extend(self, tokens: Sequence[LeaseToken], extend_ms: int) -> list[int]:
        return await self._link.request(
            lambda c: c.extend(self._topic, tokens, extend_ms), at=self._where(tokens)
        )

    def _where(self, tokens: Sequence[LeaseToken]) -> Where | None:
        """The partition of all of them, if it is one."""
        partitions = {token.partition for token in tokens}
        return (self._topic, partitions.pop()) if len(partitions) == 1 else None

    async def drain(self) -> None:
        await self._idle.wait()


def _end(waiter: asyncio.Future[None], error: Exception | None) -> None:
    if waiter.done():
        return
    if error is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(error)


class TopicHandle(Generic[T]):
    """What a topic's parts share. `wanted` are the attributes for its creation, if `create` asks
    for that."""

    def __init__(
        self,
        link: Link,
        name: str,
        *,
        content: Content[T],
        identity: ProducerIdentity,
        create: bool,
        wanted: dict[str, Any],
    ) -> None:
        self.link, self.name, self.content = link, name, content
        self.settler = Settler(link, name)
        self.producer: Producer | None = None  # None: the topic was not opened yet, or is gone
        self._identity, self._create, self._wanted = identity, create, wanted
        self._opening = asyncio.Lock()

    async def opened(self) -> Self:
        """Make sure that the topic exists and that its configuration is known."""
        await self.open_producer()
        return self

    async def open_producer(self) -> Producer:
        if self.producer is None:
            async with self._opening:
                if self.producer is None:
                    self.producer = Producer(self.link, await self._found(), self._identity)
        return self.producer

    async def _found(self) -> TopicConfig:
        if self._create:
            wanted = {"name": self.name, **self._wanted}
            answer = await self.link.call("topic_create", config=wanted, exists_ok=True)
        else:
            answer = await self.ask("topic_get")
        return msgspec.convert(answer, TopicConfig)

    @property
    def config(self) -> TopicConfig:
        """The configuration as last heard of."""
        if self.producer is None:
            raise RuntimeError(f"topic {self.name} was not opened yet: await it first")
        return self.producer.config

    async def ask(self, method: str, /, **arguments: Any) -> dict[str, Any]:
        return await self.link.call(method, topic=self.name, **arguments)

    async def confirmed(self, method: str, /, *, force: bool, **more: Any) -> dict[str, Any]:
        """A destructive call, with the confirmation that it needs."""
        if force:
            granted = await self.link.call("confirm", method=method, subject=self.name)
            more["confirm"] = granted["confirm"]
        return await self.ask(method, force=force, **more)


_UNSET: Any = object()


@dataclass(slots=True, eq=False, repr=False)
class Message(Generic[T]):
    """One message. `value` is decoded when it is first asked for."""

    _content: Content[T]
    _: KW_ONLY
    _topic: int
    partition: int
    sequence: int
    priority: int
    attempts: int  # earlier deliveries that ended unfinished
    time_ms: int  # when it was enqueued
    key: bytes
    _headers: bytes | Mapping[str, Any]
    payload: bytes
    _value: Any = _UNSET

    @property
    def id(self) -> str:
        return str(MessageId(self.time_ms, self._topic, self.partition, self.sequence))

    @property
    def value(self) -> T:
        """The payload as the topic's type; raises `InvalidArgument` when it is not one."""
        if self._value is _UNSET:
            self._value = self._content.decode(self.payload)
        value: T = self._value
        return value

    @property
    def headers(self) -> Mapping[str, Any]:
        """What it was put with. In place of headers that cannot be read, as an old log may hold
        some, there is one, `penstock-unreadable`, that says why."""
        if isinstance(self._headers, bytes):
            self._headers = headers_of(self._headers)
        return self._headers

    @property
    def enqueued_at(self) -> datetime:
        return datetime.fromtimestamp(self.time_ms / 1000, UTC)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} priority={self.priority}>"


@dataclass(slots=True, eq=False, repr=False)
class DeadMessage(Message[T]):
    """A dead letter, with why and when it died."""

    reason: str = ""
    detail: str = ""
    dead_ms: int = 0


def fields_of(fields: dict[str, Any]) -> dict[str, Any]:
    """What a message is made of, out of a call's answer."""
    return {
        # Not the id that this client knows the topic by: another may have its name by now.
        "_topic": MessageId.parse(fields["message_id"]).topic,
        "partition": fields["partition"],
        "sequence": fields["sequence"],
        "priority": fields.get("priority", 0),
        "attempts": fields.get("attempts", 0),
        "time_ms": fields["time_ms"],
        "key": fields.get("key") or b"",
        "_headers": fields.get("headers") or {},
        "payload": fields["payload"],
    }


def cells_of(columns: Columns, count: int, numbers: Sequence[str]) -> dict[str, list[Any]]:
    """What messages are made of, out of columns: some numbers, and the bytes of each."""
    cells = {name: columns.fixed(name).tolist() for name in numbers}
    for field, name in (("key", "key"), ("_headers", "headers"), ("payload", "payload")):
        column = columns.binary(name)
        cells[field] = [b""] * count if column is None else column.tolist()
    return cells


PAGE: Final = 100
UNDECIDED_MAX: Final = 1000  # batches that a reader holds back for open transactions
Page = tuple[list[DeadMessage[T]], str | None]  # and the next page's cursor


class DeadLetters(Generic[T]):
    """Iterate over it for all of them, oldest first in each partition."""

    def __init__(self, topic: TopicHandle[T]) -> None:
        self._topic = topic

    async def peek(self, limit: int = 10) -> list[DeadMessage[T]]:
        """The first few."""
        return (await self.list(limit=limit))[0]

    async def list(self, *, limit: int = PAGE, after: str | None = None) -> Page[T]:
        """A page, and the cursor of the next one (None: this was the last)."""
        answer = await self._topic.ask("dlq_list", after=after, limit=limit)
        found = [self._dead(fields) for fields in answer["messages"]]
        return found, answer.get("next")

    def _dead(self, fields: dict[str, Any]) -> DeadMessage[T]:
        death = {name: fields[name] for name in ("reason", "detail", "dead_ms") if name in fields}
        return DeadMessage(self._topic.content, **fields_of(fields), **death)

    async def __aiter__(self) -> AsyncIterator[DeadMessage[T]]:
        after: str | None = None
        while True:
            page, after = await self.list(after=after)
            for message in page:
                yield message
            if after is None:
                return

    async def replay(
        self, messages: Iterable[str | Message[T]] | None = None, *, limit: int | None = None
    ) -> int:
        """Make dead letters ready again, with no attempts counted; all of them unless named."""
        answer = await self._topic.ask("dlq_replay", message_ids=_ids(messages), limit=limit)
        replayed: int = answer["replayed"]
        return replayed

    async def delete(
        self, messages: Iterable[str | Message[T]] | None = None, *, force: bool = False
    ) -> int:
        """Delete dead letters for good; all of them unless named. Needs `force=True`."""
        answer = await self._topic.confirmed("dlq_delete", force=force, message_ids=_ids(messages))
        deleted: int = answer["deleted"]
        return deleted


def _ids(messages: Iterable[str | Message[Any]] | None) -> Any:
    if messages is None:
        return None
    return [item if isinstance(item, str) else item.id for item in messages]


class LogReader(Generic[T]):
    """The committed log of one partition. Iterate over it for messages in log order; over
    `batches()` for everything there is.

    It follows the log: at the end it waits for more. A lost connection is opened again, and the
    reader goes on where it was. If another topic has the name by then it ends with `NotFound`: a
    place in the one log is none in the other.
    """

    def __init__(
        self,
        topic: TopicHandle[T],
        *,
        partition: int,
        from_sequence: int,
        through: int = 0,
        **credit: int,
    ) -> None:
        self._topic, self._partition = topic, partition
        self._through = through  # where it ends by itself; 0: it follows
        self._next = from_sequence
        self._credit = credit  # `credit_entries` and `credit_bytes`
        self._undecided: dict[bytes, list[Batch]] = {}
        self._topic_id = 0  # of the topic whose log it began to read
        self.sequence_committed = 0  # the partition's watermark as of the last batch

    async def batches(self) -> AsyncGenerator[Batch, None]:
        """Every committed batch, of every kind."""
        async with aclosing(self.slices()) as slices:
            async for found in slices:
                for batch in found:
                    self._next = batch.last + 1  # whoever stops here goes on from here
                    yield batch

    async def slices(self) -> AsyncGenerator[list[Batch], None]:
        """The same as they arrive: about a MiB of batches at a time."""
        await self._topic.opened()
        while True:
            at = (self._topic.name, self._partition)
            stream = await self._topic.link.request(self._open, at=at)
            try:
                async for found in stream:
                    self.sequence_committed = stream.sequence_committed
                    if found:
                        self._next = found[-1].last + 1
                        yield found
                if not self._through or self._next > self._through:
                    return
            except Unavailable:
                continue  # the next request waits for a connection, within the retry bound
            finally:
                with suppress(Unavailable):  # There is nothing to close if the connection is gone.
                    await stream.close()

    async def _open(self, connection: Connection) -> LogStream:
        stream = await connection.log_stream(
            self._topic.name,
            partition=self._partition,
            from_sequence=self._next,
            through=self._through,
            topic_id=self._topic_id,
            **self._credit,
        )
        self._topic_id = stream.topic
        return stream

    async def __aiter__(self) -> AsyncGenerator[Message[T], None]:
        async with aclosing(self.batches()) as batches:
            async for batch in batches:
                for ready in self._decided(batch):
                    for message in self._decode(ready):
                        yield message

    def _decided(self, batch: Batch) -> Iterator[Batch]:
        """The batches whose messages exist now that `batch` is in the log."""
        if batch.kind is Kind.ENQ:
            yield batch
        elif batch.kind is Kind.PREPARE:
            [transaction] = batch.columns().binary("transaction") or (b"",)
            self._undecided.setdefault(transaction, []).append(batch)
            if sum(map(len, self._undecided.values())) > UNDECIDED_MAX:
                raise LimitExceeded("too many atomic batches are undecided", limit=UNDECIDED_MAX)
        elif batch.kind is Kind.DECIDE:
            columns = batch.columns()
            commits = columns.fixed("commit").tolist()
            for transaction, commit in zip(
                columns.binary("transaction") or (), commits, strict=True
            ):
                prepared = self._undecided.pop(transaction, [])
                if commit:
                    yield from prepared

    def _decode(self, batch: Batch) -> Iterator[Message[T]]:
        columns = batch.columns()
        sequences: Any = range(batch.first, batch.first + batch.entries)
        if batch.compacted:
            sequences = columns.fixed("sequence").tolist()
        cells = cells_of(columns, batch.entries, ("priority",))
        for row, sequence in enumerate(sequences):
            yield Message(
                self._topic.content,
                _topic=batch.topic,
                partition=batch.partition,
                sequence=sequence,
                attempts=0,
                time_ms=batch.time_ms,
                **{name: cell[row] for name, cell in cells.items()},
            )
