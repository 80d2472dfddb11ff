"""Messages as a reader sees them: peeked, among the dead letters, or read from the log.

The log has messages of an atomic batch from its PREPARE on, but they exist only if its DECIDE says
so: a reader of the log holds them back until then and yields them where the decision stands.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from typing import Any, Final, Generic, TypeVar

from penstock.client.network.connection import Connection, LogStream
from penstock.client.queue.entries import Content
from penstock.client.queue.handle import TopicHandle
from penstock.errors import LimitExceeded, Unavailable
from penstock.model.batch import Batch, Kind
from penstock.model.columns import Columns
from penstock.model.ids import MessageId
from penstock.model.plain import headers_of

T = TypeVar("T")
_UNSET: Any = object()


class Message(Generic[T]):
    """One message. `value` is decoded when it is first asked for."""

    __slots__ = (
        "_content", "_headers", "_topic", "_value", "attempts", "key", "partition", "payload",
        "priority", "sequence", "time_ms",
    )  # fmt: skip

    def __init__(
        self,
        content: Content[T],
        *,
        topic: int,
        partition: int,
        sequence: int,
        priority: int,
        attempts: int,
        time_ms: int,
        key: bytes,
        headers: bytes | Mapping[str, Any],
        payload: bytes,
    ) -> None:
        self._content, self._topic, self._headers = content, topic, headers
        self.partition, self.sequence = partition, sequence
        self.priority = priority
        self.attempts = attempts  # earlier deliveries that ended unfinished
        self.time_ms = time_ms  # when it was enqueued
        self.key, self.payload = key, payload
        self._value: Any = _UNSET

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


class DeadMessage(Message[T]):
    """A dead letter, with why and when it died."""

    __slots__ = ("dead_ms", "detail", "reason")

    def __init__(self, content: Content[T], fields: dict[str, Any]) -> None:
        super().__init__(content, **fields_of(fields))
        self.reason: str = fields.get("reason", "")
        self.detail: str = fields.get("detail", "")
        self.dead_ms: int = fields.get("dead_ms", 0)


def fields_of(fields: dict[str, Any]) -> dict[str, Any]:
    """What a message is made of, out of a call's answer."""
    return {
        # Not the id that this client knows the topic by: another may have its name by now.
        "topic": MessageId.parse(fields["message_id"]).topic,
        "partition": fields["partition"],
        "sequence": fields["sequence"],
        "priority": fields.get("priority", 0),
        "attempts": fields.get("attempts", 0),
        "time_ms": fields["time_ms"],
        "key": fields.get("key") or b"",
        "headers": fields.get("headers") or {},
        "payload": fields["payload"],
    }


def cells_of(columns: Columns, count: int, numbers: Sequence[str]) -> dict[str, list[Any]]:
    """What messages are made of, out of columns: some numbers, and the bytes of each."""
    cells = {name: columns.fixed(name).tolist() for name in numbers}
    for name in ("key", "headers", "payload"):
        column = columns.binary(name)
        cells[name] = [b""] * count if column is None else column.tolist()
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
        found = [DeadMessage(self._topic.content, fields) for fields in answer["messages"]]
        return found, answer.get("next")

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
        arguments = {"message_ids": _ids(messages), "limit": limit}
        given = {name: value for name, value in arguments.items() if value is not None}
        replayed: int = (await self._topic.ask("dlq_replay", **given))["replayed"]
        return replayed

    async def delete(
        self, messages: Iterable[str | Message[T]] | None = None, *, force: bool = False
    ) -> int:
        """Delete dead letters for good; all of them unless named. Needs `force=True`."""
        ids = _ids(messages)
        more = {} if ids is None else {"message_ids": ids}
        deleted: int = (await self._topic.confirmed("dlq_delete", force=force, **more))["deleted"]
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

    def __aiter__(self) -> AsyncIterator[Message[T]]:
        return self._messages()

    async def _messages(self) -> AsyncGenerator[Message[T], None]:
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
                topic=batch.topic,
                partition=batch.partition,
                sequence=sequence,
                attempts=0,
                time_ms=batch.time_ms,
                **{name: cell[row] for name, cell in cells.items()},
            )
