"""Settlements: acks of one turn of the loop share a request; all of them survive a reconnect.

At a cluster they share one only with others of their partition. A request is answered once, and
repeated as a whole: had one of its partitions trouble, the acks of the others would take effect,
be sent again, and be told as lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from penstock.client.network.connection import Connection, HowReturned
from penstock.client.network.link import Link, Where, passing
from penstock.errors import LeaseLost, PenstockError
from penstock.model.ids import LeaseToken
from penstock.wire.messages import Settled


class Settler:
    """Ends and extends the leases of one topic."""

    def __init__(self, link: Link, topic: str) -> None:
        self._link, self._topic = link, topic
        self._loop = asyncio.get_running_loop()
        self._tokens: list[LeaseToken] = []
        self._waiters: list[asyncio.Future[None]] = []
        self._under_way = 0
        self._idle: asyncio.Event = asyncio.Event()
        self._idle.set()

    async def ack(self, token: LeaseToken) -> None:
        """Acknowledge one lease, together with all others of this turn."""
        self._link.raise_if_closed()
        waiter: asyncio.Future[None] = self._loop.create_future()
        if not self._tokens:
            self._loop.call_soon(self._flush)
            self._idle.clear()
        self._tokens.append(token)
        self._waiters.append(waiter)
        await waiter

    def _flush(self) -> None:
        acks = _Acks(self._tokens, self._waiters)
        self._tokens, self._waiters = [], []
        if not self._link.clustered:
            self._send(acks, self._link.live)
            return
        apart: dict[int, _Acks] = {}
        for token, waiter in zip(acks.tokens, acks.waiters, strict=True):
            apart.setdefault(token.partition, _Acks([], [])).add(token, waiter)
        for partition, some in apart.items():
            self._send(some, self._link.toward(self._topic, partition))

    def _send(self, acks: _Acks, connection: Connection | None) -> None:
        self._under_way += 1
        if connection is None:
            self._link.spawn(self._settle(acks, None))
            return
        try:
            answer, lost = connection.settle_nowait(self._topic, acks.tokens)
        except PenstockError as lost_connection:
            self._link.spawn(self._settle(acks, lost_connection))
            return
        answer.add_done_callback(partial(self._on_answer, acks, lost))

    def _on_answer(
        self,
        acks: _Acks,
        lost: Callable[[Settled], list[int]],
        answer: asyncio.Future[Settled],
    ) -> None:
        error = answer.exception()
        if error is None:
            try:
                acks.resolve(lost(answer.result()))
            except Exception as wrong:  # noqa: BLE001 - it is told to those who wait for it
                acks.fail(wrong)
        elif isinstance(error, PenstockError) and passing(error) and not self._link.closed:
            self._link.spawn(self._settle(acks, error))
            return
        else:
            acks.fail(error)
        self._ended()

    async def _settle(self, acks: _Acks, failed: PenstockError | None) -> None:
        """The slow way: after a first try that failed, or without a connection."""
        try:
            acks.resolve(
                await self._link.request(
                    lambda c: c.settle(self._topic, acks.tokens),
                    failed=failed,
                    at=(self._topic, acks.tokens[0].partition),
                )
            )
        except PenstockError as error:
            acks.fail(error)
        except BaseException as error:
            acks.fail(PenstockError(f"the acknowledgement was given up: {error!r}"))
            raise
        finally:
            self._ended()

    def _ended(self) -> None:
        self._under_way -= 1
        if not self._under_way and not self._tokens:
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
        """Wait until every acknowledgement is answered."""
        await self._idle.wait()


class _Acks:
    """Acknowledgements that share a request, and who waits for each."""

    __slots__ = ("tokens", "waiters")

    def __init__(self, tokens: list[LeaseToken], waiters: list[asyncio.Future[None]]) -> None:
        self.tokens, self.waiters = tokens, waiters

    def add(self, token: LeaseToken, waiter: asyncio.Future[None]) -> None:
        self.tokens.append(token)
        self.waiters.append(waiter)

    def resolve(self, lost: list[int]) -> None:
        for position in lost:
            if not self.waiters[position].done():
                error = LeaseLost("the lease ran out before the message was done")
                self.waiters[position].set_exception(error)
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)

    def fail(self, error: BaseException) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(error)
