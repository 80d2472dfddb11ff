"""While this node coordinates a partition: from the barrier to the last answer.

A tenure begins when the core says that the epoch is ours and the log the right one. The heap then
applies the rest of the log, the barrier is appended, and once that is committed the partition is
served. It ends at once when the core steps down: nothing may be appended in an epoch that is over.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import msgspec

from penstock.errors import DiskFull, PenstockError, QuorumUnavailable, Unavailable
from penstock.log.crash import crash_point
from penstock.model.batch import Kind
from penstock.node.observe.logs import get_logger
from penstock.node.replica.heap_applier import HeapApplier
from penstock.node.replica.log_sender import LogSender
from penstock.node.replica.ports import Surroundings
from penstock.node.serve.partition import Partition
from penstock.node.serve.topic import ServedTopic
from penstock.node.storage.flusher import Flusher
from penstock.node.write.journal import Journal
from penstock.replication.effects import Effects
from penstock.replication.replica import Replica

BARRIER_BYTES: Final = 4096  # of records that a tenure's start may take
RESIGN_S: Final = 0.5  # for what is under way to commit
log = get_logger(__name__)


class Tenure:
    """One at a time. `journal` is there from the barrier on, `partition` once that is committed."""

    def __init__(
        self,
        topic: ServedTopic,
        index: int,
        replica: Replica,
        *,
        flusher: Flusher,
        applying: HeapApplier,
        sending: LogSender,
        around: Surroundings,
    ) -> None:
        self._topic, self._index, self._replica = topic, index, replica
        self._flusher, self._applying, self._sending = flusher, applying, sending
        self._around = around
        self.journal: Journal | None = None
        self.partition: Partition | None = None
        self._served: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serving(self) -> None:
        """Wait until the partition was served here once; raises if that cannot be."""
        await asyncio.shield(self._served)

    # --- the beginning ---

    async def begin(self, epoch: int) -> Effects:
        """Apply the tail first: what is to be served is the state after all of the log."""

        def wanted() -> bool:  # else it was given up while this waited for something slow
            coordinator = self._replica.coordinator
            return coordinator is not None and coordinator.epoch == epoch

        if not await self._applying.catch_up(self._flusher.log.sequence_last, wanted=wanted):
            # Still wanted: some of it is damaged.
            return self._replica.resign(self._around.now()) if wanted() else []
        try:
            await self._flusher.make_room(BARRIER_BYTES, enqueue=False)
        except DiskFull as error:
            if self._around.alone:
                self.refuse(error)  # whoever opens the topic decides what becomes of it
                return []
            log.error(
                "no room to coordinate",
                topic=self._topic.config.name,
                partition=self._index,
                error=error.message,
            )
            return self._replica.resign(self._around.now())
        if wanted():
            self._enter()
        return []

    def _enter(self) -> None:
        topic, around = self._topic, self._around
        now_ms, alone = around.clock.now_ms(), around.alone
        begin_ms = max(self._latest_ms(now_ms), self._flusher.log.time_ms_last)
        self.journal = journal = Journal(
            self._applying.heap, self._replica, self._flusher, clock=around.clock,
            ahead_ms=begin_ms - now_ms, reserve_bytes=around.reserve_bytes,
            flush=self._flusher.flush if alone else self.flush,
            wake=topic.wake, turn=topic.turn if alone else topic.wake, observe=topic.observe,
            writable=None if alone else self._writable, on_fatal=around.on_fatal,
        )  # fmt: skip
        journal.append_record(Kind.BARRIER, 1, {"node": [around.node.encode()]})
        crash_point("node.barrier.staged")
        journal.flush()

    def _latest_ms(self, own_ms: int) -> int:
        """When the partition's time may begin at the latest; `own_ms`, if our clock is right. Else
        we go by the clocks of those who promised the epoch, and of all that were compared."""
        clocks = self._around.clocks
        if clocks.agreed:
            return own_ms
        quorum_ms = self._replica.quorum_ms(own_ms, self._around.now())
        return min(own_ms, quorum_ms, clocks.latest_ms(own_ms))

    def on_tick(self) -> None:
        """Let the partition's time catch up once our clock is known to be right."""
        journal = self.journal
        if journal is not None and journal.ahead_ms < 0 and self._around.clocks.agreed:
            journal.ahead_ms = 0
            self._topic.wake()

    def _writable(self) -> PenstockError | None:
        refusal = self._replica.writable(self._around.now())
        if isinstance(refusal, QuorumUnavailable) and self._around.cut_off():
            refusal.details["elsewhere"] = True
        return refusal

    def serve(self, epoch: int) -> None:
        """The barrier is committed."""
        journal = self.journal
        if journal is None or journal.coordinator.epoch != epoch:
            return  # ended already
        self.partition = Partition(journal, self._index, self._around.cache)
        if journal.heap.config != self._topic.config:
            config = msgspec.msgpack.encode(self._topic.config)
            journal.append_record(Kind.CONFIG, 1, {"config": [config]})
        self._topic.serve(self._index, self.partition)
        self._around.metrics.takeovers.add((self._topic.config.name,))
        if not self._served.done():
            self._served.set_result(None)

    # --- meanwhile ---

    def flush(self) -> None:
        """Send what is staged, and write it: the disk and the followers work at the same time."""
        if self.journal is not None:
            self._sending.pump_all()
        self._flusher.flush()

    def doubt(self) -> None:
        """No quorum is heard: nobody is kept waiting for a commit that may never come. The tenure
        goes on, and what is staged commits should a quorum come back."""
        partition = self.partition
        if partition is None:
            return
        name = self._topic.config.name
        error = Unavailable(
            f"partition {self._index} of {name} hears no quorum; the outcome is unknown",
            partition=self._index,
        )
        told = partition.journal.doubt(error) + self._topic.doubt(partition, error)
        if told:
            log.warning("no quorum is heard", topic=name, partition=self._index, unanswered=told)

    # --- the end ---

    async def finish(self) -> None:
        """Begin nothing more, and give what is under way a moment to commit."""
        if self.partition is None:
            return
        journal = self.partition.journal
        journal.resigning = True
        with suppress(TimeoutError, PenstockError):  # who waits longer is told: unknown
            await asyncio.wait_for(journal.committed(journal.log.sequence_last), RESIGN_S)

    def depose(self) -> None:
        self.end(
            Unavailable(
                f"partition {self._index} of {self._topic.config.name} changed its coordinator; "
                "the outcome is unknown",
                partition=self._index,
            )
        )

    def end(self, error: Unavailable) -> None:
        """Nothing is appended or answered from here on. The heap stays; see `applying`."""
        journal, partition = self.journal, self.partition
        self.journal = self.partition = None
        self._sending.close()
        if partition is not None:
            if not self._topic.closed:
                self._topic.unserve(self._index)
            partition.reader.forget()
        if journal is not None:
            journal.end(error)
            self._flusher.flush()
            self._applying.resume(self._replica.committed)

    def refuse(self, error: PenstockError) -> None:
        """Whoever waits to be served here waits in vain."""
        if not self._served.done():
            self._served.set_exception(error)
            self._served.exception()  # it is no mistake that nobody waits

    def fail(self, error: Unavailable) -> None:
        """The disk gave up: nobody is served here any more."""
        self.refuse(error)
        if self.journal is not None:
            self.journal.end(error)
