"""Filling a sink that cannot go on by the change log: one that is new in an old pipeline, or whose
store was emptied or restored.

The fold's own state has every vector. Tasks make it as of the newest trigger, from the snapshot and
the log behind it, and write it to files like those of a trigger; then they are written into the
sink as a trigger is, by routes, shards, receipts and one commit. A sink that is fed deltas is given
all of them in the order of release, for which the log must reach back to its beginning.

Where retention has deleted what that takes (`lost`), a lake of the pipeline stands in (`lakes`), or
from the first if the sink is told so: tasks read vectors from the lake's files, and deltas from its
history partition by partition. The lake may hold more than the trigger that the sink is filled up
to. Of vectors that does no harm, and newer deltas are left out.

Sinks compare revisions, and every deleted vector is among the states, so an older copy of a sink is
brought up to date without being emptied. Until it is, no trigger behind the one that it is filled
up to is deleted. A driver that dies meanwhile leaves files that no manifest names: the next one
sweeps them, and fills the sink as of its own newest trigger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import NotFound
from penstock.propagation.fold.propagator import Propagator
from penstock.sinks.lake import VECTORS, LakePiece, LakeSink
from penstock.sinks.protocol import Feed
from penstock.sinks.schema import states_by_dimensions, states_table
from penstock.sinks.topics import Place
from penstock.spark.delivery.attachment import SinkSpec
from penstock.spark.delivery.lakes import lake_deltas, opened_lake
from penstock.spark.fold.partition_step import (
    FoldPlan,
    PartitionStep,
    find_forgotten,
    fold_deltas,
    read_deltas,
    released_table,
    write_states,
)
from penstock.spark.fold.state import ChangePart, ChangeWriter, FoldHead, Manifest
from penstock.spark.source.access import LogStatus
from penstock.spark.source.ranges import ReadRange

_HISTORY: Final = Feed.DELTAS | Feed.PAYLOADS
FEED_BYTES: Final = 64 << 20  # of the log, whose deltas go to one file
FILE_ROWS: Final = 100_000  # of states

Unit = tuple[ReadRange, FoldHead]


def units_of(manifest: Manifest) -> list[Unit]:
    """What is to be filled: every partition up to where it is folded."""
    return [
        (ReadRange(topic, partition, head.start, head.sequence), head)
        for topic, heads in manifest.heads.items()
        for partition, head in heads.partitions.items()
        if head.sequence >= head.start
    ]


def lost(
    manifest: Manifest, feed: Feed, *, status: Callable[[str], Iterable[LogStatus]]
) -> str | None:
    """What retention has deleted of the log that a sink with this feed is to be filled from; None
    if everything is there. `status` asks the node for a topic's log."""
    for topic, heads in manifest.heads.items():
        try:
            firsts = {one.partition: one.sequence_first for one in status(topic)}
        except NotFound as gone:
            return gone.message
        for partition, head in heads.partitions.items():
            begin, first = _begin(head, feed), firsts[partition]
            if begin <= head.sequence and begin < first:
                return (
                    f"the log of {topic}/{partition} begins at sequence {first}, and what the sink"
                    f" lacks is made of it from sequence {begin} on"
                )
    return None


def _begin(head: FoldHead, feed: Feed) -> int:
    """The first sequence that a filling reads."""
    whole = feed & _HISTORY or not head.snapshots
    return head.start if whole else head.snapshot_sequence + 1


class RefillPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What every task of a filling is told."""

    fold: FoldPlan
    sink: str
    feed: Feed  # what the sink is to be given


def fill_files(plan: RefillPlan, unit: Unit) -> list[ChangePart]:
    """One partition's files, durable when it returns."""
    return list(_PartitionFill(plan, *unit).files())


LakeUnit = LakePiece | Unit  # vectors of some files, or the deltas of a partition


def lake_units(lake: LakeSink, feed: Feed, manifest: Manifest) -> list[LakeUnit]:
    """What is to be read of a lake for a sink with this feed."""
    pieces = lake.pieces() if feed & Feed.STATES else []
    return [*pieces, *(units_of(manifest) if feed & _HISTORY else [])]


