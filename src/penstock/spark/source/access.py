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
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

import msgspec

from penstock.client.bridge import ThreadBridge
from penstock.client.client import Client
from penstock.client.network.endpoints import Remote
from penstock.client.options import Options
from penstock.client.queue.handle import TopicHandle
from penstock.client.queue.messages import LogReader
from penstock.errors import FailedPrecondition, LimitExceeded, Unavailable
from penstock.model.batch import Batch, Kind
from penstock.model.topic import TopicConfig, TopicKind
from penstock.sinks.protocol import Items
from penstock.sinks.requests import Part, item_requests
from penstock.wire.messages import Enqueued

R = TypeVar("R")
WINDOW_ENTRIES: Final = 1_000_000
WINDOW_BYTES: Final = 16 << 20  # sent ahead of the reader
STALL_S: Final = 60.0  # without a batch of a range that should be there
HELD_BYTES_MAX: Final = 256 << 20  # of batches behind an undecided one
UNBOUNDED: Final = 1 << 62  # rows or bytes
INFLIGHT: Final = 4  # enqueue requests that wait for their answer at once


class Wanted(NamedTuple):
    """A range of a partition, and how much of it would be welcome."""

    partition: int
    first: int
    last: int
    rows_max: int = UNBOUNDED
    bytes_max: int = UNBOUNDED


class RangeExtent(NamedTuple):
    last: int
    bytes: int


class LogStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How far one partition's log reaches."""

    partition: int
    sequence_first: int  # the oldest sequence that can still be read
    # The last sequence that a range may end at: what it holds never changes, for it is committed,
    # and every atomic batch up to here is decided.
    readable: int = msgspec.field(name="sequence_stable")


class Decisions:
    """Batches in, batches with existing messages out."""

    def __init__(self, last: int) -> None:
        self._last = last
        self._held: deque[tuple[Batch, bytes | None]] = deque()  # with the transaction it awaits
        self._bytes = 0
        self._outcomes: dict[bytes, bool] = {}  # of transactions that are held

    @property
    def open(self) -> bool:
        return bool(self._held)

    def feed(self, batches: Sequence[Batch]) -> list[Batch]:
        """The next batches of the log; returns those that became certain."""
        ready: list[Batch] = []
        for batch in batches:
            kind = batch.kind
            if kind is Kind.ENQ and batch.first <= self._last:
                if self._held:
                    self._hold(batch, None)
                else:
                    ready.append(batch)
            elif kind is Kind.PREPARE and batch.first <= self._last:
                self._hold(batch, (batch.columns().binary("transaction") or [b""])[0])
            elif kind is Kind.DECIDE and self._held:
                self._decide(batch)
                self._release(ready)
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
        decided = zip(
            columns.binary("transaction") or (), columns.fixed("commit").tolist(), strict=True
        )
        for transaction, commit in decided:
            if transaction in awaited:
                self._outcomes.setdefault(transaction, bool(commit))  # the first decision wins

    def _release(self, ready: list[Batch]) -> None:
        while self._held:
            batch, transaction = self._held[0]
            if transaction is not None:
                commit = self._outcomes.get(transaction)
                if commit is None:
                    return
                if commit:
                    ready.append(batch)
            else:
                ready.append(batch)
            self._held.popleft()
            self._bytes -= batch.size


