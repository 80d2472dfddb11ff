"""One partition of a delta topic, folded through the kernels as far as its log was read.

A fold is a function of the log: reading on feeds it more, and what it releases comes in causal
order. Deltas that waited too long for a cause are asked back: the log is searched for what they
miss, as every other reader of it does, so that all of them come to the same states.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.client.delta_heads import Head
from penstock.client.delta_log import read_deltas
from penstock.client.logreader import Source

if TYPE_CHECKING:
    from penstock.propagation.partition import Outcome


class Vector(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A vector as its deltas have made it."""

    namespace: str
    vector_id: str
    values: NDArray[np.float32]
    metadata: dict[str, Any] | None
    revision: int  # deltas merged into it
    time: int  # the newest hybrid time among them
    sequence: int  # and the newest place in the log


class Fold:
    """The fold of a partition, or of the deltas of `only` one vector of it.

    Time passes in a fold by the deltas that it is fed. So in the fold of one vector a delta that
    lacks its cause is given up, or its cause looked for, only when another of that vector comes.
    """

    def __init__(
        self, topic: Source, *, partition: int, dimensions: int, only: bytes | None = None
    ) -> None:
        from penstock.propagation.partition import Propagator  # only those who read need kernels

        self._topic, self.partition, self._only = topic, partition, only
        self._propagator = Propagator(dimensions)
        self._sequence_first = 1
        self._reading = asyncio.Lock()

    # --- reading ---

    async def outcomes(self, *, sequence_first: int, through: int) -> AsyncGenerator[Outcome, None]:
        """What comes of the log from where the fold is.

        `sequence_first` is where the log begins now: retention may have dropped what was before.
        """
        fold = self._propagator
        self._sequence_first = sequence_first
        source = read_deltas(
            self._topic,
            partition=self.partition,
            from_sequence=max(fold.sequence + 1, sequence_first),
            through=through,
            vector=self._only,
        )
        try:
            async for deltas, read in source:
                yield fold.feed(deltas, through=read, states=False)
                while missing := fold.missing():
                    yield fold.resolve(await self._find(missing))
        finally:
            await source.aclose()

    async def catch_up(self, *, sequence_first: int, through: int) -> None:
        """Read on to `through`."""
        async with self._reading:
            if through > self._propagator.sequence:
                async for _ in self.outcomes(sequence_first=sequence_first, through=through):
                    pass  # the state is what counts

    async def _find(self, ids: list[bytes]) -> set[bytes]:
        """Those of the wanted deltas that the log has from before the fold's memory of ids."""
        fold = self._propagator
        horizon = await self._topic.link.call(
            "log_find",
            topic=self._topic.name,
            partition=self.partition,
            time_ms=fold.ledger.time_ms - fold.options.dedup_ms,
        )
        wanted, found = set(ids), set[bytes]()
        if horizon["sequence"] <= self._sequence_first:
            return found
        source = read_deltas(
            self._topic,
            partition=self.partition,
            from_sequence=self._sequence_first,
            through=horizon["sequence"] - 1,
            vector=self._only,
        )
        async for deltas, _ in source:
            found |= wanted.intersection(deltas.delta_ids())
        return found

    # --- asking ---

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

    def heads(self, vectors: Sequence[bytes], origin: bytes) -> list[Head]:
        """Where the writer `origin` would go on from, for each vector."""
        own = origin.ljust(16, b"\0")
        return [
            Head() if number < 0 else self._head(number, own)
            for number in self._numbers(vectors).tolist()
        ]

    def _head(self, vector: int, own: bytes) -> Head:
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
            return Head()
        return Head(head, counter, when, origin.rstrip(b"\0"), seen)

    def _numbers(self, vectors: Sequence[bytes]) -> NDArray[np.int64]:
        halves = np.frombuffer(b"".join(vectors), "<u8").reshape(-1, 2)
        low, high = (np.ascontiguousarray(halves[:, i]) for i in (0, 1))
        return self._propagator.ledger.vectors.find(low, high)
