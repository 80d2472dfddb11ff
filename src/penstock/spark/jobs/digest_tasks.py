"""The tasks of the audit that make digests: of what the log adds up to, and of what sinks hold.

A sink is made and opened anew in each task, and read piece by piece (`PiecedSink`); one that has no
pieces is read whole in one task. The tasks of the second look give whole vectors, of a few names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.errors import InvalidArgument, Unsupported
from penstock.model.batch import Batch
from penstock.sinks.lake import LakePiece, LakeSink
from penstock.sinks.protocol import PiecedSink, Sink
from penstock.sinks.topics import Notice
from penstock.spark.delivery.attachment import SinkSpec
from penstock.spark.delivery.transform import states_of
from penstock.spark.fold.partition_step import read_deltas
from penstock.spark.jobs.digests import (
    COMPARED,
    DEAD,
    EXPECTED,
    HELD,
    KEY,
    Keys,
    as_keys,
    delta_digests,
    ids_of,
    keys_in,
    keys_of,
    message_digests,
    shares_of_keys,
    state_digests,
)
from penstock.spark.jobs.log_fold import FoldOrder, PlannedFold, ProvedFold
from penstock.spark.jobs.stores import opened_in_task
from penstock.spark.jobs.takers import Takers, taken_by
from penstock.spark.jobs.tasks import Parcel, parcel, shared_out
from penstock.spark.source.options import Connecting
from penstock.spark.source.ranges import ReadRange
from penstock.spark.source.rows import deltas_of, pieces

Place = tuple[str, int]  # a topic and a partition of it
REPORT, VECTORS, HISTORY, MESSAGES = range(4)  # what a parcel of the fold holds
FoldParcel = tuple[int, str, Any]  # what it holds, the topic, and a parcel or a report
WHOLE: Final = "whole"  # the one piece of a sink that has no pieces
_notices: Final = msgspec.msgpack.Decoder(Notice)


class DigestOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What every task that folds for an audit is told."""

    fold: FoldOrder
    shares: int
    routes: tuple[tuple[str, ...], ...]  # of each sink
    kinds: frozenset[int]  # what is to be made: some sink keeps it


def fold_digests(order: DigestOrder, task: PlannedFold) -> Iterator[FoldParcel]:
    """One task: the digests of what a log partition adds up to, and at the end the report."""
    fold, topic = ProvedFold(order.fold, task), task.range.topic
    takers = Takers(order.routes)
    for deltas in fold.released():
        chosen = takers.of_deltas(deltas)
        made = []
        if HISTORY in order.kinds:
            made.append((HISTORY, delta_digests(deltas, EXPECTED, chosen)))
        if MESSAGES in order.kinds:
            made.append((MESSAGES, message_digests(ids_of(deltas), EXPECTED, chosen)))
        for what, digests in made:
            yield from ((what, topic, one) for one in _by_key(digests, order.shares))
    for states in fold.states():
        digests = state_digests(states, EXPECTED, takers.of_states(states))
        yield from ((VECTORS, topic, one) for one in _by_key(digests, order.shares))
    yield REPORT, topic, fold.report()


def taken_states(order: FoldOrder, route: Sequence[str], task: PlannedFold) -> Iterator[pa.Table]:
    """The states of one task that a sink's routes take, for its transform."""
    fold, takers = ProvedFold(order, task), Takers((route,))
    for deltas in fold.released():
        takers.of_deltas(deltas)
    for states in fold.states():
        yield states.filter(pa.array(taken_by(takers.of_states(states), 0)))


