"""Real replicas on disks that forget what is not synced, and a network that waits to be told.

Nothing happens by itself: a message lies in `network` until it is delivered or dropped, time moves
when it is told to. Disks are quick unless they are held. After every event each replica is
validated, and whatever is committed is compared with what was committed before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from penstock.model.batch import Batch, Kind, seal
from penstock.replication import effects as fx
from penstock.replication.assignment import PartitionRecord
from penstock.replication.effects import (
    Ack,
    Append,
    Fence,
    Fenced,
    Follow,
    Followed,
    Probe,
    Probed,
)
from penstock.replication.facts import LogFacts, ReplicationOptions
from penstock.replication.replica import Replica

QUIET = (fx.Send, fx.OpenStream, fx.CloseStream, fx.Persist, fx.AppendBarrier, fx.Write)


class Letter(NamedTuple):
    source: str
    to: str
    message: object
    batches: tuple[Batch, ...] = ()

    def __str__(self) -> str:
        return f"{self.source}->{self.to} {describe(self.message, self.batches)}"


def describe(message: object, batches: tuple[Batch, ...] = ()) -> str:
    match message:
        case Fence():
            return f"Fence epoch {message.epoch}"
        case Fenced():
            end = f"{message.end_epoch}:{message.end_sequence}"
            return f"Fenced promised {message.promised}, ends {end}"
        case Follow():
            tail = " ".join(f"{epoch}:{last}" for epoch, last in message.tail) or "nothing"
            return f"Follow epoch {message.epoch}, has {tail}" + " (adopt)" * message.adopt
        case Followed():
            if message.refused:
                return "Followed refused" + ", about to enter" * message.waiting
            return (
                "Followed start over" if message.reseed else f"Followed equal to {message.matched}"
            )
        case Append():
            entries = ",".join(f"{b.epoch}:{b.last}" for b in batches) or "nothing"
            return (
                f"Append {entries}, committed {message.committed}"
                + " (resigned)" * message.resigned
            )
        case Ack():
            return f"Ack durable {message.durable}, received {message.entries}"
        case Probe():
            return f"Probe epoch {message.epoch}"
        case Probed():
            return "Probed " + ("silent" if message.silent else "alive")
        case PartitionRecord():
            return f"record epoch {message.epoch} of {message.coordinator or 'nobody'}"
    return type(message).__name__


@dataclass
class Disk:
    """What a node has left after a crash, and what it would lose."""

    uuid: str
    promised: int = 0
    batches: list[Batch] = field(default_factory=list)
    durable: int = 0
    committed: int = 0  # as it was noted; never past what is durable
    first: int = 1  # before it only a snapshot is left
    runs_base: list[tuple[int, int]] = field(default_factory=list)

    @property
    def last(self) -> int:
        return self.batches[-1].last if self.batches else self.first - 1

    def facts(self) -> LogFacts:
        runs = list(self.runs_base)
        for batch in self.batches:
            if not runs or runs[-1][0] != batch.epoch:
                runs.append((batch.epoch, batch.first))
        return LogFacts(first=self.first, last=self.last, durable=self.durable, runs=runs)


class Cluster:
    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.now = 0
        self.record = PartitionRecord(voters=("nobody",))
        self.revision = 0
        self.disks: dict[str, Disk] = {}
        self.replicas: dict[str, Replica] = {}  # of the nodes that run
        self.network: list[Letter] = []
        self.held: dict[str, list[fx.Persist | fx.Truncate]] = {}  # nodes whose disks wait
        self.cuts: set[frozenset[str]] = set()
        self.options = ReplicationOptions()
        self.history: dict[int, Batch] = {}  # what was committed, by last sequence
        self.metadata = True  # the metadata store answers
        self.doubted: dict[str, int] = {}  # node -> up to where it has answered *unknown*

    # --- nodes ---

    def start(self, node: str) -> None:
        disk = self.disks.setdefault(node, Disk(f"{node}-disk"))
        self.replicas[node] = Replica(
            node, uuid=disk.uuid, promised=disk.promised, committed=disk.committed,
            log=disk.facts(), options=self.options,
        )  # fmt: skip
        self.members()
        self.told(node)

    def crash(self, node: str) -> None:
        disk = self.disks[node]
        del self.replicas[node]
        self.held.pop(node, None)
        disk.batches = [b for b in disk.batches if b.last <= disk.durable]
        disk.committed = min(disk.committed, disk.durable)
        self.network = [letter for letter in self.network if node not in letter[:2]]
        self.members()
        for machine in self.replicas.values():
            for stream in [f.stream for f in [machine.follower] if f and f.source == node]:
                machine.on_stream_lost(stream, self.now)
            coordinator = machine.coordinator
            if coordinator is not None and node in coordinator.senders:
                stream = coordinator.senders[node].stream
                machine.on_follower_lost(node, stream)

    def members(self) -> None:
        ages = {node: age for age, node in enumerate(self.disks) if node in self.replicas}
        for machine in self.replicas.values():
            machine.on_members(ages)

    # --- the metadata store ---

    def store(self, record: PartitionRecord) -> None:
        self.record, self.revision = record, self.revision + 1

    def told(self, node: str) -> None:
        if self.metadata:
            self.network.append(Letter("store", node, (self.record, self.revision)))

    def take_epoch(self, node: str) -> None:
        known = self.replicas[node].epoch
        if not self.metadata or known != self.record.epoch:
            self.say(f"{node} is not given an epoch")
            return
        epoch = self.record.epoch + 1
        self.store(msgspec.structs.replace(self.record, epoch=epoch, coordinator=node))
        self.say(f"{node} takes epoch {epoch}")
        for other in self.replicas:
            if other != node:
                self.told(other)
        machine = self.replicas[node]
        self.perform(node, machine.on_epoch_taken(self.record, self.revision, self.now))

    def change(self, node: str, effect: fx.ChangeRecord) -> None:
        machine = self.replicas[node]
        if effect.revision != self.revision or not self.metadata:
            machine.on_change_lost()
            return
        self.store(effect.record)
        record = effect.record
        sets = " and ".join(" ".join(nodes) for nodes in record.quorums)
        learners = f", learners {' '.join(record.learners)}" if record.learners else ""
        self.say(f"{node} changes the record: {sets}{learners}")
        for other in self.replicas:
            self.told(other)

    # --- effects, in order ---

    def perform(self, node: str, effects: fx.Effects) -> None:
        for effect in effects:
            if not isinstance(effect, QUIET):
                self.narrate(node, effect)
            match effect:
                case fx.Persist() | fx.Truncate() if node in self.held:
                    self.held[node].append(effect)
                case fx.Persist() | fx.Truncate():
                    self.settle(node, effect)
                case fx.Send():
                    self.post(Letter(node, effect.to, effect.message))
                case fx.OpenStream():
                    self.post(Letter(node, effect.to, effect.follow))
                case fx.Write():
                    self.disks[node].batches += effect.batches
                    self.sync(node)
                case fx.AppendBarrier():
                    self.append(node)
                case fx.Commit():
                    self.committed(node, effect.sequence)
                case fx.TakeEpoch():
                    self.take_epoch(node)
                case fx.ChangeRecord():
                    self.change(node, effect)
                case fx.Reseed():
                    self.seed(node, effect.source)
        self.pump(node)
        if node in self.replicas:
            self.replicas[node].validate()

    def narrate(self, node: str, effect: fx.Effect) -> None:
        match effect:
            case fx.Commit():
                self.say(f"{node} commits {effect.sequence}")
            case fx.Truncate():
                self.say(f"{node} forgets all after {effect.sequence}")
            case fx.BeganServing():
                self.say(f"{node} serves epoch {effect.epoch}")
            case fx.AnswerUnknown():
                last = self.disks[node].last
                if self.doubted.get(node) != last:
                    self.doubted[node] = last
                    self.say(f"{node} answers up to {last}: unknown")
            case fx.SteppedDown():
                self.say(f"{node} steps down from epoch {effect.epoch}")
            case fx.Halt():
                self.say(f"{node} HALTS: {effect.reason}")
            case fx.Warn():
                self.say(f"{node} warns: {effect.node} {effect.what}")
            case fx.Reseed():
                self.say(f"{node} starts over from a snapshot of {effect.source}")
            case fx.Retire():
                self.say(f"{node} holds the partition no longer")

    def settle(self, node: str, effect: fx.Persist | fx.Truncate) -> None:
        disk, machine = self.disks[node], self.replicas[node]
        if isinstance(effect, fx.Persist):
            disk.promised = max(disk.promised, effect.promised)
            self.perform(node, machine.on_persisted(effect.promised, self.now))
            return
        disk.batches = [b for b in disk.batches if b.last <= effect.sequence]
        disk.durable = min(disk.durable, effect.sequence)
        self.perform(node, machine.on_truncated(effect.sequence, self.now))

    def sync(self, node: str) -> None:
        disk = self.disks[node]
        if node not in self.held and disk.durable < disk.last:
            disk.durable = disk.last
            self.perform(node, self.replicas[node].on_durable(disk.last))

    def release(self, node: str) -> None:
        for effect in self.held.pop(node):
            self.settle(node, effect)
        self.sync(node)

    def append(self, node: str, kind: Kind = Kind.BARRIER) -> None:
        disk, machine = self.disks[node], self.replicas[node]
        end = machine.log.end
        batch = seal(
            kind, f"{node} {end.sequence + 1}".encode(), topic=1, partition=0,
            epoch=machine.epoch, epoch_previous=end.epoch, first=end.sequence + 1, count=1,
            time_ms=self.now, chain_previous=disk.batches[-1].chain if disk.batches else 0,
        )  # fmt: skip
        disk.batches.append(batch)
        machine.on_staged(batch)
        self.pump(node)
        self.sync(node)

    def committed(self, node: str, sequence: int) -> None:
        disk = self.disks[node]
        disk.committed = max(disk.committed, min(sequence, disk.durable))
        for batch in disk.batches:
            if batch.last <= sequence:
                known = self.history.setdefault(batch.last, batch)
                assert known.chain == batch.chain, f"{batch.last} was committed otherwise"

    def seed(self, node: str, source: str) -> None:
        """A snapshot of all that is committed at the source."""
        at, base = self.replicas[source].committed, self.replicas[source].log
        epoch = base.epoch_at(at) or 0
        disk = self.disks[node]
        self.disks[node] = Disk(
            disk.uuid, promised=disk.promised, durable=at, committed=at, first=at + 1,
            runs_base=[(epoch, at)],
        )  # fmt: skip
        facts = self.disks[node].facts()
        self.perform(node, self.replicas[node].on_seeded(facts, at, self.now))

    # --- the network ---

    def post(self, letter: Letter) -> None:
        if frozenset(letter[:2]) not in self.cuts:
            self.network.append(letter)

    def pump(self, node: str) -> None:
        """Send what credit allows, one batch a slice."""
        machine = self.replicas.get(node)
        for other in self.disks:
            while machine is not None and (window := machine.may_send(other)):
                batch = next(b for b in self.disks[node].batches if b.first == window.first)
                self.post(Letter(node, other, machine.append_to(other), (batch,)))
                for effect in machine.on_sent(
                    other, batch.last, entries=batch.count, bytes=batch.size, now=self.now
                ):
                    self.narrate(node, effect)

    def deliver(self, letter: Letter) -> None:
        machine = self.replicas.get(letter.to)
        if machine is not None:
            self.perform(letter.to, self.handled(machine, letter))

    def handled(self, machine: Replica, letter: Letter) -> fx.Effects:
        now = self.now
        match letter.message:
            case (PartitionRecord() as record, int(revision)):
                return machine.on_record(record, revision, now)
            case Fence() as fence:
                return machine.on_fence(fence, now)
            case Fenced() as fenced:
                return machine.on_fenced(fenced, now)
            case Follow() as follow:
                return machine.on_follow(follow, now)
            case Followed() as followed:
                return machine.on_followed(followed, now)
            case Append() as append:
                return machine.on_append(append, list(letter.batches), now)
            case Ack() as ack:
                return machine.on_ack(ack, now)
            case Probe() as probe:
                return machine.on_probe(probe, now)
            case Probed() as probed:
                return machine.on_probed(probed, now)
        raise TypeError(letter.message)

    def quiesce(self) -> None:
        for _ in range(10_000):
            if not self.network:
                return
            self.deliver(self.network.pop(0))
        raise AssertionError("the cluster does not come to rest")

    def tick(self, ms: int) -> None:
        self.now += ms
        for node in list(self.replicas):
            self.perform(node, self.replicas[node].on_tick(self.now))

    def set_options(self, **options: int) -> None:
        self.options = replace(self.options, **options)
