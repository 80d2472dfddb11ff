"""A partition that this node coordinates, from its barrier until it steps down.

It owns the log and the heap over it for one tenure. Commands gather (`Enqueuer`, `LeaseSettler`)
and become batches in the topic's turn; everything runs on the event loop.

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
from contextlib import suppress
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import Backpressure, PenstockError, SequenceConflict, Unavailable
from penstock.heap.index import Keys, Sequences
from penstock.heap.machine import Heap, ReturnPlan
from penstock.heap.state import Applied
from penstock.log import crash
from penstock.model.batch import SCHEMAS, Batch, Codec, DeadReason, Kind, compress, seal
from penstock.model.columns import Buffer, Columns, Value
from penstock.model.entries import ENQ
from penstock.node.clock import Clock
from penstock.node.serve.message_reader import MessageReader, ReadCache
from penstock.node.storage.log_io import BATCH_OVERHEAD, Flusher
from penstock.node.write import (
    RETURN_BYTES,
    RETURN_BYTES_APART,
    EnqueuePart,
    ExtendRequest,
    ReturnRequest,
    TokenRequest,
    merge,
)
from penstock.replication.replica import Replica

COALESCE_ENTRIES: Final = 64  # so many are worth a batch of their own
COALESCE_BYTES: Final = 1 << 20  # parts are not merged into more than this
MERGE_BYTES: Final = 64  # what an entry may grow by: columns that only its new neighbours had
_APART_BYTES: Final = 256  # what a second batch costs besides its entries
COMPRESS_BYTES_MIN: Final = 512
LEASE_BYTES: Final = 512  # of a LEASE batch besides its messages, consumer included
EXPIRE_MAX: Final = 1000  # leases expired in one turn
SETTLE_WRITES_MAX: Final = 2  # that may pass a few settlements by
RESIGN_S: Final = 0.5  # for what is under way to commit
Answer = Callable[[], None]
Refuse = Callable[[PenstockError], None]
C = TypeVar("C", EnqueuePart, TokenRequest)


class BatchListener(Protocol):
    """Hears of every batch: when it is staged, and when all up to a sequence are committed. Of
    enqueues it is told, too, when they came, and how many entries each has."""

    def on_staged(self, batch: Batch, columns: Columns) -> None: ...

    def on_enqueued(self, arrivals: Sequence[tuple[float, int]]) -> None: ...

    def on_commit(self, sequence: int) -> None: ...


class Partition:
    # The spine may take every candidate of a partition that is served here: it knows of all of
    # them. Only another node's list may be cut.
    cut: Final = False

    def __init__(
        self,
        heap: Heap,
        replica: Replica,
        flusher: Flusher,
        *,
        clock: Clock,
        ahead_ms: int,
        reserve_bytes: int,
        cache: ReadCache,
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
            raise RuntimeError("only a coordinator has a partition to serve")
        self.heap, self.log, self.coordinator = heap, flusher.log, replica.coordinator
        self.index = flusher.log.partition
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
        self._resigning = False  # what is under way is finished, nothing else begun
        self.listener: BatchListener | None = None
        self.enqueuer, self.settler = Enqueuer(self), LeaseSettler(self)
        # What others ask of the partition goes straight there, without a call in between.
        self.enqueue, self.settle = self.enqueuer.add, self.settler.add
        self.reader = MessageReader(flusher.log, cache)

    @property
    def sequence_readable(self) -> int:
        return self.coordinator.sequence_committed

    @property
    def idle(self) -> bool:
        gathered = self.enqueuer.gathered or self.settler.gathered
        return not (gathered or self._waiting or self.flusher.writing)

    def listen(self, listener: BatchListener) -> None:
        """Tell `listener` of all batches from now on: somebody subscribes to a delta topic."""
        self.listener = listener

    def unlisten(self, listener: BatchListener) -> None:
        if self.listener is listener:
            self.listener = None

    def leased_to(self, consumer: bytes) -> int:
        """Leases whose credit a consumer does not have back yet: those that it holds, and those
        that have ended, which is not committed yet."""
        ended = sum(applied.released.get(consumer, 0) for _, applied, _ in self._unobserved)
        return self.heap.leases_of(consumer) + ended

    def expire(self) -> None:
        if self.coordinator.serving and self.may_commit:
            self.settler.expire()

    # --- time ---

    def now_ms(self) -> int:
        """The partition's own time, which its heap and its log go by."""
        return self._clock.now_ms() + self.ahead_ms

    def on_clock_agreed(self) -> None:
        """The node's clock is known to be right: the partition's time catches up with it."""
        if self.ahead_ms < 0:
            self.ahead_ms = 0
            self.wake()

    # The heap at a moment of the node's clock, so that one moment does for many partitions.

    def select(self, n: int, now: int) -> Sequences:
        return self.heap.select(n, now + self.ahead_ms)

    def candidates(self, n: int, now: int) -> tuple[Keys, Sequences]:
        return self.heap.candidates(n, now + self.ahead_ms)

    def rank(self, key: int, sequence: int, now: int) -> int:
        return self.heap.rank(key, sequence, now + self.ahead_ms)

    # --- what may be appended ---

    def refusal(self) -> PenstockError | None:
        """Why nothing can be committed now, or would be so late that writers should wait."""
        return self.failed or (None if self._writable is None else self._writable())

    def takes(self, refuse: Refuse, *, late: bool = False) -> bool:
        """Whether gathered work may become batches now. What cannot for a while is refused.
        `late`: it is taken even when writers should wait."""
        if self.failed is None and (self._resigning or not self.coordinator.serving):
            return False
        refusal = self.refusal()
        if refusal is None or (late and isinstance(refusal, Backpressure)):
            return True
        refuse(refusal)
        return False

    @property
    def may_commit(self) -> bool:
        """Whether what is appended now would be committed soon, as far as is known."""
        return not (self._resigning or isinstance(self.refusal(), Unavailable))

    def check_commits(self) -> None:
        """Raise if what is appended now would not be committed, as far as is known. For writes that
        take another way than the partition's turn, which refuses them by itself."""
        refusal = self.refusal()
        if isinstance(refusal, Unavailable):
            raise refusal

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
        if self.listener is not None:
            self.listener.on_staged(batch, columns)
        return batch

    def append_record(self, kind: Kind, count: int, values: dict[str, Value | None]) -> Batch:
        """Stage a batch of plain columns, for records that are not enqueues or leases."""
        return self.append(kind, SCHEMAS[kind].encode(count, values), count)

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
        return self.append(Kind.LEASE, body, len(messages))

    # --- what becomes of it ---

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

    def on_commit(self, sequence: int) -> None:
        if crash.armed:
            crash.crash_point("node.commit.unanswered")
        unobserved = self._unobserved
        while unobserved and unobserved[0][0] <= sequence:
            _, applied, reason = unobserved.popleft()
            self._observe(applied, reason)
        if self.listener is not None:
            self.listener.on_commit(sequence)
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

    async def finish(self) -> None:
        """Begin nothing more, and give what is under way a moment to commit."""
        self._resigning = True
        with suppress(TimeoutError, PenstockError):  # who waits longer is told: unknown
            await asyncio.wait_for(self.committed(self.log.sequence_last), RESIGN_S)

    def end(self, error: Unavailable) -> None:
        """Nothing is acknowledged from here on; who waits gets `error`."""
        if self.failed is not None:
            return
        self.failed = error
        self._unobserved.clear()
        self.doubt(error)
        self._waiting.clear()
        self.wake()


