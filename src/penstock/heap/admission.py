"""Records that bring messages: ENQ, PREPARE and DECIDE, and the question which of them are new."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.errors import Corruption, InvalidArgument, StaleProducer
from penstock.heap.state import Applied, HeapState
from penstock.heap.table import MessageState, Sequences
from penstock.heap.transactions import ProducerRun, Share, unpack_places
from penstock.model.batch import Batch
from penstock.model.columns import Columns
from penstock.model.entries import PRODUCER_NUMBER_MAX
from penstock.model.topic import TopicKind


def on_enqueue(heap: HeapState, batch: Batch, columns: Columns) -> Applied:
    count = columns.count
    if heap.config.kind is TopicKind.DELTA:
        return _on_deltas(heap, batch, columns)
    if batch.compacted:
        return _on_compacted(heap, batch, columns)
    if count == 1 and "delay_ms" not in columns.views:
        _enter_one(heap, batch, columns)
        woke = 1
    else:
        woke = _enter(heap, batch, columns, prepared=False)
    heap.sequence_enqueued = batch.last
    if columns.runs:
        _record(heap, producer_runs(columns), batch)
    return Applied(count, woke)


def _on_deltas(heap: HeapState, batch: Batch, columns: Columns) -> Applied:
    """Deltas are read from the log and never leased: they are done as soon as they are there.

    Nothing is kept of them but who sent them, so that a producer's retry is still recognised.
    """
    heap.sequence_enqueued = batch.last
    if columns.runs:
        _record(heap, producer_runs(columns), batch)
    return Applied(columns.count)


def _enter_one(heap: HeapState, batch: Batch, columns: Columns) -> None:
    """One ready message, without array arithmetic."""
    table, sequence, time_ms = heap.table, batch.first, batch.time_ms
    key = heap.ordering.key(int(columns.fixed("priority")[0]))
    at = table.open_one(sequence)
    table.key[at] = key
    table.time_ms[at] = time_ms
    if "max_retries" in columns.views:
        table.limit[at] = columns.fixed("max_retries")[0] + 1
    table.enter_one(at, MessageState.READY)
    heap.ready_index.push_one(heap.ordering.aged_one(key, time_ms), sequence)


def _enter(heap: HeapState, batch: Batch, columns: Columns, *, prepared: bool) -> int:
    """Consecutive messages; returns how many of them are ready."""
    table, count = heap.table, columns.count
    keys = heap.ordering.keys(columns.fixed("priority"))
    until_ms = _until(columns, batch.time_ms)
    limits = columns.fixed("max_retries") if "max_retries" in columns.views else None
    states: MessageState | NDArray[np.uint8] = (
        MessageState.PREPARED if prepared else MessageState.READY
    )
    if until_ms is not None and not prepared:
        states = np.where(until_ms > 0, MessageState.DELAYED, MessageState.READY).astype(np.uint8)
    for at, part in table.open_range(batch.first, count):
        table.key[at] = keys[part]
        table.time_ms[at] = batch.time_ms
        if limits is not None:
            table.limit[at] = limits[part] + 1
        if until_ms is not None:
            table.until_ms[at] = until_ms[part]
        if isinstance(states, MessageState):
            table.enter_range(at, states)
        else:
            table.enter(at, states[part])
    if prepared:
        return 0
    sequences = np.arange(batch.first, batch.first + count, dtype=np.uint64)
    return _index(heap, heap.ordering.aged(keys, batch.time_ms), sequences, until_ms)


def _index(
    heap: HeapState,
    aged: NDArray[np.int64],
    sequences: Sequences,
    until_ms: NDArray[np.int64] | None,
) -> int:
    if until_ms is None:
        heap.ready_index.push(aged, sequences, ascending=True)
        return len(sequences)
    later = until_ms > 0
    heap.index_delayed(until_ms[later], sequences[later])
    if not later.all():
        heap.ready_index.push(aged[~later], sequences[~later], ascending=True)
    return len(sequences) - int(np.count_nonzero(later))


def _until(columns: Columns, time_ms: int) -> NDArray[np.int64] | None:
    """When each message may be delivered, 0 for at once; None if that is true of all."""
    if "delay_ms" not in columns.views:
        return None
    delay_ms = columns.fixed("delay_ms")
    if not (delay_ms > 0).any():
        return None
    return np.where(delay_ms > 0, delay_ms + time_ms, 0)


def _on_compacted(heap: HeapState, batch: Batch, columns: Columns) -> Applied:
    """What compaction left of a range of the log: the messages that were alive then.

    Their producers, leases and retries are not in it. So it stands in for the range only where
    nothing of that is asked any more; a heap that needs it starts from a snapshot past the range.
    """
    heap.sequence_enqueued = max(heap.sequence_enqueued, batch.last)
    if not columns.count:
        return Applied()
    sequences: Sequences = columns.fixed("sequence")
    table = heap.table
    keys = heap.ordering.keys(columns.fixed("priority"))
    at = table.open_scattered(sequences)
    table.key[at] = keys
    table.time_ms[at] = batch.time_ms
    table.limit[at] = columns.fixed("max_retries") + 1
    until_ms = _until(columns, batch.time_ms)
    if until_ms is None:
        table.enter(at, MessageState.READY)
    else:
        table.until_ms[at] = until_ms
        states = np.where(until_ms > 0, MessageState.DELAYED, MessageState.READY).astype(np.uint8)
        table.enter(at, states)
    aged = heap.ordering.aged(keys, table.time_ms[at])
    return Applied(len(at), _index(heap, aged, sequences, until_ms))


# --- atomic batches ---


def on_prepare(heap: HeapState, batch: Batch, columns: Columns) -> Applied:
    if heap.config.kind is TopicKind.DELTA:
        raise Corruption("a delta topic has no atomic batches over partitions")
    name = columns.binary("transaction")
    if name is None or not name[0]:
        raise Corruption("a PREPARE names no transaction")
    runs = producer_runs(columns) if columns.runs else []
    share = Share(batch.first, columns.count, tuple(runs))
    heap.sequence_enqueued = batch.last
    _enter(heap, batch, columns, prepared=True)
    _record(heap, runs, batch)
    outcome = heap.transactions.outcome(name[0])
    if outcome is not None:  # the decision came first: follow it
        return _conclude(heap, share, batch.time_ms, commit=outcome)
    heap.transactions.prepare(
        name[0], home=int(columns.fixed("home")[0]), time_ms=batch.time_ms, share=share
    )
    return Applied()


def on_decide(heap: HeapState, batch: Batch, columns: Columns) -> Applied:
    total = Applied()
    names = columns.binary("transaction")
    if names is None:
        raise Corruption("a DECIDE names no transaction")
    participants = columns.binary("participants") or [b""] * columns.count
    rows = zip(names, columns.fixed("commit").tolist(), participants, strict=True)
    for name, decision, places in rows:
        transaction = heap.transactions.decide(
            name, decision, batch.time_ms, unpack_places(places)
        )  # fmt: skip
        for share in transaction.shares if transaction is not None else ():
            applied = _conclude(heap, share, batch.time_ms, commit=bool(decision))
            total.enqueued += applied.enqueued
            total.woke += applied.woke
    return total


def _conclude(heap: HeapState, share: Share, time_ms: int, *, commit: bool) -> Applied:
    sequences = np.arange(share.first, share.first + share.size, dtype=np.uint64)
    at = heap.table.places(sequences)
    if commit:
        return Applied(share.size, heap.wait(at, sequences, time_ms))
    heap.table.move(at, MessageState.DONE)
    for run in share.runs:
        heap.dedup.retract(
            run.producer,
            run.epoch,
            first=run.first,
            count=run.size,
            message=share.first + run.start,
        )
    return Applied()


# --- producers ---


def producer_runs(columns: Columns) -> list[ProducerRun]:
    """The stretches of entries that have a producer. Numbers that no node takes any more, as no
    snapshot could hold what follows from them, stand for none."""
    names = columns.binary("run_producer")
    if names is None:
        return []
    if columns.runs == 1:
        return _only_run(names[0], columns)
    runs = []
    index = 0
    for name, epoch, first, count in zip(
        names,
        columns.fixed("run_epoch").tolist(),
        columns.fixed("run_sequence").tolist(),
        columns.fixed("run_count").tolist(),
        strict=True,
    ):
        if name and count and first + count <= PRODUCER_NUMBER_MAX >= epoch:
            runs.append(ProducerRun(name, epoch, first, count, index))
        index += count
    if index > columns.count:
        raise _too_long(index, columns)
    return runs


def _only_run(name: bytes, columns: Columns) -> list[ProducerRun]:
    size = int(columns.fixed("run_count")[0])
    if size > columns.count:
        raise _too_long(size, columns)
    epoch, first = int(columns.fixed("run_epoch")[0]), int(columns.fixed("run_sequence")[0])
    kept = name and size and first + size <= PRODUCER_NUMBER_MAX >= epoch
    return [ProducerRun(name, epoch, first, size, 0)] if kept else []


def _too_long(covered: int, columns: Columns) -> InvalidArgument:
    return InvalidArgument(
        f"runs cover {covered} of {columns.count} entries", field="run_count", limit=columns.count
    )


def on_producer(heap: HeapState, batch: Batch, columns: Columns) -> Applied:
    names = columns.binary("producer")
    if names is None:
        raise Corruption("a PRODUCER record names no producer")
    for name, epoch in zip(names, columns.fixed("producer_epoch").tolist(), strict=True):
        heap.dedup.begin(name, epoch, time_ms=batch.time_ms, dedup_ms=heap.config.dedup_ms)
    return Applied()


def _record(heap: HeapState, runs: list[ProducerRun], batch: Batch) -> None:
    for producer, epoch, first, count, index in runs:
        heap.dedup.record(
            producer,
            epoch,
            first=first,
            count=count,
            message=batch.first + index,
            time_ms=batch.time_ms,
            dedup_ms=heap.config.dedup_ms,
        )


def admit(heap: HeapState, columns: Columns) -> list[tuple[int, int, int]]:
    """Which entries of a body are duplicates: (index, message sequence, its time)."""
    if not columns.runs:
        return []
    found: list[tuple[int, int, int]] = []
    runs = producer_runs(columns)
    if len(runs) > 1:
        _reject_twins(runs)
    for name, epoch, first, count, index in runs:
        producer = heap.dedup.producers.get(name)
        if producer is None or epoch > producer.epoch:
            continue
        if epoch < producer.epoch:
            raise StaleProducer(
                f"producer epoch {epoch} is over, {producer.epoch} is current",
                epoch=producer.epoch,
            )
        if first < producer.next:
            for i in range(min(count, producer.next - first)):
                place = producer.find(first + i)
                if place is not None:
                    found.append((index + i, *place))
    return found


def _reject_twins(runs: list[ProducerRun]) -> None:
    """Refuse a body that has one producer's sequence twice: neither came first."""
    ordered = sorted((r.producer, r.epoch, r.first, r.size) for r in runs)
    for one, two in pairwise(ordered):
        if one[:2] == two[:2] and two[2] < one[2] + one[3]:
            raise InvalidArgument(
                f"producer sequence {two[2]} is in one request twice", field="run_sequence"
            )
