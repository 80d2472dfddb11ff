"""Consumers that write down what they hold and for how long, and readers that follow the log.

What a consumer may believe of its lease: by a pop, that it runs from when it asked; by a stream,
until the deadline that came with the message, less a little for the clocks.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, Final

from tests.chaos.arena import KEY
from tests.chaos.history import History, Operation, now_us
from tests.chaos.producing import JOBS, RETRY_S

import penstock
from penstock.client.network.connection import Connection
from penstock.client.network.endpoints import open_connection
from penstock.client.queue.leases import LeasedMessage
from penstock.errors import PenstockError
from penstock.model.batch import Batch
from penstock.model.ids import LeaseToken
from verification.events import Committed, Delivered, Extended, Released, Settled, digest_of

VISIBILITY_S: Final = 3.0
CLOCKS_US: Final = 50_000
READ_S_MAX: Final = 60.0


class Consumer:
    """What poppers and streamers share: the books, and how a message is ended."""

    def __init__(
        self, name: str, urls: Sequence[str], history: History, seed: str, topic: str = JOBS
    ) -> None:
        self._name, self._urls, self._history, self._topic = name, urls, history, topic
        self._dice = random.Random(seed)

    def _client(self) -> penstock.Client:
        options = penstock.Options(producer=self._name, retry_s=RETRY_S, drain_s=2.0)
        return penstock.connect(self._urls, api_key=KEY, options=options)

    def _delivered(self, message: LeasedMessage[bytes], until_us: int) -> LeaseToken:
        token = LeaseToken.parse(message.lease_token)
        self._history.add(
            self._topic,
            Delivered(
                now_us(),
                self._name,
                message.partition,
                message.sequence,
                token.sequence,
                until_us,
                digest_of(message.payload),
            ),
        )
        return token

    async def _end(self, how: str, message: LeasedMessage[bytes], token: LeaseToken) -> None:
        """Acknowledge, or give back. From the moment it is sent, we hold it no longer."""
        with self._history.operation(how, self._name) as operation:
            self._describe(operation, message, token)
            self._history.add(self._topic, Released(now_us(), token.partition, token.sequence))
            if how == "nack":
                await message.nack(delay=self._dice.choice((0, 0.3, 1.0)))
                return
            await message.ack()
            self._history.add(self._topic, Settled(now_us(), token.partition, token.sequence))

    def _describe(
        self, operation: Operation, message: LeasedMessage[bytes], token: LeaseToken
    ) -> None:
        operation.details |= {
            "partition": message.partition, "message": message.sequence, "token": str(token),
        }  # fmt: skip


class Popper(Consumer):
    """Leases a few messages by a call, then acknowledges, returns, extends or forgets each."""

    async def run(self, stop: asyncio.Event, *, pause_s: float) -> None:
        async with self._client() as client:
            topic = client.topic(self._topic, bytes, create=False)
            while not stop.is_set():
                await self.round(topic)
                await asyncio.sleep(self._dice.expovariate(1 / pause_s))

    async def round(self, topic: Any, *, plain: bool = False) -> int:
        """One pop and what follows; how many messages it gave. `plain`: all acknowledged."""
        asked_us = now_us()
        messages: list[LeasedMessage[bytes]] = []
        with self._history.operation("pop", self._name) as operation:
            messages = await topic.pop(
                100 if plain else self._dice.randint(1, 10),
                wait=0.5,
                visibility=VISIBILITY_S,
            )
            operation.details["messages"] = [
                [m.partition, m.sequence, m.lease_token] for m in messages
            ]
        until_us = asked_us + int(VISIBILITY_S * 1e6)
        held = [(m, self._delivered(m, until_us)) for m in messages]
        if plain:
            await asyncio.gather(*(self._end("ack", m, token) for m, token in held))
        else:
            for message, token in held:
                await self._handle(message, token)
        return len(messages)

    async def _handle(self, message: LeasedMessage[bytes], token: LeaseToken) -> None:
        how = self._dice.choices(("ack", "nack", "extend", "forget"), (80, 8, 7, 5))[0]
        if how == "forget":
            return  # it runs out
        if how == "extend":
            await self._extend(message, token)
            how = "ack"
        await self._end(how, message, token)

    async def _extend(self, message: LeasedMessage[bytes], token: LeaseToken) -> None:
        with self._history.operation("extend", self._name) as operation:
            self._describe(operation, message, token)
            asked_us = now_us()
            await message.extend(VISIBILITY_S)
            until_us = asked_us + int(VISIBILITY_S * 1e6)
            self._history.add(self._topic, Extended(token.partition, token.sequence, until_us))
            await asyncio.sleep(self._dice.random() * 0.5)


class Streamer(Consumer):
    """Takes messages from a stream and acknowledges each after a moment."""

    async def run(self, stop: asyncio.Event, *, concurrency: int = 4) -> None:
        async with self._client() as client:
            topic = client.topic(self._topic, bytes, create=False)
            while not stop.is_set():
                with self._history.operation("stream", self._name):
                    await self._stream(topic, stop, concurrency)

    async def _stream(self, topic: Any, stop: asyncio.Event, concurrency: int) -> None:
        consumer = topic.consume(
            concurrency=concurrency, visibility=VISIBILITY_S, prefetch=2, consumer=self._name
        )
        failed: Exception | None = None
        try:
            async with consumer, asyncio.TaskGroup() as tasks:
                ending = tasks.create_task(self._close(consumer, stop))
                async for message in consumer:
                    until_us = message.deadline_ms * 1000 - CLOCKS_US
                    token = self._delivered(message, until_us)
                    tasks.create_task(self._work(message, token))
                ending.cancel()
        except* PenstockError as group:
            failed = group.exceptions[0]
        if failed is not None:
            raise failed

    async def _close(self, consumer: Any, stop: asyncio.Event) -> None:
        await stop.wait()
        await consumer.aclose()

    async def _work(self, message: LeasedMessage[bytes], token: LeaseToken) -> None:
        await asyncio.sleep(self._dice.random() * 0.05)
        await self._end("ack", message, token)


class Tail:
    """Follows the committed log of one partition through one node after another. What it has
    read must never read otherwise anywhere, at any later time."""

    def __init__(
        self, name: str, urls: Sequence[str], history: History, seed: str, *, partition: int
    ) -> None:
        self._name, self._urls, self._history = name, urls, history
        self._partition = partition
        self._dice = random.Random(seed)
        self._next, self._life = 1, 0

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            self._life += 1
            with self._history.operation("read", self._name) as operation:
                operation.details |= {"partition": self._partition, "from": self._next}
                connection = await open_connection(self._dice.choice(self._urls), api_key=KEY)
                try:
                    await self._follow(connection, stop, 5 + 15 * self._dice.random())
                finally:
                    operation.details["through"] = self._next - 1
                    await connection.close()
            if operation.outcome != "ok":
                await asyncio.sleep(0.3)

    async def _follow(self, connection: Connection, stop: asyncio.Event, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        stream = await connection.log_stream(
            JOBS, partition=self._partition, from_sequence=self._next
        )
        while not stop.is_set() and loop.time() < deadline:
            try:
                async with asyncio.timeout(1.0):
                    batches = await anext(stream)
            except TimeoutError:
                continue
            except StopAsyncIteration:
                return
            for batch in batches:
                self._seen(batch)

    def _seen(self, batch: Batch) -> None:
        self._next = batch.last + 1
        self._history.add(
            JOBS, Committed(self._partition, self._name, self._life, batch.last, batch.chain)
        )


async def read_all(url: str, topic: str, *, partition: int, through: int) -> list[Batch]:
    """A partition's committed log up to a sequence, as one node has it."""
    connection = await open_connection(url, api_key=KEY)
    try:
        stream = await connection.log_stream(topic, partition=partition, through=through)
        found: list[Batch] = []
        while not found or found[-1].last < through:
            async with asyncio.timeout(READ_S_MAX):
                found += await anext(stream)
        return found
    except StopAsyncIteration:
        raise PenstockError(f"the log of {topic}/{partition} ended early") from None
    finally:
        await connection.close()
