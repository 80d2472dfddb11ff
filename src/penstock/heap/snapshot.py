"""The heap's state as bytes, and as one number.

A snapshot is

    magic | u32 length of the head | head (msgpack) | padding to 8 | columns of the living messages

with everything small in the head: configuration, leases, producers, open transactions, details of
dead letters. The columns hold one row per living message, ascending by sequence, each padded to 8
bytes. The indexes are not stored: they are a function of the columns.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.errors import Corruption
from penstock.heap.dedup import Dedup
from penstock.heap.leases import LeaseBook, LeaseRun
from penstock.heap.state import HeapState, Totals
from penstock.heap.table import ALIVE, MessageState, MessageTable, Ordering
from penstock.model.columns import Buffer
from penstock.model.topic import TopicConfig

VERSION: Final = 3  # the first that has totals
_WITHOUT_TOTALS: Final = 1
UNCONFIRMED: Final = 2  # version 1 with commits that participants may still ask for
_PREFIX: Final = struct.Struct("<4sI")
_MAGIC: Final = b"PSH1"
_encoder: Final = msgspec.msgpack.Encoder()


def dump(heap: HeapState) -> list[Buffer]:
    """Buffers that together are the snapshot; none of them changes with the heap."""
    columns = _columns(heap)
    head = _encoder.encode(_head(heap, len(columns["sequence"])))
    parts: list[Buffer] = [_PREFIX.pack(_MAGIC, len(head)), head]
    _pad(parts, _PREFIX.size + len(head))
    for column in columns.values():
        parts.append(column.data.cast("B") if len(column) else b"")
        _pad(parts, column.nbytes)
    return parts


def load(heap: HeapState, data: Buffer) -> None:
    """Fill an empty heap."""
    view = memoryview(data)
    head, at = _read_head(view)
    if head["version"] not in (_WITHOUT_TOTALS, UNCONFIRMED, VERSION):
        raise Corruption(f"snapshot version {head['version']} is not known")
    config: TopicConfig = msgspec.convert(head["config"], TopicConfig)
    if (config.id, head["partition"]) != (heap.config.id, heap.partition):
        raise Corruption("a snapshot belongs to another partition")
    heap.config, heap.ordering = config, Ordering(config)
    heap.sequence_applied = head["sequence_applied"]
    heap.sequence_enqueued = head["sequence_enqueued"]
    heap.time_ms = head["time_ms"]
    heap.dedup = Dedup.load(head["dedup"])
    heap.transactions.load(head["transactions"])
    heap.details = dict(head["details"])
    heap.leases = _load_leases(head["leases"])
    _fill_table(heap.table, _read_columns(view, at, head["messages"]))
    heap.attempted = bool(heap.table.attempts.any())
    heap.totals = _load_totals(heap, head.get("totals"))
    heap.rebuild_indexes()


def digest(heap: HeapState) -> int:
    """Over all that the log determines; whether a due message is called ready is left out."""
    columns = _columns(heap)
    state, until_ms = columns["state"], columns["until_ms"]
    state[state == MessageState.DELAYED] = MessageState.READY
    until_ms[(state == MessageState.LEASED) | (state == MessageState.PREPARED)] = 0
    head = _head(heap, len(state))
    # A replica that was compacted into a snapshot may have learned its producers in another order.
    head["dedup"] = sorted(head["dedup"])
    hashed = xxhash.xxh3_64(_encoder.encode(head))
    for column in columns.values():
        hashed.update(column.tobytes())
    return hashed.intdigest()


def _head(heap: HeapState, messages: int) -> dict[str, Any]:
    return {
        "version": VERSION,
        "config": msgspec.to_builtins(heap.config),
        "partition": heap.partition,
        "sequence_applied": heap.sequence_applied,
        "sequence_enqueued": heap.sequence_enqueued,
        "time_ms": heap.time_ms,
        "messages": messages,
        "leases": _dump_leases(heap.leases),
        "dedup": heap.dedup.dump(),
        "transactions": heap.transactions.dump(),
        "details": sorted(heap.details.items()),
        "totals": msgspec.to_builtins(heap.totals),
    }


def _load_totals(heap: HeapState, counted: dict[str, int] | None) -> Totals:
    """The totals of a snapshot. One from before they were kept tells what is there: so many
    messages came, at least, and so many of them are dead."""
    if counted is not None:
        return msgspec.convert(counted, Totals)
    counts = heap.table.counts
    alive = sum(counts) - counts[MessageState.PREPARED]
    return Totals(enqueued=alive, dead=counts[MessageState.DEAD])


def _columns(heap: HeapState) -> dict[str, NDArray[Any]]:
    sequences = heap.table.all_in(ALIVE)
    at = heap.table.places(sequences)
    found: dict[str, NDArray[Any]] = {"sequence": sequences}
    for name in heap.table.COLUMNS:
        found[name] = getattr(heap.table, name)[at]
    return found


def _dump_leases(leases: LeaseBook) -> list[Any]:
    return [
        [
            run.first, run.consumer, run.visibility_ms, run.granted_ms, run.deadline_ms,
            bytes(run.held), run.messages.tobytes(),
            None if run.deadlines is None else run.deadlines.tobytes(),
        ]
        for run in leases.runs()
    ]  # fmt: skip


def _load_leases(rows: list[Any]) -> LeaseBook:
    book = LeaseBook()
    for first, consumer, visibility_ms, granted_ms, deadline_ms, held, messages, deadlines in rows:
        run = LeaseRun(
            first,
            np.frombuffer(messages, np.uint64),
            consumer=consumer,
            visibility_ms=visibility_ms,
            granted_ms=granted_ms,
        )
        run.held, run.left, run.deadline_ms = bytearray(held), held.count(1), deadline_ms
        if deadlines is not None:
            run.deadlines = np.frombuffer(deadlines, np.int64).copy()
        book.grant(run)
    return book


def _fill_table(table: MessageTable, columns: dict[str, NDArray[Any]]) -> None:
    sequences = columns.pop("sequence")
    if not len(sequences):
        return
    at = table.open_scattered(sequences)
    for name, column in columns.items():
        getattr(table, name)[at] = column
    table.recount()


def _read_head(view: memoryview) -> tuple[dict[str, Any], int]:
    if len(view) < _PREFIX.size:
        raise Corruption("a snapshot is cut short")
    magic, length = _PREFIX.unpack_from(view)
    end = _PREFIX.size + length
    if magic != _MAGIC or end > len(view):
        raise Corruption("not a heap snapshot")
    try:
        head: dict[str, Any] = msgspec.msgpack.decode(view[_PREFIX.size : end])
    except msgspec.DecodeError as error:
        raise Corruption(f"a snapshot's head is not msgpack: {error}") from error
    return head, (end + 7) & ~7


def _read_columns(view: memoryview, at: int, count: int) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {}
    for name, dtype in (("sequence", np.uint64), *MessageTable.COLUMNS.items()):
        size = count * np.dtype(dtype).itemsize
        if at + size > len(view):
            raise Corruption("a snapshot's columns are cut short")
        found[name] = np.frombuffer(view[at : at + size], dtype)
        at += (size + 7) & ~7
    return found


def _pad(parts: list[Buffer], size: int) -> None:
    if size & 7:
        parts.append(bytes(-size & 7))
