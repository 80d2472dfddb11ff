"""The state of one partition's heap, the steps of every record, and the state as bytes.

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
from penstock.heap.index import Pairs, RunIndex
from penstock.heap.leases import LeaseBook, LeaseRun
from penstock.heap.table import (
    ALIVE,
    WAITING,
    MessageState,
    MessageTable,
    Ordering,
    Places,
    Sequences,
)
from penstock.heap.transactions import Transactions
from penstock.model.columns import Buffer
from penstock.model.topic import TopicConfig

DETAIL_BYTES_MAX: Final = 1024  # of a dead letter's explanation; the rest is cut off
PROMOTE: Final = 4096  # so many delayed messages are made ready in one step
VERSION: Final = 3  # the first that has totals
_WITHOUT_TOTALS: Final = 1
UNCONFIRMED: Final = 2  # version 1 with commits that participants may still ask for
_PREFIX: Final = struct.Struct("<4sI")
_MAGIC: Final = b"PSH1"
_encoder: Final = msgspec.msgpack.Encoder()


class Applied(msgspec.Struct, gc=False):
    """What a batch changed, for counters and for those who wait."""

    enqueued: int = 0  # messages that entered (a committed share of an atomic batch counts then)
    acked: int = 0  # by token
    retried: int = 0  # leases that ended and counted as an attempt
    expired: int = 0  # the part of `retried` and `dead` that ended because a deadline passed
    # Messages past their retries, rejected or moved; also those dropped without a DLQ.
    dead: int = 0
    replayed: int = 0
    released: dict[bytes, int] = {}  # consumer -> leases of it that ended


class Totals(msgspec.Struct, gc=False):
    """How often what has happened, from the first entry of the log on. They are part of the state:
    whoever applies the same log, after a restart or as the next coordinator, counts the same."""

    enqueued: int = 0
    acked: int = 0
    retried: int = 0
    dead: int = 0
    expired: int = 0


class HeapState:
    """Everything that the log determines, and the two indexes derived from it."""

    def __init__(self, config: TopicConfig, *, partition: int) -> None:
        self.config, self.partition = config, partition
        self.ordering = Ordering(config)
        self.sequence_applied = 0  # the last sequence of the last batch
        self.sequence_enqueued = 0  # the last sequence that is or was a message
        self.time_ms = 0  # of the last batch
        self.totals = Totals()
        self.attempted = False  # whether any message was ever tried in vain
        self.table = MessageTable()
        self.leases = LeaseBook()
        self.dedup = Dedup()
        self.transactions = Transactions()
        self.prepared = self.transactions.prepared  # atomic batches that wait for their decision
        self.details: dict[int, bytes] = {}  # explanations of dead letters that have one
        counts = self.table.counts
        self.ready_index = RunIndex(
            self._are_ready, self._is_ready, lambda: counts[MessageState.READY]
        )
        self.delayed_index = RunIndex(
            self._are_delayed, self._is_delayed, lambda: counts[MessageState.DELAYED]
        )
        self._due_ms: int | None = None  # no delayed message falls due before this

    # --- which pairs of an index still count ---

    def _is_ready(self, _: int, sequence: int) -> bool:
        return self.table.state_of(sequence) == MessageState.READY

    def _is_delayed(self, key: int, sequence: int) -> bool:
        at = self.table.place_of(sequence)
        return bool(self.table.state[at] == MessageState.DELAYED and self.table.until_ms[at] == key)

    def _are_ready(self, pairs: Pairs) -> NDArray[np.bool_]:
        return np.equal(self.table.states(pairs.sequences), MessageState.READY)

    def _are_delayed(self, pairs: Pairs) -> NDArray[np.bool_]:
        at = self.table.places(pairs.sequences)
        current: NDArray[np.bool_] = np.equal(self.table.until_ms[at], pairs.keys)
        current &= self.table.state[at] == MessageState.DELAYED
        return current

    # --- steps ---

    def index_ready(self, at: Places | slice, sequences: Sequences) -> None:
        table = self.table
        self.ready_index.push(self.ordering.aged(table.key[at], table.time_ms[at]), sequences)

    def index_delayed(self, until_ms: NDArray[np.int64], sequences: Sequences) -> None:
        self.delayed_index.push(until_ms, sequences)
        soonest = int(until_ms.min())
        if self._due_ms is None or soonest < self._due_ms:
            self._due_ms = soonest

    def wait(self, at: Places, sequences: Sequences, time_ms: int) -> None:
        """Messages wait until their `until_ms`, or are ready if that has come by `time_ms`."""
        until_ms = self.table.until_ms[at]
        later = until_ms > time_ms
        if later.any():
            self.table.move(at[later], MessageState.DELAYED)
            self.index_delayed(until_ms[later], sequences[later])
            at, sequences = at[~later], sequences[~later]
        if len(at):
            self._wake(at, sequences)

    def _wake(self, at: Places, sequences: Sequences) -> None:
        self.table.move(at, MessageState.READY)
        self.index_ready(at, sequences)

    def promote(self, now_ms: int) -> None:
        """Call those delayed messages ready that are due. This may happen at a question: it changes
        no order and no answer, only who has counted what is due already (see `table`)."""
        if self._due_ms is None or self._due_ms > now_ms:
            return
        while True:
            pairs = self.delayed_index.best(PROMOTE)
            due = int(pairs.keys.searchsorted(now_ms, side="right"))
            if due:
                sequences = pairs.sequences[:due]
                self._wake(self.table.places(sequences), sequences)
                self.delayed_index.drop_head(sequences)
            if due < PROMOTE:
                self._due_ms = int(pairs.keys[due]) if due < pairs.size else None
                return

    def rebuild_indexes(self) -> None:
        """Fill both indexes from the table: after a snapshot was loaded or the order changed."""
        self.ready_index.clear()
        self.delayed_index.clear()
        self._due_ms = None
        for sequences in self.table.scan(WAITING):
            at = self.table.places(sequences)
            delayed = self.table.state[at] == MessageState.DELAYED
            if delayed.any():
                self.index_delayed(self.table.until_ms[at[delayed]], sequences[delayed])
            ready = at[~delayed]
            if len(ready):
                self.index_ready(ready, sequences[~delayed])

    # --- snapshots ---

    def snapshot(self) -> list[Buffer]:
        """Buffers that together are the snapshot; none of them changes with the heap."""
        columns = _columns(self)
        head = _encoder.encode(_head(self, len(columns["sequence"])))
        parts: list[Buffer] = [_PREFIX.pack(_MAGIC, len(head)), head]
        _pad(parts, _PREFIX.size + len(head))
        for column in columns.values():
            parts.append(column.data.cast("B") if len(column) else b"")
            _pad(parts, column.nbytes)
        return parts

    def load(self, data: Buffer) -> None:
        view = memoryview(data)
        head, at = _read_head(view)
        if head["version"] not in (_WITHOUT_TOTALS, UNCONFIRMED, VERSION):
            raise Corruption(f"snapshot version {head['version']} is not known")
        config: TopicConfig = msgspec.convert(head["config"], TopicConfig)
        if (config.id, head["partition"]) != (self.config.id, self.partition):
            raise Corruption("a snapshot belongs to another partition")
        self.config, self.ordering = config, Ordering(config)
        self.sequence_applied = head["sequence_applied"]
        self.sequence_enqueued = head["sequence_enqueued"]
        self.time_ms = head["time_ms"]
        self.dedup = Dedup.load(head["dedup"])
        self.transactions.load(head["transactions"])
        self.details = dict(head["details"])
        self.leases = _load_leases(head["leases"])
        _fill_table(self.table, _read_columns(view, at, head["messages"]))
        self.attempted = bool(self.table.attempts.any())
        self.totals = _load_totals(self, head.get("totals"))
        self.rebuild_indexes()

    def digest(self) -> int:
        """A hash of the state: equal for replicas that have applied the same log. Whether a due
        message is called ready is left out."""
        columns = _columns(self)
        state, until_ms = columns["state"], columns["until_ms"]
        state[state == MessageState.DELAYED] = MessageState.READY
        until_ms[(state == MessageState.LEASED) | (state == MessageState.PREPARED)] = 0
        head = _head(self, len(state))
        # A replica that began with a snapshot may have learned its producers in another order.
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
