"""One partition on this node, in whatever role: it performs what the replication core decides.

The core (`penstock.replication.replica`) is told what happened and answers with effects. They are
performed here in order, on the event loop. Some take a while: a promise that is synced, a log that
is cut, a heap that must catch up before the barrier. What comes after such an effect waits for it,
while the core goes on being told what happens. Effects that come of an effect wait for their turn.

Ending a tenure is the exception. Nothing may be appended once the core has stepped down, so that
part happens at once, whatever waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec

from penstock.errors import Corruption, PenstockError, Unavailable
from penstock.heap import Heap
from penstock.log.identity import remove_asides
from penstock.model.batch import Batch
from penstock.node.observe.logs import get_logger
from penstock.node.replica.follower_log import FollowerLog
from penstock.node.replica.heap_applier import HeapApplier, ReplayedLog
from penstock.node.replica.log_sender import LogSender
from penstock.node.replica.opener import OpenedReplica
from penstock.node.replica.ports import Key, SeedHead, Slow, Surroundings
from penstock.node.replica.repair import Repair
from penstock.node.replica.tenure import Tenure
from penstock.node.serve.partition import Partition
from penstock.node.serve.topic import ServedTopic
from penstock.node.storage.flusher import Flusher
from penstock.replication import effects as do
from penstock.replication.assignment import PartitionRecord
from penstock.replication.effects import Effect, Effects
from penstock.replication.messages import Ack, Append, Fenced, Follow, Followed, Letter
from penstock.replication.replica import Replica, Role

log = get_logger(__name__)
CREDIT_TOLD_MS: Final = 60_000  # between two warnings in the log of one follower's credit
_OF_CREDIT: Final = ("credit_low", "credit_exhausted")


class Host:
    """See the module. `partition` is there while this node serves."""

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
            opened.replayed.heap, opened.log, spawn=self._spawn, on_rebuilt=self._on_rebuilt,
            on_unreadable=self._on_unapplied,
        )  # fmt: skip
        self.following = FollowerLog(
            self.key, self.replica, log=opened.log, flusher=self.flusher, applying=self.applying,
            now=around.now, spawn=self._spawn, perform=self._perform,
        )  # fmt: skip
        self.sending = LogSender(
            self.key, self.replica, opened.log, transport=around.transport, now=around.now,
            pace=around.pace, perform=self._perform, spawn=self._spawn,
            on_unreadable=self._on_unsent,
        )  # fmt: skip
        self.snapshot = opened.replayed.snapshot  # the newest one
        self.tenure = Tenure(
            topic, index, self.replica, flusher=self.flusher, applying=self.applying,
            sending=self.sending, around=around,
        )  # fmt: skip
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
    def partition(self) -> Partition | None:
        return self.tenure.partition

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
        found = await asyncio.to_thread(
            self.log.reader.read_slice,
            from_sequence,
            through=through,
            bytes_max=bytes_max,
            nowait=False,
        )
        return found or []

    # --- from the node ---

    def on_tick(self) -> None:
        self.replica.barred = self.around.barred()
        self._perform(self.replica.on_tick(self.around.now()))
        if not (self.closed or self.halted):
            self.mending.on_tick()
            self.tenure.on_tick()

    def persist_floor(self) -> None:
        """Remember on disk how far an idle log was acknowledged."""
        reached = min(self.log.sequence_durable, self.log.sequence_committed)
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
            await self.tenure.finish()
            self._perform(self.replica.resign(self.around.now()))

    async def close(self) -> None:
        """Stop, and let go of the files. Nothing is resigned; that is `resign`."""
        if self.closed:
            return
        self.closed = True
        self.log.reader.on_damage = None
        self.topic.end_readers(self)
        stopping = Unavailable("the node is stopping; the outcome is unknown")
        self.tenure.end(stopping)
        self.tenure.refuse(stopping)
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

    def _on_unsent(self, error: Corruption) -> None:
        self.mending.on_damage(error, faulty=self.replica.coordinator is None)

    def _on_unapplied(self, error: Corruption) -> None:
        if self.around.alone or "file" not in error.details:
            self._on_error(error)  # nobody has it whole, or what is whole makes no sense
        else:
            self.mending.on_damage(error, faulty=True)

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
                self.tenure.depose()
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
        except PenstockError as error:
            self._on_error(error)
        except Exception as error:  # noqa: BLE001 - what is half done cannot be gone on from
            self.around.on_fatal(error)
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
            except PenstockError as error:
                self._on_error(error)
            except Exception as error:  # noqa: BLE001 - what is half done cannot be gone on from
                self.around.on_fatal(error)

        task = self.around.spawn(guarded())
        task.add_done_callback(_closing(work))
        return task

    def _on_error(self, error: PenstockError) -> None:
        """Something that the replica cannot go on without has failed."""
        if self.closed:
            return
        if isinstance(error, Corruption):
            self._halt(do.Halt(error.message))
            self.around.on_damage(error)
        else:
            self.flusher.fail(error)

    def _on_failed(self, error: BaseException) -> None:
        assert self.flusher.failed is not None
        self.tenure.fail(self.flusher.failed)
        self.around.on_fatal(error)

    def _halt(self, effect: do.Halt) -> None:
        self.halted = effect.reason
        self._effects.clear()
        self.tenure.end(Unavailable(f"the partition halted: {effect.reason}"))
        self._tell(log.critical, "a replica halts", reason=effect.reason)

    def _tell(self, level: Callable[..., object], event: str, **facts: object) -> None:
        level(event, topic=self.topic.config.name, partition=self.index, **facts)

    async def _persist(self, effect: do.Persist) -> Effects:
        await asyncio.to_thread(self._file.promise, effect.promised)
        self.around.metrics.promises.add((self.topic.config.name,))
        return self.replica.on_persisted(effect.promised, self.around.now())

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
        self.following.reseed(effect.source, self.around.transport.fetch_seed)

    def _on_durable(self, sequence: int) -> None:
        effects = self.replica.on_durable(sequence)
        if self.tenure.partition is None:
            self.tenure.flush()
            self.topic.on_readable()  # it may have heard of the commit before its disk was done
        elif not effects:  # no commit takes a turn
            self.topic.wake()
        self._perform(effects)

    def _write_on(self) -> None:
        """More can be written. The turn of a topic does that, for partitions that are served."""
        if self.partition is not None:
            self.topic.wake()
        else:
            self.tenure.flush()

    def _commit(self, effect: do.Commit) -> None:
        # What a full disk did not take is not here, though others have committed it.
        sequence = min(effect.sequence, self.log.sequence_last)
        self.log.advance_commit(sequence)
        journal = self.tenure.journal
        if journal is None:
            self.applying.advance(sequence)
            self.topic.on_readable()
            return
        if self.sending.streams:
            self.sending.on_commit()
        journal.on_commit(sequence)

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
    do.AnswerUnknown: lambda host, effect: host.tenure.doubt(),
    do.AppendBarrier: lambda host, effect: host.tenure.begin(effect.epoch),
    do.BeganServing: lambda host, effect: host.tenure.serve(effect.epoch),
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
