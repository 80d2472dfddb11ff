"""Hosts of one partition on several nodes of one process: real logs, a network in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import PenstockError, Unavailable
from penstock.log.flush import LogOptions
from penstock.log.identity import set_aside
from penstock.model.batch import SCHEMAS, Batch, Kind
from penstock.model.entries import ENQ
from penstock.model.topic import TopicConfig, topic_config
from penstock.node.atomic import AtomicBatches
from penstock.node.clock import ManualClock
from penstock.node.observe.metrics import Metrics
from penstock.node.replica.host import Host
from penstock.node.replica.ports import CopyPace, Key, SeedTarget, Surroundings
from penstock.node.replica.replay import open_replica
from penstock.node.route import Router
from penstock.node.serve.message_reader import ReadCache
from penstock.node.serve.topic import ServedTopic
from penstock.node.storage.log_io import WriterPool
from penstock.node.write import EnqueuePart, EnqueueRequest, ReturnRequest, TokenRequest
from penstock.replication.assignment import PartitionRecord
from penstock.replication.effects import Append, Follow, Letter
from penstock.replication.facts import ReplicationOptions
from penstock.replication.replica import Role
from penstock.wire.messages import Enqueued

KEY: Key = (1, 0)
STEP_MS = 20  # that pass for replication in a tick
START_MS = 1_700_000_000_000
SEED_BYTES = 32 << 10
LOG = LogOptions(segment_bytes=64 << 10, allocate_bytes=32 << 10, reserve_bytes=8 << 10)


class Network:
    """One node's `Transport` and `Control`. Nothing arrives before the next turn of the loop."""

    def __init__(self, cluster: Cluster, node: str) -> None:
        self._cluster, self._node = cluster, node
        self.stream: tuple[str, int] | None = None  # that we have opened: where, its number
        self.bytes_to: dict[str, int] = {}  # of batches that were sent
        self.entries_to: dict[str, int] = {}
        self.epochs_wanted = 0

    def _later(self, to: str, arrive: Callable[[Host], None]) -> None:
        def deliver() -> None:
            host = self._cluster.reach(self._node, to)
            if host is not None:
                arrive(host)

        asyncio.get_running_loop().call_soon(deliver)

    def send(self, to: str, key: Key, message: Letter) -> None:
        self._later(to, lambda host: host.on_message(message))

    def open_stream(self, to: str, key: Key, follow: Follow) -> None:
        self.stream = (to, follow.stream)
        self._later(to, lambda host: host.on_follow(follow))

    def close_stream(self, key: Key) -> None:
        if self.stream is not None:
            to, number = self.stream
            self.stream = None
            self._later(to, lambda host: host.on_follower_lost(self._node, number))

    def send_slice(self, to: str, key: Key, append: Append, batches: list[Batch]) -> bool:
        if to in self._cluster.clogged:
            return False
        self.bytes_to[to] = self.bytes_to.get(to, 0) + sum(b.size for b in batches)
        self.entries_to[to] = self.entries_to.get(to, 0) + sum(b.count for b in batches)
        self._later(to, lambda host: self._cluster.arrive(host, append, batches))
        return True

    async def fetch_seed(self, source: str, key: Key, into: SeedTarget) -> None:
        host = self._cluster.reach(self._node, source)
        if host is None:
            raise Unavailable(f"{source} is away")
        head = await host.seed_head()
        await into.begin(head)
        at = head.first
        while at <= head.through:
            batches = await host.seed_slice(at, through=head.through, bytes_max=SEED_BYTES)
            await into.write(batches)
            at = batches[-1].last + 1

    def take_epoch(self, key: Key) -> None:
        self.epochs_wanted += 1
        self._cluster.take_epoch(self._node)

    def change_record(self, key: Key, record: PartitionRecord, revision: int) -> None:
        if self._cluster.revision == revision:
            self._cluster.tell(record)
        else:
            asyncio.get_running_loop().call_soon(self._cluster.hosts[self._node].on_change_lost)

    def renew(self, key: Key, *, uuid: str, epoch: int) -> None:
        self._cluster.renew(self._node, uuid)

    def retire(self, key: Key) -> None:
        """The tests remove no replica."""


class _Here:
    """A view of the cluster for requests that are all made where they are served."""

    alone = available = True
    cut_off = False

    def __init__(self, node: str) -> None:
        self.node = node

    def coordinator(self, key: Key) -> str:
        return self.node

    def live(self, node: str) -> None:
        return None

    async def changed(self, key: Key) -> None:
        await asyncio.get_running_loop().create_future()


