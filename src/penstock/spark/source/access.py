"""A node for code that waits: Spark's workers, its driver, and the threads of sinks.

One `NodeAccess` serves a whole process (per url and key): it owns a client on an event loop in a
thread of its own, so that the next slices of a range arrive while the caller works on the last.
Everything here may be called from any thread. A lost connection is opened again and the call goes
on; what cannot be repeated without harm is not offered.

**Which batches of a range hold messages that exist** (`Decisions`). An atomic batch's share is in a
partition's log from its PREPARE on, but its messages exist only if the partition's DECIDE says so.
A reader that cuts a log into ranges needs one place for them that never moves: the PREPARE's. So
batches are held back from the first undecided PREPARE on, until its decision is read, which may
stand beyond the range's end. Invariants: what `feed` returns is in log order, each batch once;
every batch returned is an ENQ, or a PREPARE whose first decision was for it; nothing that begins
beyond `last` is returned.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import aclosing
from typing import Any, ClassVar, Final, TypeVar

import msgspec

from penstock.client.bridge import ThreadBridge
from penstock.client.client import Client
from penstock.client.network.endpoints import Remote
from penstock.client.options import Options
from penstock.client.queue.messages import LogReader
from penstock.client.topic import Topic
from penstock.errors import FailedPrecondition, LimitExceeded, Unavailable
from penstock.model.batch import Batch, Kind
from penstock.model.topic import TopicConfig, TopicKind
from penstock.sinks.protocol import Items, Part, item_requests
from penstock.wire.messages import Enqueued

R = TypeVar("R")
WINDOW_ENTRIES: Final = 1_000_000
WINDOW_BYTES: Final = 16 << 20  # sent ahead of the reader
STALL_S: Final = 60.0  # without a batch of a range that should be there
HELD_BYTES_MAX: Final = 256 << 20  # of batches behind an undecided one
UNBOUNDED: Final = 1 << 62  # rows or bytes
INFLIGHT: Final = 4  # enqueue requests that wait for their answer at once
Check = Callable[[Sequence[Batch]], None]


class Wanted(msgspec.Struct, frozen=True):
    """A range of a partition, and how much of it would be welcome."""

    partition: int
    first: int = msgspec.field(name="from_sequence")
    last: int = msgspec.field(name="through")
    rows_max: int = msgspec.field(name="entries_max", default=UNBOUNDED)
    bytes_max: int = UNBOUNDED


class RangeExtent(msgspec.Struct, frozen=True):
    last: int
    bytes: int


class LogStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How far one partition's log reaches."""

    topic_id: int  # another one than before: the topic was deleted and made again
    partition: int
    sequence_first: int  # the oldest sequence that can still be read
    # The last sequence that a range may end at: what it holds never changes, for it is committed,
    # and every atomic batch up to here is decided.
    readable: int = msgspec.field(name="sequence_stable")


class Decisions:
    """Batches in, batches with existing messages out."""

    def __init__(self, last: int) -> None:
        self.last = last
        self._held: deque[tuple[Batch, bytes | None]] = deque()  # with the transaction it awaits
        self._bytes = 0
        # Of the transactions that are held. A batch that only stands behind them awaits none.
        self._outcomes: dict[bytes | None, bool] = {None: True}

    @property
    def open(self) -> bool:
        return bool(self._held)

    def feed(self, batches: Sequence[Batch]) -> list[Batch]:
        """The next batches of the log; returns those that became certain."""
        ready: list[Batch] = []
        for batch in batches:
            kind, within = batch.kind, batch.first <= self.last
            if kind is Kind.ENQ and within and not self._held:
                ready.append(batch)
            elif kind is Kind.ENQ and within:
                self._hold(batch, None)
            elif kind is Kind.PREPARE and within:
                self._hold(batch, (batch.columns().binary("transaction") or [b""])[0])
            elif kind is Kind.DECIDE and self._held:
                self._decide(batch)
                ready += self._release()
        return ready

    def _hold(self, batch: Batch, transaction: bytes | None) -> None:
        self._held.append((batch, transaction))
        self._bytes += batch.size
        if self._bytes > HELD_BYTES_MAX:
            raise LimitExceeded(
                f"over {HELD_BYTES_MAX} bytes stand behind an undecided atomic batch",
                limit=HELD_BYTES_MAX,
            )

    def _decide(self, batch: Batch) -> None:
        columns = batch.columns()
        awaited = {transaction for _, transaction in self._held}
        commits = columns.fixed("commit").tolist()
        for transaction, commit in zip(columns.binary("transaction") or (), commits, strict=True):
            if transaction in awaited:
                self._outcomes.setdefault(transaction, bool(commit))  # the first decision wins

    def _release(self) -> Iterator[Batch]:
        while self._held and (commit := self._outcomes.get(self._held[0][1])) is not None:
            batch, _ = self._held.popleft()
            self._bytes -= batch.size
            if commit:
                yield batch


