"""The fold of partitions in tasks, for jobs: from the log to tables of Arrow, piece by piece.

A task reads its range of the log from the node with everything in it, proves it batch by batch,
and feeds the deltas to the kernels. What comes out is handed on as it comes; nothing is kept but
the state of the fold.

**Where a fold begins.** The state is a function of the log, so it may begin at the log's first
sequence, or at a snapshot that the pipeline has left and read the log from there (`PlannedFold`). A
snapshot serves if it is of this topic, if it is not beyond the range's end, and if the log that is
left joins it without a gap. What retention has deleted before it is not missed. The whole range is
proved all the same, also the part that is in the snapshot. Where neither serves, the pipeline's
lake may (`penstock.spark.jobs.lake_fold`).

Parents that a fold asks back are looked for in the log. Up to where the pipeline has folded it has
the answers in its head: retention may have deleted since what was found then.

Damage ends the fold of its partition and is part of the answer, not an error of the job: the other
partitions are still worth knowing.

The proof (`LogCheck`) is that what came is what was written, and nothing is missing:

- CRC: header and body of a batch are the bytes that were sealed.
- Gapless: a batch begins right behind the one before it.
- Chain: the batch's hash follows from that of the one before it, so that two logs with the same
  last hash are the same. A compacted batch keeps its hash but not all it was made of: it is taken
  at its word, and the next one proves it.

A log that retention has shortened is proved from its first batch on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import pyarrow as pa

from penstock.errors import Corruption, FailedPrecondition
from penstock.model.batch import Batch, Kind, decode, verify_chain
from penstock.model.delta_batch import DeltaBatch
from penstock.propagation.fold.propagator import Propagator
from penstock.propagation.fold.snapshot import digest
from penstock.propagation.options import PropagationOptions
from penstock.sinks.schema import states_table
from penstock.spark.delivery.attachment import SinkSpec
from penstock.spark.fold.partition_step import (
    FoldPlan,
    PartitionStep,
    find_forgotten,
    fold_deltas,
    released_table,
)
from penstock.spark.fold.state import FoldHead, Heads, add_counts
from penstock.spark.source.options import Connecting
from penstock.spark.source.ranges import FoldRange
from penstock.spark.source.rows import BatchPiece, deltas_of, pieces
from penstock.spark.store import StoreAddress

MESSAGES: Final = frozenset({Kind.ENQ, Kind.PREPARE})
FEED_BYTES: Final = 64 << 20  # of the log given to the kernels at once
STATES_ROWS: Final = 20_000  # of a piece of states
Origin = Literal["log", "snapshot", "lake"]


def log_ranges(
    node: Connecting, topics: Sequence[str], *, until_ms: int | None = None
) -> list[FoldRange]:
    """Everything readable of the topics' partitions as of now, or up to the last batch that was
    written at or before `until_ms`. An empty partition's range ends before it begins."""
    access = node.access()
    found = []
    for topic in topics:
        access.delta_config(topic)
        for status in access.log_status(topic):
            last, partition = status.readable, status.partition
            if until_ms is not None:
                last = min(last, access.find_time(topic, partition, until_ms + 1) - 1)
            found.append(
                FoldRange(topic, partition, status.sequence_first, last, topic_id=status.topic_id)
            )
    return found