def lake_files(plan: RefillPlan, lake: SinkSpec, unit: LakeUnit) -> list[ChangePart]:
    """Files of some of what a lake holds, durable when it returns."""
    with opened_lake(lake) as source:
        if isinstance(unit, LakePiece):
            return list(_lake_vectors(plan, source, unit))
        return list(_lake_history(plan, source, unit))


def _lake_vectors(plan: RefillPlan, lake: LakeSink, piece: LakePiece) -> Iterator[ChangePart]:
    """The states in some of a lake's files, with the older rows of a vector among them."""
    store = plan.fold.state.open()
    for place, states in _by_place(lake.vectors.read_piece(piece, VECTORS.names)):
        writer = ChangeWriter(
            store, claim=plan.fold.claim, topic=place[0], partition=place[1], sink=plan.sink
        )
        write_states(writer, states, sharded=plan.fold.sharded)
        yield writer.finish(first=1, last=1, counts={})


def _lake_history(plan: RefillPlan, lake: LakeSink, unit: Unit) -> Iterator[ChangePart]:
    """The deltas of a partition in the order of release, up to where its head says."""
    store, (one, head) = plan.fold.state.open(), unit
    for deltas in lake_deltas(lake, (one.topic, one.partition), through=head.sequence):
        writer = ChangeWriter(
            store, claim=plan.fold.claim, topic=one.topic, partition=one.partition, sink=plan.sink
        )
        writer.add("deltas", deltas)
        yield writer.finish(first=one.first, last=one.last, counts={})


def _by_place(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[Place, pa.Table]]:
    """Rows of a lake as STATES of one log partition and one number of dimensions."""
    for batch in batches:
        rows, names = pa.Table.from_batches([batch]), ["topic", "partition"]
        for group in rows.group_by(names).aggregate([]).to_pylist():
            topic, partition = (group[name] for name in names)
            here = (pc.field("topic") == topic) & (pc.field("partition") == partition)
            for states in states_by_dimensions(rows.filter(here)):
                yield (topic, partition), states


class _PartitionFill:
    def __init__(self, plan: RefillPlan, one: ReadRange, head: FoldHead) -> None:
        self._plan, self._range, self._head = plan, one, head
        self._place: dict[str, Any] = {"topic": one.topic, "partition": one.partition}
        self._store = plan.fold.state.open()
        self._access = plan.fold.node.access()

    def files(self) -> Iterator[ChangePart]:
        if self._plan.feed & _HISTORY:
            state = Propagator(
                self._plan.fold.dimensions[self._range.topic], self._plan.fold.options
            )
            yield from self._deltas(state)
        else:
            state = PartitionStep(self._plan.fold, self._range).state_at(self._head)
        if self._plan.feed & Feed.STATES:
            yield from self._states(state)

    def _states(self, state: Propagator) -> Iterator[ChangePart]:
        table = states_table(state.states(), **self._place)
        for start in range(0, table.num_rows, FILE_ROWS):
            writer = self._writer()
            write_states(writer, table.slice(start, FILE_ROWS), sharded=self._plan.fold.sharded)
            yield self._finished(writer)

    def _deltas(self, state: Propagator) -> Iterator[ChangePart]:
        feeds = read_deltas(
            self._access,
            **self._place,
            first=self._range.first,
            last=self._range.last,
            bytes_max=FEED_BYTES,
        )
        answer = lambda _: find_forgotten(self._access, **self._place, state=state)  # noqa: E731
        for outcome in fold_deltas(state, feeds, answer=answer, states=False):
            writer = self._writer()
            payloads = bool(self._plan.feed & Feed.PAYLOADS)
            writer.add("deltas", released_table(outcome, **self._place, payloads=payloads))
            yield self._finished(writer)

    def _writer(self) -> ChangeWriter:
        plan = self._plan
        return ChangeWriter(self._store, claim=plan.fold.claim, sink=plan.sink, **self._place)

    def _finished(self, writer: ChangeWriter) -> ChangePart:
        return writer.finish(first=self._range.first, last=self._range.last, counts={})
