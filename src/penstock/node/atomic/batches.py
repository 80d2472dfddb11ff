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
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from penstock.errors import PenstockError
from penstock.heap.transactions import Doubts
from penstock.model.batch import Decision
from penstock.node.atomic.driver import doubts_at, enqueue_atomically, resolve_in_doubt
from penstock.node.atomic.participant import append_decision, prepare_here
from penstock.node.clock import Alarm
from penstock.node.observe.logs import get_logger
from penstock.node.route.ports import PartitionPort
from penstock.node.serve.partition import Partition
from penstock.node.serve.topic import ServedTopic
from penstock.node.write.enqueuer import EnqueuePart

IN_DOUBT_MS: Final = 5000  # that a batch is prepared before its home is asked
DOUBT_PAUSE_MS: Final = 500  # before the next question, at least
CONFIRM_MS: Final = 10_000  # that a commit is kept before its participants are asked, and between
CROWDED: Final = 1 << 13  # commits that are not kept that long
CROWDED_MS: Final = 1000
ASKED_MAX: Final = 16  # participants at the same time
RECORD_MAX: Final = 512  # commits that one record confirms
RECORD_BYTES: Final = 32  # of it for each
RESOLVE, CONFIRM = "resolve-in-doubt", "confirm-atomic"
log = get_logger(__name__)


class AtomicBatches:
    def __init__(self, topic: ServedTopic) -> None:
        self._topic, self._clock, self._spawn = topic, topic.clock, topic.router.spawn
        self._doubt = Alarm(topic.clock, self._on_doubt)
        self._unconfirmed = Alarm(topic.clock, self._on_unconfirmed)
        self._asked_ms = 0  # when participants were asked last
        self._under_way: set[str] = set()  # what a timer has begun and is not done

    def enqueue(self, parts: Sequence[tuple[PartitionPort, EnqueuePart]]) -> None:
        self._spawn(enqueue_atomically(self._topic, parts), name="atomic-enqueue")

    def prepare(
        self, partition: Partition, part: EnqueuePart, *, transaction: bytes, home: int
    ) -> None:

        async def prepare() -> None:
            try:
                placed = await prepare_here(
                    self._topic, partition, part, transaction=transaction, home=home
                )
            except PenstockError as error:
                part.request.part_failed(error)
            else:
                part.request.part_placed(placed, part.known)

        self._spawn(prepare(), name="atomic-prepare")

    def arm(self) -> None:
        """Set the timers, as far as something waits for them."""
        local = self._topic.local
        waiting = [(p, p.heap.transactions.prepared.values()) for p in local]
        times = [batch.time_ms - p.ahead_ms for p, batches in waiting for batch in batches]
        if times and RESOLVE not in self._under_way:
            self._doubt.set(max(min(times) + IN_DOUBT_MS, self._clock.now_ms() + DOUBT_PAUSE_MS))
        kept = [(p, c) for p in local if (c := p.heap.transactions.unconfirmed)]
        if kept and CONFIRM not in self._under_way:
            crowded = max(len(commits) for _, commits in kept) >= CROWDED
            oldest_ms = min(next(iter(c.values())).time_ms - p.ahead_ms for p, c in kept)
            pause_ms = CROWDED_MS if crowded else CONFIRM_MS
            self._unconfirmed.set(max(oldest_ms, self._asked_ms) + pause_ms)

    def _on_doubt(self) -> None:
        self._begin(RESOLVE, partial(resolve_in_doubt, self._topic, older_ms=IN_DOUBT_MS))

    def _on_unconfirmed(self) -> None:
        self._begin(CONFIRM, self._confirm)

    async def _confirm(self) -> None:
        try:
            await confirm(self._topic)
        finally:
            self._asked_ms = self._clock.now_ms()

    def _begin(self, name: str, work: Callable[[], Awaitable[object]]) -> None:
        async def run() -> None:
            try:
                await work()
            finally:
                self._under_way.discard(name)
                self._topic.rearm()

        self._under_way.add(name)
        self._spawn(run(), name=name)

    def close(self) -> None:
        self._doubt.cancel()
        self._unconfirmed.cancel()


async def confirm(topic: ServedTopic) -> int:
    """Ask the participants of what the homes here keep; returns how many commits were confirmed."""
    slots = asyncio.Semaphore(ASKED_MAX)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_confirm_of(topic, home, slots)) for home in topic.local]
    return sum(task.result() for task in tasks)


async def _confirm_of(topic: ServedTopic, home: Partition, slots: asyncio.Semaphore) -> int:
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
    confirmed, journal = transactions.confirmed(answers), home.journal
    for at in range(0, len(confirmed), RECORD_MAX):
        some = confirmed[at : at + RECORD_MAX]
        if not journal.may_commit:
            return at
        if not journal.has_room(len(some) * RECORD_BYTES, enqueue=True):
            journal.grow(len(some) * RECORD_BYTES)
            return at
        append_decision(home, some, Decision.CONFIRMED)
        topic.wake()
    return len(confirmed)