class NodeAccess:
    """Blocking calls to one node. Get it with `NodeAccess.shared`."""

    _shared: ClassVar[dict[tuple[Any, ...], NodeAccess]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, url: str, *, api_key: str | None = None, tls: str | None = None) -> None:
        self._bridge = ThreadBridge("penstock-access")
        remote = Remote(url, api_key=api_key, tls=tls, client="penstock-spark")
        try:
            self._client = self.run(_opened(remote))
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
        return self.run(self._client.call(method, **arguments))

    def close(self) -> None:
        try:
            self.run(self._client.close())
        finally:
            self._bridge.close()

    # --- topics ---

    def config(self, topic: str) -> TopicConfig:
        """A topic's configuration; asked for once, so only its fixed attributes are to be used."""
        return self.run(self._handle(topic)).config

    async def _handle(self, topic: str) -> TopicHandle[bytes]:
        handle = self._client.topic(topic, create=False).handle
        await handle.opened()
        return handle

    def delta_config(self, topic: str, *, field: str = "topics") -> TopicConfig:
        config = self.config(topic)
        if config.kind is not TopicKind.DELTA:
            raise FailedPrecondition(
                f"{topic} is a {config.kind.value} topic, not one of deltas", field=field
            )
        return config

    def log_status(self, topic: str) -> list[LogStatus]:
        answer = self.call("log_status", topic=topic)
        return msgspec.convert(answer["partitions"], list[LogStatus])

    def find_time(self, topic: str, partition: int, time_ms: int) -> int:
        """The first sequence of the first batch at or after a time; past the end if none is."""
        found: int = self.call("log_find", topic=topic, partition=partition, time_ms=time_ms)[
            "sequence"
        ]
        return found

    def extents(self, topic: str, wanted: Sequence[Wanted]) -> list[RangeExtent]:
        """How far whole batches of each wanted range fit its bounds; at least one does."""
        asked = [
            {
                "partition": w.partition,
                "from_sequence": w.first,
                "through": w.last,
                "entries_max": w.rows_max,
                "bytes_max": w.bytes_max,
            }
            for w in wanted
        ]
        answer = self.call("log_extent", topic=topic, extents=asked)
        return [RangeExtent(found["last"], found["bytes"]) for found in answer["extents"]]

    # --- reading ---

    def read_range(
        self, topic: str, partition: int, first: int, last: int
    ) -> Iterator[list[Batch]]:
        """The batches with messages of `[first, last]`, in log order, a slice at a time.

        They are ENQ batches, and PREPARE batches whose atomic batch was decided for; a decision
        beyond `last` is looked up there. The first and the last batch may reach over the edges:
        `rows.pieces` trims. `last` must be committed (`LogStatus.readable`).
        """
        decisions = Decisions(last)
        for batches in self.read_log(topic, partition, first, last, decisions=decisions):
            if ready := decisions.feed(batches):
                yield ready

    def read_log(
        self,
        topic: str,
        partition: int,
        first: int,
        last: int,
        *,
        decisions: Decisions | None = None,
    ) -> Iterator[list[Batch]]:
        """Every batch of `[first, last]`, of every kind, as it is stored."""
        if first > last:
            return
        source = self._slices(topic, partition, first, last=last, decisions=decisions)
        yield from self._bridge.iterate(source)

    async def _slices(
        self, topic: str, partition: int, first: int, *, last: int, decisions: Decisions | None
    ) -> AsyncGenerator[list[Batch], None]:
        handle, at = await self._handle(topic), first
        while True:
            reader = LogReader(
                handle,
                partition=partition,
                from_sequence=at,
                credit_entries=WINDOW_ENTRIES,
                credit_bytes=WINDOW_BYTES,
                through=last if at <= last else 0,  # past it only the decisions are looked for
            )
            slices = reader.slices()
            try:
                while True:
                    async with asyncio.timeout(STALL_S):
                        batches = await anext(slices)
                    at = batches[-1].last + 1
                    yield batches
                    if at > last and (decisions is None or not decisions.open):
                        return
            except TimeoutError as error:
                raise Unavailable(
                    f"{topic}/{partition}: nothing came from {at} to {last} in {STALL_S:.0f} s"
                ) from error
            except StopAsyncIteration:
                continue  # all up to `last` was read
            finally:
                await slices.aclose()

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
        return await self._client.link.request(
            lambda connection: connection.enqueue(topic, parts), at=(topic, parts[0][0])
        )


def _new(answer: Enqueued) -> int:
    return sum(placed.count for placed in answer.placed)


async def _opened(remote: Remote) -> Client:
    client = Client(remote, Options())
    await client.__aenter__()
    return client


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
