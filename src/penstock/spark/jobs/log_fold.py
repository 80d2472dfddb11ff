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
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from penstock.errors import Corruption, FailedPrecondition
from penstock.model.batch import Batch, Kind, decode, verify_chain
from penstock.propagation.fold.propagator import Propagator
from penstock.propagation.fold.snapshot import digest
from penstock.propagation.options import PropagationOptions
from penstock.sinks.schema import DELTAS, states_table
from penstock.spark.fold.partition_step import (
    find_forgotten,
    fold_deltas,
    read_deltas,
    released_table,
)
from penstock.spark.fold.state import add_counts
from penstock.spark.source.options import Connecting
from penstock.spark.source.ranges import ReadRange

MESSAGES: Final = frozenset({Kind.ENQ, Kind.PREPARE})
FEED_BYTES: Final = 64 << 20  # of the log given to the kernels at once
STATES_ROWS: Final = 20_000  # of a record batch of states


def log_ranges(
    node: Connecting, topics: Sequence[str], *, until_ms: int | None = None
) -> list[ReadRange]:
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
            found.append(ReadRange(topic, partition, status.sequence_first, last))
    return found


def loss_of(one: ReadRange) -> str | None:
    """Why no state can be made of a range; None if the log is there from its beginning."""
    if one.first == 1:
        return None
    return (
        f"{one.topic}/{one.partition} begins at sequence {one.first}: retention has deleted"
        " what the vectors were made of"
    )


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


@contextmanager
def scratch(folder: Path | None) -> Iterator[Path]:
    """A new folder inside `folder`, which driver and executors share; gone when the job ends. None:
    one for temporary files, which does where both are on this machine."""
    own = (folder or Path(tempfile.gettempdir())) / f".job-{uuid.uuid4().hex}"
    own.mkdir(parents=True)
    try:
        yield own
    finally:
        shutil.rmtree(own)


@dataclass(kw_only=True)
class PartitionFold:
    """What one task found; the files that it wrote are in the folder."""

    range: ReadRange
    folder: Path
    check: LogCheck
    digest: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    damage: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return f"{self.range.topic}-{self.range.partition}"

    def file(self, what: str) -> str:
        return str(self.folder / f"{self.name}.{what}.arrow")

    def states(self) -> pa.Table:
        return self._mapped("states")

    def released(self) -> pa.Table:
        return self._mapped("released")

    def _mapped(self, what: str) -> pa.Table:
        with pa.memory_map(self.file(what)) as file:
            return pa.ipc.open_stream(file).read_all()


def fold_partitions(spark: Any, ranges: Sequence[ReadRange], **told: Any) -> list[PartitionFold]:
    """`fold_partition` on Spark, a task for each range; the answers come in their order."""
    tasks = spark.sparkContext.parallelize(ranges, len(ranges))
    return list(tasks.map(partial(fold_partition, **told)).collect())


def fold_whole(spark: Any, ranges: Sequence[ReadRange], **told: Any) -> list[PartitionFold]:
    """`fold_partitions` of what must be whole: refuses a log that was cut, and one with damage."""
    for one in ranges:
        if loss := loss_of(one):
            raise FailedPrecondition(loss, sequence_first=one.first)
    folds = fold_partitions(spark, ranges, **told)
    for fold in folds:
        if fold.damage is not None:
            place = f"{fold.range.topic}/{fold.range.partition}"
            raise Corruption(f"{place}: {fold.damage['reason']}")
    return folds


def fold_partition(
    one: ReadRange,
    *,
    node: Connecting,
    folder: Path,
    options: PropagationOptions,
    deltas: bool = False,
    payloads: bool = False,
) -> PartitionFold:
    """Fold one partition. With `deltas` what was released is written too, with `payloads` in its
    original bytes."""
    access = node.access()
    place: dict[str, Any] = {"topic": one.topic, "partition": one.partition}
    state = Propagator(access.config(one.topic).dimensions, options)
    check = LogCheck(first=one.first)
    found = PartitionFold(range=one, folder=folder, check=check)
    feeds = read_deltas(
        access, **place, first=one.first, last=one.last, check=check.feed, bytes_max=FEED_BYTES
    )
    outcomes = fold_deltas(
        state, feeds, answer=lambda _: find_forgotten(access, **place, state=state), states=False
    )
    file = pa.ipc.new_stream(found.file("released"), DELTAS) if deltas else nullcontext()
    try:
        with file as released:
            for outcome in outcomes:
                add_counts(found.counts, outcome.counts)
                if released is not None:
                    table = released_table(outcome, **place, payloads=payloads)
                    released.write_table(table)
        check.reached(one.last)
    except Corruption as damage:
        found.damage = {"reason": damage.message, "sequence": damage.details.get("sequence")}
        return found
    found.digest = digest(state)
    table = states_table(state.states(), **place)
    with pa.ipc.new_stream(found.file("states"), table.schema) as states:
        states.write_table(table, max_chunksize=STATES_ROWS)
    return found
