"""What a partition that is served here does for an atomic batch: prepare, decide, answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import Backpressure, BatchAborted
from penstock.heap.transactions import Doubts, SharePlace, pack_places
from penstock.log.crash import crash_point
from penstock.model.batch import SCHEMAS, Batch, Decision, Kind
from penstock.model.columns import Columns, Value
from penstock.model.entries import ENQ
from penstock.node.serve.partition import Partition
from penstock.node.serve.topic import Topic
from penstock.node.write.bodies import subset
from penstock.node.write.requests import EnqueuePart
from penstock.wire.messages import Duplicate, Placed

PREPARE = SCHEMAS[Kind.PREPARE]
EARLIER_S: Final = 1.0  # that an earlier attempt at the same entries is waited for
LOOK_S: Final = 0.005  # between looks whether it is decided
FULL_S: Final = 1.0  # after which a home that has too much to remember may be tried again


class Prepared(NamedTuple):
    """A part of a batch that is prepared: indices count the request's entries."""

    partition: int
    placed: list[Placed]
    duplicates: list[Duplicate]

    @property
    def places(self) -> list[SharePlace]:
        """Where it was written; nowhere if all of it had been before."""
        return [SharePlace(self.partition, placed.sequence) for placed in self.placed]


class StagedPart(NamedTuple):
    """A part that is on its way into its log."""

    partition: int
    prepared: asyncio.Future[Prepared]


async def stage_here(
    topic: Topic, partition: Partition, part: EnqueuePart, *, transaction: bytes, home: int
) -> StagedPart:
    """Append a PREPARE of what was not written before."""
    partition.journal.check_commits()
    if partition.index == home and partition.heap.transactions.full:
        raise Backpressure("too many atomic batches wait for participants", retry_after_s=FULL_S)
    await partition.journal.make_room(len(part.columns.body) + 64)
    known = await _known(topic, partition, part)
    batch = _append(partition, part, transaction, home, known)
    crash_point("node.atomic.preparing")
    done = Prepared(partition.index, _placed(partition, part, batch, known), known)
    # What an earlier attempt wrote is answered as what this one writes: when it is committed.
    durable = partition.journal.committed(partition.heap.sequence_applied)

    async def prepared() -> Prepared:
        await durable
        return done

    return StagedPart(partition.index, asyncio.ensure_future(prepared()))


async def decide_here(
    topic: Topic,
    home: Partition,
    transaction: bytes,
    *,
    commit: bool,
    places: Sequence[SharePlace] = (),
) -> bool:
    """Write a decision, unless there is one; returns the one that holds, once it is committed.

    `places` are those of all shares: the home keeps a commit until the others have their copy."""
    if home.heap.decision(transaction) is None:
        home.journal.check_commits()
        others = [place for place in places if place.partition != home.index]
        own = len(others) < len(places)
        commit = commit and home.heap.transactions.may_commit(transaction, own=own)
        append_decision(home, transaction, commit=commit, others=others if commit else ())
        crash_point("node.atomic.deciding")
    topic.wake()
    await home.journal.committed(home.heap.sequence_applied)
    outcome = home.heap.decision(transaction)
    assert outcome is not None
    return outcome


async def outcome_here(topic: Topic, home: Partition, transaction: bytes) -> bool:
    """How a batch was decided; if it was not, it is now: against it."""
    return await decide_here(topic, home, transaction, commit=False)


def apply_here(topic: Topic, partition: Partition, transaction: bytes, *, commit: bool) -> None:
    """Let a participant follow the home's decision."""
    if transaction in partition.heap.prepared:
        append_decision(partition, transaction, commit=commit)
        crash_point("node.atomic.applying")
        topic.wake()


async def doubts_here(topic: Topic, partition: Partition, home: int) -> Doubts:
    """Batches of a home that wait for its decision here. A decision that is not committed yet may
    still be lost: the answer is given once nothing in it can change."""
    found = Doubts(partition.heap.sequence_applied, partition.heap.transactions.doubts(home))
    topic.wake()
    await partition.journal.committed(found.sequence)
    return found


def append_decision(
    partition: Partition, transaction: bytes, *, commit: bool, others: Sequence[SharePlace] = ()
) -> Batch:
    values: dict[str, Value | None] = {"transaction": [transaction], "commit": [int(commit)]}
    if others:
        values["participants"] = [pack_places(others)]
    return partition.journal.append_record(Kind.DECIDE, 1, values)


def append_confirmed(partition: Partition, transactions: Sequence[bytes]) -> Batch:
    """All participants have these commits of this home."""
    count = len(transactions)
    values: dict[str, Value | None] = {
        "transaction": transactions,
        "commit": [int(Decision.CONFIRMED)] * count,
    }
    return partition.journal.append_record(Kind.DECIDE, count, values)


async def _known(topic: Topic, partition: Partition, part: EnqueuePart) -> list[Duplicate]:
    """Entries that an earlier attempt wrote. One that is still prepared is waited for a while:
    for ever would be a deadlock if that attempt waits for us in another partition."""
    patience = round(EARLIER_S / LOOK_S)
    duplicates = partition.heap.admit(part.columns)
    while any(partition.heap.is_prepared(s) for _, s, _ in duplicates):
        if not patience:
            raise BatchAborted("an earlier attempt at these entries is not decided yet")
        patience -= 1
        topic.wake()
        await asyncio.sleep(LOOK_S)
        duplicates = partition.heap.admit(part.columns)
    return [
        Duplicate(int(part.indices[i]), partition.index, sequence, time_ms)
        for i, sequence, time_ms in duplicates
    ]


def _fresh(part: EnqueuePart, known: list[Duplicate]) -> NDArray[np.int64]:
    seen = {duplicate.index for duplicate in known}
    return np.array([i for i, index in enumerate(part.indices) if int(index) not in seen], np.int64)


def _append(
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
