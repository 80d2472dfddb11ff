"""The heap of one partition as a state machine over its log.

`apply` is the only way to change it, and it looks at nothing but the batch: the same batches in
the same order give the same state on the coordinator, on a follower and in recovery (`digest`
compares them). Everything else is a question. The coordinator asks, writes the answer into the
log as a record, and applies that record: which messages to lease (`select`), which tokens are
held (`resolve`), when a returned message may be tried again (`plan_return`), which leases are
over (`expired`).

Invariants, checked by `validate`: every message is in exactly one state; a message is LEASED if
and only if exactly one held token names it; every READY message is in the ready index and every
DELAYED one in the delayed index; a producer's places are disjoint; counts are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import Corruption
from penstock.heap import records
from penstock.heap.index import Keys
from penstock.heap.state import Applied, HeapState
from penstock.heap.table import ALIVE, STATES, MessageState, Sequences
from penstock.model.batch import Batch, Kind
from penstock.model.columns import Buffer, Columns
from penstock.model.topic import TopicConfig

DOUBLINGS_MAX: Final = 40  # more doublings than any cap allows
_STEP: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
FORGET_MAX: Final = 10_000  # dead letters proposed for deletion at once
Handler = Callable[[HeapState, Batch, Columns], Applied]
HANDLERS: Final[dict[Kind, Handler]] = {
    Kind.BARRIER: records.on_barrier,
    Kind.ENQ: records.on_enqueue,
    Kind.LEASE: records.on_lease,
    Kind.EXTEND: records.on_extend,
    Kind.ACK: records.on_ack,
    Kind.NACK: records.on_nack,
    Kind.EXPIRE: records.on_expire,
    Kind.DEAD: records.on_dead,
    Kind.REPLAY: records.on_replay,
    Kind.PREPARE: records.on_prepare,
    Kind.DECIDE: records.on_decide,
    Kind.CONFIG: records.on_config,
    Kind.SNAPSHOT_MARK: records.on_mark,
    Kind.PRODUCER: records.on_producer,
}


def backoff_ms(
    config: TopicConfig,
    *,
    partition: int,
    messages: NDArray[np.uint64],
    attempts: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Delays after the failed tries numbered `attempts` (1 is the first): full jitter, no dice.

    The delay before try *n + 1* is drawn evenly from 0 to `base * 2^(n - 1)`, at most `cap`. The
    draw is a hash of (partition, message, attempt): spread over messages as a random number would
    be, and the same for whoever computes it.
    """
    doublings = np.minimum(attempts - 1, DOUBLINGS_MAX)
    # Floats are exact far beyond the cap, and cannot overflow.
    ceiling = np.minimum(config.backoff_ms_base * np.exp2(doublings), config.backoff_ms_cap)
    draw = _hash(
        messages * np.uint64(_STEP) + (attempts.view(np.uint64) << np.uint64(32)), partition
    )
    delays: NDArray[np.int64] = (draw * (ceiling + 1)).astype(np.int64)
    return delays


def _hash(values: NDArray[np.uint64], seed: int) -> NDArray[np.float64]:
    """Numbers spread evenly over [0, 1): the finaliser of splitmix64."""
    mixed = values + np.uint64((seed + 1) * _STEP & _WORD)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


class ReturnPlan(NamedTuple):
    """What becomes of returned leases. Tokens that are not held are in neither list."""

    tokens: Sequences  # of messages that are to be tried again
    not_before_ms: NDArray[np.int64]  # when each of `tokens` may be tried
    dead: Sequences  # tokens of messages that are past their retries


class DeadLetter(NamedTuple):
    sequence: int
    time_ms: int  # when it died
    reason: int  # model.batch.DeadReason
    attempts: int
    detail: bytes


