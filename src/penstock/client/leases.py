"""Leased messages: what may be done with them, and how their leases are kept.

A delivery is the unit: a `MessageBatch` knows for each of its messages whether it is still held, in
one byte. A `LeasedMessage` is a view of one row. A `Keeper` extends, at a third of the visibility,
all leases of its batches that are still held, whether a handler works on them or they wait their
turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from penstock.client import tracing
from penstock.client.content import Content
from penstock.client.messages import Message
from penstock.client.options import Duration, milliseconds
from penstock.client.settling import Settler
from penstock.client.streams import DeliveredBatch
from penstock.errors import LeaseLost, PenstockError
from penstock.model.ids import LeaseToken

T = TypeVar("T")
log = logging.getLogger("penstock.client")
REASON_CHARS_MAX = 500


class State(IntEnum):
    """WAITING → OUT when it is handed to a handler; either → SETTLED by us, or LOST by time.
    Nothing leads back. The first two are held."""

    WAITING = 0
    OUT = 1
    SETTLED = 2
    LOST = 3


_WAITING, _OUT, _SETTLED = (bytes((s,)) for s in (State.WAITING, State.OUT, State.SETTLED))


class Origin(Protocol):
    """What a batch needs of its topic."""

    name: str
    content: Content[Any]
    settler: Settler

    @property
    def id(self) -> int: ...


class MessageBatch(Generic[T]):
    """Messages of one partition, leased together. As a context manager it acknowledges them all
    on exit, or gives them back on an error; rows that were settled one by one are left out."""

    def __init__(
        self,
        origin: Origin,
        delivered: DeliveredBatch,
        released: Callable[[MessageBatch[Any], int], None] | None = None,
    ) -> None:
        self._origin = origin
        self._delivery, self._columns = delivered.delivery, delivered.columns
        self._states = bytearray(self._delivery.count)
        self._released = released  # told how many of the leases that were out have ended
        self._rows: dict[str, list[Any]] | None = None
        self.entered: Callable[[MessageBatch[Any]], None] | None = None  # a handler has begun
        self.kept: Callable[[MessageBatch[Any]], None] | None = None  # told when none is held
        self.held = self._delivery.count

    def __len__(self) -> int:
        return self._delivery.count

    @property
    def partition(self) -> int:
        return self._delivery.partition

    @property
    def visibility_ms(self) -> int:
        return self._delivery.visibility_ms

    @property
    def deadline_ms(self) -> int:
        """When the leases end unless they are extended, by the coordinator's wall clock."""
        return self._delivery.deadline_ms

    @property
    def payloads(self) -> list[bytes]:
        """Every payload, without making messages of them."""
        column = self._columns.binary("payload")
        return [b""] * len(self) if column is None else column.tolist()

    @property
    def values(self) -> list[T]:
        decode = self._origin.content.decode
        return [decode(payload) for payload in self.payloads]

    @overload
    def __getitem__(self, index: int) -> LeasedMessage[T]: ...
    @overload
    def __getitem__(self, index: slice) -> list[LeasedMessage[T]]: ...
    def __getitem__(self, index: int | slice) -> LeasedMessage[T] | list[LeasedMessage[T]]:
        if isinstance(index, slice):
            return [self._message(row) for row in range(*index.indices(len(self)))]
        row = index + len(self) if index < 0 else index
        if not 0 <= row < len(self):
            raise IndexError(index)
        return self._message(row)

    def __iter__(self) -> Iterator[LeasedMessage[T]]:
        return (self._message(row) for row in range(len(self)))

    def _message(self, row: int) -> LeasedMessage[T]:
        rows = self._rows
        if rows is None:
            rows = self._rows = self._decode()
        return LeasedMessage(self, row, {name: column[row] for name, column in rows.items()})

    def _decode(self) -> dict[str, list[Any]]:
        columns = self._columns
        rows: dict[str, list[Any]] = {
            "sequence": columns.fixed("message").tolist(),
            "priority": columns.fixed("priority").tolist(),
            "attempts": columns.fixed("attempts").tolist(),
            "time_ms": columns.fixed("time_ms").tolist(),
        }
        for name in ("key", "headers", "payload"):
            column = columns.binary(name)
            rows[name] = [b""] * len(self) if column is None else column.tolist()
        return rows

    # --- settling ---

    async def ack(self) -> None:
        """Acknowledge every message still held; raises `LeaseLost` if some were not any more."""
        rows = self.take()
        if len(rows):
            lost = await self._origin.settler.ack_range(
                partition=self.partition, epoch=self._delivery.epoch, tokens=self._tokens(rows)
            )
            self._raise_lost(lost)

    async def nack(self, *, delay: Duration | None = None, reason: str = "") -> None:
        """Give every message still held back for a retry, after `delay` or the topic's backoff."""
        delay_ms = None if delay is None else milliseconds(delay, field="delay")
        await self._give_back(delay_ms=delay_ms, reason=reason)

    async def reject(self, reason: str = "") -> None:
        """Move every message still held to the dead letters."""
        await self._give_back(reject=True, reason=reason)

    async def give_back(self) -> None:
        """Return what was not used: no attempt is counted."""
        await self._give_back(counted=False, delay_ms=0)

    async def _give_back(self, **how: Any) -> None:
        rows = self.take()
        if len(rows):
            tokens = [self.token(row) for row in rows.tolist()]
            self._raise_lost(await self._origin.settler.give_back(tokens, **how))

    def _raise_lost(self, lost: list[int]) -> None:
        if lost:
            raise LeaseLost(f"{len(lost)} of {len(self)} leases were lost", lost=len(lost))

    async def __aenter__(self) -> MessageBatch[T]:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            await self.ack()
        elif isinstance(error, Exception):
            await _quietly(self.nack(reason=describe(error)), self._origin.name)
        else:
            await _quietly(self.give_back(), self._origin.name)

    # --- rows and their leases ---

    @property
    def origin(self) -> Origin:
        return self._origin

    def token(self, row: int) -> LeaseToken:
        head = self._delivery
        return LeaseToken(head.partition, head.epoch, head.token_first + row)

    def state(self, row: int) -> State:
        return State(self._states[row])

    def is_held(self, row: int) -> bool:
        return self._states[row] <= State.OUT

    def held_rows(self) -> NDArray[np.int64]:
        if self.held == len(self):
            return np.arange(len(self))
        return np.flatnonzero(np.frombuffer(self._states, np.uint8) <= State.OUT)

    def hand_out(self, row: int | None = None) -> None:
        """A handler has the row now, or all of them."""
        if row is None:
            self._states = self._states.replace(_WAITING, _OUT)
        elif self._states[row] == State.WAITING:
            self._states[row] = State.OUT

    def take(self) -> NDArray[np.int64]:
        """Mark every held row as settled; returns them."""
        rows = self.held_rows()
        if len(rows) < len(self):
            self.mark(rows.tolist(), State.SETTLED)
        else:
            out = self._states.count(State.OUT)
            self._states = bytearray(_SETTLED * len(self))
            self._end(len(rows), out)
        return rows

    def take_row(self, row: int) -> None:
        """Mark one row as settled; raises if it is not ours to settle any more."""
        state = self._states[row]
        if state == State.LOST:
            raise LeaseLost("the lease ran out before the message was settled")
        if state == State.SETTLED:
            raise LeaseLost("the message was settled already")
        self.mark((row,), State.SETTLED)

    def mark(self, rows: Sequence[int], state: State) -> None:
        """End the leases of those `rows` that are held."""
        states = self._states
        ended = out = 0
        for row in rows:
            if states[row] <= State.OUT:
                out += states[row]
                ended += 1
                states[row] = state
        self._end(ended, out)

    def _end(self, ended: int, out: int) -> None:
        self.held -= ended
        if out and self._released is not None:
            self._released(self, out)
        if not self.held and self.kept is not None:
            self.kept(self)

    def _tokens(self, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
        return (rows + self._delivery.token_first).astype(np.uint64)


class LeasedMessage(Message[T]):
    """A message that is ours until its lease ends. Use it as a context manager: leaving
    acknowledges it, an error gives it back for a retry, cancellation gives it back unused."""

    __slots__ = ("_batch", "_row", "_span")

    def __init__(self, batch: MessageBatch[T], row: int, fields: dict[str, Any]) -> None:
        origin = batch.origin
        super().__init__(origin.content, topic=origin.id, partition=batch.partition, **fields)
        self._batch, self._row = batch, row
        self._span: tracing.Span | None = None

    @property
    def lease_token(self) -> str:
        return str(self._batch.token(self._row))

    @property
    def deadline_ms(self) -> int:
        """When its lease ends unless it is extended, by the coordinator's wall clock."""
        return self._batch.deadline_ms

    @property
    def held(self) -> bool:
        """False once it was settled, or its lease is known to be lost."""
        return self._batch.is_held(self._row)

    def hand_out(self) -> None:
        self._batch.hand_out(self._row)

    def take(self) -> LeaseToken:
        """Mark it as settled for whoever ends its lease by this token."""
        self._batch.take_row(self._row)
        return self._batch.token(self._row)

    async def ack(self) -> None:
        """Done with it. Raises `LeaseLost` if the lease had ended; it may be delivered again."""
        await self._batch.origin.settler.ack(self.take())

    async def nack(self, *, delay: Duration | None = None, reason: str = "") -> None:
        """Try again later: after `delay`, or after the topic's backoff."""
        delay_ms = None if delay is None else milliseconds(delay, field="delay")
        await self._give_back(delay_ms=delay_ms, reason=reason)

    async def reject(self, reason: str = "") -> None:
        """Never again: to the dead letters at once."""
        await self._give_back(reject=True, reason=reason)

    async def give_back(self) -> None:
        """Not used: someone else may have it now, and no attempt is counted."""
        await self._give_back(counted=False, delay_ms=0)

    async def extend(self, duration: Duration) -> None:
        """Let the lease run for `duration` from now."""
        extend_ms = milliseconds(duration, field="duration")
        token = self._batch.token(self._row)
        if await self._batch.origin.settler.extend([token], extend_ms):
            self._batch.mark((self._row,), State.LOST)
            raise LeaseLost("the lease ran out before it was extended")

    async def _give_back(self, **how: Any) -> None:
        if await self._batch.origin.settler.give_back([self.take()], **how):
            raise LeaseLost("the lease ran out before the message was given back")

    def begin(self) -> None:
        """A handler has begun."""
        if self._batch.entered is not None:
            self._batch.entered(self._batch)

    async def finish(self, error: BaseException | None) -> None:
        """The handler ended, with `error` or without; settle accordingly unless it did."""
        if self._batch.state(self._row) is State.SETTLED:
            return
        if error is None:
            await self.ack()
        elif isinstance(error, Exception):
            await _quietly(self.nack(reason=describe(error)), self._batch.origin.name)
        else:
            await _quietly(self.give_back(), self._batch.origin.name)

    def trace(self) -> tracing.Span | None:
        """A span for handling it, if the application traces."""
        return tracing.begin_process(self._batch.origin.name, self)

    async def __aenter__(self) -> LeasedMessage[T]:
        self.begin()
        self._span = self.trace()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.finish(error)
        finally:
            if self._span is not None:
                self._span.end(error)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:REASON_CHARS_MAX]


async def _quietly(settling: Any, topic: str) -> None:
    """Settle while an error is on its way up: it must not be replaced by a second one."""
    try:
        await settling
    except PenstockError as error:
        log.warning("a message of %s was not given back: %s", topic, error)