class NodeAccess:
    """Blocking calls to one node. Get it with `NodeAccess.shared`."""

    _shared: ClassVar[dict[tuple[Any, ...], NodeAccess]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, url: str, *, api_key: str | None = None, tls: str | None = None) -> None:
        self._bridge = ThreadBridge("penstock-access")
        remote = Remote(url, api_key=api_key, tls=tls, client="penstock-spark")
        self.client = Client(remote, Options())
        try:
            self.run(self.client.__aenter__())
        except BaseException:
            self._bridge.close()
            raise

    @classmethod
    def shared(cls, url: str, *, api_key: str | None = None, tls: str | None = None) -> NodeAccess:
        """This process' access to a node; a forked child gets one of its own."""
        key = (os.getpid(), url, api_key, tls)
        with cls._lock:
            found = cls._shared.get(key)
            if found is None:
                found = cls._shared[key] = cls(url, api_key=api_key, tls=tls)
            return found

    @classmethod
    def close_shared(cls) -> None:
        with cls._lock:
            own = [key for key in cls._shared if key[0] == os.getpid()]
            closing = [cls._shared.pop(key) for key in own]
        for access in closing:
            access.close()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run `work` on the client's loop and wait for it; an interrupted caller cancels it."""
        return self._bridge.run(work)

    def call(self, method: str, /, **arguments: Any) -> dict[str, Any]:
        return self.run(self.client.call(method, **arguments))

    def close(self) -> None:
        try:
            self.run(self.client.close())
        finally:
            self._bridge.close()

    # --- topics ---

    def config(self, topic: str) -> TopicConfig:
        """A topic's configuration; asked for once, so only its fixed attributes are to be used."""
        return self.run(self._topic(topic)).config

    async def _topic(self, topic: str) -> Topic[bytes]:
        return await self.client.topic(topic, create=False)

    def topics(self) -> list[str]:
        return sorted(row["name"] for row in self.run(self.client.topics()))

    def delta_config(self, topic: str, *, field: str = "topics") -> TopicConfig:
        config = self.config(topic)
        if config.kind is not TopicKind.DELTA:
            raise FailedPrecondition(
                f"{topic} is a {config.kind.value} topic, not one of deltas", field=field
            )
        return config

    def log_status(self, topic: str) -> list[LogStatus]:
        answer = self.call("log_status", topic=topic)
        rows = [row | {"topic_id": answer["topic_id"]} for row in answer["partitions"]]
        return msgspec.convert(rows, list[LogStatus])

    def find_time(self, topic: str, partition: int, time_ms: int) -> int:
        """The first sequence of the first batch at or after a time; past the end if none is."""
        answer = self.call("log_find", topic=topic, partition=partition, time_ms=time_ms)
        return int(answer["sequence"])

    def extents(self, topic: str, wanted: Sequence[Wanted]) -> list[RangeExtent]:
        """How far whole batches of each wanted range fit its bounds; at least one does."""
        answer = self.call("log_extent", topic=topic, extents=msgspec.to_builtins(wanted))
        return msgspec.convert(answer["extents"], list[RangeExtent])

    # --- reading ---

    def read_range(
        self, topic: str, partition: int, first: int, last: int, *, check: Check | None = None
    ) -> Iterator[list[Batch]]:
        """The batches with messages of `[first, last]`, in log order, a slice at a time.

        They are ENQ batches, and PREPARE batches whose atomic batch was decided for; a decision
        beyond `last` is looked up there. The first and the last batch may reach over the edges:
        `rows.pieces` trims. `last` must be committed (`LogStatus.readable`). `check` is shown every
        batch that is read, of every kind, as it is stored.
        """
        decisions = Decisions(last)
        slices = self._slices(topic, partition, first, decisions=decisions)
        for batches in self._bridge.iterate(slices):
            if check is not None:
                check(batches)
            if ready := decisions.feed(batches):
                yield ready

    async def _slices(
        self, topic: str, partition: int, first: int, *, decisions: Decisions
    ) -> AsyncGenerator[list[Batch], None]:
        handle, at, last = await self._topic(topic), first, decisions.last
        while at <= last or decisions.open:
            reader = LogReader(
                handle,
                partition=partition,
                from_sequence=at,
                credit_entries=WINDOW_ENTRIES,
                credit_bytes=WINDOW_BYTES,
                through=last if at <= last else 0,  # past it only the decisions are looked for
            )
            async with aclosing(reader.slices()) as slices:
                while at <= last or decisions.open:
                    awaited = f"{topic}/{partition}: nothing came from {at} to {last}"
                    batches = await _in_time(anext(slices, None), awaited)
                    if batches is None:
                        break  # all up to `last` was read
                    at = batches[-1].last + 1
                    yield batches

    # --- writing ---

    def enqueue_all(self, topic: str, requests: Iterable[Sequence[Part]]) -> int:
        """Append ENQ bodies, which carry producer keys: a request is sent again until it is
        answered. A few are under way at a time; the number of new messages."""
        waiting: list[Any] = []
        written = 0
        try:
            for parts in requests:
                work = self._enqueue(topic, parts)
                waiting.append(self._bridge.begin(work))
                if len(waiting) == INFLIGHT:
                    written += _new(waiting.pop(0).result())
            while waiting:
                written += _new(waiting.pop(0).result())
            return written
        finally:
            for future in waiting:
                future.cancel()

    async def _enqueue(self, topic: str, parts: Sequence[Part]) -> Enqueued:
        return await self.client.link.request(
            lambda connection: connection.enqueue(topic, parts), at=(topic, parts[0][0])
        )


async def _in_time(work: Awaitable[R], awaited: str) -> R:
    try:
        async with asyncio.timeout(STALL_S):
            return await work
    except TimeoutError as error:
        raise Unavailable(f"{awaited} in {STALL_S:.0f} s") from error


def _new(answer: Enqueued) -> int:
    return sum(placed.count for placed in answer.placed)


class NodeTopicWriter:
    """`penstock.sinks.protocol.TopicWriter` for the topics of one node."""

    def __init__(self, access: Callable[[], NodeAccess]) -> None:
        self._access = access  # called with each write: the first one connects

    def append(
        self, topic: str, *, producer: str, epoch: int, items: Items, partition: int
    ) -> None:
        """Durable on return; what was appended before under the same keys is left as it is."""
        if not len(items):
            return
        access = self._access()
        config = access.config(topic)
        appended = item_requests(items, config, producer=producer, epoch=epoch, partition=partition)
        access.enqueue_all(topic, appended)

    def close(self) -> None:
        """The access is shared; it is closed by whoever opened it."""


# The loop's thread is a daemon: without this its sockets would be torn down in the middle.
atexit.register(NodeAccess.close_shared)