class Heap(HeapState):
    # The spine may take every candidate of a heap; only a remote partition hands out a cut list.
    cut: Final = False

    @property
    def ready(self) -> int:
        return self.table.counts[MessageState.READY]

    @property
    def delayed(self) -> int:
        return self.table.counts[MessageState.DELAYED]

    @property
    def leased(self) -> int:
        return self.table.counts[MessageState.LEASED]

    @property
    def dead(self) -> int:
        return self.table.counts[MessageState.DEAD]

    def apply(self, batch: Batch, columns: Columns) -> Applied:
        """Let the next batch of the log take effect. Its time is the batch's, not the clock's."""
        if batch.first != self.sequence_applied + 1:
            raise Corruption(
                f"batch {batch.first} does not follow sequence {self.sequence_applied}"
            )
        applied = HANDLERS[batch.kind](self, batch, columns)
        totals = self.totals
        totals.enqueued += applied.enqueued
        totals.acked += applied.acked
        totals.retried += applied.retried
        totals.dead += applied.dead
        totals.expired += applied.expired
        self.sequence_applied = batch.last
        self.time_ms = max(self.time_ms, batch.time_ms)
        return applied

    # --- delivery ---

    def select(self, n: int, now: int) -> Sequences:
        """The best `n` messages that are ready (or due) at `now`, best first."""
        self.promote(now)
        return self.ready_index.best(n).sequences

    def candidates(self, n: int, now: int) -> tuple[Keys, Sequences]:
        """`select` with the keys, smaller is better, comparable between partitions of a topic."""
        self.promote(now)
        return self.ready_index.best(n)

    def rank(self, key: int, sequence: int, now: int) -> int:
        """How many ready messages are strictly better than (key, sequence)."""
        self.promote(now)
        return self.ready_index.count_below(key, sequence)

    def attempts(self, sequences: Sequences) -> NDArray[np.uint32]:
        if not self.attempted:
            return np.zeros(len(sequences), np.uint32)
        return self.table.attempts[self.table.places(sequences)].astype(np.uint32)

    def states(self, sequences: Sequences) -> NDArray[np.uint8]:
        return self.table.states(sequences)

    def is_prepared(self, sequence: int) -> bool:
        return self.table.state_of(sequence) == MessageState.PREPARED

    # --- leases ---

    def resolve(self, tokens: Sequences) -> tuple[Sequences, NDArray[np.bool_]]:
        """The message of each token and whether it is held; 0 where it is not. A token that is
        given twice counts as held the first time only."""
        count = len(tokens)
        messages, held = np.zeros(count, np.uint64), np.zeros(count, np.bool_)
        for run, offsets, at, _ in self.leases.stretches(tokens):
            messages[at] = run.messages[offsets]
            held[at] = True
        return messages, held

    def leases_of(self, consumer: bytes) -> int:
        return self.leases.by_consumer.get(consumer, 0)

    def plan_return(
        self, tokens: Sequences, now: int, *, delay_ms: int | None, counted: bool
    ) -> ReturnPlan:
        """When each of these may be tried again, or that it may not.

        A `counted` return is a failed try: past `max_retries` of them a message is dead, before
        that it waits for the backoff, or for `delay_ms` if the caller has a wish. An uncounted
        one comes back at once unless `delay_ms` says otherwise.
        """
        messages, held = self.resolve(tokens)
        if not held.all():
            tokens, messages = tokens[held], messages[held]
        if not counted:
            wait = np.full(len(tokens), now + (delay_ms or 0), np.int64)
            return ReturnPlan(tokens, wait, tokens[:0])
        at = self.table.places(messages)
        tries = self.table.attempts[at].astype(np.int64) + 1
        limit = self.table.limit[at].astype(np.int64)
        over = tries >= np.where(limit > 0, limit, self.config.max_retries + 1)
        dead = tokens[over]
        if len(dead):
            again = ~over
            tokens, messages, tries = tokens[again], messages[again], tries[again]
        if delay_ms is not None:
            return ReturnPlan(tokens, np.full(len(tokens), now + delay_ms, np.int64), dead)
        delays = backoff_ms(
            self.config, partition=self.partition, messages=messages, attempts=tries
        )
        return ReturnPlan(tokens, delays + now, dead)

    def cap_extend(self, tokens: Sequences, now: int, extend_ms: int) -> NDArray[np.int64]:
        """How far from now each lease may be extended; 0 for one that is not held. A lease lasts at
        most `visibility_ms_max` from its grant, extensions included."""
        allowed = np.zeros(len(tokens), np.int64)
        for run, _, at, _ in self.leases.stretches(tokens):
            left = run.granted_ms + self.config.visibility_ms_max - now
            allowed[at] = max(0, min(extend_ms, left))
        return allowed

    def expired(self, now: int, limit: int) -> Sequences:
        self.promote(now)
        return self.leases.expired(now, limit)

    def next_wakeup(self) -> int | None:
        """When the next lease or delay falls due; never later than that."""
        if not self.leases.by_consumer:
            return self._due_ms
        times = (self.leases.next_ms(), self._due_ms)
        return min((time_ms for time_ms in times if time_ms is not None), default=None)

    # --- dead letters and upkeep ---

    def dead_list(self, after: int, limit: int) -> list[DeadLetter]:
        """Dead letters with a sequence past `after`, ascending."""
        found: list[DeadLetter] = []
        if not self.dead:
            return found
        table = self.table
        for sequences in table.scan(frozenset({MessageState.DEAD}), after=after):
            some = sequences[: limit - len(found)]
            at = table.places(some)
            rows = zip(
                some.tolist(),
                table.until_ms[at].tolist(),
                table.reason[at].tolist(),
                table.attempts[at].tolist(),
                strict=True,
            )
            found += [DeadLetter(*row, self.details.get(row[0], b"")) for row in rows]
            if len(found) >= limit:
                break
        return found

    def forget_dead_before(self, time_ms: int) -> Sequences:
        """Dead letters that died before `time_ms`, some at a time, for an ACK by message."""
        dead = self.table.all_in(frozenset({MessageState.DEAD}))
        return dead[self.table.until_ms[self.table.places(dead)] < time_ms][:FORGET_MAX]

    def alive(self, first: int, last: int) -> Sequences:
        """Messages in [first, last] that the log must keep, ascending."""
        return self.table.all_in(ALIVE, after=first - 1, through=last)

    def oldest_alive(self) -> int | None:
        return next((int(found[0]) for found in self.table.scan(ALIVE)), None)

    def oldest_ready_ms(self, now: int) -> int | None:
        self.promote(now)
        if not self.ready:
            return None
        oldest = next(self.table.scan(frozenset({MessageState.READY})))
        return int(self.table.time_ms[self.table.place_of(int(oldest[0]))])

    # --- snapshots and checks ---

    @classmethod
    def restore(cls, config: TopicConfig, data: Buffer, *, partition: int) -> Heap:
        """The heap that `snapshot` described. Its own configuration holds, as of that sequence;
        `config` only tells which topic it must be."""
        heap = cls(config, partition=partition)
        heap.load(data)
        return heap

    def validate(self) -> None:
        """Raise AssertionError unless every invariant holds. Slow: for tests and simulations."""
        self.table.validate()
        self.leases.validate()
        self.dedup.validate()
        self.ready_index.validate()
        self.delayed_index.validate()
        held = [run.messages[run.mask()] for run in self.leases.runs()]
        leased = np.sort(np.concatenate(held)) if held else np.empty(0, np.uint64)
        assert (leased == self.table.all_in(frozenset({MessageState.LEASED}))).all()
        assert len(np.unique(leased)) == len(leased) == self.leased, "a message has two leases"
        prepared = sum(t.count for t in self.prepared.values())
        assert prepared == self.table.counts[MessageState.PREPARED], (
            "a prepared message is orphaned"
        )
        self.transactions.validate()
        dead = set(self.table.all_in(frozenset({MessageState.DEAD})).tolist())
        assert self.details.keys() <= dead, "a detail outlived its dead letter"
        assert len(self.table.counts) == STATES
        assert self.delayed == 0 or self._due_ms is not None, "a delay is not waited for"
