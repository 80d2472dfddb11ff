"""Leased messages: what may be done with them, and how their leases are kept.

A delivery is the unit: a `MessageBatch` knows for each of its messages whether it is still held, in
one byte. A `LeasedMessage` is a view of one row. A `Keeper` extends, at a third of the visibility,
all leases of its batches that are still held, whether a handler works on them or they wait their
turn.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from functools import cached_property
from typing import Any, Final, Generic, TypeVar, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from penstock.client.network.connection import HowReturned
from penstock.client.options import Duration, milliseconds, optional_ms
from penstock.client.queue.messages import Message, TopicHandle, cells_of, fields_of
from penstock.errors import InvalidArgument, LeaseLost, PenstockError
from penstock.model.columns import Columns
from penstock.model.ids import LeaseToken
from penstock.wire.messages import Delivery

T = TypeVar("T")
log = logging.getLogger("penstock.client")
REASON_CHARS_MAX = 500
# Nothing of OpenTelemetry is imported that the application has not imported by itself: without its
# tracer there is nobody to send spans to, and then a message costs one dictionary lookup.
TRACING: Final = "opentelemetry.trace"


class LeaseState(IntEnum):
    """WAITING → OUT when it is handed to a handler; either → SETTLED by us, or LOST by time.
    Nothing leads back. The first two are held."""

    WAITING = 0
    OUT = 1
    SETTLED = 2
    LOST = 3


class Returnable(ABC):
    """What is leased, and may be given back as long as it is held."""

    __slots__ = ()

    async def nack(self, *, delay: Duration | None = None, reason: str = "") -> None:
        """Try again later: after `delay`, or after the topic's backoff."""
        await self._give_back(delay_ms=optional_ms(delay, field="delay"), reason=reason)

    async def reject(self, reason: str = "") -> None:
        """Never again: to the dead letters at once."""
        await self._give_back(reject=True, reason=reason)

    async def give_back(self) -> None:
        """Not used: someone else may have it now, and no attempt is counted."""
        await self._give_back(counted=False, delay_ms=0)

    @abstractmethod
    def hand_out(self) -> bool:
        """A handler has it now. False if it was lost while it waited."""

    @abstractmethod
    def take_tokens(self) -> list[LeaseToken]:
        """Mark what is held as settled; the leases that end with it."""

    @abstractmethod
    async def ack(self) -> None: ...

    @abstractmethod
    async def _give_back(self, **how: Unpack[HowReturned]) -> None: ...

    async def _settle(self, error: BaseException | None, topic: str) -> None:
        """Settle it by how its handler ended. While an error is on its way up it must not be
        replaced by a second one."""
        if error is None:
            await self.ack()
            return
        try:
            if isinstance(error, Exception):
                await self.nack(reason=f"{type(error).__name__}: {error}"[:REASON_CHARS_MAX])
            else:
                await self.give_back()
        except PenstockError as failed:
            log.warning("a message of %s was not given back: %s", topic, failed)


