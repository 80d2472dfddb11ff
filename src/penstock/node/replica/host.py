"""One partition on this node, in whatever role: it performs what the replication core decides.

The core (`penstock.replication.replica`) is told what happened and answers with effects. They are
performed here in order, on the event loop. Some take a while: a promise that is synced, a log that
is cut, a heap that must catch up before the barrier. What comes after such an effect waits for it,
while the core goes on being told what happens. Effects that come of an effect wait for their turn.

A *tenure* begins when the core says that the epoch is ours and the log the right one. The heap then
applies the rest of the log, and a `Partition` is made, whose first batch is the barrier; once that
is committed, the topic serves it. The tenure's end is the one effect that does not wait for others:
nothing may be appended once the core has stepped down.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec

from penstock.errors import Corruption, DiskFull, PenstockError, QuorumUnavailable, Unavailable
from penstock.heap.machine import Heap
from penstock.log.crash import crash_point
from penstock.log.identity import remove_asides
from penstock.model.batch import Batch, Kind
from penstock.model.columns import Value
from penstock.node.observe.logs import get_logger
from penstock.node.replica.log_ends import FollowerLog, LogSender, Repair
from penstock.node.replica.ports import Key, SeedHead, Slow, Surroundings
from penstock.node.replica.replay import HeapApplier, OpenedReplica, ReplayedLog
from penstock.node.serve.partition import Partition
from penstock.node.serve.topic import ServedTopic
from penstock.node.storage.log_io import Flusher
from penstock.replication import effects as do
from penstock.replication.assignment import PartitionRecord
from penstock.replication.effects import (
    Ack,
    Append,
    Effect,
    Effects,
    Fenced,
    Follow,
    Followed,
    Letter,
)
from penstock.replication.replica import Replica, Role

log = get_logger(__name__)
BARRIER_BYTES: Final = 4096  # of records that a tenure's start may take
CREDIT_TOLD_MS: Final = 60_000  # between two warnings in the log of one follower's credit
_OF_CREDIT: Final = ("credit_low", "credit_exhausted")


class Host:
    """See the module. `partition` is there while this node serves it."""

    def __init__(
        self, topic: ServedTopic, index: int, opened: OpenedReplica, around: Surroundings
    ) -> None:
        self.topic, self.index, self.around = topic, index, around
        self.key: Key = (topic.config.id, index)
        self.log, self._file = opened.log, opened.file
        self.replica = Replica(
            around.node, uuid=opened.file.uuid, promised=opened.file.promised,
            committed=opened.log.sequence_committed, log=opened.facts, options=around.options,
            policy=around.policy,
        )  # fmt: skip
        self._effects: deque[Effect] = deque()  # that wait to be performed
        self._busy = False  # one is being performed, perhaps slowly
        self.mending = Repair(
            self.replica, now=around.now, resign=self._hand_over, renew=self._start_over,
            report=around.on_damage,
        )  # fmt: skip
        self._loop = asyncio.get_running_loop()
        opened.log.reader.on_damage = self._hear_of_damage
        self._aside = opened.aside  # damaged copies are kept until this one counts
        self.flusher = Flusher(
            opened.log, clock=around.clock, submit=around.writers.pin(), syncer=around.syncer,
            metrics=around.metrics, on_durable=self._on_durable,
            on_room=self._write_on, on_failed=self._on_failed,
        )  # fmt: skip
        self.applying = HeapApplier(
            opened.replayed.heap, opened.log, on_rebuilt=self._on_rebuilt,
            on_unreadable=self._on_unapplied,
        )  # fmt: skip
        self.following = FollowerLog(
            self.key, self.replica, opened.log, around, flusher=self.flusher,
            applying=self.applying, spawn=self._spawn, perform=self._perform,
        )  # fmt: skip
        self.sending = LogSender(
            self.key, self.replica, opened.log, around, perform=self._perform,
            on_unreadable=self._on_unsent,
        )  # fmt: skip
        self.snapshot = opened.replayed.snapshot  # the newest one
        self._entered: Partition | None = None  # from its barrier on
        self.partition: Partition | None = None  # the same, once the barrier is committed
        self._served: asyncio.Future[None] = self._loop.create_future()
        self.replayed = opened.replayed.batches
        self._floor_persisted = 0  # how far the log is known on disk to be acknowledged
        self._credit_told_ms: dict[tuple[str, str], int] = {}  # (follower, what) -> when
        self.halted = ""  # why nothing is done any more
        self.closed = False
        # What the metadata store and connections tell that has no effects goes straight there.
        self.on_members, self.on_change_lost = self.replica.on_members, self.replica.on_change_lost
        self.on_writable = self.sending.on_writable

    @property
    def heap(self) -> Heap:
        return self.applying.heap

    @property
    def committed(self) -> int:
        return self.replica.committed

    @property
    def sequence_readable(self) -> int:
        """How far the log may be shown to readers of this replica."""
        return min(self.log.sequence_committed, self.log.sequence_durable)

    @property
    def role(self) -> Role:
        return Role.HALTED if self.halted else self.replica.role

    @property
    def coordinates(self) -> bool:
        """Whether this node holds the partition's epoch and has entered it, or is about to."""
        return self.replica.coordinator is not None

    # --- from the metadata store ---

    def on_record(self, record: PartitionRecord, revision: int) -> None:
        self._perform(self.replica.on_record(record, revision, self.around.now()))
        if self._aside and self.replica.counts:
            self._aside = False
            self._spawn(self._forget_asides())

    def on_epoch_taken(self, record: PartitionRecord, revision: int) -> None:
        self._perform(self.replica.on_epoch_taken(record, revision, self.around.now()))

    # --- from other nodes ---

    def on_message(self, message: Letter) -> None:
        self._perform(self.replica.on_message(message, self.around.now()))
        if type(message) is Ack:
            self.sending.pump(message.node)

    def on_follow(self, follow: Follow) -> None:
        """A node opens a stream here; the answer is a `Followed` to be sent."""
        self._perform(self.replica.on_follow(follow, self.around.now()))

    def on_slice(self, append: Append, batches: list[Batch]) -> None:
        """Of the stream that we have opened. Bodies may be views of a network buffer."""
        self._perform(self.replica.on_append(append, batches, self.around.now()))

    def on_stream_lost(self, stream: int, *, gone: bool = False) -> None:
        """The stream that we have opened broke. `gone`: nobody listens there any more."""
        self.replica.on_stream_lost(stream, self.around.now(), gone=gone)

    def on_follower_lost(self, node: str, stream: int) -> None:
        self.sending.closed(node, stream)
        self.replica.on_follower_lost(node, stream)

    async def seed_head(self) -> SeedHead:
        return await asyncio.to_thread(self._seed_head, self.committed)

    def _seed_head(self, committed: int) -> SeedHead:
        snapshot, base = self.log.load_snapshot(), self.log.base
        through = min(committed, self.log.sequence_durable)
        if snapshot is None:
            return SeedHead(base.first, base.chain, base.epoch, through)
        return SeedHead(
            base.first, base.chain, base.epoch, max(through, snapshot.sequence),
            snapshot.sequence, snapshot.chain, snapshot.epoch, bytes(snapshot.data),
        )  # fmt: skip

    async def seed_slice(self, from_sequence: int, *, through: int, bytes_max: int) -> list[Batch]:
        """The next batches of a copy as stored, compacted ones too; at least one, whatever its
        size. Raises `NotFound` when they were dropped meanwhile: the copy begins anew."""
        read = self.log.reader.read_slice
        found = await asyncio.to_thread(
            read, from_sequence, through=through, bytes_max=bytes_max, nowait=False
        )
        return found or []

    # --- from the node ---

    def on_tick(self) -> None:
        self.replica.barred = self.around.barred()
        self._perform(self.replica.on_tick(self.around.now()))
        if not (self.closed or self.halted):
            self.mending.on_tick()
            if self._entered is not None and self.around.clocks.agreed:
                self._entered.on_clock_agreed()

    def persist_floor(self) -> None:
        reached = self.sequence_readable
        idle = not self.flusher.writing if self.partition is None else self.partition.idle
        lately = not self.log.floor_due
        if idle and self._floor_persisted < reached and not (lately or self.log.seeding):
            self._floor_persisted = reached
            self.flusher.persist_floor()

    async def on_shrunk(self) -> None:
        """The log was compacted: what can be streamed as it was written begins later now."""
        if not self.around.alone:  # else nobody asks for it
            first = await asyncio.to_thread(self.log.reader.first_as_written)
            self.replica.log.first = max(self.replica.log.first, first)

    async def resign(self) -> None:
        """Give up the epoch, after what is under way: another takes over at once."""
        if self.partition is not None:
            await self.partition.finish()
            self._perform(self.replica.resign(self.around.now()))

    async def close(self) -> None:
        """Stop, and let go of the files. Nothing is resigned; that is `resign`."""
        if self.closed:
            return
        self.closed = True
        self.log.reader.on_damage = None
        self.topic.end_readers(self)
        stopping = Unavailable("the node is stopping; the outcome is unknown")
        self._end(stopping)
        self._refuse(stopping)
        self._effects.clear()
        await self.following.stop()
        if self.flusher.failed is None:
            await self.flusher.alone(self.log.close)

    # --- damage ---

    def _hear_of_damage(self, error: Corruption) -> None:
        """On whichever thread has met it."""
        self._loop.call_soon_threadsafe(self._on_damaged, error)

    def _on_damaged(self, error: Corruption) -> None:
        # What is not committed may have been cut off while somebody read it.
        committed = error.details.get("sequence", 0) <= self.log.sequence_committed
        if committed and not self.closed:
            self.mending.on_damage(error)

    def _on_unsent(self, error: BaseException) -> None:
        if isinstance(error, Corruption):
            self.mending.on_damage(error, faulty=self.replica.coordinator is None)
        else:
            self._on_error(error)

    def _on_unapplied(self, error: BaseException) -> None:
        if isinstance(error, Corruption) and "file" in error.details and not self.around.alone:
            self.mending.on_damage(error, faulty=True)
        else:
            self._on_error(error)  # nobody has it whole, or what is whole makes no sense

    def _hand_over(self) -> None:
        self._tell(log.warning, "a damaged replica hands over")
        self._spawn(self.resign())

    def _start_over(self) -> None:
        self.around.control.renew(self.key, uuid=self.replica.uuid, epoch=self.replica.epoch)

    async def _forget_asides(self) -> None:
        try:
            await asyncio.to_thread(remove_asides, self.log.folder)
        except OSError as error:
            self._tell(log.warning, "a damaged copy is not removed", error=str(error))
        else:
            self._tell(log.info, "a mended replica counts; its damaged copy is removed")

    # --- effects ---

    def _perform(self, effects: Effects) -> None:
        if self.closed or self.halted:
            return
        for effect in effects:
            if type(effect) is do.SteppedDown:
                self._end(self._unknown("changed its coordinator"))
        self._effects.extend(effects)
        if not self._busy:
            self._perform_next()

    def _perform_next(self) -> None:
        """Until one takes a while; what comes after it waits."""
        self._busy = True
        try:
            while self._effects:
                effect = self._effects.popleft()
                slow = _EFFECTS[type(effect)](self, effect)
                if slow is not None:
                    self._spawn(self._finish(slow)).add_done_callback(_closing(slow))
                    return
        except Exception as error:  # noqa: BLE001 - what is half done cannot be gone on from
            self._on_error(error)
        self._busy = False

    async def _finish(self, slow: Slow) -> None:
        effects = await slow
        self._busy = False
        self._perform(effects)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` beside everything else; whatever it raises is told."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - what is half done cannot be gone on from
                self._on_error(error)

        task = self.around.spawn(guarded())
        task.add_done_callback(_closing(work))
        return task

    def _on_error(self, error: BaseException) -> None:
        """Something that the replica cannot go on without has failed."""
        if self.closed:
            return
        if isinstance(error, Corruption):
            self._halt(do.Halt(error.message))
            self.around.on_damage(error)
        elif isinstance(error, PenstockError):
            self.flusher.fail(error)
        else:
            self.around.on_fatal(error)

    def _on_failed(self, error: BaseException) -> None:
        assert self.flusher.failed is not None
        self._refuse(self.flusher.failed)
        if self._entered is not None:
            self._entered.end(self.flusher.failed)
        self.around.on_fatal(error)

    def _halt(self, effect: do.Halt) -> None:
        self.halted = effect.reason
        self._effects.clear()
        self._end(Unavailable(f"the partition halted: {effect.reason}"))
        self._tell(log.critical, "a replica halts", reason=effect.reason)

    def _tell(self, level: Callable[..., object], event: str, **facts: object) -> None:
        level(event, topic=self.topic.config.name, partition=self.index, **facts)

    async def _persist(self, effect: do.Persist) -> Effects:
        await asyncio.to_thread(self._file.promise, effect.promised)
        self.around.metrics.promises.add((self.topic.config.name,))
        return self.replica.on_persisted(effect.promised, self.around.now())

    # --- the tenure ---

    async def serving(self) -> None:
        """Wait until the partition was served here once; raises if that cannot be."""
        await asyncio.shield(self._served)

    def _refuse(self, error: PenstockError) -> None:
        """Whoever waits to be served here waits in vain."""
        if not self._served.done():
            self._served.set_exception(error)
            self._served.exception()  # it is no mistake that nobody waits

    async def _begin(self, effect: do.AppendBarrier) -> Effects:
        """Apply the tail first: what is to be served is the state after all of the log."""

        def wanted() -> bool:  # else it was given up while this waited for something slow
            coordinator = self.replica.coordinator
            return coordinator is not None and coordinator.epoch == effect.epoch

        if not await self.applying.catch_up(self.log.sequence_last, wanted=wanted):
            # Still wanted: some of it is damaged.
            return self.replica.resign(self.around.now()) if wanted() else []
        try:
            await self.flusher.make_room(BARRIER_BYTES, enqueue=False)
        except DiskFull as error:
            if self.around.alone:
                self._refuse(error)  # whoever opens the topic decides what becomes of it
                return []
            self._tell(log.error, "no room to coordinate", error=error.message)
            return self.replica.resign(self.around.now())
        if wanted():
            self._enter()
        return []

    def _enter(self) -> None:
        topic, around, alone = self.topic, self.around, self.around.alone
        now_ms = around.clock.now_ms()
        begin_ms = max(self._latest_ms(now_ms), self.log.time_ms_last)
        self._entered = partition = Partition(
            self.heap, self.replica, self.flusher, clock=around.clock,
            ahead_ms=begin_ms - now_ms, reserve_bytes=around.reserve_bytes, cache=around.cache,
            flush=self.flusher.flush if alone else self._flush,
            wake=topic.wake, turn=topic.turn if alone else topic.wake, observe=topic.observe,
            writable=None if alone else self._writable, on_fatal=around.on_fatal,
        )  # fmt: skip
        partition.append_record(Kind.BARRIER, 1, {"node": [around.node.encode()]})
        crash_point("node.barrier.staged")
        partition.flush()

    def _latest_ms(self, own_ms: int) -> int:
        """When the partition's time may begin at the latest; `own_ms`, if our clock is right. Else
        we go by the clocks of those who promised the epoch, and of all that were compared."""
        clocks = self.around.clocks
        if clocks.agreed:
            return own_ms
        quorum_ms = self.replica.quorum_ms(own_ms, self.around.now())
        return min(own_ms, quorum_ms, clocks.latest_ms(own_ms))

    def _writable(self) -> PenstockError | None:
        refusal = self.replica.writable(self.around.now())
        if isinstance(refusal, QuorumUnavailable) and self.around.cut_off():
            refusal.details["elsewhere"] = True
        return refusal

    def _serve(self, effect: do.BeganServing) -> None:
        """The barrier is committed."""
        partition, config = self._entered, self.topic.config
        if partition is None or partition.coordinator.epoch != effect.epoch:
            return  # ended already
        self.partition = partition
        if partition.heap.config != config:
            values: dict[str, Value | None] = {"config": [msgspec.msgpack.encode(config)]}
            partition.append_record(Kind.CONFIG, 1, values)
        self.topic.serve(partition)
        self.around.metrics.takeovers.add((config.name,))
        if not self._served.done():
            self._served.set_result(None)

    def _doubt(self, effect: do.AnswerUnknown) -> None:
        """No quorum is heard: nobody is kept waiting for a commit that may never come. The tenure
        goes on, and what is staged commits should a quorum come back."""
        if self.partition is not None:
            error = self._unknown("hears no quorum")
            told = self.partition.doubt(error) + self.topic.doubt(self.partition, error)
            if told:
                self._tell(log.warning, "no quorum is heard", unanswered=told)

    def _unknown(self, why: str) -> Unavailable:
        name = self.topic.config.name
        return Unavailable(
            f"partition {self.index} of {name} {why}; the outcome is unknown", partition=self.index
        )

    def _end(self, error: Unavailable) -> None:
        """Nothing is appended or answered from here on. The heap stays; see `applying`."""
        entered, served = self._entered, self.partition
        self._entered = self.partition = None
        self.sending.close()
        if served is not None and not self.topic.closed:
            self.topic.unserve(self.index)
        if entered is not None:
            entered.reader.forget()
            entered.end(error)
            self.flusher.flush()
            self.applying.resume(self.replica.committed)

    # --- messages and streams ---

    def _send(self, effect: do.Send) -> None:
        message = effect.message
        if isinstance(message, Append):
            self.sending.send_sign(effect.to, message)
            return
        if isinstance(message, Fenced):
            message = msgspec.structs.replace(message, time_ms=self.around.clock.now_ms())
        self.around.transport.send(effect.to, self.key, message)
        if isinstance(message, Followed) and not (message.refused or message.reseed):
            self.sending.opened(effect.to, message.stream)

    def _close_stream(self, effect: do.CloseStream) -> Slow | None:
        self.around.transport.close_stream(self.key)
        return self.following.abandon_copy() if self.following.copying else None

    # --- the log ---

    def _truncate(self, effect: do.Truncate) -> Slow:
        lost = self.log.sequence_last - effect.sequence
        self.around.metrics.truncated.add((self.topic.config.name,), lost)
        self._tell(log.warning, "uncommitted entries are cut off", entries=lost)
        return self.following.truncate(effect.sequence)

    def _reseed(self, effect: do.Reseed) -> None:
        self._tell(log.warning, "a replica starts over from a snapshot", source=effect.source)
        self.mending.on_replaced()
        self.around.on_mended(self.key)
        self.following.reseed(effect.source)

    def _on_durable(self, sequence: int) -> None:
        effects = self.replica.on_durable(sequence)
        if self.partition is None:
            self._flush()
            self.topic.on_readable()  # it may have heard of the commit before its disk was done
        elif not effects:  # no commit takes a turn
            self.topic.wake()
        self._perform(effects)

    def _write_on(self) -> None:
        """More can be written. The turn of a topic does that, for partitions that are served."""
        if self.partition is not None:
            self.topic.wake()
        else:
            self._flush()

    def _flush(self) -> None:
        """Send what is staged, and write it: the disk and the followers work at the same time."""
        if self._entered is not None:
            self.sending.pump_all()
        self.flusher.flush()

    def _commit(self, effect: do.Commit) -> None:
        # What a full disk did not take is not here, though others have committed it.
        sequence = min(effect.sequence, self.log.sequence_last)
        self.log.advance_commit(sequence)
        if self._entered is None:
            self.applying.advance(sequence)
            self.topic.on_readable()
            return
        if self.sending.streams:
            self.sending.on_commit()
        self._entered.on_commit(sequence)

    def _on_rebuilt(self, replayed: ReplayedLog) -> None:
        self.snapshot = replayed.snapshot

    def _warn(self, effect: do.Warn) -> None:
        self.around.metrics.follower_warnings.add(
            (self.topic.config.name, str(self.index), effect.node, effect.what)
        )
        level = log.info if effect.what == "resumed" else log.warning
        if effect.what in _OF_CREDIT and not self._credit_is_news(effect):
            level = log.debug
        self._tell(level, "a follower's stream", follower=effect.node, what=effect.what)

    def _credit_is_news(self, effect: do.Warn) -> bool:
        """Large batches use credit up each time and mean nothing by it: all are counted, and one
        line in a while is enough."""
        about, now = (effect.node, effect.what), self.around.now()
        if now < self._credit_told_ms.get(about, now - CREDIT_TOLD_MS) + CREDIT_TOLD_MS:
            return False
        self._credit_told_ms[about] = now
        return True


def _closing(work: Coroutine[Any, Any, Any]) -> Callable[[asyncio.Task[None]], None]:
    """Close `work` when the task that was to await it is done: one that is cancelled before its
    first step never has."""
    return lambda _: work.close()


_EFFECTS: Final[dict[type, Callable[[Host, Any], Slow | None]]] = {
    do.AnswerUnknown: Host._doubt,
    do.AppendBarrier: Host._begin,
    do.BeganServing: Host._serve,
    do.ChangeRecord: lambda host, effect: host.around.control.change_record(
        host.key, effect.record, effect.revision
    ),
    do.CloseStream: Host._close_stream,
    do.Commit: Host._commit,
    do.Halt: Host._halt,
    do.OpenStream: lambda host, effect: host.around.transport.open_stream(
        effect.to, host.key, effect.follow
    ),
    do.Persist: Host._persist,
    do.Reseed: Host._reseed,
    do.Retire: lambda host, effect: host.around.control.retire(host.key),
    do.Send: Host._send,
    do.SteppedDown: lambda host, effect: None,  # it took place when it was heard of
    do.TakeEpoch: lambda host, effect: host.around.control.take_epoch(host.key),
    do.Truncate: Host._truncate,
    do.Warn: Host._warn,
    do.Write: lambda host, effect: host.following.extend(effect.batches),
}
