"""Records about messages that are here already: leases, their ends, dead letters, configuration.

The coordinator checks tokens before it writes a record. A token that is not held any more, or a
message that is in no state to be settled, is passed over here without an effect, on every replica
alike.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import Corruption
from penstock.heap.leases import LeaseRun
from penstock.heap.state import DETAIL_BYTES_MAX, Applied, HeapState, Ordering
from penstock.heap.table import ALIVE, WAITING, MessageState, Sequences, mask_of
from penstock.model.batch import Batch, DeadReason
from penstock.model.columns import Columns
from penstock.model.topic import TopicConfig

ATTEMPTS_MAX = np.iinfo(np.uint16).max
_SETTLED = mask_of(ALIVE - {MessageState.PREPARED})  # what an administrator may delete
_MOVABLE = mask_of(WAITING | {MessageState.LEASED})  # what may become a dead letter
_NO_MESSAGES = np.empty(0, np.uint64)


# --- leases ---


def on_lease(heap: HeapState, batch: Batch, columns: Columns) -> Applied:
    # The run gets a copy, because it outlives the batch's buffer.
    messages: Sequences = columns.fixed("message").copy()
    if len(messages) > 1:
        ordered = np.sort(messages)
        if (ordered[1:] == ordered[:-1]).any():
            raise Corruption("a LEASE names a message twice")
        heap.table.move(heap.table.places(messages), MessageState.LEASED)
    else:
        heap.table.move_one(heap.table.place_of(int(messages[0])), MessageState.LEASED)
    heap.ready_index.drop_head(messages)
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
    return Applied(leased=at)


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
    table = heap.table
    if "token" in columns.views:
        messages = _release(heap, columns.fixed("token"), applied.released)
        if len(messages) == 1:
            table.move_one(table.place_of(int(messages[0])), MessageState.DONE)
            applied.acked = 1
        elif len(messages):
            table.move(table.places(messages), MessageState.DONE)
            applied.acked = len(messages)
    if "message" in columns.views:
        messages = _living(heap, columns.fixed("message"), _SETTLED)
        _end_leases_of(heap, messages, applied.released)
        _finish(heap, messages)
        applied.purged += len(messages)
    if "through" in columns.views:
        messages = _waiting_through(heap, int(columns.fixed("through").max()))
        _finish(heap, messages)
        applied.purged += len(messages)
    return applied


def _finish(heap: HeapState, messages: Sequences) -> None:
    if len(messages):
        heap.table.move(heap.table.places(messages), MessageState.DONE)
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


def _waiting_through(heap: HeapState, through: int) -> Sequences:
    found = []
    for messages in heap.table.scan(WAITING):
        if int(messages[0]) > through:
            break
        found.append(messages[messages <= np.uint64(through)])
    return np.concatenate(found) if found else _NO_MESSAGES


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
        applied.woke += heap.wait(at, messages, batch.time_ms)
        applied.retried += len(tried)
        applied.returned += len(at) - len(tried)
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
        heap.table.move(heap.table.places(messages), MessageState.DONE)
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
    return Applied(woke=heap.wait(at, messages, batch.time_ms), replayed=len(messages))


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
