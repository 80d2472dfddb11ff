"""Short ways to use a node through its native connection, for the tests of the engine."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.client.network.connection import Connection, DeliveredBatch, LeaseStream
from penstock.config import Config
from penstock.model.batch import SCHEMAS, Kind
from penstock.model.ids import LeaseToken, MessageId
from penstock.node.clock import ManualClock
from penstock.node.engine import Engine
from penstock.server.embedded import EmbeddedNode, open_embedded
from penstock.wire.messages import Enqueued

START_MS = 1_700_000_000_000
Row = dict[str, Any]


def body(rows: Sequence[Row], *, producer: tuple[str, int, int] | None = None) -> bytes:
    """An ENQ body; a row has payload and perhaps priority, key, delay_ms, max_retries.

    `producer` is the id, the epoch and the sequence of the first row.
    """
    values: dict[str, Any] = {
        "priority": [row.get("priority", 0) for row in rows],
        "delay_ms": [row.get("delay_ms", 0) for row in rows],
        "max_retries": [row.get("max_retries", -1) for row in rows],
        "key": [row.get("key", b"") for row in rows],
        "headers": [msgspec.msgpack.encode(row["headers"]) if "headers" in row else b""
                    for row in rows],
        "payload": [row["payload"] for row in rows],
    }  # fmt: skip
    if producer is None:
        return SCHEMAS[Kind.ENQ].encode(len(rows), values)
    name, epoch, sequence = producer
    values |= {
        "run_count": [len(rows)], "run_epoch": [epoch], "run_sequence": [sequence],
        "run_producer": [name.encode()],
    }  # fmt: skip
    return SCHEMAS[Kind.ENQ].encode(len(rows), values, runs=1)


def ids_of(answer: Enqueued) -> list[str]:
    """The message ids of an enqueue's entries, in its order, duplicates included."""
    found: dict[int, str] = {}
    for p in answer.placed:
        for i in range(p.count):
            place = MessageId(p.time_ms, answer.topic, p.partition, p.sequence + i)
            found[p.index + i] = str(place)
    for d in answer.duplicates:
        found[d.index] = str(MessageId(d.time_ms, answer.topic, d.partition, d.sequence))
    return [found[i] for i in range(len(found))]


def tokens_of(messages: Iterable[Row]) -> list[LeaseToken]:
    return [LeaseToken.parse(message["lease_token"]) for message in messages]


def payloads_of(messages: Iterable[Row]) -> list[bytes]:
    return [message["payload"] for message in messages]


