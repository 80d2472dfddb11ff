"""What each record of the log does to a heap.

The coordinator checks tokens before it writes a record. A token that is not held any more, or a
message that is in no state to be settled, is passed over here without an effect, on every replica
alike.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import Corruption
from penstock.heap.dedup import ProducerRun, producer_runs
from penstock.heap.leases import LeaseRun
from penstock.heap.state import DETAIL_BYTES_MAX, Applied, HeapState
from penstock.heap.table import ALIVE, WAITING, MessageState, Opened, Ordering, Sequences, mask_of
from penstock.heap.transactions import Share, unpack_places
from penstock.model.batch import Batch, DeadReason
from penstock.model.columns import Columns
from penstock.model.topic import TopicConfig, TopicKind

ATTEMPTS_MAX = np.iinfo(np.uint16).max
_SETTLED = mask_of(ALIVE - {MessageState.PREPARED})  # what an administrator may delete
_MOVABLE = mask_of(WAITING | {MessageState.LEASED})  # what may become a dead letter
_NO_MESSAGES = np.empty(0, np.uint64)


# --- new messages ---


def on_enqueue(heap: HeapState, batch: Batch, columns: Columns) -> Applied:
    heap.sequence_enqueued = batch.last
    # Deltas are read from the log and never leased: they are done as soon as they are there. All
    # that is kept of them is who sent them, so that a producer's retry is still recognised.
    if heap.config.kind is not TopicKind.DELTA:
        if columns.count == 1 and not batch.compacted and "delay_ms" not in columns.views:
            _enter_one(heap, batch, columns)
        elif columns.count:
            _enter(heap, batch, columns, prepared=False)
    if columns.runs:
        _note_producers(heap, batch, producer_runs(columns))
    return Applied(columns.count)


def _note_producers(heap: HeapState, batch: Batch, runs: list[ProducerRun]) -> None:
    dedup_ms = heap.config.dedup_ms
    heap.dedup.record(runs, message=batch.first, time_ms=batch.time_ms, dedup_ms=dedup_ms)


def _enter_one(heap: HeapState, batch: Batch, columns: Columns) -> None:
    """One ready message, without array arithmetic."""
    priorities, retries = columns.views.get("priority"), columns.views.get("max_retries")
    key, aged = heap.ordering.key_one(priorities[0] if priorities else 0, batch.time_ms)
    limit = retries[0] + 1 if retries else 0
    heap.table.enter_one(batch.first, key=key, time_ms=batch.time_ms, limit=limit)
    heap.ready_index.push_one(aged, batch.first)


def _enter(heap: HeapState, batch: Batch, columns: Columns, *, prepared: bool) -> None:
    """Consecutive messages, or those that compaction has left of a range of the log.

    Producers, leases and retries are not in what is left. So it stands in for the range only where
    nothing of that is asked any more; a heap that needs it starts from a snapshot past the range.
    """
    table = heap.table
    keys = heap.ordering.keys(columns.fixed("priority"))
    limits = columns.fixed("max_retries") + 1 if "max_retries" in columns.views else None
    state = MessageState.PREPARED if prepared else MessageState.READY
    states = until_ms = later = None
    if "delay_ms" in columns.views:
        delay_ms = columns.fixed("delay_ms")
        later = delay_ms > 0
        until_ms = np.where(later, delay_ms + batch.time_ms, 0)
        if not prepared:
            states = np.where(later, MessageState.DELAYED, MessageState.READY).astype(np.uint8)
    if batch.compacted:
        sequences: Sequences = columns.fixed("sequence")
        opened: Opened = [(table.open_scattered(sequences), slice(None))]
    else:
        sequences = np.arange(batch.first, batch.last + 1, dtype=np.uint64)
        opened = table.open_range(batch.first, columns.count)
    for at, part in opened:
        table.key[at] = keys[part]
        table.time_ms[at] = batch.time_ms
        if limits is not None:
            table.limit[at] = limits[part]
        if until_ms is not None:
            table.until_ms[at] = until_ms[part]
        table.enter(at, state if states is None else states[part])
    if prepared:
        return
    if later is not None and until_ms is not None and later.any():
        heap.index_delayed(until_ms[later], sequences[later])
        keys, sequences = keys[~later], sequences[~later]
    heap.ready_index.push(heap.ordering.aged(keys, batch.time_ms), sequences)


def on_producer(heap: HeapState, batch: Batch, columns: Columns) -> Applied:
    names = columns.binary("producer")
    if names is None:
        raise Corruption("a PRODUCER record names no producer")
    for name, epoch in zip(names, columns.fixed("producer_epoch").tolist(), strict=True):
        heap.dedup.begin(name, epoch, time_ms=batch.time_ms, dedup_ms=heap.config.dedup_ms)
    return Applied()


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
    _note_producers(heap, batch, runs)
    outcome = heap.transactions.outcome(name[0])
    if outcome is not None:  # the decision came first: follow it
        return Applied(_conclude(heap, share, batch.time_ms, commit=outcome))
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
            total.enqueued += _conclude(heap, share, batch.time_ms, commit=bool(decision))
    return total


def _conclude(heap: HeapState, share: Share, time_ms: int, *, commit: bool) -> int:
    """End the wait for a decision; returns how many messages entered."""
    sequences = np.arange(share.first, share.first + share.size, dtype=np.uint64)
    at = heap.table.places(sequences)
    if commit:
        heap.wait(at, sequences, time_ms)
        return share.size
    heap.table.move(at, MessageState.DONE)
    for run in share.runs:
        heap.dedup.retract(run, message=share.first + run.start)
    return 0


# --- leases ---


def on_lease(heap: HeapState, batch: Batch, columns: Columns) -> Applied:
    # The run gets a copy, because it outlives the batch's buffer.
    messages: Sequences = columns.fixed("message").copy()
    if len(messages) > 1:
        ordered = np.sort(messages)
        if (ordered[1:] == ordered[:-1]).any():
            raise Corruption("a LEASE names a message twice")
    heap.table.move_all(messages, MessageState.LEASED)
    heap.ready_index.drop_head(messages)
    _grant(heap, batch, columns, messages)
    return Applied()


def _grant(heap: HeapState, batch: Batch, columns: Columns, messages: Sequences) -> None:
    consumers = columns.binary("run_consumer")
    visibilities = columns.fixed("run_visibility_ms").tolist()
    at = 0
    for i, count in enumerate(columns.fixed("run_count").tolist()):
        run = LeaseRun(
            batch.first + at,
            messages if count == len(messages) else messages[at : at + count],
            consumer=b"" if consumers is None else consumers[i],
            visibility_ms=visibilities[i],
            granted_ms=batch.time_ms,
        )
        if count:
            heap.leases.grant(run)
        at += count
    if at != len(messages):
        raise Corruption(f"the runs of a LEASE cover {at} of {len(messages)} entries")


def on_extend(heap: HeapState, batch: Batch, columns: Columns) -> Applied:
    heap.leases.extend(columns.fixed("token"), columns.fixed("extend_ms") + batch.time_ms)
    return Applied()


def on_barrier(heap: HeapState, batch: Batch, columns: Columns) -> Applied:
    heap.leases.rearm(batch.time_ms)
    return Applied()


def _release(heap: HeapState, tokens: Sequences, released: dict[bytes, int]) -> Sequences:
    """End these leases; the messages of those that were held, in the order of `stretches`."""
    stretches = heap.leases.stretches(tokens)
    if len(stretches) == 1:
        return heap.leases.release(stretches[0], released)
    if not stretches:
        return _NO_MESSAGES
    return np.concatenate([heap.leases.release(stretch, released) for stretch in stretches])


# --- done ---


def on_ack(heap: HeapState, batch: Batch, columns: Columns) -> Applied:
    applied = Applied(released={})
    if "token" in columns.views:
        messages = _release(heap, columns.fixed("token"), applied.released)
        heap.table.move_all(messages, MessageState.DONE)
        applied.acked = len(messages)
    if "message" in columns.views:
        messages = _living(heap, columns.fixed("message"), _SETTLED)
        _end_leases_of(heap, messages, applied.released)
        _finish(heap, messages)
    if "through" in columns.views:
        _finish(heap, heap.table.all_in(WAITING, through=int(columns.fixed("through").max())))
    return applied


def _finish(heap: HeapState, messages: Sequences) -> None:
    heap.table.move_all(messages, MessageState.DONE)
    _drop_details(heap, messages)


def _drop_details(heap: HeapState, messages: Sequences) -> None:
    if heap.details:
        for message in messages.tolist():
            heap.details.pop(message, None)


def _living(heap: HeapState, messages: Sequences, wanted: NDArray[np.bool_]) -> Sequences:
    """The distinct ones in a wanted state; 0 stands for no message."""
    distinct = np.unique(messages)
    return distinct[wanted[heap.table.states(distinct)]]


def _end_leases_of(heap: HeapState, messages: Sequences, released: dict[bytes, int]) -> None:
    leased = messages[heap.table.states(messages) == MessageState.LEASED]
    if len(leased):
        _release(heap, heap.leases.tokens_of(set(leased.tolist())), released)


# --- back ---


def on_nack(heap: HeapState, batch: Batch, columns: Columns) -> Applied:
    counted = columns.fixed("counted") > 0 if "counted" in columns.views else None
    return _take_back(heap, batch, columns, counted)


def on_expire(heap: HeapState, batch: Batch, columns: Columns) -> Applied:
    applied = _take_back(heap, batch, columns, None)
    applied.expired = applied.retried
    return applied


def _take_back(
    heap: HeapState, batch: Batch, columns: Columns, counted: NDArray[np.bool_] | None
) -> Applied:
    """Leases end unfinished: the messages wait until `not_before_ms`. `counted` None: all count."""
    applied = Applied(released={})
    until_ms, table = columns.fixed("not_before_ms"), heap.table
    for stretch in heap.leases.stretches(columns.fixed("token")):
        messages = heap.leases.release(stretch, applied.released)
        at = table.places(messages)
        table.until_ms[at] = until_ms[stretch.at]
        tried = at if counted is None else at[counted[stretch.at]]
        table.attempts[tried] += table.attempts[tried] < ATTEMPTS_MAX
        heap.attempted = True
        heap.wait(at, messages, batch.time_ms)
        applied.retried += len(tried)
    return applied


# --- dead letters ---


def on_dead(heap: HeapState, batch: Batch, columns: Columns) -> Applied:
    applied = Applied(released={})
    entries = np.arange(columns.count)
    if "token" in columns.views:
        # A batch has one reason. It does not say whether a last try was given up or ran out of
        # time; the lease does.
        tried = int(columns.fixed("reason")[0]) == DeadReason.RETRIES
        for stretch in heap.leases.stretches(columns.fixed("token")):
            if tried:
                applied.expired += stretch.run.overdue(stretch.offsets, batch.time_ms)
            messages = heap.leases.release(stretch, applied.released)
            applied.dead += _bury(heap, batch, columns, messages, entries[stretch.at])
    if "message" in columns.views:
        named: Sequences = columns.fixed("message")
        distinct, first = np.unique(named, return_index=True)
        good = _MOVABLE[heap.table.states(distinct)]
        messages = distinct[good]
        _end_leases_of(heap, messages, applied.released)
        applied.dead += _bury(heap, batch, columns, messages, first[good])
    return applied


def _bury(
    heap: HeapState, batch: Batch, columns: Columns, messages: Sequences, at: NDArray[np.int64]
) -> int:
    """Make messages dead letters for the reasons in entries `at` (drop them without a DLQ)."""
    if not len(messages):
        return 0
    if not heap.config.dlq:
        heap.table.move_all(messages, MessageState.DONE)
        return len(messages)
    table = heap.table
    places = table.places(messages)
    table.move(places, MessageState.DEAD)
    table.until_ms[places] = batch.time_ms
    table.reason[places] = columns.fixed("reason")[at]
    details = columns.binary("detail")
    if details is not None:
        for message, detail in zip(messages.tolist(), details.take(at), strict=True):
            if detail:
                heap.details[message] = detail[:DETAIL_BYTES_MAX]
    return len(messages)


def on_replay(heap: HeapState, batch: Batch, columns: Columns) -> Applied:
    messages = _living(heap, columns.fixed("message"), mask_of(frozenset({MessageState.DEAD})))
    if not len(messages):
        return Applied()
    table = heap.table
    at = table.places(messages)
    table.until_ms[at] = 0
    table.attempts[at] = 0
    table.reason[at] = 0
    _drop_details(heap, messages)
    heap.wait(at, messages, batch.time_ms)
    return Applied(replayed=len(messages))


# --- the rest ---


def on_config(heap: HeapState, batch: Batch, columns: Columns) -> Applied:
    """A new configuration, as msgpack. A changed rate of ageing orders everything anew."""
    cell = columns.binary("config")
    try:
        config = msgspec.msgpack.decode(b"" if cell is None else cell[0], type=TopicConfig)
    except msgspec.MsgspecError as error:
        raise Corruption(f"a CONFIG record does not hold a configuration: {error}") from error
    if config.mode is not heap.config.mode:
        raise Corruption("a CONFIG record changes the mode of a topic")
    if (config.kind, config.dimensions) != (heap.config.kind, heap.config.dimensions):
        raise Corruption("a CONFIG record changes the kind of a topic")
    reorder = config.ageing_per_s != heap.config.ageing_per_s
    heap.config, heap.ordering = config, Ordering(config)
    if reorder:
        heap.rebuild_indexes()
    return Applied()


def on_mark(heap: HeapState, batch: Batch, columns: Columns) -> Applied:
    """A snapshot exists: of interest to the log, not to its state."""
    return Applied()
