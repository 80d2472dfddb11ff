"""The owner of one partition: its commands gather here and take effect in its turn.

Everything runs on the event loop; storage work goes to the partition's writer thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from penstock.heap.spine import Keys, Sequences
from penstock.model.batch import SCHEMAS, Batch, Kind
from penstock.model.topic import TopicConfig
from penstock.node.clock import Clock
from penstock.node.observe.metrics import Metrics
from penstock.node.route.ports import Key, PartitionPort
from penstock.node.route.router import Router
from penstock.node.serve.message_reader import MessageReader, ReadCache
from penstock.node.write.enqueuer import Enqueuer
from penstock.node.write.journal import Journal
from penstock.node.write.settler import LeaseSettler


class Partition:
    # The spine may take every candidate of a partition that is served here: it knows of all of
    # them. Only another node's list may be cut.
    cut: Final = False

    def __init__(self, journal: Journal, index: int, cache: ReadCache) -> None:
        self.index = index
        self.journal = journal
        self.heap, self.log, self.coordinator = journal.heap, journal.log, journal.coordinator
        self.enqueuer = Enqueuer(journal, index)
        self.settler = LeaseSettler(journal)
        # What others ask of the partition goes straight there, without a call in between.
        self.enqueue, self.settle = self.enqueuer.enqueue, self.settler.settle
        self.reader = MessageReader(journal.log, cache)

    @property
    def ahead_ms(self) -> int:
        """What the partition's time is ahead of the node's clock; negative: behind."""
        return self.journal.ahead_ms

    @property
    def sequence_readable(self) -> int:
        return self.coordinator.sequence_committed

    @property
    def idle(self) -> bool:
        return not (self.enqueuer.gathered or self.settler.gathered) and self.journal.idle

    def leased_to(self, consumer: bytes) -> int:
        """Leases whose credit a consumer does not have back yet."""
        return self.heap.leases_of(consumer) + self.journal.releasing(consumer)

    def expire(self) -> None:
        if self.coordinator.serving and self.journal.may_commit:
            self.settler.expire()

    # --- the heap at a moment of the node's clock, so that one moment does for many partitions ---

    def select(self, n: int, now: int) -> Sequences:
        return self.heap.select(n, now + self.ahead_ms)

    def candidates(self, n: int, now: int) -> tuple[Keys, Sequences]:
        return self.heap.candidates(n, now + self.ahead_ms)

    def rank(self, key: int, sequence: int, now: int) -> int:
        return self.heap.rank(key, sequence, now + self.ahead_ms)

    # --- leasing ---

    def lease(self, messages: Sequences, *, consumer: bytes, visibility_ms: int) -> Batch:
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


class TopicView(Protocol):
    """What the parts of a topic may ask it: those that lease its messages, here and to other nodes,
    and the one that takes deltas in."""

    config: TopicConfig
    clock: Clock
    metrics: Metrics
    router: Router
    closed: bool
    live_room: Callable[[], int] | None  # how many deltas the live path has room for; None: any

    @property
    def partitions(self) -> Sequence[PartitionPort]:
        """All, wherever they are served."""

    @property
    def local(self) -> Sequence[Partition]:
        """Those that this node serves, by index."""

    @property
    def leased(self) -> int: ...

    def key(self, index: int) -> Key: ...

    def served(self, index: int) -> Partition | None: ...

    def wake(self) -> None:
        """Take a turn soon."""
