"""The owner of one partition: its commands gather here and take effect in its turn.

Everything runs on the event loop; storage work goes to the partition's writer thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.errors import Backpressure
from penstock.heap.spine import Keys, Sequences
from penstock.model.batch import SCHEMAS, Batch, Kind
from penstock.node.enqueueing import COALESCE_ENTRIES, Enqueueing
from penstock.node.journal import Journal
from penstock.node.reading import MessageReader, ReadCache
from penstock.node.settling import Settling

SETTLE_WRITES_MAX: Final = 2  # that pass a few settlements by


@dataclass(slots=True)
class SnapshotFacts:
    """The newest snapshot of a partition, for status and metrics."""

    sequence: int = 0
    bytes: int = 0
    time_ms: int = 0
    log_bytes: int = 0  # size of the log when it was taken


class Partition:
    cut: Final = False  # as its heap, of which it is a source for the spine

    def __init__(self, journal: Journal, index: int, cache: ReadCache) -> None:
        self.index = index
        self.journal = journal
        self.ahead_ms = journal.clock.ahead_ms  # of the node's clock
        self.heap, self.log, self.coordinator = journal.heap, journal.log, journal.coordinator
        self.enqueueing = Enqueueing(journal, index)
        self.settling = Settling(journal)
        self.reader = MessageReader(journal.log, cache)
        self.snapshot = SnapshotFacts()

    @property
    def sequence_readable(self) -> int:
        return self.coordinator.sequence_committed

    @property
    def idle(self) -> bool:
        return not self._gathered and self.journal.idle

    @property
    def _gathered(self) -> int:
        return self.enqueueing.gathered + self.settling.gathered

    def take_enqueues(self) -> None:
        """Turn the enqueues that have gathered into batches.

        While a write is under way a little is taken once, so that the work is done when the write
        is; after that it waits, and becomes one batch with what else comes.
        """
        work, journal = self.enqueueing, self.journal
        if self._may_take(work):
            if journal.writing and work.gathered < COALESCE_ENTRIES:
                if work.taken_during == journal.writes:
                    return
                work.taken_during = journal.writes
            work.process()

    def take_settlements(self) -> None:
        """The same for acknowledgements, returns and extensions, which can wait a little longer:
        a few are taken when no write is under way, or when some have passed them by."""
        work, journal = self.settling, self.journal
        if self._may_take(work):
            passed = journal.writes - work.waiting_since
            if (
                not journal.writing
                or work.gathered >= COALESCE_ENTRIES
                or passed >= SETTLE_WRITES_MAX
            ):
                work.process()

    def _may_take(self, work: Enqueueing | Settling) -> bool:
        if self.journal.failed is not None:
            work.fail(self.journal.failed)
            return False
        if not work.gathered or not self.coordinator.serving or self.journal.resigning:
            return False
        refusal = self.journal.refusal()
        if refusal is None or (work is self.settling and isinstance(refusal, Backpressure)):
            return True
        work.fail(refusal)
        return False

    def leased_to(self, consumer: bytes) -> int:
        """Leases whose credit a consumer does not have back yet."""
        return self.heap.leases_of(consumer) + self.journal.releasing(consumer)

    def now_ms(self) -> int:
        """The partition's own time, which its heap and its log go by."""
        return self.journal.clock.now_ms()

    def expire(self) -> None:
        if self.coordinator.serving and self.journal.may_commit:
            self.settling.expire()

    def next_wakeup(self) -> int | None:
        """What the node's clock shows when the next lease or delay falls due."""
        when_ms = self.heap.next_wakeup()
        return None if when_ms is None else when_ms - self.ahead_ms

    # --- the heap at a moment of the node's clock, so that one moment does for many partitions ---

    def select(self, n: int, now: int) -> Sequences:
        return self.heap.select(n, now + self.ahead_ms)

    def candidates(self, n: int, now: int) -> tuple[Keys, Sequences]:
        return self.heap.candidates(n, now + self.ahead_ms)

    def rank(self, key: int, sequence: int, now: int) -> int:
        return self.heap.rank(key, sequence, now + self.ahead_ms)

    # --- leasing ---

    def lease(self, messages: Sequences, *, consumer: bytes, visibility_ms: int) -> Batch:
        """Lease the given ready messages to one consumer."""
        body = SCHEMAS[Kind.LEASE].encode(
            len(messages),
            {
                "message": messages,
                "run_count": [len(messages)],
                "run_visibility_ms": [visibility_ms],
                "run_consumer": [consumer],
            },
            runs=1,
        )
        return self.journal.append(Kind.LEASE, body, len(messages))