class CommandQueue(Generic[C]):
    def __init__(self, partition: Partition) -> None:
        self._partition, self._heap = partition, partition.heap
        self._waiting: list[C] = []
        self.gathered = 0  # entries or tokens of those that wait

    def add(self, command: C) -> None:
        if self._partition.failed is not None:
            command.fail(self._partition.failed)
            return
        self._waiting.append(command)
        self.gathered += command.count
        self._partition.wake()

    def fail(self, error: PenstockError) -> None:
        waiting, self._waiting, self.gathered = self._waiting, [], 0
        _fail_all(waiting, error)

    def _put_back(self, commands: list[C], body_bytes: int) -> None:
        """The disk has to give more room first. If it just refused, all are refused."""
        self._waiting = commands + self._waiting
        self.gathered = sum(command.count for command in self._waiting)
        full = self._partition.flusher.disk_full()
        if full is not None:
            self.fail(full)
        else:
            self._partition.grow(body_bytes)


def _fail_all(commands: Sequence[C], error: PenstockError) -> None:
    for command in commands:
        command.fail(error)


class Enqueuer(CommandQueue[EnqueuePart]):
    """Many small enqueues become one batch, a large one goes in as it came."""

    _taken_during = -1  # the write during which a little was taken last

    def take_turn(self) -> None:
        """Turn the enqueues that have gathered into batches.

        While a write is under way a little is taken once, so that the work is done when the write
        is; after that it waits, and becomes one batch with what else comes.
        """
        partition = self._partition
        if not partition.takes(self.fail):
            return
        if partition.flusher.writing and self.gathered < COALESCE_ENTRIES:
            if self._taken_during == partition.flusher.writes:
                return
            self._taken_during = partition.flusher.writes
        self._process()

    def _process(self) -> None:
        parts, self._waiting, self.gathered = self._waiting, [], 0
        group: list[EnqueuePart] = []
        size = 0  # bytes that the group will take
        producers: set[bytes] = set()
        for at, part in enumerate(parts):
            own = len(part.columns.body) + MERGE_BYTES * part.count
            names = part.columns.binary("run_producer") if len(parts) > 1 else None
            mine = set() if names is None else set(names)
            alone = part.expected_sequence is not None or not producers.isdisjoint(mine)
            if group and (alone or size + own > COALESCE_BYTES):
                self._write_group(group)
                group, size, producers = [], 0, set()
            if not self._partition.has_room(size + own + _APART_BYTES, enqueue=True):
                self._write_group(group)
                self._put_back(parts[at:], own + _APART_BYTES)
                return
            if self._is_answered(part):
                continue
            group.append(part)
            size += own
            producers |= mine
            if part.count >= COALESCE_ENTRIES:
                self._write_group(group)
                group, size, producers = [], 0, set()
        self._write_group(group)

    def _is_answered(self, part: EnqueuePart) -> bool:
        """Whether nothing of a part is to be appended: it conflicts, or was all written before.

        A request that was written is answered as before whatever it expects: its own entries are
        what has moved the partition.
        """
        request = part.request
        try:
            duplicates = self._heap.dedup.admit(part.columns)
        except PenstockError as error:
            request.part_failed(error)
            return True
        at = self._heap.sequence_enqueued
        if len(duplicates) < part.count and part.expected_sequence not in (None, at):
            # That is told once it is final: what is not committed may come to nothing, and another
            # attempt succeed.
            text = f"partition {self._partition.index} is at {at}, not at {part.expected_sequence}"
            answer = partial(request.part_failed, SequenceConflict(text, sequence=at))
        else:
            if duplicates:
                part.leave_out(duplicates, self._partition.index)
            if part.count:
                return False
            at = max(sequence for _, sequence, _ in duplicates)
            answer = partial(request.part_placed, [], part.known)
        self._partition.when_committed(at, answer, unknown=request.part_failed)
        return True

    def _write_group(self, group: list[EnqueuePart]) -> None:
        if not group:
            return
        partition, first = self._partition, group[0]
        body, columns, codec = first.body, first.columns, first.codec
        if len(group) > 1:
            body, codec = merge([part.columns for part in group]), 0
            columns = ENQ.decode(body, sum(part.count for part in group))
        wanted = Codec[self._heap.config.compression.name]
        if not codec and wanted and len(columns.body) >= COMPRESS_BYTES_MIN:
            body, codec = compress(wanted, body), wanted
        batch = partition.append(
            Kind.ENQ, body, columns.count, columns=columns, codec=Codec(codec),
            raw_length=len(columns.body),
        )  # fmt: skip
        if crash.armed:
            crash.crash_point("node.enqueue.staged")
        if partition.listener is not None:
            partition.listener.on_enqueued([(p.request.started, p.count) for p in group])
        answer = partial(self._answer, group, batch)
        partition.when_committed(batch.last, answer, unknown=partial(_fail_all, group))

    def _answer(self, group: list[EnqueuePart], batch: Batch) -> None:
        first = batch.first
        for part in group:
            placed = part.placed(self._partition.index, first, batch.time_ms)
            part.request.part_placed(placed, part.known)
            first += part.count


