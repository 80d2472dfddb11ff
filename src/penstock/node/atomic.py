"""All-or-none batches over several partitions: PREPARE in each, one DECIDE in the home partition.

The decision is the DECIDE record of the home partition: once that is committed, the batch is in,
and nothing can take it back. A prepared participant never decides alone. After a restart, whatever
is still prepared asks its home: a decision found there holds; if there is none, the home decides
against, which later attempts then find.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from ulid import ULID

from penstock.errors import BatchAborted, PenstockError
from penstock.log.crash import crash_point
from penstock.model.batch import SCHEMAS, Batch, Kind
from penstock.model.columns import Columns, Value
from penstock.node.bodies import ENQ, subset
from penstock.node.partition import Partition
from penstock.node.requests import EnqueuePart
from penstock.node.topic import Topic
from penstock.wire.messages import Duplicate, Placed

PREPARE = SCHEMAS[Kind.PREPARE]


async def enqueue_atomically(topic: Topic, parts: Sequence[tuple[Partition, EnqueuePart]]) -> None:
    """Write all parts or none; each part's request is answered."""
    transaction = ULID().bytes
    home = parts[0][0]
    prepared: list[tuple[Partition, EnqueuePart, Batch | None, list[Duplicate]]] = []
    try:
        for partition, part in parts:
            await partition.journal.make_room(len(part.columns.body) + 64)
            known = await _known(topic, partition, part)
            batch = _prepare(partition, part, transaction, home.index, known)
            prepared.append((partition, part, batch, known))
        crash_point("node.atomic.staged")
        topic.wake()
        await asyncio.gather(*(committed(p, b.last) for p, _, b, _ in prepared if b is not None))
        crash_point("node.atomic.prepared")
        written = [p for p, _, batch, _ in prepared if batch is not None]
        if written:
            await _decide(topic, home, transaction, commit=True)
            crash_point("node.atomic.decided")
            for partition in written:
                if partition is not home:
                    _append_decision(partition, transaction, commit=True)
            topic.wake()
    except PenstockError as error:
        await _abort(topic, home, [p for p, _, b, _ in prepared if b is not None], transaction)
        for _, part in parts:
            part.request.part_failed(error)
        return
    for partition, part, batch, known in prepared:
        part.request.part_placed(_placed(partition, part, batch, known), known)


async def resolve_in_doubt(topic: Topic) -> int:
    """After a restart: give every prepared batch the decision of its home partition."""
    resolved = 0
    for partition in topic.local:
        for transaction, prepared in list(partition.heap.prepared.items()):
            home = topic.here(prepared.home)
            decision = home.heap.decision(transaction)
            if decision is None:
                decision = False
                await _decide(topic, home, transaction, commit=False)
            if transaction in partition.heap.prepared:
                _append_decision(partition, transaction, commit=decision)
            topic.wake()
            resolved += 1
    return resolved


def committed(partition: Partition, sequence: int) -> asyncio.Future[None]:
    """A future that is done once `sequence` is committed."""
    return partition.journal.committed(sequence)


async def _known(topic: Topic, partition: Partition, part: EnqueuePart) -> list[Duplicate]:
    """Entries that an earlier attempt wrote. One that is still prepared is waited for."""
    while True:
        duplicates = partition.heap.admit(part.columns)
        if not any(partition.heap.is_prepared(s) for _, s, _ in duplicates):
            break
        topic.wake()
        await committed(partition, partition.log.sequence_last + 1)
    return [
        Duplicate(int(part.indices[i]), partition.index, sequence, time_ms)
        for i, sequence, time_ms in duplicates
    ]


def _fresh(part: EnqueuePart, known: list[Duplicate]) -> NDArray[np.int64]:
    seen = {duplicate.index for duplicate in known}
    return np.array([i for i, index in enumerate(part.indices) if int(index) not in seen], np.int64)


def _prepare(
    partition: Partition,
    part: EnqueuePart,
    transaction: bytes,
    home: int,
    known: list[Duplicate],
) -> Batch | None:
    columns = part.columns
    if known:
        fresh = _fresh(part, known)
        if not len(fresh):
            return None
        columns = ENQ.decode(subset(columns, fresh), len(fresh))
    values = _values(columns) | {"transaction": [transaction], "home": [home]}
    body = PREPARE.encode(columns.count, values, runs=columns.runs)
    return partition.journal.append(Kind.PREPARE, body, columns.count)


def _values(columns: Columns) -> dict[str, Value | None]:
    return {
        column.name: columns.binary(column.name) if column.binary else columns.fixed(column.name)
        for column in ENQ.columns
        if column.name in columns
    }


def _placed(
    partition: Partition, part: EnqueuePart, batch: Batch | None, known: list[Duplicate]
) -> list[Placed]:
    if batch is None:
        return []
    if known:
        fresh = _fresh(part, known)
        indices = np.asarray(part.indices, np.int64)[fresh]
        part = EnqueuePart(
            part.request, ENQ.decode(subset(part.columns, fresh), len(fresh)), indices=indices,
            body=b"",
        )  # fmt: skip
    return part.placed(partition.index, batch.first, batch.time_ms)


async def _decide(topic: Topic, home: Partition, transaction: bytes, *, commit: bool) -> None:
    batch = _append_decision(home, transaction, commit=commit)
    topic.wake()
    await committed(home, batch.last)
    if home.heap.decision(transaction) is not commit:
        raise BatchAborted("another decision came first")


def _append_decision(partition: Partition, transaction: bytes, *, commit: bool) -> Batch:
    values: dict[str, Value | None] = {"transaction": [transaction], "commit": [int(commit)]}
    return partition.journal.append_record(Kind.DECIDE, 1, values)


async def _abort(
    topic: Topic, home: Partition, participants: list[Partition], transaction: bytes
) -> None:
    if not participants:
        return
    await _decide(topic, home, transaction, commit=False)
    for partition in participants:
        if partition is not home:
            _append_decision(partition, transaction, commit=False)
    topic.wake()
