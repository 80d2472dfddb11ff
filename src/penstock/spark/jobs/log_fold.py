"""The fold of whole partitions on Spark, for jobs: one task each, from the log to files of Arrow.

A task reads its range of the log from the node with everything in it, proves it batch by batch,
and feeds the deltas to the kernels. What comes out goes to the job's folder, which
the driver and the executors share: the states as one stream of Arrow, what was released, if wanted,
as another. The driver maps those files; it never holds the log.

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

import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from penstock.errors import Corruption, FailedPrecondition
from penstock.model.batch import Batch, Kind, decode, verify_chain
from penstock.model.delta_batch import DeltaBatch
from penstock.model.topic import TopicKind
from penstock.propagation.fold.propagator import FeedOutcome, Propagator
from penstock.propagation.fold.snapshot import digest
from penstock.propagation.options import PropagationOptions
from penstock.sinks.schema import DELTAS, states_table
from penstock.spark.fold.changes import add_counts
from penstock.spark.fold.log_deltas import find_forgotten
from penstock.spark.fold.partition_step import released_table
from penstock.spark.source.access import NodeAccess
from penstock.spark.source.decisions import Decisions
from penstock.spark.source.options import Connecting
from penstock.spark.source.rows import BatchPiece, deltas_of, pieces


@dataclass(frozen=True, kw_only=True)
class LogRange:
    """Sequences `first` to `last` of one partition; `last` < `first`: nothing."""

    topic: str
    partition: int
    first: int
    last: int
    dimensions: int

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.partition}"

    @property
    def loss(self) -> str | None:
        """Why no state can be made of it; None if the log is there from its beginning."""
        if self.first == 1:
            return None
        return (
            f"{self.topic}/{self.partition} begins at sequence {self.first}: retention has deleted"
            " what the vectors were made of"
        )


def log_ranges(
    node: Connecting, topics: Sequence[str], *, until_ms: int | None = None
) -> list[LogRange]:
    """Everything readable of the topics' partitions as of now, or up to the last batch that was
    written at or before `until_ms`."""
    access = node.access()
    found = []
    for topic in topics:
        dimensions = _dimensions(access, topic)
        for status in access.log_status(topic):
            last, partition = status.readable, status.partition
            if until_ms is not None:
                last = min(last, access.find_time(topic, partition, until_ms + 1) - 1)
            found.append(
                LogRange(
                    topic=topic,
                    partition=partition,
                    first=status.sequence_first,
                    last=last,
                    dimensions=dimensions,
                )
            )
    return found


def _dimensions(access: NodeAccess, topic: str) -> int:
    config = access.config(topic)
    if config.kind is not TopicKind.DELTA:
        raise FailedPrecondition(
            f"{topic} is a {config.kind.value} topic, not one of deltas", field="topics"
        )
    return config.dimensions


MESSAGES: Final = frozenset({Kind.ENQ, Kind.PREPARE})


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
            self._pass(batch)

    def _check(self, batch: Batch) -> None:
        if batch.first != self.next:
            raise Corruption(f"sequence {self.next} is missing: a batch begins at {batch.first}")
        decode(batch.encode())
        if self.chain is not None:
            verify_chain(batch, self.chain)
        if batch.epoch < self.epoch:
            raise Corruption(f"epoch {batch.epoch} follows epoch {self.epoch}")

    def _pass(self, batch: Batch) -> None:
        self.next, self.chain, self.epoch = batch.last + 1, batch.chain, batch.epoch
        self.batches += 1
        self.bytes += batch.size
        if batch.kind in MESSAGES:
            self.messages += batch.entries


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A new folder inside `folder`, which driver and executors share; gone when the job ends."""
    own = folder / f".job-{uuid.uuid4().hex}"
    own.mkdir(parents=True)
    try:
        yield own
    finally:
        shutil.rmtree(own)


FEED_ROWS: Final = 50_000  # deltas given to the kernels at once
STATES_ROWS: Final = 20_000  # of a record batch of states
Feeds = Iterator[tuple[DeltaBatch, int]]


@dataclass(frozen=True, kw_only=True)
class FoldTask:
    """What one task is to do."""

    node: Connecting
    range: LogRange
    folder: Path
    options: PropagationOptions
    deltas: bool  # write what was released, too
    payloads: bool  # and with the original bytes


