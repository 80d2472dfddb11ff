"""What a partition that is served here does for an atomic batch: prepare, decide, answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from penstock.errors import Backpressure, BatchAborted
from penstock.heap.transactions import Doubts, SharePlace, pack_places
from penstock.log.crash import crash_point
from penstock.model.batch import SCHEMAS, Kind
from penstock.model.columns import Value
from penstock.model.entries import ENQ
from penstock.node.serve.partition import Partition
from penstock.node.serve.topic import ServedTopic
from penstock.node.write.enqueuer import EnqueuePart
from penstock.wire.messages import Placed

PREPARE = SCHEMAS[Kind.PREPARE]
EARLIER_S: Final = 1.0  # that an earlier attempt at the same entries is waited for
LOOK_S: Final = 0.005  # between looks whether it is decided
FULL_S: Final = 1.0  # after which a home that has too much to remember may be tried again


async def stage_here(
    topic: ServedTopic, partition: Partition, part: EnqueuePart, *, transaction: bytes, home: int
) -> asyncio.Future[list[Placed]]:
    """Append a PREPARE of what was not written before. The future gets where that is, once it is
    committed."""
    partition.journal.check_commits()
    if partition.index == home and partition.heap.transactions.full:
        raise Backpressure("too many atomic batches wait for participants", retry_after_s=FULL_S)
    await partition.journal.make_room(len(part.columns.body) + 64)
    await _leave_known_out(topic, partition, part)
    placed = _append(partition, part, transaction=transaction, home=home)
    crash_point("node.atomic.preparing")
    # What an earlier attempt wrote is answered as what this one writes: when it is committed.
    durable = partition.journal.committed(partition.heap.sequence_applied)

    async def prepared() -> list[Placed]:
        await durable
        return placed

    return asyncio.ensure_future(prepared())


async def prepare_here(
    topic: ServedTopic, partition: Partition, part: EnqueuePart, *, transaction: bytes, home: int
) -> list[Placed]:
    staged = await stage_here(topic, partition, part, transaction=transaction, home=home)
    topic.wake()
    return await staged


async def decide_here(
    topic: ServedTopic,
    home: Partition,
    transaction: bytes,
    *,
    commit: bool,
    places: Sequence[SharePlace] = (),
) -> bool:
    """Write a decision, unless there is one; returns the one that holds, once it is committed.

    `places` are those of all shares: the home keeps a commit until the others have their copy."""
    if home.heap.transactions.outcome(transaction) is None:
        home.journal.check_commits()
        others = [place for place in places if place.partition != home.index]
        own = len(others) < len(places)
        commit = commit and home.heap.transactions.may_commit(transaction, own=own)
        append_decision(home, [transaction], int(commit), others=others if commit else ())
        crash_point("node.atomic.deciding")
    topic.wake()
    await home.journal.committed(home.heap.sequence_applied)
    outcome = home.heap.transactions.outcome(transaction)
    assert outcome is not None
    return outcome


def apply_here(
    topic: ServedTopic, partition: Partition, transaction: bytes, *, commit: bool
) -> None:
    """Let a participant follow the home's decision."""
    if transaction in partition.heap.prepared:
        append_decision(partition, [transaction], int(commit))
        crash_point("node.atomic.applying")
        topic.wake()


async def doubts_here(topic: ServedTopic, partition: Partition, home: int) -> Doubts:
    """Batches of a home that wait for its decision here. A decision that is not committed yet may
    still be lost: the answer is given once nothing in it can change."""
    found = Doubts(partition.heap.sequence_applied, partition.heap.transactions.doubts(home))
    topic.wake()
    await partition.journal.committed(found.sequence)
    return found


def append_decision(
    partition: Partition,
    transactions: Sequence[bytes],
    decision: int,
    *,
    others: Sequence[SharePlace] = (),
) -> None:
    values: dict[str, Value | None] = {
        "transaction": transactions,
        "commit": [decision] * len(transactions),
    }
    if others:
        values["participants"] = [pack_places(others)]
    partition.journal.append_record(Kind.DECIDE, len(transactions), values)


async def _leave_known_out(topic: ServedTopic, partition: Partition, part: EnqueuePart) -> None:
    """Write nothing that an earlier attempt wrote. What it has prepared is waited for a while: for
    ever would be a deadlock if that attempt waits for us in another partition."""
    patience = round(EARLIER_S / LOOK_S)
    while duplicates := partition.heap.dedup.admit(part.columns):
        if not any(partition.heap.is_prepared(sequence) for _, sequence, _ in duplicates):
            part.leave_out(duplicates, partition.index)
            return
        if not patience:
            raise BatchAborted("an earlier attempt at these entries is not decided yet")
        patience -= 1
        topic.wake()
        await asyncio.sleep(LOOK_S)


def _append(
    partition: Partition, part: EnqueuePart, *, transaction: bytes, home: int
) -> list[Placed]:
    if not part.count:
        return []
    columns = part.columns
    values: dict[str, Value | None] = {
        column.name: columns.binary(column.name) if column.binary else columns.fixed(column.name)
        for column in ENQ.columns
        if column.name in columns.views
    }
    values |= {"transaction": [transaction], "home": [home]}
    body = PREPARE.encode(part.count, values, runs=columns.runs)
    batch = partition.journal.append(Kind.PREPARE, body, part.count)
    return part.placed(partition.index, batch.first, batch.time_ms)