class Caller:
    """One connection, and what the tests do with it most."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.call = connection.call

    async def topic(self, name: str = "jobs", **config: Any) -> str:
        await self.call("topic_create", config={"name": name, **config})
        return name

    async def update(self, topic: str, **changes: Any) -> Row:
        return await self.call("topic_update", topic=topic, changes=changes)

    async def enqueue(
        self,
        topic: str,
        rows: Sequence[Row],
        *,
        partition: int | None = None,
        producer: tuple[str, int, int] | None = None,
        **how: Any,
    ) -> Enqueued:
        """Into one partition, or wherever the node puts the rows."""
        part = (partition or 0, len(rows), body(rows, producer=producer))
        spread = partition is None
        return await self.connection.enqueue(topic, [part], partitioned=not spread, **how)

    async def put(self, topic: str, *payloads: bytes, **row: Any) -> list[str]:
        rows = [{"payload": payload, **row} for payload in payloads]
        return ids_of(await self.enqueue(topic, rows))

    async def pop(self, topic: str, limit: int = 1, **how: Any) -> list[Row]:
        found = await self.call("pop", topic=topic, limit=limit, **how)
        return list(found["messages"])

    async def popped(self, topic: str, limit: int = 100, **how: Any) -> list[bytes]:
        return payloads_of(await self.pop(topic, limit, **how))

    async def ack(self, topic: str, messages: Iterable[Row]) -> list[int]:
        return await self.connection.settle(topic, tokens_of(messages))

    async def nack(self, topic: str, messages: Iterable[Row], **how: Any) -> list[int]:
        return await self.connection.give_back(topic, tokens_of(messages), **how)

    async def extend(self, topic: str, messages: Iterable[Row], extend_ms: int) -> list[int]:
        return await self.connection.extend(topic, tokens_of(messages), extend_ms)

    async def stats(self, topic: str = "jobs") -> Row:
        found = await self.call("stats", topic=topic)
        return dict(found["topics"][0])

    async def counts(self, topic: str = "jobs") -> tuple[int, int, int, int]:
        """Ready, delayed, leased and dead messages."""
        found = await self.stats(topic)
        return found["ready"], found["delayed"], found["leased"], found["dead"]

    async def dead(self, topic: str = "jobs", **how: Any) -> list[Row]:
        return list((await self.call("dlq_list", topic=topic, **how))["messages"])

    async def forced(self, method: str, subject: str, **arguments: Any) -> Row:
        """A destructive call with its confirmation."""
        token = await self.call("confirm", method=method, subject=subject)
        named = {"id": subject} if method == "key_revoke" else {"topic": subject}
        return await self.call(method, **named, force=True, confirm=token["confirm"], **arguments)


class Node(Caller):
    """An embedded node on a clock that stands still, and one connection to it."""

    def __init__(self, path: Path, config: Config | None = None) -> None:
        self.path = path
        self.clock = ManualClock(START_MS)
        self.config = config or Config(data=path, drain_s=5.0)
        self._embedded: EmbeddedNode | None = None
        self.held: list[Row] = []  # what a test has popped and wants to use later

    @property
    def engine(self) -> Engine:
        assert self._embedded is not None
        return self._embedded.engine

    async def start(self) -> Node:
        self._embedded = await open_embedded(self.path, clock=self.clock, config=self.config)
        super().__init__(await self._embedded.connect())
        return self

    async def connect(self, api_key: str | None = None) -> Caller:
        assert self._embedded is not None
        return Caller(await self._embedded.connect(api_key))

    async def stop(self) -> None:
        if self._embedded is not None:
            embedded, self._embedded = self._embedded, None
            await embedded.close()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def crash(self) -> None:
        """Go on with what is on disk now, as after a `kill -9`."""
        left = self.path.with_name(f"{self.path.name}+")
        shutil.copytree(self.path, left)
        await self.stop()
        self.path = left
        self.config = msgspec.structs.replace(self.config, data=left)
        await self.start()

    async def advance(self, seconds: float) -> None:
        """Move time on and let what fell due be written."""
        self.clock.advance(seconds)
        await self.settled()

    async def settled(self) -> None:
        """Wait until the node has nothing under way."""
        async with asyncio.timeout(60):
            quiet = 0
            while quiet < 3:
                await asyncio.sleep(0)
                partitions = [p for t in self.engine.topics.values() for p in t.local]
                quiet = quiet + 1 if all(p.idle for p in partitions) else 0

    async def stream(self, topic: str = "jobs", *, credits: int, **how: Any) -> LeaseStream:
        return await self.connection.lease_stream(topic, credits=credits, **how)

    async def delivered(self, stream: LeaseStream) -> list[DeliveredBatch]:
        """What has arrived on a stream once the node is at rest."""
        await self.settled()
        for _ in range(3):  # frames travel by one turn of the loop each
            await asyncio.sleep(0)
        found = []
        while (item := stream.take_nowait()) is not None:
            found.append(item)
        return found


def delivered_payloads(batches: Iterable[DeliveredBatch]) -> list[bytes]:
    return [p for batch in batches for p in (batch.columns.binary("payload") or [])]


def delivered_tokens(batches: Iterable[DeliveredBatch]) -> list[LeaseToken]:
    return [b.delivery.token(i) for b in batches for i in range(b.delivery.count)]
