"""One partition of a delta topic, folded through the kernels as far as its log was read.

A fold is a function of the log: reading on feeds it more, and what it releases comes in causal
order. Deltas that waited too long for a cause are asked back: the log is searched for what they
miss, as every other reader of it does, so that all of them come to the same states.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.client.delta.writer import DeltaWriter, VectorHead
from penstock.client.queue.messages import LogReader
from penstock.client.topic import Topic
from penstock.model.delta_batch import DeltaBatch, deltas_of
from penstock.model.ids import partitions_of_digests

if TYPE_CHECKING:
    from penstock.propagation.fold.propagator import FeedOutcome

CREDIT_ENTRIES: Final = 200_000  # read ahead of whoever folds them
CREDIT_BYTES: Final = 8 << 20


class Vector(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A vector as its deltas have made it."""

    namespace: str
    vector_id: str
    values: NDArray[np.float32]
    metadata: dict[str, Any] | None
    revision: int  # deltas merged into it
    time: int  # the newest hybrid time among them
    sequence: int  # and the newest place in the log


class LogFold:
    """The fold of a partition, or of the deltas of `only` one vector of it. Time passes in a fold
    by the deltas that it is fed. So in the fold of one vector a delta that lacks its cause is given
    up, or its cause looked for, only when another of that vector comes."""

    def __init__(self, topic: Topic[Any], *, partition: int, only: bytes | None = None) -> None:
        from penstock.propagation.fold.propagator import Propagator  # only readers need kernels

        self._topic, self.partition, self._only = topic, partition, only
        self._propagator = Propagator(topic.config.dimensions)
        self._sequence_first = 1
        self._reading = asyncio.Lock()

    async def outcomes(
        self, sequence_first: int, through: int
    ) -> AsyncGenerator[FeedOutcome, None]:
        """What comes of the log from where the fold is. `sequence_first` is where the log begins
        now: retention may have dropped what was before."""
        fold = self._propagator
        self._sequence_first = sequence_first
        first = max(fold.sequence + 1, sequence_first)
        async with aclosing(self._read(first, through)) as source:
            async for deltas, read in source:
                yield fold.feed(deltas, through=read, states=False)
                while missing := fold.missing():
                    yield fold.resolve(await self._find(missing))

    async def catch_up(self, sequence_first: int, through: int) -> None:
        async with self._reading:
            if through > self._propagator.sequence:
                async for _ in self.outcomes(sequence_first, through):
                    pass  # the state is what counts

    async def _find(self, ids: list[bytes]) -> set[bytes]:
        """Those of the wanted deltas that the log has from before the fold's memory of ids."""
        fold = self._propagator
        horizon = await self._topic.ask(
            "log_find",
            partition=self.partition,
            time_ms=fold.ledger.time_ms - fold.options.dedup_ms,
        )
        wanted, found = set(ids), set[bytes]()
        if horizon["sequence"] <= self._sequence_first:
            return found
        async for deltas, _ in self._read(self._sequence_first, horizon["sequence"] - 1):
            found |= wanted.intersection(deltas.delta_ids())
        return found

    async def _read(
        self, from_sequence: int, through: int
    ) -> AsyncGenerator[tuple[DeltaBatch, int], None]:
        """Deltas from a sequence on, and how far the log is read with them. The last batch may
        reach past `through`."""
        if from_sequence > through:
            return
        reader: LogReader[Any] = LogReader(
            self._topic,
            partition=self.partition,
            from_sequence=from_sequence,
            through=through,
            credit_entries=CREDIT_ENTRIES,
            credit_bytes=CREDIT_BYTES,
        )
        wanted = None if self._only is None else np.frombuffer(self._only, "<u8")
        async with aclosing(reader.slices()) as slices:
            async for batches in slices:
                deltas = deltas_of(batches)
                if wanted is not None:
                    deltas = deltas.take((deltas.vector == wanted).all(axis=1))
                if len(deltas) and int(deltas.sequences[0]) < from_sequence:
                    # A slice begins with the whole batch that holds the first sequence asked for.
                    deltas = deltas.take(deltas.sequences >= from_sequence)
                yield deltas, batches[-1].last

    def vector(self, vector: bytes) -> Vector | None:
        """A vector as it is here; None if it is not, or deleted."""
        numbers = self._numbers([vector])
        if numbers[0] < 0:
            return None
        states = self._propagator.states(numbers)
        if not states.revision[0] or states.deleted[0]:
            return None
        metadata = states.metadata[0]
        return Vector(
            namespace=states.namespace[0].decode(),
            vector_id=states.vector_id[0].decode(),
            values=states.values[0],
            metadata=msgspec.msgpack.decode(metadata) if metadata else None,
            revision=int(states.revision[0]),
            time=int(states.time[0]),
            sequence=int(states.sequence[0]),
        )

    def heads(self, vectors: Sequence[bytes], origin: bytes) -> list[VectorHead]:
        """Where the writer `origin` would go on from, for each vector."""
        own = origin.ljust(16, b"\0")
        return [
            VectorHead() if number < 0 else self._head(number, own)
            for number in self._numbers(vectors).tolist()
        ]

    def _head(self, vector: int, own: bytes) -> VectorHead:
        """The latest of the vector's chains is its head; a chain is one origin's deltas of it."""
        ledger = self._propagator.ledger
        chains, names = ledger.chains.table, ledger.origins.table
        counter, latest = 0, (-1, b"", 0, b"")
        for chain in ledger.heads_of(vector):
            seen = int(chains["seen"][chain])
            origin_number = int(chains["high"][chain])
            pair = (names["low"][origin_number], names["high"][origin_number])
            origin = np.array(pair, "<u8").tobytes()
            if origin == own:
                counter = seen
            if seen:
                head = chains["head"][chain].tobytes()
                latest = max(latest, (int(chains["time"][chain]), origin, seen, head))
        when, origin, seen, head = latest
        if when < 0:
            return VectorHead()
        return VectorHead(head, counter, when, origin.rstrip(b"\0"), seen)

    def _numbers(self, vectors: Sequence[bytes]) -> NDArray[np.int64]:
        halves = np.frombuffer(b"".join(vectors), "<u8").reshape(-1, 2)
        low, high = (np.ascontiguousarray(halves[:, i]) for i in (0, 1))
        return self._propagator.ledger.vectors.find(low, high)


