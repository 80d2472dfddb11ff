"""The client: one link to a node or a cluster, and its topics."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from penstock.client.network.connection import all_pages
from penstock.client.network.endpoints import ConnectionSource
from penstock.client.network.link import Link
from penstock.client.options import Options
from penstock.client.queue.entries import ProducerIdentity, content_of
from penstock.client.topic import Topic
from penstock.errors import InvalidArgument
from penstock.model.entries import PRODUCER_ID_BYTES_MAX
from penstock.model.topic import Mode

if TYPE_CHECKING:
    from penstock.client.delta.deltas import Deltas
    from penstock.client.delta.writer import DeltaWriter

T = TypeVar("T")
log = logging.getLogger("penstock.client")


class Client:
    """Use it as an async context manager; leaving it drains what is under way."""

    def __init__(self, source: ConnectionSource, options: Options) -> None:
        self.link = Link(source, options)
        self._name = options.producer or f"{os.getpid():x}-{secrets.token_hex(8)}"
        limit = PRODUCER_ID_BYTES_MAX - len(".1023")
        if len(self._name.encode()) > limit:
            raise InvalidArgument(
                f"producer has at most {limit} bytes", field="producer", limit=limit
            )
        # A later client of the same producer name fences off an earlier one.
        self._epoch = time.time_ns()
        self._identities: dict[str, ProducerIdentity] = {}
        self._options = options
        self._topics: dict[Any, Topic[Any]] = {}
        self._deltas: dict[Any, Deltas] = {}
        # By topic and origin: two writers of one origin would count the same deltas twice.
        self._writers: dict[Any, DeltaWriter] = {}

    async def __aenter__(self) -> Self:
        await self.link.open()
        return self

    async def __aexit__(self, *exited: object) -> None:
        await self.close()

    @overload
    def topic(
        self,
        name: str,
        of: type[T],
        *,
        mode: Mode | str | None = None,
        partitions: int | None = None,
        create: bool = True,
        **config: Any,
    ) -> Topic[T]: ...
    @overload
    def topic(
        self,
        name: str,
        of: Any = bytes,
        *,
        mode: Mode | str | None = None,
        partitions: int | None = None,
        create: bool = True,
        **config: Any,
    ) -> Topic[Any]: ...
    def topic(
        self, name: str, of: Any = bytes, *, mode: Mode | str | None = None,
        partitions: int | None = None, create: bool = True, **config: Any,
    ) -> Topic[Any]:  # fmt: skip
        """A topic whose messages are `of` a type. Await it to create or look it up right now;
        otherwise its first use does. `config` are attributes for its creation."""
        given = {"mode": None if mode is None else str(mode), "partitions": partitions, **config}
        wanted = {field: value for field, value in given.items() if value is not None}
        # The same question gets the same object: its puts share requests wherever it is asked.
        key = (name, of, create, repr(sorted(wanted.items())))
        found = self._topics.get(key)
        if found is None:
            found = self._topics[key] = Topic(
                self.link,
                name,
                content=content_of(of),
                identity=self.identity(name),
                create=create,
                wanted=wanted,
            )
        return found

    def deltas(
        self,
        topic: str,
        *,
        dimensions: int | None = None,
        create: bool = False,
        origin: str | None = None,
        namespace: str = "default",
        partitions: int | None = None,
        **config: Any,
    ) -> Deltas:
        """The vectors of a delta topic. `origin` names this writer: one that is alive at a time.
        `create` makes the topic, with `dimensions`, if it is not there yet."""
        from penstock.client.delta.deltas import Deltas
        from penstock.client.delta.writer import DeltaWriter

        wanted = {"kind": "delta", "dimensions": dimensions, **config} if create else {}
        owner = self.topic(topic, bytes, partitions=partitions, create=create, **wanted)
        key = (owner, origin, namespace, dimensions)
        found = self._deltas.get(key)
        if found is None:
            found = self._deltas[key] = Deltas(
                owner,
                writer=self._writers.setdefault((topic, origin), DeltaWriter(origin)),
                namespace=namespace,
                dimensions=dimensions,
            )
        return found

    def identity(self, topic: str) -> ProducerIdentity:
        """The producer key of a topic: one per client, or two objects would reuse sequences."""
        lasting = self._options.producer is not None
        made = ProducerIdentity(self._name, self._epoch, lasting=lasting)
        return self._identities.setdefault(topic, made)

    async def topics(self) -> list[dict[str, Any]]:
        """The configuration of every topic."""
        found: list[dict[str, Any]] = (await all_pages(self.call, "topic_list", "topics"))["topics"]
        return found

    async def stats(self) -> dict[str, Any]:
        """The node's and every topic's numbers."""
        return await all_pages(self.call, "stats", "topics")

    async def call(self, method: str, /, **arguments: Any) -> dict[str, Any]:
        """Any administrative call of the protocol."""
        return await self.link.call(method, **arguments)

    async def close(self) -> None:
        """Stop consumers, drain puts and acknowledgements, hang up."""
        deadline = asyncio.get_running_loop().time() + self._options.drain_s
        try:
            async with asyncio.timeout_at(deadline):
                for topic in self._topics.values():
                    await topic.close()
        except TimeoutError:
            log.warning("the client closed before everything was drained")
        finally:
            left = deadline - asyncio.get_running_loop().time()
            await self.link.close(max(0.1, left))
