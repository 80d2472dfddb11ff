"""One native connection per API key, shared by all requests that carry the key, and the enqueues.

The engine decides about a key when a connection greets it, and ends the connections of a key that
is revoked; the pool remembers which key a living connection was opened with, by its digest. So a
request with a good key costs a lookup, and the gateway itself needs to know nothing about keys.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from penstock.client.network.connection import Connection
from penstock.client.queue.producer import ids_in
from penstock.errors import (
    CallerError,
    InvalidArgument,
    LimitExceeded,
    Unauthenticated,
    Unavailable,
)
from penstock.model.topic import TopicConfig
from penstock.node.observe.logs import request_id
from penstock.server.entries import FLIGHT_BYTES_MAX, Desk, Entry, GatewayEntries, Written
from penstock.wire.limits import TEXT_LENGTH_MAX
from penstock.wire.messages import Enqueued

Connect = Callable[[str | None], Awaitable[Connection]]
KEYS_MAX: Final = 256  # connections kept, one per API key
CONFIGS_MAX: Final = 1024
CONFIG_S: Final = 2.0  # for which a topic's configuration is believed
FRAME_SLACK: Final = 64 << 10  # for offsets, numbers and the control message of a frame


class GatewayLink:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        # What one native enqueue may hold, with room for its offsets and numbers.
        self.body_bytes_max = connection.welcome.payload_bytes_max - FRAME_SLACK
        self.desk = Desk(connection, bytes_max=min(self.body_bytes_max, FLIGHT_BYTES_MAX))
        self.users = 0  # requests that hold it; a link in use is not evicted
        self._configs: dict[str, tuple[TopicConfig, float]] = {}
        self._loop = asyncio.get_running_loop()

    async def config(self, topic: str) -> TopicConfig:
        """The topic's configuration, at most `CONFIG_S` old; raises `NotFound`."""
        found = self._configs.get(topic)
        if found is not None and self._loop.time() < found[1]:
            return found[0]
        fields = await self.call("topic_get", topic=topic)
        config = msgspec.convert(fields, TopicConfig)
        if len(self._configs) >= CONFIGS_MAX:
            self._configs.clear()
        self._configs[topic] = (config, self._loop.time() + CONFIG_S)
        return config

    async def call(self, method: str, /, **arguments: Any) -> dict[str, Any]:
        """An administrative call that carries the id of the request it serves."""
        return await self.connection.call(method, request_id=request_id.get(), **arguments)

    def forget(self, topic: str) -> None:
        """Ask again next time: the topic is not what it was believed to be."""
        self._configs.pop(topic, None)

    async def put(self, topic: str, entry: Entry) -> Written:
        """Enqueue one message, together with what else is on its way to the topic."""
        entry.check(await self.config(topic), bytes_max=self.body_bytes_max)
        try:
            return await self.desk.put(topic, entry)
        except CallerError:
            self.forget(topic)
            raise

    async def put_batch(
        self, topic: str, entries: GatewayEntries, *, atomic: bool, expected_sequence: int | None
    ) -> dict[str, Any]:
        """A batch's message ids in its order, and the positions of duplicates."""
        config = await self.config(topic)
        entries.check(config)
        if entries.size > self.body_bytes_max:
            raise InvalidArgument(
                f"the messages are over {self.body_bytes_max} bytes together",
                field="messages",
                limit=self.body_bytes_max,
            )
        count = len(entries.payloads)
        partition = 0 if expected_sequence is None else entries.partition(config)
        try:
            enqueued = await self.connection.enqueue(
                topic,
                [(partition, count, entries.body())],
                atomic=atomic,
                expected_sequence=expected_sequence,
                partitioned=expected_sequence is not None,
            )
        except CallerError:
            self.forget(topic)
            raise
        return {
            "message_ids": ids_in(enqueued, count),
            "duplicates": [known.index for known in enqueued.duplicates],
            "sequence_last": _sequence_last(enqueued),
        }

    @contextmanager
    def held(self) -> Iterator[GatewayLink]:
        self.users += 1
        try:
            yield self
        finally:
            self.users -= 1


class Pool:
    """Links by key, least recently used first. Invariant: never more than `keys_max`."""

    def __init__(self, connect: Connect, *, keys_max: int = KEYS_MAX) -> None:
        self._connect = connect
        self._keys_max = keys_max
        self._links: OrderedDict[bytes, GatewayLink] = OrderedDict()
        self._opening: dict[bytes, asyncio.Lock] = {}
        self._closed = False

    async def link(self, api_key: str | None) -> GatewayLink:
        """The living link of a key; raises `Unauthenticated` when the engine refuses it."""
        place = _place(api_key)
        found = self._links.get(place)
        if found is not None and found.connection.alive:
            self._links.move_to_end(place)
            return found
        return await self._open(place, api_key)

    async def connect(self, api_key: str | None) -> Connection:
        """A connection apart, for a caller that keeps streams open; it is the caller's to close."""
        if self._closed:
            raise Unavailable("the gateway stops")
        return await self._connect(api_key)

    async def close(self) -> None:
        self._closed = True
        links, self._links = self._links, OrderedDict()
        for link in links.values():
            await link.connection.close()

    async def _open(self, place: bytes, api_key: str | None) -> GatewayLink:
        if api_key is not None and len(api_key) > TEXT_LENGTH_MAX:
            raise Unauthenticated("the API key is not valid")  # no greeting could carry it
        lock = self._opening.setdefault(place, asyncio.Lock())
        try:
            async with lock:
                found = self._links.get(place)
                if found is not None and found.connection.alive:
                    return found
                self._links.pop(place, None)
                connection = await self._connect(api_key)
                return await self._keep(place, connection)
        finally:
            if not lock.locked():
                self._opening.pop(place, None)

    async def _keep(self, place: bytes, connection: Connection) -> GatewayLink:
        if self._closed:
            await connection.close()
            raise Unavailable("the gateway stops")
        idle = [p for p, link in self._links.items() if not link.users]
        if len(self._links) >= self._keys_max and not idle:
            await connection.close()
            raise LimitExceeded(f"{self._keys_max} API keys are in use", limit=self._keys_max)
        link = GatewayLink(connection)
        self._links[place] = link
        if len(self._links) > self._keys_max:
            await self._links.pop(idle[0]).connection.close()
        return link


def _sequence_last(enqueued: Enqueued) -> int | None:
    """What the next call of a writer that is alone in its partition expects."""
    placed = enqueued.placed
    if len({run.partition for run in placed}) != 1:
        return None
    return max(run.sequence + run.count - 1 for run in placed)


def _place(api_key: str | None) -> bytes:
    """A digest, so that looking a key up takes as long whatever of it is right."""
    return b"" if api_key is None else hashlib.sha256(api_key.encode()).digest()