class MessageBatch(Returnable, Generic[T]):
    """Messages of one partition, leased together. As a context manager it acknowledges them all
    on exit, or gives them back on an error; rows that were settled one by one are left out."""

    def __init__(
        self,
        origin: TopicHandle[Any],
        delivery: Delivery,
        columns: Columns | None,  # None: of a message that came without
        *,
        released: Callable[[MessageBatch[Any], int], None] | None = None,
        entered: Callable[[MessageBatch[Any]], None] | None = None,
    ) -> None:
        self.origin = origin
        self._delivery, self._columns = delivery, columns
        self.topic, self.partition = delivery.topic, delivery.partition
        self.visibility_ms = delivery.visibility_ms
        # When the leases end unless they are extended, by the coordinator's wall clock.
        self.deadline_ms = delivery.deadline_ms
        self.token = delivery.token  # of the lease in a row
        self._states = bytearray(delivery.count)  # the `LeaseState` of each row
        self._all_states = np.frombuffer(self._states, np.uint8)
        self._released = released  # told how many of the leases that were out have ended
        self.entered = entered  # told when a handler begins
        self.kept: Callable[[MessageBatch[Any]], None] | None = None  # told when none is held
        self.held = delivery.count

    def __len__(self) -> int:
        return self._delivery.count

    @property
    def payloads(self) -> list[bytes]:
        """Every payload, without making messages of them."""
        column = None if self._columns is None else self._columns.binary("payload")
        return [b""] * len(self) if column is None else column.tolist()

    @property
    def values(self) -> list[T]:
        decode = self.origin.content.decode
        return [decode(payload) for payload in self.payloads]

    @overload
    def __getitem__(self, index: int) -> LeasedMessage[T]: ...
    @overload
    def __getitem__(self, index: slice) -> list[LeasedMessage[T]]: ...
    def __getitem__(self, index: int | slice) -> LeasedMessage[T] | list[LeasedMessage[T]]:
        rows = range(len(self))[index]
        return self._message(rows) if isinstance(rows, int) else [*map(self._message, rows)]

    def __iter__(self) -> Iterator[LeasedMessage[T]]:
        return map(self._message, range(len(self)))

    def _message(self, row: int) -> LeasedMessage[T]:
        fields = {name: column[row] for name, column in self._rows.items()}
        return LeasedMessage(
            self, row, {"_topic": self.topic, "partition": self.partition, **fields}
        )

    @cached_property
    def _rows(self) -> dict[str, list[Any]]:
        assert self._columns is not None
        numbers = ("priority", "attempts", "time_ms")
        rows = cells_of(self._columns, len(self), numbers)
        return {"sequence": self._columns.fixed("message").tolist(), **rows}

    async def ack(self) -> None:
        """Acknowledge every message still held; raises `LeaseLost` if some were not any more."""
        rows = self.take()
        if len(rows):
            tokens = (rows + self._delivery.token_first).astype(np.uint64)
            lost = await self.origin.settler.ack_range(self.token(0), tokens)
            self._raise_lost(lost)

    async def _give_back(self, **how: Unpack[HowReturned]) -> None:
        _mend_reason(how)
        if tokens := self.take_tokens():
            self._raise_lost(await self.origin.settler.give_back(tokens, **how))

    def _raise_lost(self, lost: list[int]) -> None:
        if lost:
            raise LeaseLost(f"{len(lost)} of {len(self)} leases were lost", lost=len(lost))

    async def __aenter__(self) -> MessageBatch[T]:
        return self

    async def __aexit__(self, *exited: Any) -> None:
        await self._settle(exited[1], self.origin.name)

    def state(self, row: int) -> LeaseState:
        return LeaseState(self._states[row])

    def held_rows(self) -> NDArray[np.int64]:
        return np.flatnonzero(self._all_states <= LeaseState.OUT)

    def hand_out(self) -> bool:
        self._all_states[self._all_states == LeaseState.WAITING] = LeaseState.OUT
        return self.held > 0

    def hand_out_row(self, row: int) -> None:
        if self._states[row] == LeaseState.WAITING:
            self._states[row] = LeaseState.OUT

    def take(self) -> NDArray[np.int64]:
        """Mark every held row as settled; returns them."""
        rows, out = self.held_rows(), self._states.count(LeaseState.OUT)
        self._all_states[rows] = LeaseState.SETTLED
        self._end(len(rows), out)
        return rows

    def take_tokens(self) -> list[LeaseToken]:
        return [self.token(row) for row in self.take().tolist()]

    def take_row(self, row: int) -> None:
        """Mark one row as settled; raises if it is not ours to settle any more."""
        state = self._states[row]
        if state == LeaseState.LOST:
            raise LeaseLost("the lease ran out before the message was settled")
        if state == LeaseState.SETTLED:
            raise LeaseLost("the message was settled already")
        self._states[row] = LeaseState.SETTLED
        self._end(1, state)

    def lose(self, row: int) -> None:
        """The lease of a row has run out, unless it was settled."""
        state = self._states[row]
        if state <= LeaseState.OUT:
            self._states[row] = LeaseState.LOST
            self._end(1, state)

    def _end(self, ended: int, out: int) -> None:
        self.held -= ended
        if out and self._released is not None:
            self._released(self, out)
        if not self.held and self.kept is not None:
            self.kept(self)


