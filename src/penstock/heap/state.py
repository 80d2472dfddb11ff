"""The state of one partition's heap, and the steps of every record."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.heap.dedup import Dedup
from penstock.heap.index import Pairs, RunIndex
from penstock.heap.leases import LeaseBook
from penstock.heap.table import (
    WAITING,
    MessageState,
    MessageTable,
    Ordering,
    Places,
    Sequences,
)
from penstock.heap.transactions import Transactions
from penstock.model.topic import TopicConfig

DETAIL_BYTES_MAX: Final = 1024  # of a dead letter's explanation; the rest is cut off
PROMOTE: Final = 4096  # so many delayed messages are made ready in one step


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
        """Messages became ready: the index must know."""
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
        """Call those delayed messages ready that are due.

        This may happen at a question: it changes no order and no answer, only who has counted what
        is due already (see `table`).
        """
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
