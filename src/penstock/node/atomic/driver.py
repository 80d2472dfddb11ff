"""All-or-none batches over several partitions: PREPARE in each, one DECIDE in the home partition.

The decision is the DECIDE record of the home partition: once that is committed, the batch is in,
and nothing can take it back. A prepared participant never decides alone. Whoever coordinates a
partition in which a batch has been prepared for too long asks its home: a decision found there
holds; if there is none, the home decides against, which whoever drove the batch then finds. The
driver may be any node, and so may the partitions' coordinators; each of them may fail at any time.

- A PREPARE is sent once. If nobody knows whether it was written, the batch is decided against, and
  a PREPARE that comes later than that is resolved by its coordinator.
- A decision may be sent again and again: the first one in the home's log holds, and is the answer.
- The other participants get a copy. Should it be lost, they ask, as after a restart. The home keeps
  what it decided for until all of them have it (`confirming`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from ulid import ULID

from penstock.errors import BatchAborted, PenstockError
from penstock.heap.transactions import SharePlace
from penstock.log.crash import crash_point
from penstock.node.atomic.participant import (
    Prepared,
    StagedPart,
    apply_here,
    stage_here,
)
from penstock.node.atomic.remote import apply_at, decide_at, outcome_at, prepare_at
from penstock.node.observe.logs import get_logger
from penstock.node.route.ports import PartitionPort
from penstock.node.serve.partition import Partition
from penstock.node.serve.topic import Topic
from penstock.node.write.requests import EnqueuePart

# That a batch may be prepared for before it is decided for. A home keeps its aborts for longer
# (`heap.transactions.ABORTED_MS`), so a driver that is late finds them.
COMMIT_S: Final = 60.0
HOMES_MAX: Final = 16  # asked at the same time
log = get_logger(__name__)


async def enqueue_atomically(
    topic: Topic, parts: Sequence[tuple[PartitionPort, EnqueuePart]]
) -> None:
    """Write all parts or none; each part's request is answered."""
    transaction = ULID().bytes
    home = choose_home([port.index for port, _ in parts], transaction)
    late = asyncio.get_running_loop().time() + COMMIT_S
    try:
        prepared = await _prepare_all(topic, parts, transaction, home)
        crash_point("node.atomic.prepared")
        places = [place for part in prepared for place in part.places]
        if places:
            await _commit(topic, home, transaction, places, late=late)
    except PenstockError as error:
        for _, part in parts:
            part.request.part_failed(error)
        return
    for (_, part), done in zip(parts, prepared, strict=True):
        part.request.part_placed(done.placed, done.duplicates)


def choose_home(partitions: Sequence[int], transaction: bytes) -> int:
    """One of the participants, each as often as the others: what homes keep is spread over them."""
    return partitions[transaction[-1] % len(partitions)]


async def _commit(
    topic: Topic, home: int, transaction: bytes, places: list[SharePlace], *, late: float
) -> None:
    """Have the home decide for the batch, and tell the others; raises if it is decided against."""
    others = sorted({place.partition for place in places} - {home})
    if asyncio.get_running_loop().time() > late:
        await _abort(topic, home, others, transaction)
        raise BatchAborted("it took too long to prepare")
    if not await decide_at(topic, home, transaction, commit=True, places=places):
        raise BatchAborted("another decision came first")
    crash_point("node.atomic.decided")
    await _tell(topic, others, transaction, commit=True)


async def _prepare_all(
    topic: Topic,
    parts: Sequence[tuple[PartitionPort, EnqueuePart]],
    transaction: bytes,
    home: int,
) -> list[Prepared]:
    """Every part, prepared and committed. If one fails, the batch is decided against."""
    staging = await asyncio.gather(
        *(_stage(topic, port.index, part, transaction, home) for port, part in parts),
        return_exceptions=True,
    )
    staged = [s for s in staging if isinstance(s, StagedPart)]
    crash_point("node.atomic.staged")
    topic.wake()
    ended = await asyncio.gather(*(s.prepared for s in staged), return_exceptions=True)
    failed = [e for e in (*staging, *ended) if isinstance(e, BaseException)]
    if failed:
        if staged:
            await _abort(topic, home, [s.partition for s in staged], transaction)
        raise failed[0]
    return [e for e in ended if isinstance(e, Prepared)]


async def _stage(
    topic: Topic, index: int, part: EnqueuePart, transaction: bytes, home: int
) -> StagedPart:
    served = topic.served(index)
    if served is not None:
        return await stage_here(topic, served, part, transaction=transaction, home=home)
    work = prepare_at(topic, index, part, transaction=transaction, home=home)
    return StagedPart(index, asyncio.ensure_future(work))


async def _tell(topic: Topic, partitions: list[int], transaction: bytes, *, commit: bool) -> None:
    """Give participants a copy of the decision. One that does not get it will ask."""
    results = await asyncio.gather(
        *(apply_at(topic, index, transaction, commit=commit) for index in partitions),
        return_exceptions=True,
    )
    for index, result in zip(partitions, results, strict=True):
        if isinstance(result, PenstockError):
            log.info("a decision was not told", partition=index, error=result.message)
        elif isinstance(result, BaseException):
            raise result


async def _abort(topic: Topic, home: int, participants: list[int], transaction: bytes) -> None:
    """Decide against. If even that is not possible now, participants ask for it later."""
    try:
        outcome = await decide_at(topic, home, transaction, commit=False)
    except PenstockError as error:
        log.warning("an atomic batch is in doubt", home=home, error=error.message)
        return
    await _tell(topic, [i for i in participants if i != home], transaction, commit=outcome)


async def resolve_in_doubt(topic: Topic, *, older_ms: int | None = None) -> int:
    """Give what is prepared here, for that long at least, the decision of its home partition.

    Homes are asked side by side, and each fails by itself: what one of them cannot answer now must
    not keep the batches of others invisible. Returns how many were resolved.
    """
    slots = asyncio.Semaphore(HOMES_MAX)

    async def ask(home: int, doubts: list[tuple[Partition, bytes]]) -> int:
        async with slots:
            return await _resolve_of(topic, home, doubts)

    async with asyncio.TaskGroup() as group:
        asking = [
            group.create_task(ask(home, doubts))
            for home, doubts in _in_doubt(topic, older_ms).items()
        ]
    return sum(task.result() for task in asking)


def _in_doubt(topic: Topic, older_ms: int | None) -> dict[int, list[tuple[Partition, bytes]]]:
    """What is prepared in the partitions served here, by home."""
    found: dict[int, list[tuple[Partition, bytes]]] = {}
    for partition in topic.local:
        for transaction, prepared in partition.heap.prepared.items():
            if older_ms is None or prepared.time_ms <= partition.journal.now_ms() - older_ms:
                found.setdefault(prepared.home, []).append((partition, transaction))
    return found


async def _resolve_of(topic: Topic, home: int, doubts: list[tuple[Partition, bytes]]) -> int:
    """Ask one home, as long as it answers; returns how many batches it told of."""
    for resolved, (partition, transaction) in enumerate(doubts):
        try:
            decision = await outcome_at(topic, home, transaction)
            if partition.journal.failed is None:
                apply_here(topic, partition, transaction, commit=decision)
        except PenstockError as error:
            log.warning(
                "still in doubt", topic=topic.config.name, home=home,
                count=len(doubts) - resolved, error=error.message,
            )  # fmt: skip
            return resolved
    return len(doubts)