def transformed_digests(shares: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Digests of what a transform gave, as rows of parcels."""
    for states in states_of(batches):
        found = list(_by_key(state_digests(states, EXPECTED), shares))
        numbers, packed = zip(*found, strict=True)
        yield pa.record_batch(
            {"share": pa.array(numbers, pa.int32()), "packed": pa.array(packed, pa.binary())}
        )


def _by_key(digests: pa.Table, shares: int) -> Iterator[Parcel]:
    return shared_out(digests, shares_of_keys(keys_in(digests), shares))


# --- what a sink holds ---


def scan_digests(spec: SinkSpec, shares: int, piece: Any) -> Iterator[Parcel]:
    """One task: a piece of a sink's vectors; `WHOLE` is all of them."""
    with opened_in_task(spec) as sink:
        yield from held_digests(sink, shares, piece)


def held_digests(sink: Sink, shares: int, piece: Any) -> Iterator[Parcel]:
    for batch in scanned(sink, piece):
        if batch.num_rows:
            yield from _by_key(state_digests(batch, HELD), shares)


def buildable(spec: SinkSpec) -> Iterator[bool]:
    """One task: whether the sink can be made where tasks run. Its class may be known to the driver
    alone."""
    try:
        spec.build()
    except InvalidArgument:
        yield False
    else:
        yield True


def scanned(sink: Sink, piece: Any) -> Iterator[pa.RecordBatch]:
    if isinstance(sink, PiecedSink) and piece != WHOLE:
        return sink.scan_piece(piece)
    return sink.scan()


def pieces_of(sink: Sink) -> list[Any]:
    return list(sink.pieces()) if isinstance(sink, PiecedSink) else [WHOLE]


def history_digests(
    spec: SinkSpec, shares: int, begun: Mapping[Place, int], piece: LakePiece
) -> Iterator[Parcel]:
    """One task: a piece of a lake's history, of the pipeline's partitions and behind the ordinals
    that their folds began with."""
    with opened_in_task(spec) as lake:
        assert isinstance(lake, LakeSink)
        for batch in lake.history.read_piece(piece, COMPARED):
            rows = pa.Table.from_batches([batch])
            rows = rows.filter(pa.array(_expected_places(rows, begun)))
            if rows.num_rows:
                yield from _by_key(delta_digests(rows, HELD), shares)


def _expected_places(rows: pa.Table, begun: Mapping[Place, int]) -> NDArray[np.bool_]:
    chosen = np.zeros(rows.num_rows, np.bool_)
    for (topic, partition), ordinal in begun.items():
        here = pc.and_(pc.equal(rows["topic"], topic), pc.equal(rows["partition"], partition))
        later = pc.and_(here, pc.greater(rows["ordinal"], ordinal))
        chosen |= later.to_numpy(zero_copy_only=False)
    return chosen


def _delta_ids(batches: Sequence[Batch]) -> Keys:
    deltas = deltas_of(pieces(batches, first=0, last=1 << 62))
    return as_keys(deltas.delta_id)


def _notice_ids(batches: Sequence[Batch]) -> Keys:
    payloads = [p for batch in batches for p in batch.columns().binary("payload") or ()]
    return np.frombuffer(b"".join(_notices.decode(p).delta_id for p in payloads), KEY)


# Sinks that keep no vectors but pass deltas on: how the ids in their topic are read, its name.
FORWARDING: Final[dict[str, tuple[Callable[[Sequence[Batch]], Keys], str]]] = {
    "remote": (_delta_ids, "{topic}"),
    "notify": (_notice_ids, "{topic}-changes"),
}


def forwarded_digests(node: Connecting, kind: str, shares: int, one: ReadRange) -> Iterator[Parcel]:
    """One task: the ids of the deltas that a partition of the destination holds."""
    ids, _ = FORWARDING[kind]
    for batches in node.access().read_range(one.topic, one.partition, one.first, one.last):
        if any(batch.compacted for batch in batches):
            raise Unsupported(f"the log of {one.topic} was compacted: settled messages are gone")
        yield from _by_key(message_digests(ids(batches), HELD), shares)


def dead_digests(node: Connecting, shares: int, one: ReadRange) -> Iterator[Parcel]:
    """One task: the vectors that a partition of a sink's dead letters names."""
    place = one.topic, one.partition
    for deltas, _ in read_deltas(node.access(), *place, first=one.first, last=one.last):
        yield from _by_key(message_digests(as_keys(deltas.vector), DEAD), shares)


# --- the second look ---


def folded_values(order: FoldOrder, names: frozenset[bytes], task: PlannedFold) -> Iterator[Parcel]:
    """One task: the whole states of a few vectors, by the hashes of their names."""
    fold = ProvedFold(order, task)
    for _ in fold.released():
        pass
    yield from _named(fold.states(), names)


def scanned_values(spec: SinkSpec, names: frozenset[bytes], piece: Any) -> Iterator[Parcel]:
    with opened_in_task(spec) as sink:
        yield from held_values(sink, names, piece)


def held_values(sink: Sink, names: frozenset[bytes], piece: Any) -> Iterator[Parcel]:
    return _named(scanned(sink, piece), names)


def _named(
    tables: Iterable[pa.Table | pa.RecordBatch], names: frozenset[bytes]
) -> Iterator[Parcel]:
    wanted = np.array(sorted(names), KEY)
    for table in tables:
        rows = np.flatnonzero(np.isin(keys_of(table), wanted)) if table.num_rows else ()
        if len(rows):
            chosen = table.select(["namespace", "vector_id", "revision", "vector"]).take(rows)
            yield parcel(pa.table(chosen.columns, names=chosen.schema.names))
