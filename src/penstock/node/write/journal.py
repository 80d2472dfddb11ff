"""A partition's journal: the log, the heap over it, and the coordinator, during one tenure.

*Apply at append, answer at commit.* A batch changes the heap in the same step in which it is staged
to the log, so the next command sees it; whoever waits is called back only when the coordinator says
that the batch is committed. When the tenure ends before that, what waits is told that its outcome
is unknown: the next coordinator may have the batch or not. The same is told when no quorum is heard
for long; the batch stays then, and may be committed yet.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from penstock.errors import Backpressure, PenstockError, Unavailable
from penstock.heap import Applied, Heap
from penstock.log import crash
from penstock.model.batch import SCHEMAS, Batch, Codec, DeadReason, Kind, seal
from penstock.model.columns import Buffer, Columns, Value
from penstock.node.clock import Clock
from penstock.node.storage.flusher import BATCH_OVERHEAD, Flusher
from penstock.replication.replica import Replica

COALESCE_ENTRIES: Final = 64  # so many are worth a batch of their own
LEASE_BYTES: Final = 512  # of a LEASE batch besides its messages, consumer included

Answer = Callable[[], None]
Reply = Callable[[object], None]  # called once, with a result or a PenstockError
Refuse = Callable[[PenstockError], None]


class JournalListener(Protocol):
    """Hears of every batch: when it is staged, and when all up to a sequence are committed. Of
    enqueues it is told, too, when they came, and how many entries each has."""

    def on_staged(self, batch: Batch, columns: Columns) -> None: ...

    def on_enqueued(self, arrivals: Sequence[tuple[float, int]]) -> None: ...

    def on_commit(self, sequence: int) -> None: ...


class Journal:
    def __init__(
        self,
        heap: Heap,
        replica: Replica,
        flusher: Flusher,
        *,
        clock: Clock,
        ahead_ms: int,
        reserve_bytes: int,
        flush: Callable[[], None],
        wake: Callable[[], None],
        turn: Callable[[], None],
        observe: Callable[[Applied, str], None],
        writable: Callable[[], PenstockError | None] | None,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """`ahead_ms`: what the partition's time is ahead of the node's clock; negative: behind.
        Log time never steps back, and the log may come from a node whose clock is faster. A node
        that does not know yet whether its clock is right begins with what others say, and is behind
        until it knows."""
        if replica.coordinator is None:
            raise RuntimeError("a journal is a coordinator's")
        self.heap, self.log, self.coordinator = heap, flusher.log, replica.coordinator
        self._clock, self.ahead_ms = clock, ahead_ms
        self.flush, self.wake = flush, wake
        self.flusher, self._replica = flusher, replica
        self.has_room, self.grow = flusher.has_room, flusher.grow
        self._reserve_bytes = reserve_bytes
        self._observe, self._turn = observe, turn
        self._writable = writable  # None: there is nobody whose agreement is needed
        self._on_fatal = on_fatal
        # Ascending sequences; each with whom to call if it commits, and if that is unknown.
        self._waiting: deque[tuple[int, Answer, Refuse | None]] = deque()
        # Ascending sequences; each with what its batch has changed besides messages that came.
        self._unobserved: deque[tuple[int, Applied, str]] = deque()
        self.failed: Unavailable | None = None  # nothing is taken or acknowledged any more
        self.resigning = False  # what is under way is finished, nothing else begun
        # The fold of a delta topic, while somebody subscribes.
        self.live: JournalListener | None = None

    @property
    def idle(self) -> bool:
        return not (self._waiting or self.flusher.writing)

    def now_ms(self) -> int:
        """The partition's own time, which its heap and its log go by."""
        return self._clock.now_ms() + self.ahead_ms

    def refusal(self) -> PenstockError | None:
        """Why nothing can be committed now, or would be so late that writers should wait."""
        return self.failed or (None if self._writable is None else self._writable())

    def takes(self, refuse: Refuse, *, late: bool = False) -> bool:
        """Whether gathered work may become batches now. What cannot for a while is refused.
        `late`: it is taken even when writers should wait."""
        if self.failed is None and (self.resigning or not self.coordinator.serving):
            return False
        refusal = self.refusal()
        if refusal is None or (late and isinstance(refusal, Backpressure)):
            return True
        refuse(refusal)
        return False

    @property
    def may_commit(self) -> bool:
        """Whether what is appended now would be committed soon, as far as is known."""
        return not (self.resigning or isinstance(self.refusal(), Unavailable))

    def check_commits(self) -> None:
        """Raise if what is appended now would not be committed, as far as is known. For writes that
        take another way than the partition's turn, which refuses them by itself."""
        refusal = self.refusal()
        if isinstance(refusal, Unavailable):
            raise refusal

    # --- appending ---

    def append(
        self, kind: Kind, body: Buffer, count: int, *, columns: Columns | None = None,
        codec: Codec = Codec.NONE, raw_length: int | None = None,
    ) -> Batch:  # fmt: skip
        """Stage one batch and apply it. The caller has made sure that there is room."""
        if self.failed is not None:
            raise self.failed
        log = self.log
        batch = seal(
            kind,
            body,
            topic=log.topic,
            partition=log.partition,
            epoch=self.coordinator.epoch,
            epoch_previous=log.epoch_last,
            first=log.sequence_last + 1,
            count=count,
            time_ms=max(self._clock.now_ms() + self.ahead_ms, log.time_ms_last),
            chain_previous=log.chain_last,
            codec=codec,
            raw_length=raw_length,
        )
        log.stage(batch)
        self._replica.on_staged(batch)
        columns = columns or batch.columns()
        applied = self.heap.apply(batch, columns)
        if kind is not Kind.ENQ:  # which releases nothing, and is counted when it is answered
            reason = ""
            if kind is Kind.DEAD:  # a batch of them has one reason
                reason = DeadReason.name_of(int(columns.fixed("reason")[0]))
            self._unobserved.append((batch.last, applied, reason))
        if self.live is not None:
            self.live.on_staged(batch, columns)
        return batch

    def append_record(self, kind: Kind, count: int, values: dict[str, Value | None]) -> Batch:
        """Stage a batch of plain columns, for records that are not enqueues or leases."""
        return self.append(kind, SCHEMAS[kind].encode(count, values), count)

    def when_committed(
        self, sequence: int, callback: Answer, *, unknown: Refuse | None = None
    ) -> None:
        """Call back once everything up to `sequence` is committed (at once if it is), or call
        `unknown` if the tenure ends first, or no quorum is heard for long."""
        if sequence <= self.coordinator.sequence_committed:
            callback()
            return
        if self._waiting:
            sequence = max(sequence, self._waiting[-1][0])
        self._waiting.append((sequence, callback, unknown))

    def committed(self, sequence: int) -> asyncio.Future[None]:
        """A future that is done once `sequence` is committed, or fails as the tenure did."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.failed is not None:
            future.set_exception(self.failed)
            return future

        def done() -> None:
            if not future.done():
                future.set_result(None)

        def unknown(error: PenstockError) -> None:
            if not future.done():
                future.set_exception(error)

        self.when_committed(sequence, done, unknown=unknown)
        return future

    def releasing(self, consumer: bytes) -> int:
        """Leases of a consumer that have ended, which is not committed yet."""
        return sum(applied.released.get(consumer, 0) for _, applied, _ in self._unobserved)

    # --- what becomes of it ---

    def on_commit(self, sequence: int) -> None:
        if crash.armed:
            crash.crash_point("node.commit.unanswered")
        unobserved = self._unobserved
        while unobserved and unobserved[0][0] <= sequence:
            _, applied, reason = unobserved.popleft()
            self._observe(applied, reason)
        if self.live is not None:
            self.live.on_commit(sequence)
        self._turn()  # the next write is under way while this one's waiters are answered
        waiting = self._waiting
        while waiting and waiting[0][0] <= sequence:
            answer = waiting.popleft()[1]
            try:
                answer()
            except Exception as error:  # noqa: BLE001 - the others must still be answered
                self._on_fatal(error)

    def doubt(self, error: Unavailable) -> int:
        """Whoever can be told that an outcome is unknown gets `error`; returns how many. The
        batches stay, and with them what is to be done for nobody in particular at their commit."""
        told = [unknown for _, _, unknown in self._waiting if unknown is not None]
        self._waiting = deque(waiter for waiter in self._waiting if waiter[2] is None)
        for unknown in told:
            try:
                unknown(error)
            except Exception as failure:  # noqa: BLE001 - the others must still be told
                self._on_fatal(failure)
        return len(told)

    def end(self, error: Unavailable) -> None:
        """Nothing is acknowledged from here on; who waits gets `error`."""
        if self.failed is not None:
            return
        self.failed = error
        self._unobserved.clear()
        self.doubt(error)
        self._waiting.clear()
        self.wake()

    # --- room on disk ---

    def has_room_to_lease(self, count: int) -> bool:
        """As `has_room`, but what is leased must also find room to be settled, and be committed
        before its time runs out."""
        if not self.may_commit:
            return False
        body_bytes = count * 8 + LEASE_BYTES
        settling = self._reserve_bytes // 2
        return self.log.room(False) >= body_bytes + settling + BATCH_OVERHEAD

    async def make_room(self, body_bytes: int) -> None:
        """Wait until an enqueue of so many bytes fits; raises `DiskFull` if it will not."""
        await self.flusher.make_room(body_bytes, enqueue=True)
        if self.failed is not None:
            raise self.failed