@dataclass(kw_only=True)
class PartitionFold:
    """What one task found, and the files that it wrote."""

    range: LogRange
    folder: Path
    batches: int = 0
    messages: int = 0
    bytes: int = 0
    chain: int | None = None
    digest: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    damage: dict[str, Any] | None = None
    states_file: str | None = None
    released_file: str | None = None

    def states(self) -> pa.Table:
        return self._mapped(self.states_file)

    def released(self) -> pa.Table:
        return self._mapped(self.released_file)

    def _mapped(self, name: str | None) -> pa.Table:
        assert name is not None, "the task wrote no such file"
        with pa.memory_map(str(self.folder / name)) as file:
            return pa.ipc.open_stream(file).read_all()


def fold_partitions(
    spark: Any,
    ranges: Sequence[LogRange],
    *,
    node: Connecting,
    folder: Path,
    options: PropagationOptions,
    deltas: bool = False,
    payloads: bool = False,
) -> list[PartitionFold]:
    """Fold ranges on Spark, a task each; the answers come in their order."""
    tasks = [
        FoldTask(
            node=node, range=one, folder=folder, options=options, deltas=deltas, payloads=payloads
        )
        for one in ranges
    ]
    if not tasks:
        return []
    return list(spark.sparkContext.parallelize(tasks, len(tasks)).map(fold_partition).collect())


def fold_whole(spark: Any, ranges: Sequence[LogRange], **told: Any) -> list[PartitionFold]:
    """`fold_partitions` of what must be whole: refuses a log that was cut, and one with damage."""
    for one in ranges:
        if one.loss is not None:
            raise FailedPrecondition(one.loss, sequence_first=one.first)
    folds = fold_partitions(spark, ranges, **told)
    for fold in folds:
        if fold.damage is not None:
            place = f"{fold.range.topic}/{fold.range.partition}"
            raise Corruption(f"{place}: {fold.damage['reason']}")
    return folds


def fold_partition(task: FoldTask) -> PartitionFold:
    """Fold one partition; runs in a worker of Spark."""
    found = PartitionFold(range=task.range, folder=task.folder)
    propagator = Propagator(task.range.dimensions, task.options)
    check = LogCheck(first=task.range.first)
    released = _Released(task)
    try:
        with released:
            for outcome in _fold(task, propagator, _feeds(task, check)):
                released.add(outcome)
                add_counts(found.counts, outcome.counts)
    except Corruption as damage:
        found.damage = {"reason": damage.message, "sequence": damage.details.get("sequence")}
    found.batches, found.messages, found.bytes = check.batches, check.messages, check.bytes
    found.chain = check.chain
    if found.damage is None:
        found.digest = digest(propagator)
        found.states_file, found.released_file = _write_states(task, propagator), released.name
    return found


def _feeds(task: FoldTask, check: LogCheck) -> Feeds:
    """The range's deltas in pieces, each with the sequence up to which it reaches."""
    one = task.range
    if one.last < one.first:
        return
    decisions = Decisions(one.last)
    log = task.node.access().read_log(
        one.topic, one.partition, one.first, one.last, decisions=decisions
    )
    held: list[BatchPiece] = []
    for batches in log:
        check.feed(batches)
        held += pieces(decisions.feed(batches), first=one.first, last=one.last)
        if sum(piece.count for piece in held) >= FEED_ROWS:
            yield deltas_of(held), held[-1].batch.last
            held = []
    if check.next <= one.last:
        raise Corruption(f"the log ends at {check.next - 1}, not {one.last}", sequence=check.next)
    yield deltas_of(held), one.last


def _fold(task: FoldTask, state: Propagator, feeds: Feeds) -> Iterator[FeedOutcome]:
    one = task.range
    for deltas, through in feeds:
        yield state.feed(deltas, through=through, states=False)
        while state.missing():
            found = find_forgotten(task.node.access(), one.topic, one.partition, state)
            yield state.resolve(found)


def _write_states(task: FoldTask, state: Propagator) -> str:
    name = f"{task.range.name}.states.arrow"
    table = states_table(state.states(), topic=task.range.topic, partition=task.range.partition)
    with pa.ipc.new_stream(str(task.folder / name), table.schema) as file:
        file.write_table(table, max_chunksize=STATES_ROWS)
    return name


class _Released:
    """The file with what was released, if it is wanted."""

    def __init__(self, task: FoldTask) -> None:
        self.name = f"{task.range.name}.released.arrow" if task.deltas else None
        self._task = task
        self._file: Any = None

    def __enter__(self) -> _Released:
        if self.name is not None:
            self._file = pa.ipc.new_stream(str(self._task.folder / self.name), DELTAS)
        return self

    def add(self, outcome: FeedOutcome) -> None:
        if self._file is not None:
            one = self._task.range
            table = released_table(
                outcome, topic=one.topic, partition=one.partition, payloads=self._task.payloads
            )
            self._file.write_table(table)

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