class LeasedMessage(Message[T], Returnable):
    """A message that is ours until its lease ends. Use it as a context manager: leaving
    acknowledges it, an error gives it back for a retry, cancellation gives it back unused."""

    __slots__ = ("_batch", "_row", "_span")

    def __init__(self, batch: MessageBatch[T], row: int, fields: dict[str, Any]) -> None:
        super().__init__(batch.origin.content, **fields)
        self._batch, self._row = batch, row
        self._span: AbstractContextManager[Any] = nullcontext()  # around its handler

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
        return self._batch.state(self._row) <= LeaseState.OUT

    def hand_out(self) -> bool:
        self._batch.hand_out_row(self._row)
        return self.held

    def take_tokens(self) -> list[LeaseToken]:
        return [self.take()] if self.held else []

    def take(self) -> LeaseToken:
        """Mark it as settled for whoever ends its lease by this token."""
        self._batch.take_row(self._row)
        return self._batch.token(self._row)

    async def ack(self) -> None:
        """Done with it. Raises `LeaseLost` if the lease had ended; it may be delivered again."""
        await self._batch.origin.settler.ack(self.take())

    async def extend(self, duration: Duration) -> None:
        """Let the lease run for `duration` from now."""
        extend_ms = milliseconds(duration, field="duration")
        token = self._batch.token(self._row)
        if await self._batch.origin.settler.extend([token], extend_ms):
            self._batch.lose(self._row)
            raise LeaseLost("the lease ran out before it was extended")

    async def _give_back(self, **how: Unpack[HowReturned]) -> None:
        _mend_reason(how)
        if await self._batch.origin.settler.give_back([self.take()], **how):
            raise LeaseLost("the lease ran out before the message was given back")

    def begin(self) -> None:
        if self._batch.entered is not None:
            self._batch.entered(self._batch)

    async def finish(self, error: BaseException | None) -> None:
        """The handler ended, with `error` or without; settle accordingly unless it did."""
        if self._batch.state(self._row) is not LeaseState.SETTLED:
            await self._settle(error, self._batch.origin.name)

    def trace(self) -> AbstractContextManager[Any]:
        """A span for handling it, child of the one that put it, if the application traces."""
        if TRACING not in sys.modules:
            return nullcontext()
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        topic = self._batch.origin.name
        texts = {name: value for name, value in self.headers.items() if isinstance(value, str)}
        return trace.get_tracer("penstock").start_as_current_span(
            f"process {topic}",
            context=TraceContextTextMapPropagator().extract(texts),
            kind=trace.SpanKind.CONSUMER,
            attributes={
                "messaging.system": "penstock",
                "messaging.destination.name": topic,
                "messaging.message.id": self.id,
                "penstock.partition": self.partition,
                "penstock.attempts": self.attempts,
            },
        )

    async def __aenter__(self) -> LeasedMessage[T]:
        self.begin()
        self._span = self.trace()
        self._span.__enter__()
        return self

    async def __aexit__(self, *exited: Any) -> None:
        try:
            await self.finish(exited[1])
        finally:
            self._span.__exit__(*exited)


def _mend_reason(how: HowReturned) -> None:
    """Make the reason one that can be sent, while the lease is still held. Text of the system may
    hold bytes that are no Unicode, as in the name of a file; they must not keep a message from
    going back."""
    reason: Any = how.get("reason", "")
    if not isinstance(reason, str):
        raise InvalidArgument(f"reason must be text, not {type(reason).__name__}", field="reason")
    how["reason"] = reason.encode(errors="backslashreplace").decode()


class Keeper:
    """Extends all leases of its batches every third of the visibility.

    Each partition has a request of its own, which is given up when the next one is due: one that
    is out of reach must not cost the leases on others. It runs while something is held, and while
    a consumer is open: what has arrived there meanwhile is then brought in by its `absorb`.
    """

    def __init__(self, topic: TopicHandle[Any], visibility_ms: int) -> None:
        self._topic, self._visibility_ms = topic, visibility_ms
        self._interval_s = visibility_ms / 3000
        self._absorbing: list[Callable[[], None]] = []  # of each consumer that is open
        self._batches: set[MessageBatch[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def start(self, absorb: Callable[[], None]) -> None:
        self._absorbing.append(absorb)
        self._arm()

    def finish(self, absorb: Callable[[], None]) -> None:
        """Nothing new will come; what is held is still kept."""
        self._absorbing.remove(absorb)

    def keep(self, batch: MessageBatch[Any]) -> None:
        self._batches.add(batch)
        batch.kept = self._batches.discard
        self._arm()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._interval_s, self._on_due)

    def _on_due(self) -> None:
        self._timer = None
        if (self._absorbing or self._batches) and not self._topic.link.closed:
            self._topic.link.spawn(self._extend_all())
            self._arm()

    async def _extend_all(self) -> None:
        for absorb in self._absorbing:
            absorb()
        held: dict[int, list[tuple[MessageBatch[Any], int]]] = defaultdict(list)
        for batch in self._batches:
            for row in batch.held_rows().tolist():
                held[batch.partition].append((batch, row))
        async with asyncio.TaskGroup() as tasks:
            for some in held.values():
                tasks.create_task(self._extend(some))

    async def _extend(self, held: list[tuple[MessageBatch[Any], int]]) -> None:
        try:
            async with asyncio.timeout(self._interval_s):
                tokens = [batch.token(row) for batch, row in held]
                lost = await self._topic.settler.extend(tokens, self._visibility_ms)
        except (PenstockError, TimeoutError) as error:
            log.warning("%d leases were not extended: %s", len(held), error or "no answer")
            return
        for position in lost:
            batch, row = held[position]
            batch.lose(row)


def popped(
    origin: TopicHandle[Any], fields: dict[str, Any], entered: Callable[[MessageBatch[Any]], None]
) -> LeasedMessage[Any]:
    """A message out of a `pop` call; `entered` is called when a handler begins with it."""
    token = LeaseToken.parse(fields["lease_token"])
    delivery = Delivery(
        token.partition, token.epoch, token.sequence, 1,
        fields.get("deadline_ms", 0), fields.get("visibility_ms", 30_000), token.topic,
    )  # fmt: skip
    batch: MessageBatch[Any] = MessageBatch(origin, delivery, None, entered=entered)
    batch.hand_out()
    return LeasedMessage(batch, 0, fields_of(fields))
