"""The fold of whole partitions on Spark: one task each, from the log to files of Arrow.

A task reads its range of the log from the node with everything in it, proves it batch by batch
(`logcheck`), and feeds the deltas to the kernels. What comes out goes to the job's folder, which
the driver and the executors share: the states as one stream of Arrow, what was released, if wanted,
as another. The driver maps those files; it never holds the log.

Damage ends the fold of its partition and is part of the answer, not an error of the job: the other
partitions are still worth knowing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from penstock.errors import Corruption
from penstock.model.deltas import DeltaBatch
from penstock.propagation.partition import Outcome, PropagationOptions, Propagator
from penstock.sinks.schema import DELTAS, deltas_table, states_table
from penstock.spark.fold.log_deltas import deltas_of, find_forgotten
from penstock.spark.fold.output import LAST
from penstock.spark.jobs.logcheck import LogCheck
from penstock.spark.jobs.ranges import LogRange
from penstock.spark.source.decisions import Decisions
from penstock.spark.source.options import Connecting
from penstock.spark.source.rows import Piece, pieces

FEED_ROWS: Final = 50_000  # deltas given to the kernels at once
STATES_ROWS: Final = 20_000  # of a record batch of states
Feeds = Iterator[tuple[DeltaBatch, int]]


@dataclass(frozen=True, kw_only=True)
class FoldTask:
    """What one task is to do."""

    node: Connecting
    range: LogRange
    folder: Path
    options: PropagationOptions = field(default_factory=PropagationOptions)
    deltas: bool = False  # write what was released, too
    payloads: bool = False  # and with the original bytes


@dataclass(kw_only=True)
class PartitionFold:
    """What one task found. Files lie in the job's folder."""

    topic: str
    partition: int
    first: int
    last: int
    dimensions: int
    batches: int = 0
    messages: int = 0
    bytes: int = 0
    chain: int | None = None
    digest: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    damage: dict[str, Any] | None = None
    states: str | None = None
    released: str | None = None

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.partition}"


def fold_partitions(spark: Any, tasks: Sequence[FoldTask]) -> list[PartitionFold]:
    """Run the tasks on Spark, one Spark task each; the answers come in the order of the tasks."""
    if not tasks:
        return []
    context = spark.sparkContext
    return list(context.parallelize(tasks, len(tasks)).map(fold_partition).collect())


def fold_partition(task: FoldTask) -> PartitionFold:
    """Fold one partition; runs in a worker of Spark."""
    found = PartitionFold(
        topic=task.range.topic,
        partition=task.range.partition,
        first=task.range.first,
        last=task.range.last,
        dimensions=task.range.dimensions,
    )
    propagator = Propagator(task.range.dimensions, task.options)
    check = LogCheck(first=task.range.first)
    released = _Released(task)
    try:
        with released:
            for outcome in _fold(task, propagator, _feeds(task, check)):
                released.add(outcome)
                _add(found.counts, outcome.counts)
    except Corruption as damage:
        found.damage = {"reason": damage.message, "sequence": damage.details.get("sequence")}
    found.batches, found.messages, found.bytes = check.batches, check.messages, check.bytes
    found.chain = check.chain
    if found.damage is None:
        found.digest = propagator.digest()
        found.states, found.released = _write_states(task, propagator), released.name
    return found


def _add(counts: dict[str, int], more: Mapping[str, int]) -> None:
    for name, value in more.items():
        counts[name] = value if name in LAST else counts.get(name, 0) + value


def _feeds(task: FoldTask, check: LogCheck) -> Feeds:
    """The range's deltas in pieces, each with the sequence up to which it reaches."""
    one = task.range
    if one.last < one.first:
        return
    decisions = Decisions(one.last)
    log = task.node.access().read_log(
        one.topic, one.partition, one.first, one.last, decisions=decisions
    )
    held: list[Piece] = []
    for batches in log:
        check.feed(batches)
        held += pieces(decisions.feed(batches), first=one.first, last=one.last)
        if sum(piece.count for piece in held) >= FEED_ROWS:
            yield deltas_of(held), held[-1].batch.last
            held = []
    if check.next <= one.last:
        raise Corruption(f"the log ends at {check.next - 1}, not {one.last}", sequence=check.next)
    yield deltas_of(held), one.last


def _fold(task: FoldTask, state: Propagator, feeds: Feeds) -> Iterator[Outcome]:
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

    def add(self, outcome: Outcome) -> None:
        if self._file is not None:
            one = self._task.range
            table = deltas_table(
                outcome, topic=one.topic, partition=one.partition, payloads=self._task.payloads
            )
            self._file.write_table(table)

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def open_table(folder: Path, name: str) -> pa.Table:
    """A file that a task wrote, mapped."""
    with pa.memory_map(str(folder / name)) as file:
        return pa.ipc.open_stream(file).read_all()
