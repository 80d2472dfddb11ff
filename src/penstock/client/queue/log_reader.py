"""The committed log of one partition, as messages or as the batches that hold them.

Messages of an atomic batch are in the log from its PREPARE on but exist only if its DECIDE says so;
the reader holds them back until then and yields them where the decision stands.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any, Final, Generic, TypeVar

from penstock.client.network.connection import Connection
from penstock.client.network.streams import LogStream
from penstock.client.queue.handle import TopicHandle
from penstock.client.queue.messages import Message
from penstock.errors import LimitExceeded, Unavailable
from penstock.model.batch import Batch, Kind

T = TypeVar("T")
UNDECIDED_MAX: Final = 1000  # batches held back for open transactions


class LogReader(Generic[T]):
    """Iterate over it for messages in log order; over `batches()` for everything there is.

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
        credit_entries: int,
        credit_bytes: int,
        through: int = 0,
    ) -> None:
        self._topic, self._partition = topic, partition
        self._through = through  # where it ends by itself; 0: it follows
        self._next = from_sequence
        self._credit = (credit_entries, credit_bytes)
        self._undecided: dict[bytes, list[Batch]] = {}
        self._topic_id = 0  # of the topic whose log it began to read
        self.sequence_committed = 0  # the partition's watermark as of the last batch

    async def batches(self) -> AsyncGenerator[Batch, None]:
        """Every committed batch, of every kind."""
        slices = self.slices()
        try:
            async for found in slices:
                for batch in found:
                    self._next = batch.last + 1  # whoever stops here goes on from here
                    yield batch
        finally:
            await slices.aclose()

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
                await _close(stream)

    async def _open(self, connection: Connection) -> LogStream:
        entries, size = self._credit
        stream = await connection.log_stream(
            self._topic.name,
            partition=self._partition,
            from_sequence=self._next,
            credit_entries=entries,
            credit_bytes=size,
            through=self._through,
            topic_id=self._topic_id,
        )
        self._topic_id = stream.topic
        return stream

    def __aiter__(self) -> AsyncIterator[Message[T]]:
        return self._messages()

    async def _messages(self) -> AsyncGenerator[Message[T], None]:
        batches = self.batches()
        try:
            async for batch in batches:
                for ready in self._decided(batch):
                    for message in self._decode(ready):
                        yield message
        finally:
            await batches.aclose()

    def _decided(self, batch: Batch) -> Iterator[Batch]:
        """The batches whose messages exist now that `batch` is in the log."""
        if batch.kind is Kind.ENQ:
            yield batch
        elif batch.kind is Kind.PREPARE:
            transaction = _first(batch, "transaction")
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
        count = batch.entries
        sequences: Any = range(batch.first, batch.first + count)
        if batch.compacted:
            sequences = columns.fixed("sequence").tolist()
        priorities = columns.fixed("priority").tolist()
        cells = [columns.binary(name) for name in ("key", "headers", "payload")]
        keys, headers, payloads = ([b""] * count if c is None else list(c) for c in cells)
        for row, sequence in enumerate(sequences):
            yield Message(
                self._topic.content,
                topic=batch.topic,
                partition=batch.partition,
                sequence=sequence,
                priority=priorities[row],
                attempts=0,
                time_ms=batch.time_ms,
                key=keys[row],
                headers=headers[row],
                payload=payloads[row],
            )


def _first(batch: Batch, name: str) -> bytes:
    column = batch.columns().binary(name)
    return b"" if column is None else column[0]


async def _close(stream: LogStream) -> None:
    try:
        await stream.close()
    except Unavailable:
        pass  # nothing to close on a connection that is gone
