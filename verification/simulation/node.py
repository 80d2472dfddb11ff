"""One node: a process that is started, stopped, paused and killed, with its partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.model.batch import Batch
from penstock.replication.assignment import PartitionRecord
from penstock.replication.effects import Append, Follow
from verification.simulation.caller import Caller
from verification.simulation.disk import FailedSync, Platter, Snapshot
from verification.simulation.host import Host
from verification.simulation.network import Stream
from verification.simulation.schedule import MS, SECOND
from verification.simulation.tenure import Request

if TYPE_CHECKING:
    from verification.simulation.simulation import Simulation

TICK_US: Final = 100 * MS
KEEP_ALIVE_US: Final = 500 * MS
LIST_RETRY_US: Final = 200 * MS
SCRUB_US: Final = (5 * MS, 800 * MS)  # until it meets what has gone bad
EPOCH_MS: Final = 1_700_000_000_000  # what wall clocks show when a simulation begins


class Crash(Exception):
    """The process ends here."""

    def __init__(self, point: str) -> None:
        super().__init__(point)
        self.point = point


class Node:
    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation, self.name = simulation, name
        self._schedule = simulation.schedule
        self.platters: dict[int, Platter] = {}
        self.hosts: dict[int, Host] = {}
        self.up = False
        self.refuses = False  # the machine runs: who connects is told that nobody listens
        self.life = 0
        self.fuse: int | None = None  # named points until the process ends
        self.trap: str | None = None  # the named point at which it ends
        self.slow_disk = False
        self.watched: int | None = None  # changes of the metadata seen; None: not listed yet
        self._paused: list[tuple[Callable[..., None], tuple[Any, ...]]] | None = None
        self._members: dict[str, int] = {}
        self._coordinators: dict[int, str] = {}  # of all partitions, as last heard
        self._uuids = 0
        self.monotonic_us = simulation.schedule.between(0, 3600 * SECOND)
        self.wall_ms = EPOCH_MS + simulation.schedule.between(-300, 300)  # of the machine
        self._clock_ms = self.wall_ms  # of the process: wall when it began, monotonic after that
        self.caller = Caller(simulation, self)

    # --- time ---

    @property
    def now_ms(self) -> int:
        """Monotonic; a suspended machine may make it jump ahead."""
        return (self._schedule.now + self.monotonic_us) // MS

    @property
    def clock_ms(self) -> int:
        return self._clock_ms + self.now_ms

    # --- running ---

    def run(self, action: Callable[..., None], *args: Any) -> None:
        """Let the process do something, unless it is not there; it may end while it does."""
        if not self.up:
            return
        if self._paused is not None:
            self._paused.append((action, args))
            return
        try:
            action(*args)
        except Crash as crash:
            self.crash(crash.point)
        except FailedSync:
            self.crash("sync failed")

    def after(self, delay_us: int, action: Callable[..., None], *args: Any) -> None:
        self._schedule.after(delay_us, self._fire, self.life, action, args)

    def after_in(
        self, life: int, delay_us: int, action: Callable[..., None], *args: Any
    ) -> None:  # fmt: skip
        """As `after`, for the process that was there in `life`."""
        self._schedule.after(delay_us, self._fire, life, action, args)

    def _fire(self, life: int, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        if life != self.life:
            return
        if self._paused is None and self.up:
            try:
                action(*args)
            except Crash as crash:
                self.crash(crash.point)
            except FailedSync:
                self.crash("sync failed")
        else:
            self.run(action, *args)

    def point(self, name: str) -> None:
        """A named point: the process may end here."""
        if self.trap == name:
            raise Crash(name)
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse <= 0:
                raise Crash(name)

    def pause(self) -> None:
        if self._paused is None:
            self._paused = []

    def resume(self) -> None:
        missed, self._paused = self._paused or [], None
        life = self.life
        for action, args in missed:
            if self.life == life:
                self.run(action, *args)

    # --- its life ---

    def boot(self) -> None:
        if self.up:
            return
        self.life += 1
        self.up, self.refuses, self.watched = True, True, None
        self._clock_ms = self.wall_ms - self.monotonic_us // MS
        self.simulation.log(self.name, "boot", self.life)
        self._members, self._coordinators = {}, {}
        self.caller.reset()
        for partition, platter in self.platters.items():
            if platter.rotten or platter.replays_bad:
                self.simulation.log(self.name, partition, "rot found")
                platter.renew(self.new_uuid())
            elif platter.bad:
                self.after(self.simulation.schedule.skewed(*SCRUB_US), self.scrub, partition)
        self._list()
        self.after(self.simulation.schedule.between(0, TICK_US), self._tick)
        self._keep_alive()

    def crash(self, why: str, *, power: bool = False) -> None:
        if not self.up:
            return
        lost = sum(host.disk.crash() for host in self.hosts.values())
        self.simulation.log(self.name, "crash", why, "lost", lost)
        self.simulation.on_crash(why)
        self._end(power=power)
        self.simulation.faults.on_stopped(self)

    def _end(self, *, power: bool) -> None:
        self.up, self.refuses = False, not power
        self.life += 1
        self.fuse = self.trap = self._paused = None
        self.hosts.clear()
        self.simulation.network.node_stopped(self.name, refuses=not power)

    def scrub(self, partition: int) -> None:
        host = self.hosts.get(partition)
        if host is not None:
            host.scrub()

    def new_uuid(self) -> str:
        self._uuids += 1
        return f"{self.name}.{self._uuids}"

    def wipe(self) -> None:
        """The disks are lost; the process is not running."""
        self.platters.clear()

    def _tick(self) -> None:
        self.after(TICK_US, self._tick)
        for host in list(self.hosts.values()):
            host.on_tick()

    # --- metadata ---

    def _keep_alive(self) -> None:
        self.after(KEEP_ALIVE_US, self._keep_alive)
        store = self.simulation.store
        store.request(
            self.name, lambda: store.keep_alive(self.name) if self.up else None,
            lambda _: None, lossy=False,
        )  # fmt: skip

    def _list(self) -> None:
        store = self.simulation.store

        def listed(found: Any) -> None:
            if found is None:
                self.after(LIST_RETRY_US, self._list)
                return
            self.watched, records, members = found
            self._on_members(members)
            for partition, (record, revision) in records.items():
                self._on_record(partition, record, revision)
            store.wake(self.name)

        store.request(self.name, lambda: store.listed(self.name), listed, lossy=False)

    def on_change(self, change: Any) -> None:
        if isinstance(change, dict):
            self._on_members(change)
        else:
            self._on_record(*change)

    def _on_members(self, members: dict[str, int]) -> None:
        self._members = members
        for host in self.hosts.values():
            host.on_members(members)

    def _on_record(self, partition: int, record: PartitionRecord, revision: int) -> None:
        self._coordinators[partition] = record.coordinator
        host = self.hosts.get(partition)
        if host is None:
            if self.name not in record.members:
                return
            platter = self.platters.get(partition)
            if platter is None:
                platter = self.platters[partition] = Platter(self.new_uuid())
            host = self.hosts[partition] = Host(self, partition, platter)
            host.on_members(self._members)
        host.on_record(record, revision)

    def retire(self, partition: int) -> None:
        """The partition has gone elsewhere, if the store itself says so: a watch may tell of a
        record from before it came back."""
        store = self.simulation.store
        host = self.hosts[partition]

        def read(found: tuple[PartitionRecord, int] | None) -> None:
            if self.hosts.get(partition) is not host or host.named():
                return  # it is gone, or was given back meanwhile
            if found is None:
                self.after(LIST_RETRY_US, ask)
            elif self.name in found[0].members:
                self._on_record(partition, *found)
            else:
                self.simulation.log(self.name, partition, "retired")
                host.close()
                del self.hosts[partition]
                del self.platters[partition]

        def ask() -> None:
            store.request(self.name, lambda: store.records[partition], read, lossy=False)

        ask()

    def renew(self, partition: int, *, uuid: str, epoch: int) -> None:
        """As the driver does: first the record counts on the disk no more, then it is dropped."""
        store, host = self.simulation.store, self.hosts[partition]

        def read(found: tuple[PartitionRecord, int] | None) -> None:
            without = found and found[0].disowned(self.name, uuid=uuid, epoch=epoch)
            if found is None or without is None or self.hosts.get(partition) is not host:
                return
            if without is found[0]:
                start_over(*found)
                return
            self.point("renew.asked")
            store.request(
                self.name,
                lambda: store.swap(partition, without, found[1]),
                lambda revision: start_over(without, revision) if revision else None,
                lossy=True,
            )

        def start_over(record: PartitionRecord, revision: int) -> None:
            if self.hosts.get(partition) is not host:
                return
            host.on_record(record, revision)
            self.point("renew.disowned")
            self.simulation.log(self.name, partition, "renewed")
            self.simulation.network.close(self.name, partition)
            host.close()
            promised = host.platter.promised
            self.platters[partition] = Platter(self.new_uuid(), promised=promised)
            del self.hosts[partition]
            self.point("renew.done")
            self._on_record(partition, record, revision)

        store.request(self.name, lambda: store.records[partition], read, lossy=False)

    def take_epoch(self, partition: int) -> None:
        store = self.simulation.store

        def read(found: tuple[PartitionRecord, int] | None) -> None:
            if found is None:
                return
            record, revision = found
            mine = msgspec.structs.replace(
                record, epoch=record.epoch + 1, coordinator=self.name
            )  # fmt: skip
            self.point("epoch.asked")
            store.request(
                self.name,
                lambda: store.swap(partition, mine, revision),
                lambda result: taken(mine, result),
                lossy=True,
            )

        def taken(record: PartitionRecord, revision: int | None) -> None:
            self.point("epoch.taken")
            host = self.hosts.get(partition)
            if revision and host is not None:
                host.perform(host.replica.on_epoch_taken(record, revision, host.now))

        store.request(self.name, lambda: store.records[partition], read, lossy=False)

    def change_record(self, partition: int, record: PartitionRecord, expected: int) -> None:
        store = self.simulation.store
        self.point("change.asked")

        def changed(revision: int | None) -> None:
            self.point("change.done")
            host = self.hosts.get(partition)
            if host is None:
                return
            if revision:
                host.on_record(record, revision)
            else:
                host.replica.on_change_lost()
                host.perform([])

        store.request(
            self.name, lambda: store.swap(partition, record, expected), changed, lossy=True
        )

    # --- messages ---

    def on_message(self, partition: int, message: Any) -> None:
        host = self.hosts.get(partition)
        if host is not None:
            host.on_message(message)

    def on_slice(self, partition: int, append: Append, batches: list[Batch]) -> None:
        host = self.hosts.get(partition)
        if host is not None:
            host.on_slice(append, batches)

    def on_follow(self, partition: int, follow: Follow, stream: Stream) -> None:
        host = self.hosts.get(partition)
        if host is not None:
            host.on_follow(follow)
        else:
            self.simulation.network.break_stream(stream)

    def on_stream_lost(self, stream: Stream, gone: bool) -> None:
        host = self.hosts.get(stream.partition)
        if host is not None:
            host.on_stream_lost(stream, gone)

    def on_follower_lost(self, stream: Stream) -> None:
        host = self.hosts.get(stream.partition)
        if host is not None:
            host.on_follower_lost(stream)

    def on_seed_asked(self, partition: int, reader: str, number: int) -> None:
        host = self.hosts.get(partition)
        if host is not None:
            host.copies.on_seed_asked(reader, number)

    def on_seed(
        self, partition: int, number: int, snapshot: Snapshot, batches: list[Batch]
    ) -> None:  # fmt: skip
        host = self.hosts.get(partition)
        if host is not None:
            host.copies.on_seed(number, snapshot, batches)

    # --- requests ---

    def on_request(self, sender: str, number: int, request: Request) -> None:
        host = self.hosts.get(request.partition)

        def reply(answer: Any) -> None:
            self.simulation.network.send(self.name, sender, "on_reply", number, answer)

        if host is None or host.tenure is None or not host.tenure.serving:
            reply(("elsewhere", self._coordinators.get(request.partition, "")))
            return
        host.tenure.serve(request, reply)
        host.pump()

    def on_reply(self, number: int, answer: Any) -> None:
        self.caller.on_reply(number, answer)
