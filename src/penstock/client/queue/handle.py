"""A topic as all its parts know it.

The consumers, readers and dead letters of a topic share one `TopicHandle`: the link, the type of
the values, the configuration as last heard of, the calls about the topic, and a `Settler`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, Generic, TypeVar, Unpack

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.client.network.connection import HowReturned, grouped
from penstock.client.network.link import Link, Where
from penstock.client.queue.entries import Content, ProducerIdentity
from penstock.client.queue.producer import Producer
from penstock.errors import LeaseLost
from penstock.model.ids import LeaseToken
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
        """Wait until every acknowledgement is answered."""
        await self._idle.wait()


def _end(waiter: asyncio.Future[None], error: Exception | None) -> None:
    if waiter.done():
        return
    if error is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(error)


class TopicHandle(Generic[T]):
    """One topic. It is opened, and created if `create` says so, at its first use.

    `wanted` are the attributes for its creation."""

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

    async def opened(self) -> Producer:
        """Make sure that the topic exists and that its configuration is known."""
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
        if self.producer is None:
            raise RuntimeError(f"topic {self.name} was not opened yet: await it first")
        return self.producer.config

    async def ask(self, method: str, /, **arguments: Any) -> dict[str, Any]:
        """A call about this topic."""
        return await self.link.call(method, topic=self.name, **arguments)

    async def confirmed(self, method: str, /, *, force: bool, **more: Any) -> dict[str, Any]:
        """A destructive call, with the confirmation that it needs."""
        if force:
            granted = await self.link.call("confirm", method=method, subject=self.name)
            more["confirm"] = granted["confirm"]
        return await self.ask(method, force=force, **more)