class Cluster:
    """Nodes a, b, c … and the record of one partition. `cut` names those that reach nobody."""

    def __init__(
        self, folder: Path, *, nodes: str = "abc", credit: tuple[int, int] = (1000, 8 << 20),
        log: LogOptions = LOG,
    ) -> None:  # fmt: skip
        self.folder, self.names, self.log = folder, list(nodes), log
        self.config: TopicConfig = topic_config({"name": "jobs", "id": 1, "retention_ms": 1000})
        self.record = PartitionRecord(
            voters=tuple(nodes), uuids={node: f"uuid-{node}" for node in nodes}
        )
        self.revision = 1
        self.hosts: dict[str, Host] = {}
        self.networks: dict[str, Network] = {}
        self.cut: set[str] = set()
        self.quiet: set[str] = set()  # those that do not try to coordinate
        self.clogged: set[str] = set()  # their connections take nothing
        self.slow: dict[str, list[tuple[Append, list[Batch]]]] = {}  # node -> slices not taken yet
        self.now_ms = 1000
        self.clock = ManualClock(START_MS)
        self.fatal: list[BaseException] = []
        self.damages: list[PenstockError] = []
        self.mended: list[Key] = []
        self.renewing: set[str] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.options = ReplicationOptions(credit_entries=credit[0], credit_bytes=credit[1])
        self._writers: dict[str, WriterPool] = {}

    # --- starting and stopping ---

    async def start(self, *names: str) -> None:
        for name in names or self.names:
            topic = self._topic(name)
            opened = await asyncio.to_thread(
                open_replica, self.folder / name / "t" / "p", self.config, 0, options=self.log,
                alone=False, uuid=f"uuid-{name}",
            )  # fmt: skip
            host = Host(topic, 0, opened, self._around(name, topic))
            self.hosts[name] = host
            host.on_record(self.record, self.revision)
        self._tell_members()

    def _topic(self, name: str) -> ServedTopic:
        return ServedTopic(
            self.config, clock=self.clock, metrics=Metrics(node=name),
            on_damage=self.damages.append, on_fatal=self.fatal.append,
            router=Router(_Here(name), spawn=self._run, consumers=b""),
            atomic=AtomicBatches,
        )  # fmt: skip

    def _around(self, name: str, topic: ServedTopic) -> Surroundings:
        network = self.networks[name] = Network(self, name)
        writers = self._writers[name] = WriterPool(1)
        return Surroundings(
            node=name, clock=self.clock, metrics=topic.metrics, writers=writers, syncer=None,
            cache=ReadCache(1 << 20), control=network, transport=network, alone=False,
            spawn=self._spawn,
            on_damage=self.damages.append, on_mended=self.mended.append,
            on_fatal=self.fatal.append, reserve_bytes=LOG.reserve_bytes, options=self.options,
            pace=CopyPace(self.options.seed_bytes_per_s), now=lambda: self.now_ms,
        )  # fmt: skip

    async def stop(self, *names: str) -> None:
        for name in names or list(self.hosts):
            host = self.hosts.pop(name)
            host.topic.close()
            await host.close()
            await self._writers.pop(name).close()
        self._tell_members()

    def renew(self, name: str, uuid: str) -> None:
        if name not in self.renewing | self.cut and len(self.record.uuids) == len(self.names):
            self.renewing.add(name)
            self._spawn(self._renew(name, uuid))

    async def _renew(self, name: str, uuid: str) -> None:
        assert self.record.uuids[name] == uuid
        uuids = {node: disk for node, disk in self.record.uuids.items() if node != name}
        self.tell(msgspec.structs.replace(self.record, uuids=uuids))
        folder = self.hosts[name].log.folder
        await self.stop(name)
        await asyncio.to_thread(set_aside, folder)
        await self.start(name)
        self.renewing.discard(name)

    def _tell_members(self) -> None:
        alive = {name: self.names.index(name) + 1 for name in self.hosts if name not in self.cut}
        for name, host in self.hosts.items():
            host.on_members(alive if name not in self.cut else {name: 1})

    def isolate(self, name: str) -> None:
        """The node reaches nobody, and hears nothing of the record."""
        self.cut.add(name)
        for other in self.hosts:
            number = self.networks[name].stream
            if number is not None and number[0] == other:
                self.hosts[other].on_follower_lost(name, number[1])

    def heal(self, name: str) -> None:
        self.cut.discard(name)
        self.hosts[name].on_record(self.record, self.revision)
        self._tell_members()

    # --- the network and the record ---

    def reach(self, source: str, to: str) -> Host | None:
        if source in self.cut or to in self.cut or source not in self.hosts:
            return None
        return self.hosts.get(to)

    def arrive(self, host: Host, append: Append, batches: list[Batch]) -> None:
        waiting = self.slow.get(host.around.node)
        if waiting is not None:  # signs of life too: nothing overtakes within a stream
            waiting.append((append, batches))
        else:
            host.on_slice(append, batches)

    def speed_up(self) -> None:
        """Those that were slow take what waits for them."""
        slow, self.slow = self.slow, {}
        for name, waiting in slow.items():
            for append, batches in waiting:
                self.hosts[name].on_slice(append, batches)

    def take_epoch(self, node: str) -> None:
        if node not in self.cut | self.quiet:
            self.record = msgspec.structs.replace(
                self.record, epoch=self.record.epoch + 1, coordinator=node
            )
            self.tell(self.record, taken=node)

    def tell(self, record: PartitionRecord, *, taken: str = "") -> None:
        self.record, self.revision = record, self.revision + 1
        revision = self.revision
        for name, host in self.hosts.items():
            if name in self.cut:
                continue
            hear = host.on_epoch_taken if name == taken else host.on_record
            asyncio.get_running_loop().call_soon(hear, record, revision)

    # --- time ---

    async def until(self, holds: Callable[[], object], *, ticks: int = 3000) -> None:
        """Let time pass until something holds."""
        for _ in range(ticks):
            if self.fatal:
                raise self.fatal[0]
            if holds():
                return
            await self.tick()
        raise AssertionError("it never came to be")

    async def tick(self) -> None:
        self.now_ms += STEP_MS
        for host in list(self.hosts.values()):
            host.on_tick()
            host.replica.validate()
        await asyncio.sleep(0.001)

    async def serving(self) -> Host:
        """The host that serves, once there is one that the record names."""

        def found() -> Host | None:
            host = self.hosts.get(self.record.coordinator)
            return host if host is not None and host.role is Role.SERVING else None

        await self.until(lambda: found() is not None and found().partition is not None)  # type: ignore[union-attr]
        host = found()
        assert host is not None
        return host

    async def at_rest(self) -> None:
        """Until every replica holds, and has applied, what the coordinator has."""
        leader = await self.serving()
        await self.until(
            lambda: all(
                host.committed == host.log.sequence_durable == leader.log.sequence_last
                and host.heap.sequence_applied == leader.log.sequence_last
                for host in self.hosts.values()
            )
        )

    def _run(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        self._spawn(work)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


class SlowDisk:
    """What the writer thread has done is told to the host only when it is let go."""

    def __init__(self, host: Host) -> None:
        host.flusher._syncer = None  # the thread does it all
        self._submit = host.flusher._submit
        self._told: list[Callable[[], None]] | None = []
        host.flusher._submit = self._hold

    def _hold(self, work: Callable[[], Any], done: Callable[[Any], None], /) -> None:
        def told(written: Any) -> None:
            if self._told is None:
                done(written)
            else:
                self._told.append(lambda: done(written))

        self._submit(work, told)

    def let_go(self) -> None:
        told, self._told = self._told or [], None
        for tell in told:
            tell()


class StuckDisk:
    """Nothing is written until it is let go."""

    def __init__(self, host: Host) -> None:
        host.flusher._syncer = None  # the thread does it all
        self._submit = host.flusher._submit
        self._held: list[Callable[[], None]] = []
        self._flusher, host.flusher._submit = host.flusher, self._hold

    def _hold(self, work: Callable[[], Any], done: Callable[[Any], None], /) -> None:
        self._held.append(lambda: self._submit(work, done))

    def let_go(self) -> None:
        self._flusher._submit = self._submit
        for write in self._held:
            write()


# --- what a client would do, at the host that serves ---


def put(
    host: Host,
    payloads: Sequence[bytes],
    *,
    delay_ms: int = 0,
    producer: tuple[bytes, int] = (b"", 0),
) -> asyncio.Future[Enqueued]:
    """Enqueue; the future has the answer, or fails with the error."""
    values: dict[str, Any] = {"payload": list(payloads), "delay_ms": [delay_ms] * len(payloads)}
    values |= {
        "run_count": [len(payloads)], "run_epoch": [1], "run_sequence": [producer[1]],
        "run_producer": [producer[0]],
    }  # fmt: skip
    body = ENQ.encode(len(payloads), values, runs=1)
    answer, reply = _reply()
    request = EnqueueRequest(1, reply)
    part = EnqueuePart(
        request, ENQ.decode(body, len(payloads)), indices=range(len(payloads)), body=body
    )
    assert host.partition is not None
    host.partition.enqueue(part)
    return answer


async def lease(host: Host, count: int) -> NDArray[np.uint64]:
    """Lease the best messages for a minute; returns the tokens."""
    partition = host.partition
    assert partition is not None
    messages = partition.heap.select(count, host.around.clock.now_ms())
    batch = partition.lease(messages, consumer=b"c", visibility_ms=60_000)
    host.topic.wake()
    await partition.committed(batch.last)
    return np.arange(batch.first, batch.first + len(messages), dtype=np.uint64)


def settle(host: Host, tokens: NDArray[np.uint64]) -> asyncio.Future[list[int]]:
    answer, reply = _reply()
    assert host.partition is not None
    host.partition.settle(TokenRequest(tokens, reply))
    return answer


def reject(host: Host, tokens: NDArray[np.uint64]) -> asyncio.Future[list[int]]:
    answer, reply = _reply()
    assert host.partition is not None
    host.partition.settle(ReturnRequest(tokens, reply, reject=True))
    return answer


def _reply() -> tuple[asyncio.Future[Any], Callable[[object], None]]:
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def reply(result: object) -> None:
        if isinstance(result, PenstockError):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    return answer, reply


def payloads(host: Host) -> list[bytes]:
    """All messages that were ever enqueued, as the log has them up to its commit."""
    found: list[bytes] = []
    for batch in host.log.reader.scan(1):
        if batch.kind is Kind.ENQ and batch.last <= host.committed:
            found += SCHEMAS[Kind.ENQ].decode(batch.raw(), batch.entries).binary("payload") or []
    return found
