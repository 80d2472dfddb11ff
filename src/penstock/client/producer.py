"""Puts become requests: gathered while others are in flight, bounded, retried with the same key.

Every put of one turn of the loop, and every put that comes while `requests_max` requests wait for
their answer, joins the next request. A request that fails for now is sent again as it is; one that
is refused because of an entry is sent again entry by entry, so that a put fails only for its own
fault.

Invariant: `_entries` and `_bytes` count what was accepted and is not answered; never below zero.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial

from penstock.client.connection import Connection
from penstock.client.entries import Entries, Identity, Shipment, sealed, sealed_payloads
from penstock.client.link import Link
from penstock.errors import InvalidArgument, PenstockError
from penstock.model.columns import Binary
from penstock.model.topic import TopicConfig
from penstock.wire.messages import Enqueued


class Gathering:
    """Puts that will share a request, and who waits for each of them."""

    __slots__ = ("entries", "waiters")

    def __init__(self) -> None:
        self.entries = Entries()
        self.waiters: list[asyncio.Future[str]] = []


class Producer:
    """The enqueueing half of one topic."""

    def __init__(self, link: Link, config: TopicConfig, identity: Identity) -> None:
        self.config = config
        self._link, self._identity, self._options = link, identity, link.options
        self._loop = asyncio.get_running_loop()
        self._gathered: deque[Gathering] = deque()
        self._requests = 0
        self._entries = 0
        self._bytes = 0
        self._room: list[asyncio.Future[None]] = []
        self._scheduled = False
        self._sticky = 0
        self._idle: list[asyncio.Future[None]] = []

    @property
    def inflight(self) -> tuple[int, int]:
        """Entries and bytes that were accepted and are not answered."""
        return self._entries, self._bytes

    # --- one by one ---

    @property
    def ready(self) -> bool:
        """Whether an entry may be added right now."""
        return not (self.full or self._link.closed)

    @property
    def full(self) -> bool:
        options = self._options
        return (
            self._entries >= options.inflight_entries_max
            or self._bytes >= options.inflight_bytes_max
        )

    async def room(self) -> None:
        """Wait until another put is within the bounds."""
        self._link.raise_if_closed()
        while self.full:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._room.append(waiter)
            await waiter

    def add(
        self,
        payload: bytes,
        priority: int,
        *,
        key: bytes = b"",
        headers: bytes = b"",
        delay_ms: int = 0,
        max_retries: int = -1,
    ) -> asyncio.Future[str]:
        """Take one checked entry; the future gets its message id once it is durable."""
        options = self._options
        gathered = self._gathered
        if gathered and len((last := gathered[-1]).waiters) < options.batch_entries_max:
            entries = last.entries
            if entries.bytes >= options.batch_bytes_max:
                last = self._start()
        else:
            last = self._start()
        entries = last.entries
        before = entries.bytes
        entries.add(
            payload, priority, key=key, headers=headers, delay_ms=delay_ms, max_retries=max_retries
        )
        self._entries += 1
        self._bytes += entries.bytes - before
        waiter: asyncio.Future[str] = self._loop.create_future()
        last.waiters.append(waiter)
        if not self._scheduled and self._requests < options.requests_max:
            self._scheduled = True
            self._loop.call_soon(self._flush)
        return waiter

    def _start(self) -> Gathering:
        gathering = Gathering()
        self._gathered.append(gathering)
        return gathering

    def _flush(self) -> None:
        """End of a turn: send what was gathered, as far as requests may be in flight."""
        self._scheduled = False
        connection = self._link.live
        if connection is not None and connection.slow_until > self._loop.time():
            self._scheduled = True
            self._loop.call_at(connection.slow_until, self._flush)
            return
        while self._gathered and self._requests < self._options.requests_max:
            gathering = self._gathered.popleft()
            if self._link.closed:
                self._requests += 1
                self._fail(gathering, PenstockError("the client closed before the put was sent"))
                continue
            shipment = self._seal(gathering.entries)
            self._requests += 1
            if connection is None or not connection.alive:
                self._link.spawn(self._deliver(gathering, shipment, None))
                continue
            answer = connection.enqueue_nowait(shipment.request, shipment.bodies)
            answer.add_done_callback(partial(self._on_answer, gathering, shipment))

    def _seal(self, entries: Entries) -> Shipment:
        return sealed(entries, config=self.config, identity=self._identity, partition=self._turn())

    def _turn(self) -> int:
        """The partition of the next batch's entries without a key."""
        self._sticky = (self._sticky + 1) % self.config.partitions
        return self._sticky

    def _on_answer(
        self, gathering: Gathering, shipment: Shipment, answer: asyncio.Future[Enqueued]
    ) -> None:
        error = answer.exception()
        if error is None:
            self._resolve(gathering, shipment, answer.result())
        elif isinstance(error, PenstockError) and error.retryable and not self._link.closed:
            self._link.spawn(self._deliver(gathering, shipment, error))
        else:
            self._refused(gathering, error)

    async def _deliver(
        self, gathering: Gathering, shipment: Shipment, failed: PenstockError | None
    ) -> None:
        """The slow way: after a first try that failed, or without a connection."""
        try:
            answer = await self.ship(shipment, failed=failed)
        except PenstockError as error:
            # Not entry by entry: an earlier try may have written them, under the keys of this one.
            self._fail(gathering, error)
        except BaseException as error:
            self._fail(gathering, PenstockError(f"the put was given up: {error!r}"))
            raise
        else:
            self._resolve(gathering, shipment, answer)

    async def ship(self, shipment: Shipment, *, failed: PenstockError | None = None) -> Enqueued:
        """Send, and send again with the same bytes, until there is an answer."""

        async def send(connection: Connection) -> Enqueued:
            return await connection.enqueue_nowait(shipment.request, shipment.bodies)

        return await self._link.request(send, failed=failed)

    # --- the answer ---

    def _resolve(self, gathering: Gathering, shipment: Shipment, answer: Enqueued) -> None:
        try:
            ids = shipment.ids(answer)
        except PenstockError as error:
            self._fail(gathering, error)
            return
        for waiter, message_id in zip(gathering.waiters, ids, strict=True):
            if not waiter.done():
                waiter.set_result(message_id)
        self._done(gathering)

    def _refused(self, gathering: Gathering, error: BaseException) -> None:
        """Nothing of the request was written. If others share the blame, let each try alone."""
        if isinstance(error, InvalidArgument) and len(gathering.waiters) > 1:
            for row, waiter in enumerate(gathering.waiters):
                alone = Gathering()
                alone.entries = gathering.entries.only(row)
                alone.waiters.append(waiter)
                self._gathered.append(alone)
            self._requests -= 1
            self._schedule()
        else:
            self._fail(gathering, error)

    def _fail(self, gathering: Gathering, error: BaseException) -> None:
        for waiter in gathering.waiters:
            if not waiter.done():
                waiter.set_exception(error)
        self._done(gathering)

    def _done(self, gathering: Gathering) -> None:
        self._requests -= 1
        self.release(len(gathering.waiters), gathering.entries.bytes)
        self._schedule()

    def _schedule(self) -> None:
        if self._gathered and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    # --- many at once ---

    async def reserve(self, entries: Entries) -> None:
        """Count `entries` as in flight, when there is room; `release` ends it."""
        if self.full:
            await self.room()
        self._entries += len(entries)
        self._bytes += entries.bytes

    def release(self, entries: int, size: int) -> None:
        self._entries -= entries
        self._bytes -= size
        if self._entries < 0 or self._bytes < 0:
            raise RuntimeError(f"in flight: {self._entries} entries, {self._bytes} bytes")
        if self._room and not self.full:
            _wake(self._room)
        if not self._entries:
            _wake(self._idle)

    async def put_many(
        self, entries: Entries, *, atomic: bool, expected_sequence: int | None
    ) -> list[str]:
        """One request of its own for `entries`; their message ids."""
        await self.reserve(entries)
        try:
            shipment = sealed(
                entries,
                config=self.config,
                identity=self._identity,
                partition=self._turn(),
                atomic=atomic,
                expected_sequence=expected_sequence,
            )
            return shipment.ids(await self._sent(shipment))
        finally:
            self.release(len(entries), entries.bytes)

    async def put_payloads(self, payloads: Binary, *, partition: int, headers: bytes = b"") -> None:
        """One request of its own for payloads that belong to one partition."""
        size = len(payloads.blob)
        await self.room()
        self._entries += len(payloads)
        self._bytes += size
        try:
            await self._sent(
                sealed_payloads(
                    payloads,
                    config=self.config,
                    identity=self._identity,
                    partition=partition,
                    headers=headers,
                )
            )
        finally:
            self.release(len(payloads), size)

    async def _sent(self, shipment: Shipment) -> Enqueued:
        connection = self._link.live
        if connection is None or connection.slow_until > self._loop.time():
            return await self.ship(shipment)
        try:
            return await connection.enqueue_nowait(shipment.request, shipment.bodies)
        except PenstockError as error:
            if not error.retryable:
                raise
            return await self.ship(shipment, failed=error)

    async def drain(self) -> None:
        """Wait until everything that was accepted is answered."""
        while self._entries:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._idle.append(waiter)
            await waiter


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()
