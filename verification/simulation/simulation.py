"""One run: a cluster, its clients and its faults, from a seed; and what the checkers say of it."""

from __future__ import annotations

import traceback
from typing import Any, Final

import msgspec
import xxhash

from penstock.model.batch import Batch
from penstock.model.columns import Columns
from penstock.model.topic import TopicConfig
from penstock.replication.assignment import PartitionRecord
from penstock.replication.replica import Role
from verification.checkers import Verdict
from verification.events import AtRest, Committed, Stuck
from verification.simulation.clients import AtomicProducer, Client, Consumer, Producer
from verification.simulation.delays import Delays
from verification.simulation.disk import Platter
from verification.simulation.faults import Faults
from verification.simulation.host import Host
from verification.simulation.metadata import MetadataStore
from verification.simulation.network import Network
from verification.simulation.node import Node
from verification.simulation.observer import Observer
from verification.simulation.profiles import PROFILES, Profile
from verification.simulation.schedule import MS, SECOND, Schedule
from verification.simulation.trace import Trace

HEAL_US: Final = 45 * SECOND  # everything has come to rest so long after the last fault
LAST_EVENTS: Final = 60


class Result(msgspec.Struct):
    seed: int
    profile: str
    ok: bool
    trace: str  # hash of all that happened
    events: int
    virtual_ms: int
    heal_ms: int
    faults: dict[str, int]
    crashes: dict[str, int]  # by the named point at which a process ended
    verdict: Verdict
    last: list[str] = []  # events, if it failed


