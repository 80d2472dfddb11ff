"""The atomic batches of one topic: what its producers and other nodes begin, and what is left over.

Two timers are set anew when something was appended to the topic's logs. A batch that was prepared
too long ago asks its home for the decision. And homes learn that every participant has its copy of
a decision: a home keeps each commit for those that may still ask (`heap.transactions`). After a
while it asks them instead: each participant tells which of the home's batches still wait there.
What waits nowhere is confirmed by a record in the home's log, for many batches at once. A
participant that cannot answer holds back the batches that it has a share of, and no others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from penstock.errors import PenstockError
from penstock.heap.transactions import Doubts
from penstock.node.atomic.driver import enqueue_atomically, resolve_in_doubt
from penstock.node.atomic.participant import append_confirmed, stage_here
from penstock.node.atomic.remote import doubts_at
from penstock.node.clock import Alarm, Clock, Timer
from penstock.node.observe.logs import get_logger
from penstock.node.route.ports import PartitionPort
from penstock.node.serve.partition import Partition
from penstock.node.serve.topic import Topic
from penstock.node.write.requests import EnqueuePart

IN_DOUBT_MS: Final = 5000  # that a batch is prepared before its home is asked
DOUBT_PAUSE_MS: Final = 500  # before the next question, at least
CONFIRM_MS: Final = 10_000  # that a commit is kept before its participants are asked, and between
CROWDED: Final = 1 << 13  # commits that are not kept that long
CROWDED_MS: Final = 1000
ASKED_MAX: Final = 16  # participants at the same time
RECORD_MAX: Final = 512  # commits that one record confirms
RECORD_BYTES: Final = 32  # of it for each
log = get_logger(__name__)


class AtomicBatches:
    def __init__(self, topic: Topic) -> None:
        self._topic, self._clock, self._spawn = topic, topic.clock, topic.router.spawn
        self._confirmer = Confirmer(topic, topic.clock)
        self._doubt: Timer | None = None  # set until what was prepared too long ago has asked

    def enqueue(self, parts: Sequence[tuple[PartitionPort, EnqueuePart]]) -> None:
        """Write all parts or none; each part's request is answered."""
        self._spawn(enqueue_atomically(self._topic, parts), name="atomic-enqueue")

    def prepare(
        self, partition: Partition, part: EnqueuePart, *, transaction: bytes, home: int
    ) -> None:
        """Prepare a part of a batch that another node drives."""
        work = self._prepare(partition, part, transaction=transaction, home=home)
        self._spawn(work, name="atomic-prepare")

    async def _prepare(
        self, partition: Partition, part: EnqueuePart, *, transaction: bytes, home: int
    ) -> None:
        try:
            staged = await stage_here(
                self._topic, partition, part, transaction=transaction, home=home
            )
            self._topic.wake()
            done = await staged.prepared
        except PenstockError as error:
            part.request.part_failed(error)
        else:
            part.request.part_placed(done.placed, done.duplicates)

    def arm(self) -> None:
        """Set the timers, as far as something waits for them."""
        self._confirmer.arm()
        if self._doubt is not None:
            return
        local = self._topic.local
        times = [t.time_ms - p.ahead_ms for p in local for t in p.heap.prepared.values()]
        if times:
            when_ms = max(min(times) + IN_DOUBT_MS, self._clock.now_ms() + DOUBT_PAUSE_MS)
            self._doubt = self._clock.call_at(when_ms, self._on_doubt)

    def _on_doubt(self) -> None:
        if not self._topic.closed:
            self._spawn(self._resolve(), name="resolve-in-doubt")

    async def _resolve(self) -> None:
        try:
            await resolve_in_doubt(self._topic, older_ms=IN_DOUBT_MS)
        finally:
            self._doubt = None
            self._topic.rearm()

    def close(self) -> None:
        if self._doubt is not None:
            self._doubt.cancel()
        self._confirmer.cancel()


class Confirmer:
    """The timer of a topic's homes."""

    def __init__(self, topic: Topic, clock: Clock) -> None:
        self._topic, self._clock = topic, clock
        self._alarm = Alarm(clock, self._on_due)
        self._asked_ms = 0  # when participants were asked last
        self._asking = False

    def arm(self) -> None:
        """Set the timer if something is to be confirmed."""
        kept = [p for p in self._topic.local if p.heap.transactions.unconfirmed]
        if self._asking or not kept:
            return
        crowded = max(len(p.heap.transactions.unconfirmed) for p in kept) >= CROWDED
        pause_ms = CROWDED_MS if crowded else CONFIRM_MS
        oldest_ms = min(_oldest_ms(p) for p in kept)
        self._alarm.set(max(oldest_ms, self._asked_ms) + pause_ms)

    def cancel(self) -> None:
        self._alarm.cancel()

    def _on_due(self) -> None:
        if not self._topic.closed:
            self._asking = True
            self._topic.router.spawn(self._confirm(), name="confirm-atomic")

    async def _confirm(self) -> None:
        try:
            await confirm(self._topic)
        finally:
            self._asking, self._asked_ms = False, self._clock.now_ms()
            if not self._topic.closed:
                self.arm()


def _oldest_ms(partition: Partition) -> int:
    """When the first of a home's commits was written, by the node's clock."""
    commits = partition.heap.transactions.unconfirmed.values()
    return next(iter(commits)).time_ms - partition.ahead_ms


async def confirm(topic: Topic) -> int:
    """Ask the participants of what the homes here keep; returns how many commits were confirmed."""
    slots = asyncio.Semaphore(ASKED_MAX)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_confirm_of(topic, home, slots)) for home in topic.local]
    return sum(task.result() for task in tasks)


async def _confirm_of(topic: Topic, home: Partition, slots: asyncio.Semaphore) -> int:
    transactions = home.heap.transactions
    asked = {place.partition for c in transactions.unconfirmed.values() for place in c.places}
    answers: dict[int, Doubts] = {}

    async def ask(index: int) -> None:
        try:
            async with slots:
                answers[index] = await doubts_at(topic, index, home=home.index)
        except PenstockError as error:
            log.info(
                "commits are kept", topic=topic.config.name, home=home.index, participant=index,
                count=len(transactions.unconfirmed), error=error.message,
            )  # fmt: skip

    async with asyncio.TaskGroup() as group:
        for index in asked:
            group.create_task(ask(index))
    written = _write(home, transactions.confirmed(answers))
    if written:
        topic.wake()
    return written


def _write(home: Partition, confirmed: list[bytes]) -> int:
    """Records that these are confirmed, as far as there is room for them."""
    journal = home.journal
    for at in range(0, len(confirmed), RECORD_MAX):
        some = confirmed[at : at + RECORD_MAX]
        if not journal.may_commit:
            return at
        if not journal.has_room(len(some) * RECORD_BYTES, enqueue=True):
            journal.grow(len(some) * RECORD_BYTES)
            return at
        append_confirmed(home, some)
    return len(confirmed)