class LogCheck:
    """Feed it the batches of one partition, of all kinds and in order; it raises `Corruption`."""

    def __init__(self, *, first: int) -> None:
        self.next = first
        # The hash before `first`: 0 where a log begins, unknown where retention has cut it.
        self.chain: int | None = 0 if first == 1 else None
        self.epoch = 0
        self.batches = self.messages = self.bytes = 0

    def feed(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            try:
                self._check(batch)
            except Corruption as damage:
                raise Corruption(damage.message, sequence=self.next) from damage
            self.next, self.chain, self.epoch = batch.last + 1, batch.chain, batch.epoch
            self.batches += 1
            self.bytes += batch.size
            self.messages += batch.entries if batch.kind in MESSAGES else 0

    def _check(self, batch: Batch) -> None:
        if batch.first != self.next:
            raise Corruption(f"sequence {self.next} is missing: a batch begins at {batch.first}")
        decode(batch.encode())
        if self.chain is not None:
            verify_chain(batch, self.chain)
        if batch.epoch < self.epoch:
            raise Corruption(f"epoch {batch.epoch} follows epoch {self.epoch}")

    def reached(self, last: int) -> None:
        if self.next <= last:
            raise Corruption(f"the log ends at {self.next - 1}, not {last}", sequence=self.next)


@dataclass(frozen=True, kw_only=True)
class PlannedFold:
    """A range of the log, all of which is proved, and what its fold begins from."""

    range: FoldRange
    head: FoldHead | None = None  # of the pipeline, if it has folded this partition
    origin: Origin = "log"

    @property
    def begin(self) -> int:
        """The first sequence that is folded."""
        if self.head is None:
            return self.range.first
        if self.origin == "snapshot":
            return self.head.snapshot_sequence + 1
        return max(self.range.first, self.head.start)

    @property
    def loss(self) -> str | None:
        """Why no state can be made of it; None if everything that it is made of is there."""
        if self.origin != "log" or self.range.first == 1:
            return None
        if self.head is not None and self.head.start >= self.range.first:
            return None  # the pipeline itself began there
        one = self.range
        return (
            f"{one.topic}/{one.partition} begins at sequence {one.first}: retention has deleted"
            f" what the vectors were made of, and {self._unserved}"
        )

    @property
    def _unserved(self) -> str:
        if self.head is None:
            return "no pipeline has a snapshot of it"
        if not self.head.snapshots:
            return "the pipeline has no snapshot of it yet"
        at = self.head.snapshot_sequence
        if at > self.range.last:
            return f"the pipeline's snapshot is of sequence {at}, which is later than was asked for"
        if at >= self.range.first - 1:
            return f"what was released up to the pipeline's snapshot, of sequence {at}, is wanted"
        return f"the pipeline's snapshot is of sequence {at}, to which the log no longer reaches"


def fold_tasks(
    ranges: Sequence[FoldRange], heads: Heads, *, use: Literal["always", "if cut"]
) -> list[PlannedFold]:
    """A task for each range. Snapshots are used wherever there is one that serves, or only where
    retention has deleted the log's beginning."""
    return [_task(one, heads, use=use) for one in ranges]


def _task(one: FoldRange, heads: Heads, *, use: Literal["always", "if cut"]) -> PlannedFold:
    topic = heads.get(one.topic)
    head = None if topic is None else topic.partitions.get(one.partition)
    if topic is None or head is None or topic.id != one.topic_id:
        return PlannedFold(range=one)
    serves = head.snapshots and one.first - 1 <= head.snapshot_sequence <= one.last
    if serves and (use == "always" or one.first > head.start):
        return PlannedFold(range=one, head=head, origin="snapshot")
    return PlannedFold(range=one, head=head)


def reject_lost(tasks: Sequence[PlannedFold]) -> None:
    for task in tasks:
        if task.loss is not None:
            raise FailedPrecondition(task.loss, sequence_first=task.range.first)


class FoldOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What every task of a fold is told."""

    node: Connecting
    options: PropagationOptions
    state: StoreAddress | None = None  # where snapshots are
    lake: SinkSpec | None = None  # for tasks that begin from one


class FoldReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a task found out about its partition, but for the rows."""

    topic: str
    partition: int
    first: int
    last: int
    origin: Origin
    begin: int
    ordinal: int  # of the last delta that was released before `begin`
    batches: int
    messages: int
    bytes: int
    vectors: int = 0
    chain: int | None = None
    digest: int | None = None
    counts: dict[str, int] = {}
    damage: dict[str, Any] | None = None

    @property
    def place(self) -> tuple[str, int]:
        return self.topic, self.partition


class ProvedFold:
    """One task's fold: `released` to its end, then `states` and `report`."""

    def __init__(self, order: FoldOrder, task: PlannedFold) -> None:
        self._task, self._access = task, order.node.access()
        one = task.range
        self._place: dict[str, Any] = {"topic": one.topic, "partition": one.partition}
        self._check = LogCheck(first=one.first)
        self._counts: dict[str, int] = {}
        self._vectors = 0
        self.damage: dict[str, Any] | None = None
        self._state = self._begun(order)
        self._ordinal = self._state.ordinal

    def _begun(self, order: FoldOrder) -> Propagator:
        """The state at the sequence before the first that is folded."""
        topic, head = self._task.range.topic, self._task.head
        dimensions = self._access.config(topic).dimensions
        if head is None or self._task.origin == "log":
            return Propagator(dimensions, order.options)
        assert order.state is not None, "a snapshot lies in a store"
        plan = FoldPlan(
            pipeline="", node=order.node, state=order.state, claim=0,
            dimensions={topic: dimensions}, options=order.options, snapshot_deltas=0,
        )  # fmt: skip
        at_snapshot = msgspec.structs.replace(head, sequence=head.snapshot_sequence)
        return PartitionStep(plan, self._task.range).state_at(at_snapshot)

    def released(self, *, payloads: bool = False) -> Iterator[pa.Table]:
        """What the fold releases, in the order of release; with `payloads` in its original bytes.
        It ends early where the log is damaged."""
        outcomes = fold_deltas(self._state, self._feeds(), answer=self._answer, states=False)
        try:
            for outcome in outcomes:
                add_counts(self._counts, outcome.counts)
                yield released_table(outcome, **self._place, payloads=payloads)
            self._check.reached(self._task.range.last)
        except Corruption as damage:
            self.damage = {"reason": damage.message, "sequence": damage.details.get("sequence")}

    def drain(self) -> None:
        """Fold to the end, for whoever wants nothing but the states."""
        for _ in self.released():
            pass

    def _feeds(self) -> Iterator[tuple[DeltaBatch, int]]:
        one, head = self._task.range, self._task.head
        reading = self._access.read_range(
            one.topic, one.partition, one.first, one.last, check=self._check.feed
        )
        return feeds_of(
            reading, first=self._task.begin, cut=0 if head is None else head.sequence, last=one.last
        )

    def _answer(self, wanted: Iterable[bytes]) -> Set[bytes]:
        head = self._task.head if self._task.origin == "snapshot" else None
        if head is not None and self._state.sequence < head.sequence:
            return frozenset(map(bytes.fromhex, head.found)).intersection(wanted)
        return find_forgotten(self._access, **self._place, state=self._state)

    def states(self) -> Iterator[pa.Table]:
        """All vectors, deleted ones too, in pieces; none of a damaged log."""
        if self.damage is None:
            table = states_table(self._state.states(), **self._place)
            self._vectors = table.num_rows
            for start in range(0, table.num_rows, STATES_ROWS):
                yield table.slice(start, STATES_ROWS)

    def reject_damage(self) -> None:
        if self.damage is not None:
            one = self._task.range
            raise Corruption(f"{one.topic}/{one.partition}: {self.damage['reason']}")

    def report(self) -> FoldReport:
        one, check = self._task.range, self._check
        return FoldReport(
            topic=one.topic,
            partition=one.partition,
            first=one.first,
            last=one.last,
            origin=self._task.origin,
            begin=self._task.begin,
            ordinal=self._ordinal,
            batches=check.batches,
            messages=check.messages,
            bytes=check.bytes,
            vectors=self._vectors,
            chain=check.chain,
            digest=None if self.damage is not None else digest(self._state),
            counts=self._counts,
            damage=self.damage,
        )


def feeds_of(
    reading: Iterable[Sequence[Batch]], *, first: int, cut: int, last: int
) -> Iterator[tuple[DeltaBatch, int]]:
    """The deltas of `[first, last]`, each time with the sequence up to which they reach. What comes
    before `first` is read over. No piece reaches across `cut`."""
    feed = _Feed(at=first)
    for ready in reading:
        end = min(ready[-1].last, last)
        if feed.at <= cut < end:
            feed.take(ready, through=cut)
            yield feed.give(through=cut)
        feed.take(ready, through=end)
        if feed.size >= FEED_BYTES:
            yield feed.give(through=end)
    yield feed.give(through=max(last, feed.at - 1))


@dataclass
class _Feed:
    at: int  # the first sequence that was not given yet

    def __post_init__(self) -> None:
        self._held: list[BatchPiece] = []
        self.size = 0

    def take(self, batches: Sequence[Batch], *, through: int) -> None:
        if self.at <= through:
            self._held += pieces(batches, first=self.at, last=through)
            self.size += sum(batch.size for batch in batches)

    def give(self, *, through: int) -> tuple[DeltaBatch, int]:
        deltas = deltas_of(self._held)
        self.at, self._held, self.size = through + 1, [], 0
        return deltas, through
