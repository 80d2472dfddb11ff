"""Deltas of a topic in causal order, as they are released, from several partitions at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np

from penstock.client.delta_fold import Fold
from penstock.errors import InvalidArgument
from penstock.model.delta import Delta, Op, decode
from penstock.model.delta_batch import DeltaBatch

if TYPE_CHECKING:
    from penstock.propagation.partition import Outcome

Start = int | Mapping[int, int] | Literal["now"]
QUEUE_OUTCOMES_MAX: Final = 16  # read ahead of the subscriber, over all partitions


class Released(msgspec.Struct, frozen=True, kw_only=True):
    """A delta, and how it stands in the log."""

    delta: Delta
    partition: int
    sequence: int  # its own place
    position: int  # of the delta whose arrival released it
    ordinal: int  # it is the partition's so-many-th released delta
    time_ms: int  # when the log took it
    headers: dict[str, Any]  # of its message


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which deltas a subscriber wants."""

    namespace: str | None = None
    op: Op | None = None

    def rows(self, deltas: DeltaBatch) -> list[int]:
        mask = np.ones(len(deltas), np.bool_)
        if self.op is not None:
            mask &= deltas.op == self.op
        found: list[int] = np.flatnonzero(mask).tolist()
        if self.namespace is None:
            return found
        wanted = self.namespace.encode()
        namespaces, _ = deltas.name_bytes()
        return [row for row in found if namespaces[row] == wanted]


def start_of(start: Start, partition: int, *, committed: int) -> int:
    """From which position on a partition's deltas are wanted."""
    if start == "now":
        return committed + 1
    found = start if isinstance(start, int) else start.get(partition, 1)
    if found < 0:
        raise InvalidArgument("from_sequence must not be negative", field="from_sequence")
    return found


async def subscribed(
    folds: Sequence[Fold], ends: Mapping[int, Mapping[str, int]], *, start: Start, wanted: Filter
) -> AsyncGenerator[Released, None]:
    """Follow the folds' partitions for ever; `ends` is each one's `log_status`."""
    queue: asyncio.Queue[tuple[int, Outcome]] = asyncio.Queue(QUEUE_OUTCOMES_MAX)
    starts = {
        fold.partition: start_of(
            start, fold.partition, committed=ends[fold.partition]["sequence_committed"]
        )
        for fold in folds
    }

    async def follow(fold: Fold) -> None:
        first = ends[fold.partition]["sequence_first"]
        async for outcome in fold.outcomes(sequence_first=first):
            if len(outcome.released):
                await queue.put((fold.partition, outcome))

    # A generator may be left by another task than entered it: no task group, but each is awaited.
    followers = [asyncio.create_task(follow(fold)) for fold in folds]
    try:
        while True:
            partition, outcome = await _next(queue, followers)
            for released in _released(partition, outcome, starts[partition], wanted):
                yield released
    finally:
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)


async def _next(
    queue: asyncio.Queue[tuple[int, Outcome]], followers: list[asyncio.Task[None]]
) -> tuple[int, Outcome]:
    """What comes next; raises what ended a follower."""
    if not queue.empty():
        return queue.get_nowait()
    getting = asyncio.create_task(queue.get())
    try:
        done, _ = await asyncio.wait([getting, *followers], return_when=asyncio.FIRST_COMPLETED)
        for follower in followers:
            if follower in done:
                follower.result()
        return await getting
    finally:
        getting.cancel()


def _released(partition: int, outcome: Outcome, start: int, wanted: Filter) -> list[Released]:
    deltas = outcome.released
    found = []
    for row in wanted.rows(deltas):
        position = int(outcome.positions[row])
        if position < start:
            continue
        packed = b"" if deltas.headers is None else deltas.headers[row]
        found.append(
            Released(
                delta=decode(deltas.payload(row)),
                partition=partition,
                sequence=int(deltas.sequences[row]),
                position=position,
                ordinal=int(outcome.ordinals[row]),
                time_ms=int(deltas.log_times_ms[row]),
                headers=msgspec.msgpack.decode(packed) if packed else {},
            )
        )
    return found
