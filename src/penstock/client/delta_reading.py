"""Vectors and deltas out of a delta topic's log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from datetime import datetime
from typing import Any, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from penstock.client.delta_fold import Fold, Vector
from penstock.client.delta_subscription import (
    Filter,
    Following,
    Released,
    ReleasedBatch,
    What,
    request_of,
)
from penstock.client.delta_writer import Writer
from penstock.client.topic import Topic
from penstock.errors import FailedPrecondition
from penstock.model.delta import Delta, vector_hash
from penstock.model.partitioning import partitions_of_digests
from penstock.model.topic import TopicKind


class DeltaReading:
    """The reading half of a delta topic.

    `get`, and writing to a vector that was not written to before, fold the log of the vector's
    partition: they keep its vectors in memory and read only what is new. Topics beyond that are
    what the sinks of a pipeline are for. `history` and `get(at=…)` read the partition's log from
    its beginning, and keep nothing.
    """

    def __init__(
        self, topic: Topic[bytes], *, namespace: str, dimensions: int | None, writer: Writer
    ) -> None:
        self.topic, self.namespace = topic, namespace
        self.heads, self.flights = writer.heads, writer.flights
        self._dimensions = dimensions  # that the caller counts on
        self.dimensions = 0  # known once it is open
        self._folds: dict[int, Fold] = {}
        self._looking = asyncio.Lock()  # one look-up at a time
        self._wanted: set[bytes] = set()  # what the next one is to find
        self._next: asyncio.Event | None = None  # its end, if somebody waits for it

    def __await__(self) -> Generator[Any, None, Self]:
        return self.opened().__await__()

    @property
    def name(self) -> str:
        return self.topic.name

    async def opened(self) -> Self:
        """Make sure that the topic is there, and one of deltas."""
        if not self.dimensions:
            config = (await self.topic.opened()).config
            if config.kind is not TopicKind.DELTA:
                raise FailedPrecondition(f"{self.name} is no delta topic", topic=self.name)
            if self._dimensions not in (None, config.dimensions):
                raise FailedPrecondition(
                    f"{self.name} has {config.dimensions} dimensions, not {self._dimensions}",
                    field="dimensions",
                )
            self.dimensions = config.dimensions
        return self

    async def get(
        self, vector_id: str, at: datetime | int | None = None, *, namespace: str | None = None
    ) -> Vector | None:
        """A vector as of now, or as of a time of the log (`at`, unix milliseconds if a number)."""
        await self.opened()
        vector = vector_hash(self.namespace if namespace is None else namespace, vector_id)
        if at is None:
            fold = self._fold(*self._homes([vector]))
            await self._follow(fold)
        else:
            fold = self._fold_of(vector)
            time_ms = round(at.timestamp() * 1000) if isinstance(at, datetime) else at
            found = await self.topic.ask("log_find", partition=fold.partition, time_ms=time_ms + 1)
            await self._follow(fold, through=found["sequence"] - 1)
        return fold.vector(vector)

    async def history(self, vector_id: str, *, namespace: str | None = None) -> list[Delta]:
        """The vector's deltas in causal order, as far as the log is kept."""
        await self.opened()
        fold = self._fold_of(
            vector_hash(self.namespace if namespace is None else namespace, vector_id)
        )
        end = (await self._ends())[fold.partition]
        found: list[Delta] = []
        async for outcome in fold.outcomes(
            sequence_first=end["sequence_first"], through=end["sequence_committed"]
        ):
            found += outcome.released.decoded()
        return found

    async def search(
        self,
        vector: Sequence[float] | NDArray[Any],
        k: int = 10,
        *,
        namespace: str | None = None,
        sink: str | None = None,
        partial: bool = False,
    ) -> list[dict[str, Any]]:
        """The nearest vectors, by the index that the topic's nodes host themselves; each has
        namespace, vector_id, distance, revision and metadata. It needs no pipeline.

        While an index is filled, after a start or a takeover, this waits; with `partial` it
        answers from what is in it.
        """
        found = await self.topic.ask(
            "vector_search", vector=np.asarray(vector, np.float32).tolist(), limit=k,
            namespace=namespace, sink=sink, partial=partial,
        )  # fmt: skip
        neighbours: list[dict[str, Any]] = found["neighbours"]
        return neighbours

    async def subscribe(self, **what: Unpack[What]) -> AsyncGenerator[Released, None]:
        """Deltas in causal order as they are released, and on as the log grows.

        `from_sequence`: those that the log released from there on; one number for all partitions,
        a map of partitions to numbers, or "now". With a `vector_id` the namespace is the object's
        own by default. Under the name of a `cursor` the nodes keep how far this reader is: a delta
        counts as handled when the next one is asked for, and the next subscriber under that name
        begins there.
        """
        batches = self.subscribe_batches(**what)
        try:
            async for batch in batches:
                done = 0
                try:
                    for released in batch:
                        yield released
                        done += 1
                finally:
                    if done < len(batch):
                        batch.ack_before(done)
        finally:
            await batches.aclose()

    async def subscribe_batches(self, **what: Unpack[What]) -> AsyncGenerator[ReleasedBatch, None]:
        """The same as they come from the node, in columns."""
        following = await self.follow(what)
        try:
            async for batch in following:
                yield batch
        finally:
            await following.close()

    async def follow(self, what: What) -> Following:
        """The same for who also asks where it began; it must be closed."""
        await self.opened()
        wanted = self._filter(what)
        partitions: Sequence[int] = range(self.topic.config.partitions)
        if wanted.vector is not None:
            partitions = self._homes([wanted.vector])
        requests = [await request_of(self.topic, p, what=what, wanted=wanted) for p in partitions]
        return Following(self.topic, requests, wanted.beside(what))

    def _filter(self, what: What) -> Filter:
        namespace, vector_id = what.get("namespace"), what.get("vector_id")
        if vector_id is not None and namespace is None:
            namespace = self.namespace
        return Filter(namespace=namespace, vector_id=vector_id, op=what.get("op"))

    # --- folds ---

    async def look_up(self, vectors: Iterable[bytes]) -> None:
        """Learn the heads of vectors that nothing is known of, from the log.

        Whoever asks while a look-up is under way shares the next one with all who do.
        """
        wanted = [vector for vector in vectors if vector not in self.heads]
        while wanted:
            await self.flights.landed(wanted)
            self._wanted.update(wanted)
            if self._next is None:
                await self._look_up_wanted()
            else:
                await self._next.wait()
            wanted = [vector for vector in wanted if vector not in self.heads]

    async def _look_up_wanted(self) -> None:
        self._next = done = asyncio.Event()
        try:
            async with self._looking:
                self._next = None  # who comes from now on is not in this one
                wanted, self._wanted = list(self._wanted), set()
                await self._learn(wanted)
        finally:
            if self._next is done:
                self._next = None
            done.set()

    async def _learn(self, vectors: list[bytes]) -> None:
        homes: dict[int, list[bytes]] = {}
        for vector, partition in zip(vectors, self._homes(vectors), strict=True):
            homes.setdefault(partition, []).append(vector)
        ends = await self._ends()
        for partition, some in homes.items():
            fold, end = self._fold(partition), ends[partition]
            await fold.catch_up(
                sequence_first=end["sequence_first"], through=end["sequence_committed"]
            )
            for vector, head in zip(some, fold.heads(some, self.heads.origin), strict=True):
                if vector not in self.heads:  # nor written to meanwhile
                    self.heads.adopt(vector, head)

    async def _follow(self, fold: Fold, *, through: int | None = None) -> None:
        end = (await self._ends())[fold.partition]
        last = end["sequence_committed"] if through is None else through
        await fold.catch_up(sequence_first=end["sequence_first"], through=last)

    async def _ends(self) -> dict[int, dict[str, int]]:
        status = await self.topic.ask("log_status")
        return {end["partition"]: end for end in status["partitions"]}

    def _homes(self, vectors: Sequence[bytes]) -> list[int]:
        """The partitions that vectors belong to."""
        digests = np.frombuffer(b"".join([vector[:8] for vector in vectors]), "<u8")
        found: list[int] = partitions_of_digests(digests, self.topic.config.partitions).tolist()
        return found

    def _fold(self, partition: int) -> Fold:
        """The fold that is kept for a partition."""
        found = self._folds.get(partition)
        if found is None:
            found = self._folds[partition] = self._new_fold(partition)
        return found

    def _new_fold(self, partition: int) -> Fold:
        return Fold(self.topic, partition=partition, dimensions=self.dimensions)

    def _fold_of(self, vector: bytes) -> Fold:
        return Fold(
            self.topic,
            partition=self._homes([vector])[0],
            dimensions=self.dimensions,
            only=vector,
        )
