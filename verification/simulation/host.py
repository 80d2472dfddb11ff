"""One partition on one node: the real replica and heap, over a simulated disk and network.

Effects are performed in the order in which the core returns them. Between them lie the named points
at which the process may end.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.errors import Corruption
from penstock.heap.machine import Heap
from penstock.model.batch import Batch
from penstock.node.replica.log_ends import Repair
from penstock.replication.effects import (
    Ack,
    AnswerUnknown,
    Append,
    AppendBarrier,
    BeganServing,
    ChangeRecord,
    CloseStream,
    Commit,
    Effect,
    Effects,
    Fence,
    Fenced,
    Follow,
    Followed,
    Halt,
    OpenStream,
    Persist,
    Probe,
    Probed,
    Reseed,
    Retire,
    Send,
    SteppedDown,
    TakeEpoch,
    Truncate,
    Warn,
    Write,
)
from penstock.replication.replica import Replica
from verification.simulation.copies import Copies
from verification.simulation.disk import Disk, Platter, Snapshot
from verification.simulation.network import Stream
from verification.simulation.schedule import MS
from verification.simulation.sending import Sending
from verification.simulation.tenure import Tenure

if TYPE_CHECKING:
    from verification.simulation.node import Node


class Host:
    def __init__(self, node: Node, partition: int, platter: Platter) -> None:
        self.node, self.partition, self.platter = node, partition, platter
        self.simulation, self._schedule = node.simulation, node.simulation.schedule
        self._trace = self.simulation.trace.add
        self.disk = Disk(
            platter,
            node.simulation.schedule,
            node.after,
            self._on_synced,
            sync_us=node.simulation.profile.sync_us,
        )
        self.disk.slow = node.slow_disk
        self.snapshot: Snapshot | None = platter.snapshot
        self.committed = platter.floor
        self.heap: Heap = self.rebuilt()
        self.tenure: Tenure | None = None
        self._sending = Sending(self)
        self.pump = self._sending.pump
        self._queue: deque[Effect] = deque()  # effects that wait for a slow one
        self._slow = False
        self._closed = False
        self.copies = Copies(self)
        self.replica: Replica = Replica(
            node.name,
            uuid=platter.uuid,
            promised=platter.promised,
            committed=self.committed,
            log=self.disk.facts(),
            options=self.simulation.profile.replication,
            policy=self.simulation.profile.policy,
        )

        self.mending = Repair(
            self.replica, now=lambda: self.now, resign=self.resign,
            renew=lambda: node.renew(partition, uuid=self.replica.uuid, epoch=self.replica.epoch),
            report=lambda error: self.log("rot found", error.message),
        )  # fmt: skip

    @property
    def now(self) -> int:
        return (self._schedule.now + self.node.monotonic_us) // MS

    def log(self, *event: Any) -> None:
        self._trace((self._schedule.now, self.node.name, self.partition, *event))

    # --- the heap ---

    def rebuilt(self) -> Heap:
        """The state at the commit, from the snapshot and the log."""
        config = self.simulation.config
        if self.snapshot is None:
            heap = Heap(config, partition=self.partition)
        else:
            heap = Heap.restore(config, self.snapshot.data, partition=self.partition)
        heap.transactions.decided_max = self.simulation.profile.decided_max
        self._apply(heap, self.committed)
        return heap

    def _apply(self, heap: Heap, through: int) -> None:
        if heap.sequence_applied >= through:
            return
        columns_of = self.simulation.columns_of
        for batch in self.disk.read(heap.sequence_applied + 1, through=through):
            heap.apply(batch, columns_of(batch))
        if heap.sequence_applied != through:
            self.simulation.checker.broken(
                "gaps", f"{self.node.name}/{self.partition} applied {heap.sequence_applied},"
                f" not {through}",
            )  # fmt: skip

    # --- what comes in ---

    def on_record(self, record: Any, revision: int) -> None:
        self.perform(self.replica.on_record(record, revision, self.now))

    def on_members(self, alive: dict[str, int]) -> None:
        self.replica.on_members(alive)
        self.perform([])

    def on_tick(self) -> None:
        self.perform(self.replica.on_tick(self.now))
        if self.tenure is not None:
            self.tenure.on_tick()
            self.pump()
        if not self._closed:
            self.mending.on_tick()

    def on_message(self, message: Any) -> None:
        replica, now = self.replica, self.now
        match message:
            case Ack():
                effects = replica.on_ack(message, now)
            case Append():
                effects = replica.on_append(message, [], now)
            case Fence():
                effects = replica.on_fence(message, now)
            case Fenced():
                effects = replica.on_fenced(message, now)
            case Probe():
                effects = replica.on_probe(message, now)
            case Probed():
                effects = replica.on_probed(message, now)
            case Followed():
                effects = replica.on_followed(message, now)
            case _:
                raise TypeError(f"{message} is no message")
        self.perform(effects)

    def on_slice(self, append: Append, batches: list[Batch]) -> None:
        self.perform(self.replica.on_append(append, batches, self.now))

    def on_follow(self, follow: Follow) -> None:
        self.perform(self.replica.on_follow(follow, self.now))

    def on_stream_lost(self, stream: Stream, gone: bool) -> None:
        self.replica.on_stream_lost(stream.number, self.now, gone=gone)
        self.perform([])

    def on_follower_lost(self, stream: Stream) -> None:
        self._sending.closed(stream)
        self.replica.on_follower_lost(stream.follower, stream.number)
        self.perform([])

    def _on_synced(self, sequence: int) -> None:
        self.node.point("write.synced")
        self.perform(self.replica.on_durable(sequence))

    def resign(self) -> None:
        self.perform(self.replica.resign(self.now))

    # --- rot ---

    def scrub(self) -> None:
        if self.platter.damaged:
            self.on_rot()

    def on_rot(self, *, faulty: bool = False) -> None:
        if not self._closed:
            self.mending.on_damage(Corruption(f"at {self.platter.bad}"), faulty=faulty)

    def on_unsent(self) -> None:
        self.on_rot(faulty=self.replica.coordinator is None)

    # --- effects ---

    def perform(self, effects: Effects) -> None:
        """A driver may let effects of later events pass one that is slow, or make all wait for it;
        both are tried. What stands after a promise in one list always waits for it."""
        if self._closed:
            return
        if self.simulation.serial:
            for effect in effects:
                if isinstance(effect, SteppedDown):
                    self._end_tenure()
            self._queue.extend(effects)
            if self._queue and not self._slow:
                self._perform_queued()
        else:
            for at, effect in enumerate(effects):
                if isinstance(effect, Persist):
                    self._persist(effect.promised, effects[at + 1 :])
                    break
                self.do(effect)
        self.replica.validate()
        if self._sending.streams and not self._closed:
            self.pump()

    def _perform_queued(self) -> None:
        while self._queue and not self._slow:
            effect = self._queue.popleft()
            self._slow = isinstance(effect, Persist | Truncate)
            if isinstance(effect, Persist):
                self._persist(effect.promised, [])
            else:
                self.do(effect)

    def _persist(self, promised: int, rest: Effects) -> None:
        self.log("persist", promised)
        self.node.point("persist.asked")

        def done(stored: int) -> None:
            self.node.point("persist.done")
            self._slow = False
            self.perform(self.replica.on_persisted(stored, self.now))
            self.perform(rest)

        self.disk.persist(promised, done)

    def do(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(effect.to, effect.message)
            case Write():
                self._write(effect.batches)
            case Commit():
                self._commit(effect.sequence)
            case Truncate():
                self._truncate(effect.sequence)
            case OpenStream():
                self._open_stream(effect.to, effect.follow)
            case CloseStream():
                self.simulation.network.close(self.node.name, self.partition)
            case Reseed():
                self.copies.reseed(effect.source)
            case TakeEpoch():
                self.log("take epoch")
                self.node.take_epoch(self.partition)
            case ChangeRecord():
                self.node.change_record(self.partition, effect.record, effect.revision)
            case AppendBarrier():
                self._enter_when_ready(effect.epoch)
            case BeganServing():
                self._serve(effect.epoch)
            case AnswerUnknown():
                self._answer_unknown()
            case SteppedDown():
                self._step_down(effect.epoch)
            case Retire():
                self.node.retire(self.partition)
            case Warn():
                self.log("warn", effect.node, effect.what)
            case Halt():
                self.log("halt", effect.reason)
                self.simulation.checker.broken("halts", f"{self.node.name}: {effect.reason}")

    def _send(self, to: str, message: Any) -> None:
        self.log("send", to, message)
        network, stream = self.simulation.network, None
        if isinstance(message, Fenced):
            message = msgspec.structs.replace(message, time_ms=self.node.clock_ms)
        if isinstance(message, Ack):
            stream = network.stream_to(self.node.name, self.partition, message.stream)
        elif isinstance(message, Followed | Append):
            stream = network.stream_to(to, self.partition, message.stream)
        network.send(
            self.node.name, to, "on_message", self.partition, message, stream=stream
        )  # fmt: skip
        if isinstance(message, Followed):
            self._sending.opened(to, stream, message)
        elif isinstance(message, Fenced):
            self.node.point("fence.answered")

    def _open_stream(self, to: str, follow: Follow) -> None:
        self.log("follow", to, follow)
        network = self.simulation.network
        stream = network.open(self.node.name, to, self.partition, follow.stream)
        network.send(
            self.node.name, to, "on_follow", self.partition, follow, stream, stream=stream
        )  # fmt: skip

    def _write(self, batches: list[Batch]) -> None:
        self.simulation.checker.on_appends(self.partition, self.node.name, self.disk.end, batches)
        if self.disk.full:
            batches = batches[: self.simulation.schedule.between(0, len(batches) - 1)]
        if batches:
            self.log("write", batches[0].first, batches[-1].last, batches[-1].epoch)
            self.disk.append(batches)
            self.node.point("write.staged")
        if self.disk.full:
            self.log("no room after", self.disk.end.sequence)
            self.perform(self.replica.on_unwritten(self.disk.end.sequence, self.now))

    def _truncate(self, sequence: int) -> None:
        self.log("truncate", sequence)
        if self.heap.sequence_applied > sequence:
            self.simulation.checker.broken(
                "changed", f"{self.node.name}/{self.partition} forgets applied entries"
            )
        self.node.point("truncate.asked")

        def done() -> None:
            self.node.point("truncate.done")
            self._slow = False
            self.perform(self.replica.on_truncated(sequence, self.now))

        self.disk.cut(sequence, done)

    def _commit(self, sequence: int) -> None:
        if self.disk.full and sequence > self.disk.end.sequence:
            return  # it came with what found no room
        if sequence <= self.committed:
            self.simulation.checker.broken(
                "regressions", f"{self.node.name} commits {sequence} after {self.committed}"
            )
        self.committed = self.disk.committed = sequence
        self.log("commit", sequence)
        batch = self.disk.batch_ending(sequence)
        self.simulation.on_commit(self, sequence, batch)
        self.node.point("commit.unanswered")
        self._apply(self.heap, sequence)
        if self.tenure is not None:
            self.tenure.on_commit(sequence)
        self.copies.take_snapshot()

    # --- coordinating ---

    def _enter_when_ready(self, epoch: int) -> None:
        """The heap has to take in the rest of the log first, which may take a while; by then
        another may have taken over."""
        schedule = self.simulation.schedule
        if self.simulation.serial and schedule.chance(0.3):
            self._slow = True
            self.node.after(schedule.skewed(1 * MS, 200 * MS), self._enter_now, epoch)
        else:
            self._enter_now(epoch)

    def _enter_now(self, epoch: int) -> None:
        self._slow = False
        coordinator = self.replica.coordinator
        if coordinator is not None and coordinator.epoch == epoch:
            self._enter(epoch)
        self.perform([])

    def _enter(self, epoch: int) -> None:
        self._apply(self.heap, self.disk.end.sequence)
        self.simulation.checker.on_entered(self.partition, epoch, self.node.name)
        self.tenure = Tenure(self, epoch)
        batch = self.tenure.append_barrier()
        self.log("barrier", epoch, batch.first)
        self.node.point("barrier.staged")

    def _serve(self, epoch: int) -> None:
        self.log("serve", epoch)
        if self.tenure is None or self.tenure.epoch != epoch:
            return  # over already
        self.tenure.serving = True
        self.node.point("serving.began")
        self.tenure.on_serving()

    def _answer_unknown(self) -> None:
        if self.tenure is not None and self.tenure.waiting:
            self.log("answer unknown")
            self.tenure.answer_unknown()

    def _step_down(self, epoch: int) -> None:
        self.log("step down", epoch)
        self._end_tenure()
        self.node.point("serving.ended")
        if self.heap.sequence_applied > self.committed:
            self.heap = self.rebuilt()

    def _end_tenure(self) -> None:
        if self.tenure is not None:
            self.tenure.answer_unknown()
            self.tenure = None

    def named(self) -> bool:
        """Whether the newest record that we know counts on this node."""
        record = self.replica.record
        return record is not None and self.node.name in record.members

    def close(self) -> None:
        """The partition has gone elsewhere."""
        self._closed = True
        self._queue.clear()