class LeaseSettler(CommandQueue[TokenRequest]):
    """Leases that end or run longer. Acknowledgements of one turn become one ACK batch."""

    _waiting_since = 0  # the write during which the first of those came that wait

    def add(self, command: TokenRequest) -> None:
        if not self.gathered:
            self._waiting_since = self._partition.flusher.writes
        super().add(command)

    def take_turn(self) -> None:
        """Turn the requests that have gathered into batches. A few of them may wait for two writes,
        because nobody is blocked by them."""
        if not self._partition.takes(self.fail, late=True):
            return
        flusher = self._partition.flusher
        passed = flusher.writes - self._waiting_since
        if flusher.writing and self.gathered < COALESCE_ENTRIES and passed < SETTLE_WRITES_MAX:
            return
        waiting, self._waiting, self.gathered = self._waiting, [], 0
        acks = [request for request in waiting if type(request) is TokenRequest]
        if acks:
            self._process(acks)
        for request in waiting:
            if type(request) is not TokenRequest:
                self._process([request])

    def expire(self) -> None:
        now_ms = self._partition.now_ms()
        tokens = self._heap.expired(now_ms, EXPIRE_MAX)
        need = len(tokens) * RETURN_BYTES + RETURN_BYTES_APART
        if len(tokens) and self._partition.has_room(need):
            plan = self._heap.plan_return(tokens, now_ms, delay_ms=None, counted=True)
            self._append_return(Kind.EXPIRE, plan, counted=True)

    def _process(self, requests: list[TokenRequest]) -> None:
        """Write one record for several acknowledgements, or for one request of another kind."""
        first = requests[0]
        tokens = first.tokens
        if len(requests) > 1:
            tokens = np.concatenate([request.tokens for request in requests])
        _, held = self._heap.resolve(tokens)
        kept = tokens[held]
        sequence = self._partition.coordinator.sequence_committed
        if len(kept):
            need = first.record_bytes(len(kept))
            if not self._partition.has_room(need):
                self._put_back(requests, need)
                return
            sequence = self._write(first, kept)
        self._answer(requests, held, sequence)

    def _write(self, request: TokenRequest, tokens: NDArray[np.uint64]) -> int:
        """Append what is asked for as a record; returns its sequence."""
        partition, heap, count = self._partition, self._heap, len(tokens)
        if isinstance(request, ReturnRequest):
            reason = request.reason_for(count)
            if request.reject:
                return self._append_dead(tokens, request.cause, reason)
            plan = heap.plan_return(
                tokens, partition.now_ms(), delay_ms=request.delay_ms, counted=request.counted
            )
            return self._append_return(Kind.NACK, plan, counted=request.counted, detail=reason)
        if isinstance(request, ExtendRequest):
            extend_ms = heap.cap_extend(tokens, partition.now_ms(), request.extend_ms)
            values: dict[str, Value | None] = {"token": tokens, "extend_ms": extend_ms}
            return partition.append_record(Kind.EXTEND, count, values).last
        sequence = partition.append_record(Kind.ACK, count, {"token": tokens}).last
        crash.crash_point("node.ack.staged")
        return sequence

    def _answer(self, requests: list[TokenRequest], held: NDArray[np.bool_], sequence: int) -> None:
        """Tell each request, once committed, which of its tokens were lost."""
        shares: list[list[int]] = [[]] * len(requests)
        if not held.all():
            ends = np.cumsum([request.count for request in requests])
            shares = [np.flatnonzero(~own).tolist() for own in np.split(held, ends[:-1])]

        def answer() -> None:
            for request, lost in zip(requests, shares, strict=True):
                request.reply(lost)

        self._partition.when_committed(sequence, answer, unknown=partial(_fail_all, requests))

    def _append_return(
        self, kind: Kind, plan: ReturnPlan, *, counted: bool, detail: bytes = b""
    ) -> int:
        """Write a return plan: a NACK or EXPIRE for those that retry, a DEAD for the others."""
        sequence = 0
        if len(plan.tokens):
            values: dict[str, Value | None] = {
                "token": plan.tokens,
                "not_before_ms": plan.not_before_ms,
            }
            if not counted:
                values["counted"] = np.zeros(len(plan.tokens), np.uint8)
            sequence = self._partition.append_record(kind, len(plan.tokens), values).last
        if len(plan.dead):
            sequence = self._append_dead(plan.dead, DeadReason.RETRIES, detail)
        return sequence

    def _append_dead(self, tokens: NDArray[np.uint64], reason: DeadReason, detail: bytes) -> int:
        values: dict[str, Value | None] = {
            "token": tokens,
            "reason": np.full(len(tokens), reason),
            "detail": [detail] * len(tokens) if detail else None,
        }
        return self._partition.append_record(Kind.DEAD, len(tokens), values).last