class Simulation:
    def __init__(self, seed: int, profile: Profile) -> None:
        # Profiles that share a seed should not share their chances.
        self.schedule = Schedule(seed << 32 | xxhash.xxh32_intdigest(profile.name.encode()))
        self.seed, self.profile = seed, profile
        self.trace = Trace()
        self.checker = Observer()
        self.calm = self.closing = False
        self.serial = self.schedule.chance(0.5)  # how drivers treat slow effects
        self.crashes: dict[str, int] = {}
        self.config = TopicConfig(
            name="jobs", id=7, partitions=profile.partitions, visibility_ms=1000,
            replication_factor=profile.replication_factor, backoff_ms_base=100, max_retries=3,
        )  # fmt: skip
        self.ledger: dict[int, list[Batch]] = {p: [] for p in range(profile.partitions)}
        self._columns: dict[int, tuple[Batch, Columns]] = {}  # by the batch's identity
        self.names = [f"n{i}" for i in range(profile.nodes)]
        self.nodes: dict[str, Node] = {}
        self.clients: dict[str, Client] = {}
        self.receivers: dict[str, Node | Client] = {}  # all who can be sent something
        self.delays = Delays(self)
        self.network = Network(self)
        self.store = MetadataStore(self)
        self.faults = Faults(self)
        self._build()

    def _build(self) -> None:
        profile = self.profile
        for name in self.names:
            self.nodes[name] = Node(self, name)
        self.nodes[self.names[-1]].wall_ms += profile.fast_ms
        for partition in range(profile.partitions):
            voters = [
                self.names[(partition + i) % profile.nodes]
                for i in range(profile.replication_factor)
            ]
            uuids = {}
            for name in voters:
                uuid = self.nodes[name].new_uuid()
                self.nodes[name].platters[partition] = Platter(uuid)
                uuids[name] = uuid
            self.store.create(partition, PartitionRecord(voters=tuple(voters), uuids=uuids))
        kinds = ((Producer, profile.producers), (Consumer, profile.consumers))
        for kind, count in (*kinds, (AtomicProducer, profile.atomics)):
            for i in range(count):
                name = f"{kind.__name__.lower()}{i}"
                self.clients[name] = kind(self, name)
        self.receivers = {**self.clients, **self.nodes}

    # --- what the parts tell ---

    def log(self, *event: Any) -> None:
        self.trace.add((self.schedule.now, *event))

    def on_crash(self, point: str) -> None:
        self.crashes[point] = self.crashes.get(point, 0) + 1

    def on_commit(self, host: Host, sequence: int, batch: Batch | None) -> None:
        """A replica's watermark moved. The first to commit an entry writes it into the ledger."""
        who = f"{host.node.name}/{host.partition}"
        if batch is None:
            self.checker.broken("gaps", f"{who} commits {sequence} where no batch ends")
            return
        # A replica that starts over has another watermark: it goes by its disk.
        disk = host.platter.uuid
        self.checker.add(Committed(host.partition, disk, host.node.life, sequence, batch.chain))
        ledger = self.ledger[host.partition]
        end = ledger[-1].last if ledger else 0
        if sequence > end:
            fresh = host.disk.read(end + 1, through=sequence)
            self.checker.on_ledger(who, ledger[-1] if ledger else None, fresh)
            ledger += fresh
        else:
            self.checker.on_committed_again(who, batch)

    def keep_columns(self, batch: Batch, columns: Columns) -> None:
        self._columns[id(batch)] = (batch, columns)

    def columns_of(self, batch: Batch) -> Columns:
        """A batch never changes and all replicas hold the same object: it is decoded once."""
        known = self._columns.get(id(batch))
        if known is None:
            known = self._columns[id(batch)] = (batch, batch.columns())
        return known[1]

    # --- the run ---

    def run(self) -> Result:
        heal_ms = 0
        try:
            self.start()
            self.schedule.run_until(self.profile.duration_ms * MS)
            heal_ms = self.heal()
        except Exception as error:  # noqa: BLE001 - whatever a core raises is a finding
            where = traceback.format_exc(limit=-4)
            self.checker.broken("exceptions", f"{type(error).__name__}: {error}\n{where}")
        verdict = self.verdict()
        return Result(
            self.seed, self.profile.name, verdict.ok, self.trace.digest, self.schedule.fired,
            self.schedule.now // MS, heal_ms, self.faults.drawn, self.crashes, verdict,
            [] if verdict.ok else self.trace.lines(LAST_EVENTS),
        )  # fmt: skip

    def start(self) -> None:
        schedule = self.schedule
        for node in self.nodes.values():
            schedule.after(schedule.between(0, 200 * MS), node.boot)
        schedule.after(500 * MS, self._expire_leases)
        for client in self.clients.values():
            schedule.after(0, client.start)
        if self.profile.faults:
            schedule.after(schedule.between(0, SECOND), self.faults.start)

    def heal(self) -> int:
        """No more faults: all must come to an end and to rest. Returns how many ms that took."""
        schedule = self.schedule
        self.log("calm")
        self.calm = True
        self.faults.mend_all()
        schedule.run_until(schedule.now + 500 * MS)
        self.closing = True
        mended = schedule.now
        if schedule.run_until(mended + HEAL_US, self._at_rest):
            self._compare()
        else:
            for what in self._unrest():
                self.checker.add(Stuck(what))
        return (schedule.now - mended) // MS

    def verdict(self) -> Verdict:
        for ledger in self.ledger.values():
            self.checker.add_log(ledger, self.columns_of)
        return self.checker.verdict()

    def _expire_leases(self) -> None:
        self.store.expire()
        self.schedule.after(500 * MS, self._expire_leases)

    # --- the end ---

    def _at_rest(self) -> bool:
        return next(iter(self._unrest()), None) is None

    def _unrest(self) -> list[str]:
        found = [f"{c.name} waits for an answer" for c in self.clients.values() if c.busy]
        for partition, (record, _) in self.store.records.items():
            found += self._unrest_of(partition, record)
            if found:
                return found
        return found

    def _unrest_of(self, partition: int, record: PartitionRecord) -> list[str]:
        host = self.nodes[record.coordinator].hosts.get(partition) if record.coordinator else None
        if host is None or not host.replica.serving or host.replica.epoch != record.epoch:
            return [f"partition {partition} is not served: {record}"]
        if record.joint or record.target or host.heap.prepared:
            return [f"partition {partition} has something unfinished: {record}"]
        if host.committed != host.disk.end.sequence:
            return [f"partition {partition} has uncommitted entries"]
        behind = []
        for name in record.members:
            other = self.nodes[name].hosts.get(partition)
            if other is None or other.committed != host.committed:
                behind.append(f"{name} is behind in partition {partition}")
            elif record.is_voter(name) and record.uuids.get(name) != other.platter.uuid:
                behind.append(f"the disk of {name} does not count in partition {partition}")
            elif other.replica.role not in (Role.SERVING, Role.FOLLOWING):
                behind.append(f"{name} is {other.replica.role} in partition {partition}")
        return behind

    def _compare(self) -> None:
        for partition, (record, _) in self.store.records.items():
            for name in record.members:
                host = self.nodes[name].hosts[partition]
                host.heap.validate()
                end = host.disk.end
                self.checker.add(
                    AtRest(partition, name, end.sequence, end.chain, host.heap.digest())
                )


def run_seed(seed: int, profile: str = "mixed") -> Result:
    return Simulation(seed, PROFILES[profile]).run()
