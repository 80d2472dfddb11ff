"""A delta topic as a Python object: change vectors, and read them back.

    vectors = client.deltas("vectors", dimensions=3, create=True)
    await vectors.create("a", [1.0, 0.0, 0.0], metadata={"kind": "unit"})
    await vectors.set("a", {1: 0.5})
    print((await vectors.get("a")).values)

Every change is a delta in the topic's log. Its parent, its clock and its time are filled in for one
writer at a time under one `origin`; several writers use an origin each, or name the causes of a
delta themselves (`parent=`, `clock=`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Any, Final, Self, TypedDict, Unpack

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.client.delta.fold import LogFolds, Vector
from penstock.client.delta.subscription import (
    DeltaSubscription,
    Filter,
    Released,
    ReleasedBatch,
    What,
    request_of,
)
from penstock.client.delta.writer import (
    Causes,
    DeltaColumns,
    DeltaWriter,
    Ids,
    Names,
    VectorHead,
    VectorHeads,
    encode_columns,
)
from penstock.client.options import Duration, deadline
from penstock.client.queue.entries import Item, encode_headers
from penstock.client.topic import Topic
from penstock.errors import FailedPrecondition, InvalidArgument
from penstock.model.delta import Delta, Op, PriorityClass, Source, encode, vector_hash
from penstock.model.entries import BATCH_ENTRIES_MAX
from penstock.model.ids import partitions_of_digests
from penstock.model.topic import TopicKind
from penstock.wire.messages import SEARCH_MAX

Components = Mapping[int, float] | tuple[ArrayLike, ArrayLike]
BULK_BYTES: Final = 4 << 20  # payload of one request of a bulk load
BULK_REQUESTS: Final = 4  # of them under way at once


class How(TypedDict, total=False):
    """What any change may be told besides what it changes."""

    namespace: str
    priority: PriorityClass
    source: Source
    headers: Mapping[str, Any]  # of the message, for routes
    parent: bytes  # the delta it follows; without one: the vector's last as known here
    clock: Mapping[str, int]  # origin → deltas of the vector seen, the own new one included
    timeout: Duration  # how long to wait for a node whose queue is full


def new_delta_id() -> bytes:
    return secrets.token_bytes(16)


class Deltas:
    """The vectors of one delta topic. It is opened at its first use, or by awaiting it.

    `get`, and writing to a vector that was not written to before, fold the log of the vector's
    partition: they keep its vectors in memory and read only what is new. Topics beyond that are
    what the sinks of a pipeline are for. `history` and `get(at=…)` read the partition's log from
    its beginning, and keep nothing.
    """

    def __init__(
        self,
        topic: Topic[bytes],
        *,
        writer: DeltaWriter,
        namespace: str = "default",
        dimensions: int | None = None,
    ) -> None:
        self.topic, self.namespace, self.origin = topic, namespace, writer.origin
        self.heads, self._flights, self._clock = writer.heads, writer.flights, writer.clock
        self.folds = LogFolds(topic, writer)
        self._dimensions = dimensions  # that the caller counts on
        self.dimensions = 0  # known once it is open

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

    # --- one change ---

    async def create(
        self,
        vector_id: str,
        values: ArrayLike,
        *,
        metadata: dict[str, Any] | None = None,
        **how: Unpack[How],
    ) -> Delta:
        """A new vector with all its components. Over an old one it counts as `replace`."""
        return await self.change(Op.CREATE, vector_id, values=values, metadata=metadata, **how)

    async def replace(
        self,
        vector_id: str,
        values: ArrayLike,
        *,
        metadata: dict[str, Any] | None = None,
        **how: Unpack[How],
    ) -> Delta:
        """All components anew."""
        return await self.change(Op.DENSE, vector_id, values=values, metadata=metadata, **how)

    async def set(self, vector_id: str, components: Components, **how: Unpack[How]) -> Delta:
        """Some components anew: {index: value}, or (indices, values)."""
        indices, values = _components(components)
        return await self.change(Op.SPARSE, vector_id, indices=indices, values=values, **how)

    async def scale(self, vector_id: str, factor: float, **how: Unpack[How]) -> Delta:
        """Multiply every component."""
        return await self.change(Op.SCALE, vector_id, values=[factor], **how)

    async def offset(
        self, vector_id: str, components: Components | Sequence[float], **how: Unpack[How]
    ) -> Delta:
        """Add to some components, given as for `set`, or to all: one number for each."""
        if not isinstance(components, Mapping | tuple):
            return await self.change(Op.OFFSET, vector_id, values=components, **how)
        indices, values = _components(components)
        return await self.change(Op.OFFSET, vector_id, indices=indices, values=values, **how)

    async def delete(self, vector_id: str, **how: Unpack[How]) -> Delta:
        return await self.change(Op.DELETE, vector_id, **how)

    async def set_metadata(
        self, vector_id: str, metadata: dict[str, Any], **how: Unpack[How]
    ) -> Delta:
        """Replace the metadata; the components stay."""
        return await self.change(Op.METADATA, vector_id, metadata=metadata, **how)

    async def change(
        self,
        op: Op,
        vector_id: str,
        *,
        indices: ArrayLike | None = None,
        values: ArrayLike | None = None,
        metadata: dict[str, Any] | None = None,
        **how: Unpack[How],
    ) -> Delta:
        """Any change by its op: what the methods above are made of."""
        await self.opened()
        namespace = how.get("namespace", self.namespace)
        vector = vector_hash(namespace, vector_id)
        if vector not in self.heads and not ("clock" in how and "parent" in how):
            await self.folds.look_up([vector])
        head = self.heads.get(vector)
        delta = Delta(
            delta_id=new_delta_id(),
            namespace=namespace,
            vector_id=vector_id,
            op=op,
            origin=self.origin,
            time=max(self._clock.tick(), head.time + 1),
            parent=how.get("parent", None if "clock" in how else head.delta_id),
            clock=dict(how["clock"]) if "clock" in how else self._counted(head),
            indices=None if indices is None else np.asarray(indices),
            values=None if values is None else np.asarray(values),
            metadata=metadata,
            priority=how.get("priority", PriorityClass.NORMAL),
            source=how.get("source", Source.WRITER),
        )
        await self.put(delta, headers=how.get("headers"), timeout=how.get("timeout"))
        return _as_written(delta)

    def _counted(self, head: VectorHead) -> dict[str, int]:
        """The clock of the delta that follows `head`."""
        clock = {self.origin: head.counter + 1}
        if head.origin and head.origin != self.heads.origin:
            clock[head.origin.decode()] = head.origin_counter
        return clock

    # --- deltas as they are ---

    async def put(
        self,
        delta: Delta,
        *,
        headers: Mapping[str, Any] | None = None,
        timeout: Duration | None = None,
    ) -> str:
        """Write a delta as it stands; the id of its message, once it is durable.

        A node whose queue is full is asked again for as long as any failure is. With a `timeout`
        that ends, by raising `Backpressure`, after so long; 0: at once. It fails too if one does
        that was under way before it for the same vector.
        """
        await self.opened()
        payload = encode(delta, dimensions=self.dimensions)
        vectors = await self._head([delta])
        if timeout is None:
            return await self._flights.of(vectors, self.topic.put(payload, headers=headers))
        item = Item(payload, headers=headers)
        writing = self.topic.put_many([item], atomic=False, timeout=timeout)
        return (await self._flights.of(vectors, writing))[0]

    async def put_many(
        self, deltas: Iterable[Delta] | DeltaColumns, *, timeout: Duration | None = None
    ) -> int:
        """Write many deltas, in order for each vector; how many, once all are durable. Where a
        `timeout` ends it some may have been written. The same `Delta`s may be written again: each
        counts once."""
        if isinstance(deltas, DeltaColumns):
            return len(await self._put_columns(deltas, fresh=False, timeout=timeout))
        await self.opened()
        found = list(deltas)
        items = [Item(encode(delta, dimensions=self.dimensions)) for delta in found]
        vectors = await self._head(found)
        writing = self.topic.put_many(items, atomic=False, timeout=timeout)
        await self._flights.of(vectors, writing)
        return len(found)

    async def _head(self, deltas: Sequence[Delta]) -> Collection[bytes]:
        """Let deltas of our own origin be the heads of their vectors, which are returned."""
        own = [delta for delta in deltas if delta.origin == self.origin]
        vectors = [vector_hash(delta.namespace, delta.vector_id) for delta in own]
        await self._flights.landed([vector for vector in vectors if vector not in self.heads])
        for vector, delta in zip(vectors, own, strict=True):
            counter = delta.clock[delta.origin]
            self.heads.advance(vector, delta_id=delta.delta_id, counter=counter, time=delta.time)
        return set(vectors)

    # --- in bulk ---

    async def put_columns(
        self,
        vector_ids: Sequence[str] | Sequence[bytes],
        values: ArrayLike,
        *,
        indices: ArrayLike | None = None,
        op: Op | NDArray[np.uint8] | None = None,
        namespace: str | None = None,
        priority: PriorityClass | NDArray[np.uint8] = PriorityClass.NORMAL,
        source: Source = Source.IMPORT,
        metadata: Sequence[bytes] | None = None,
        headers: Mapping[str, Any] | None = None,
        fresh: bool = False,
        timeout: Duration | None = None,
    ) -> Ids:
        """Write a delta per row; their ids as an (n, 16) array, once all are durable.

        `values` and `indices` are (n, k) arrays; without indices rows are dense. Rows of one
        vector follow each other. `fresh`: none of these vectors has a delta of this origin yet, nor
        comes again in another call; nothing is looked up then, and nothing remembered.
        """
        columns = DeltaColumns(
            vector_ids=vector_ids,
            values=np.asarray(values),
            indices=None if indices is None else np.asarray(indices),
            namespace=self.namespace if namespace is None else namespace,
            op=op,
            priority=priority,
            source=source,
            metadata=metadata,
            headers=encode_headers(headers),
        )
        return await self._put_columns(columns, fresh=fresh, timeout=timeout)

    async def _put_columns(
        self, columns: DeltaColumns, *, fresh: bool, timeout: Duration | None
    ) -> Ids:
        await self.opened()
        room_by = deadline(timeout)
        columns = columns.checked()
        if not len(columns):
            return np.empty((0, 16), np.uint8)
        names = Names.of(columns.namespace, columns.vector_ids)
        heads = VectorHeads(self.origin.encode()) if fresh else self.heads
        vectors = set() if fresh else set(names.digests)
        while unknown := [vector for vector in vectors if vector not in heads]:
            await self.folds.look_up(unknown)  # others may fail meanwhile, and are unknown then
        causes = heads.chain(names, self._clock)
        await self._flights.of(vectors, self._send(columns, names, causes, room_by=room_by))
        return causes.delta_ids

    async def _send(
        self, columns: DeltaColumns, names: Names, causes: Causes, *, room_by: float | None
    ) -> None:
        producer, origin = await self.topic.open_producer(), self.origin.encode()
        under_way = asyncio.Semaphore(BULK_REQUESTS)

        async def send(partition: int, rows: NDArray[np.int64]) -> None:
            async with under_way:
                payloads = encode_columns(columns, names, causes, origin=origin, rows=rows)
                await producer.put_payloads(
                    payloads, partition=partition, headers=columns.headers, room_by=room_by
                )

        try:
            async with asyncio.TaskGroup() as group:
                for partition, rows in _portions(columns, names, producer.config.partitions):
                    group.create_task(send(partition, rows))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    # --- reading ---

    async def get(
        self, vector_id: str, at: datetime | int | None = None, *, namespace: str | None = None
    ) -> Vector | None:
        """A vector as of now, or as of a time of the log (`at`, unix milliseconds if a number)."""
        await self.opened()
        vector = self._vector(namespace, vector_id)
        if at is None:
            fold = self.folds.kept(*self.folds.homes([vector]))
            await self.folds.follow(fold)
        else:
            fold = self.folds.of_one(vector)
            time_ms = round(at.timestamp() * 1000) if isinstance(at, datetime) else at
            found = await self.topic.ask("log_find", partition=fold.partition, time_ms=time_ms + 1)
            await self.folds.follow(fold, through=found["sequence"] - 1)
        return fold.vector(vector)

    async def history(self, vector_id: str, *, namespace: str | None = None) -> list[Delta]:
        """The vector's deltas in causal order, as far as the log is kept."""
        await self.opened()
        fold = self.folds.of_one(self._vector(namespace, vector_id))
        ends = await self.folds.ends()
        found: list[Delta] = []
        async for outcome in fold.outcomes(*ends[fold.partition]):
            found += outcome.released.decoded()
        return found

    def _vector(self, namespace: str | None, vector_id: str) -> bytes:
        return vector_hash(self.namespace if namespace is None else namespace, vector_id)

    async def search(
        self,
        vector: Sequence[float] | NDArray[Any],
        k: int = 10,
        *,
        namespace: str | None = None,
        where: Mapping[str, Any] | None = None,
        sink: str | None = None,
        partial: bool = False,
    ) -> list[dict[str, Any]]:
        """The nearest vectors, by the index that the topic's nodes host themselves; each has
        namespace, vector_id, distance, revision and metadata. It needs no pipeline. `where` is a
        condition on the metadata, such as `{"lang": "de", "price": {"$lt": 10}}`.

        While an index is filled, after a start or a takeover, this waits; with `partial` it
        answers from what is in it.
        """
        if not 1 <= k <= SEARCH_MAX:
            message = f"k is {k}, must be from 1 to {SEARCH_MAX}"
            raise InvalidArgument(message, field="k", limit=SEARCH_MAX)
        found = await self.topic.ask(
            "vector_search", vector=np.asarray(vector, np.float32).tolist(), limit=k,
            namespace=namespace, sink=sink, partial=partial,
            **({} if where is None else {"where": dict(where)}),
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
        async with aclosing(self.subscribe_batches(**what)) as batches:
            async for batch in batches:
                done = 0
                try:
                    for released in batch:
                        yield released
                        done += 1
                finally:
                    if done < len(batch):
                        batch.ack_before(done)

    async def subscribe_batches(self, **what: Unpack[What]) -> AsyncGenerator[ReleasedBatch, None]:
        """The same as they come from the node, in columns."""
        following = await self.follow(what)
        try:
            async for batch in following:
                yield batch
        finally:
            await following.close()

    async def follow(self, what: What) -> DeltaSubscription:
        """The same for who also asks where it began; it must be closed."""
        await self.opened()
        namespace, vector_id = what.get("namespace"), what.get("vector_id")
        if vector_id is not None and namespace is None:
            namespace = self.namespace
        wanted = Filter(namespace=namespace, vector_id=vector_id, op=what.get("op"))
        partitions: Sequence[int] = range(self.topic.config.partitions)
        if wanted.vector is not None:
            partitions = self.folds.homes([wanted.vector])
        routes, left = wanted.divided(what)
        requests = [await request_of(self.topic, p, what=what, routes=routes) for p in partitions]
        return DeltaSubscription(self.topic, requests, left, topic_id=self.topic.id)


def _as_written(delta: Delta) -> Delta:
    """The delta with the numbers that its bytes hold."""
    indices, values = delta.indices, delta.values
    return msgspec.structs.replace(
        delta,
        indices=None if indices is None else indices.astype(np.uint16),
        values=None if values is None else values.astype(np.float32),
    )


def _portions(
    columns: DeltaColumns, names: Names, partitions: int
) -> Iterable[tuple[int, NDArray[np.int64]]]:
    digests = np.ascontiguousarray(names.hashes).view("<u8")[:, 0]
    homes = partitions_of_digests(np.ascontiguousarray(digests), partitions)
    width = columns.values.shape[1] * (4 if columns.indices is None else 6) + 256
    step = max(1, min(BATCH_ENTRIES_MAX, BULK_BYTES // width))
    for partition in np.unique(homes).tolist():
        rows = np.flatnonzero(homes == partition)
        for at in range(0, len(rows), step):
            yield partition, rows[at : at + step]


def _components(components: Components) -> tuple[NDArray[Any], NDArray[Any]]:
    """Indices and values, by index."""
    if isinstance(components, Mapping):
        indices, values = np.array(list(components)), np.array(list(components.values()))
    else:
        indices, values = (np.asarray(part) for part in components)
    if indices.ndim != 1 or indices.shape != values.shape:
        raise InvalidArgument("indices and values differ in shape", field="indices")
    if len(indices) == 1:
        return indices, values
    order = np.argsort(indices, kind="stable")
    return indices[order], values[order]