class LogFolds:
    """The folds of a delta topic's partitions, each of which is kept and reads only what is new."""

    def __init__(self, topic: Topic[Any], writer: DeltaWriter) -> None:
        self._topic, self._writer = topic, writer
        self._kept: dict[int, LogFold] = {}
        self._looking = asyncio.Lock()  # one look-up at a time
        self._wanted: set[bytes] = set()  # the vectors that the next look-up is to find

    def kept(self, partition: int) -> LogFold:
        found = self._kept.get(partition)
        if found is None:
            found = self._kept[partition] = LogFold(self._topic, partition=partition)
        return found

    def of_one(self, vector: bytes) -> LogFold:
        """A new fold of one vector's deltas, which nobody keeps."""
        return LogFold(self._topic, partition=self.homes([vector])[0], only=vector)

    async def look_up(self, vectors: Iterable[bytes]) -> None:
        """Learn the heads of vectors that nothing is known of, from the log. Whoever asks while a
        look-up is under way shares the next one with all who do."""
        wanted = self._unknown(vectors)
        while wanted:
            await self._writer.flights.landed(wanted)
            self._wanted.update(wanted)
            async with self._looking:
                # Whoever comes first looks for all; the others then find that nothing is left.
                some, self._wanted = self._unknown(self._wanted), set()
                if some:
                    await self._learn(some)
            wanted = self._unknown(wanted)

    def _unknown(self, vectors: Iterable[bytes]) -> list[bytes]:
        return [vector for vector in vectors if vector not in self._writer.heads]

    async def _learn(self, vectors: list[bytes]) -> None:
        homes: dict[int, list[bytes]] = {}
        for vector, partition in zip(vectors, self.homes(vectors), strict=True):
            homes.setdefault(partition, []).append(vector)
        ends = await self.ends()
        for partition, some in homes.items():
            fold = self.kept(partition)
            await fold.catch_up(*ends[partition])
            for vector, head in zip(some, fold.heads(some, self._writer.heads.origin), strict=True):
                if vector not in self._writer.heads:  # It may have been written to meanwhile.
                    self._writer.heads.adopt(vector, head)

    async def follow(self, fold: LogFold, *, through: int | None = None) -> None:
        first, committed = (await self.ends())[fold.partition]
        await fold.catch_up(first, committed if through is None else through)

    async def ends(self) -> dict[int, tuple[int, int]]:
        """The first sequence that each partition's log has, and the last that is committed."""
        found = (await self._topic.ask("log_status"))["partitions"]
        return {p["partition"]: (p["sequence_first"], p["sequence_committed"]) for p in found}

    def homes(self, vectors: Sequence[bytes]) -> list[int]:
        digests = np.frombuffer(b"".join([vector[:8] for vector in vectors]), "<u8")
        found: list[int] = partitions_of_digests(digests, self._topic.config.partitions).tolist()
        return found
