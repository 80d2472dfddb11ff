"""What waits in a partition for its turn, and the request that an enqueue's parts add up to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PenstockError, from_wire
from penstock.model.batch import DeadReason
from penstock.model.columns import Buffer, Columns
from penstock.model.entries import ENQ
from penstock.node.write.bodies import subset
from penstock.wire.messages import Duplicate, Enqueued, Placed

Reply = Callable[[object], None]  # called once, with a result or a PenstockError


def as_one(errors: Sequence[PenstockError], parts: int) -> PenstockError:
    """The first of what some parts of a request failed with, as the answer to all of it. It says
    `elsewhere`, which means that nothing was done, only if every part does."""
    first = errors[0]
    undone = [error for error in errors if error.details.get("elsewhere")]
    if "elsewhere" not in first.details or len(undone) == parts:
        return first
    return from_wire({n: value for n, value in first.to_wire().items() if n != "elsewhere"})


class Gathered:
    """The results of a request's parts, which come in any order. Once all are here, `whole` makes
    one answer of them, in the order of the parts."""

    __slots__ = ("_remaining", "_reply", "_results", "_whole")

    def __init__(self, parts: int, whole: Callable[[list[object]], object], reply: Reply) -> None:
        self._results: list[object] = [None] * parts
        self._remaining, self._whole, self._reply = parts, whole, reply

    def part(self, index: int) -> Reply:

        def done(result: object) -> None:
            self._results[index] = result
            self._remaining -= 1
            if not self._remaining:
                self._reply(self._whole(self._results))

        return done


class EnqueueRequest:
    """A producer's request: answered once all of its parts are, which are made before any of them
    is handed on."""

    __slots__ = (
        "_duplicates", "_ended", "_errors", "_placed", "parts", "reply", "started", "topic",
    )  # fmt: skip

    def __init__(self, topic: int, reply: Reply) -> None:
        self.topic, self.reply = topic, reply
        self.started = time.perf_counter()
        self.parts = self._ended = 0
        self._placed: list[Placed] = []
        self._duplicates: list[Duplicate] = []
        self._errors: list[PenstockError] = []

    def part_placed(self, placed: Sequence[Placed], duplicates: Sequence[Duplicate] = ()) -> None:
        self._placed.extend(placed)
        self._duplicates.extend(duplicates)
        self._ended += 1
        if self._ended < self.parts:
            return
        if self._errors:
            self.reply(as_one(self._errors, self.parts))
        else:
            self._duplicates.sort(key=lambda known: known.index)  # parts end in any order
            self.reply(Enqueued(self.topic, self._placed, self._duplicates))

    def part_failed(self, error: PenstockError) -> None:
        self._errors.append(error)
        self.part_placed(())


class EnqueuePart:
    """One partition's share. `indices` are its entries' places in the request."""

    __slots__ = (
        "body", "codec", "columns", "count", "expected_sequence", "indices", "known", "request",
    )  # fmt: skip

    def __init__(
        self,
        request: EnqueueRequest,
        columns: Columns,
        *,
        indices: NDArray[np.int64] | range,
        body: Buffer,
        codec: int = 0,
        expected_sequence: int | None = None,
    ) -> None:
        request.parts += 1
        self.request, self.columns, self.count = request, columns, columns.count
        self.indices = indices
        self.body, self.codec = body, codec  # as received, compressed or not
        self.expected_sequence = expected_sequence
        self.known: list[Duplicate] = []

    def leave_out(self, duplicates: list[tuple[int, int, int]], partition: int) -> None:
        """Entries were written before: they are answered as they were then, and only the others are
        written now. `duplicates` are their places here, sequences and times."""
        indices = np.asarray(self.indices, np.int64)
        self.known = [
            Duplicate(int(indices[i]), partition, sequence, time_ms)
            for i, sequence, time_ms in duplicates
        ]
        fresh = np.delete(np.arange(self.count), [i for i, _, _ in duplicates])
        self.indices, self.count = indices[fresh], len(fresh)
        if self.count:
            self.body, self.codec = subset(self.columns, fresh), 0
            self.columns = ENQ.decode(self.body, self.count)

    def placed(self, partition: int, first: int, time_ms: int) -> list[Placed]:
        """Where the entries went when they were all written from sequence `first` on."""
        if isinstance(self.indices, range):
            return [Placed(self.indices.start, self.count, partition, first, time_ms)]
        return stretches(self.indices, np.arange(first, first + self.count), partition, time_ms)


def stretches(
    indices: NDArray[np.int64], sequences: NDArray[np.int64], partition: int, time_ms: int
) -> list[Placed]:
    """Describe entries by the stretches in which index and sequence run on together."""
    breaks = np.flatnonzero((np.diff(indices) != 1) | (np.diff(sequences) != 1)) + 1
    starts = np.concatenate([[0], breaks]).astype(np.int64)
    counts = np.diff(np.append(starts, len(indices)))
    return [
        Placed(i, n, partition, s, time_ms)
        for i, n, s in zip(
            indices[starts].tolist(), counts.tolist(), sequences[starts].tolist(), strict=True
        )
    ]


@dataclass(slots=True, eq=False)
class TokenRequest:
    """Leases of one partition to acknowledge; `reply` gets the lost positions."""

    tokens: NDArray[np.uint64]
    reply: Reply


@dataclass(slots=True, eq=False, kw_only=True)
class ReturnRequest(TokenRequest):
    """Leases to give back, or messages to reject."""

    delay_ms: int | None = None
    reject: bool = False
    counted: bool = True
    reason: bytes = b""
    cause: DeadReason = DeadReason.REJECTED  # of death, if it is rejected


@dataclass(slots=True, eq=False, kw_only=True)
class ExtendRequest(TokenRequest):
    extend_ms: int


def unused(tokens: NDArray[np.uint64], *, delay_ms: int = 0) -> ReturnRequest:
    """Leases end whose messages nobody was told of, and no attempt is counted."""
    return ReturnRequest(tokens, ignore, delay_ms=delay_ms, counted=False)


def ignore(_: object) -> None:
    """Nobody waits for this answer."""
