"""The engine: topics of one node over one data folder, from recovery to a clean stop."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
from prometheus_client.core import Metric

from penstock.cluster.catalog import Catalog
from penstock.cluster.keys import KeyRing
from penstock.cluster.membership import NodeInfo
from penstock.cluster.reserve import Reserve
from penstock.cluster.store import MetadataStore
from penstock.config import Config, host_port
from penstock.errors import Corruption, FailedPrecondition, PenstockError, Unavailable
from penstock.log.folder import FORMAT_DELTAS, DataFolder, foreign_log, missing_partition
from penstock.model.batch import Kind
from penstock.model.topic import TopicConfig, TopicKind
from penstock.model.version import __version__
from penstock.node.atomic import AtomicBatches
from penstock.node.clock import Clock
from penstock.node.cluster.administration import ClusterAdministration
from penstock.node.cluster.cluster import Cluster
from penstock.node.door.budget import Budget
from penstock.node.door.confirmations import Confirmations
from penstock.node.door.doorway import Doorway
from penstock.node.door.flow import ReadPace, Rota
from penstock.node.live.catch_up import ReadTurns
from penstock.node.live.cursors import Cursors
from penstock.node.live.hub import Hub
from penstock.node.observe.audit import AuditLog
from penstock.node.observe.logs import get_logger
from penstock.node.observe.metrics import Metrics
from penstock.node.replica.host import Host
from penstock.node.replica.ports import Control, Key, Surroundings
from penstock.node.replica.replay import OpenedReplica, open_replica
from penstock.node.route import ClusterView, Router
from penstock.node.serve.message_reader import ReadCache
from penstock.node.serve.partition import Partition
from penstock.node.serve.topic import ServedTopic, reject_delta_topic, topic_not_found
from penstock.node.storage.log_io import WriterPool, open_syncer
from penstock.node.storage.room import Room, Unopened
from penstock.replication.assignment import PartitionRecord

if TYPE_CHECKING:
    from penstock.sinks.protocol import OpenWriter

PARTING_S: Final = 1.0  # for clients to end their connections when the node stops
READS_MAX: Final = 2  # answers with messages that are being made at once
log = get_logger(__name__)


class NodeIdentity(msgspec.Struct, frozen=True):
    """Content of `node.json`: who this data belongs to."""

    node: str
    replica_uuid: str
    cluster: str = ""  # its name; empty: the node is alone
    cluster_uuid: str = ""  # of the metadata that the topics' ids are from


class _OpenTopics(dict[str, ServedTopic]):
    """Topics by their names. Who asks for one that is not open is told why."""

    def __init__(self, unopened: Unopened) -> None:
        super().__init__()
        self._unopened = unopened

    def __missing__(self, name: str) -> ServedTopic:
        trouble = self._unopened.topic(name)
        if trouble is None:
            raise topic_not_found(name)
        error = trouble.error
        raise type(error)(f"topic {name} is not open: {error.message}", **error.details)


class NodeCluster(ClusterView, Protocol):
    """The nodes that this one is among. A node alone is the only one."""

    @property
    def alive(self) -> Mapping[str, NodeInfo]: ...

    @property
    def ages(self) -> Mapping[str, int]:
        """The lowest is of the oldest node."""

    @property
    def rolled_back(self) -> bool:
        """The folder was found to be an older copy, and some replica in it does not count yet."""

    async def open(self) -> None: ...

    def close(self) -> None: ...


class Administration(Protocol):
    @property
    def replica_sets(self) -> ClusterAdministration:
        """By which replicas are moved; raises if this node is alone."""

    async def create_topic(self, fields: dict[str, Any], *, exists_ok: bool) -> TopicConfig: ...

    async def update_topic(self, name: str, changes: dict[str, Any]) -> TopicConfig: ...

    async def delete_topic(self, name: str) -> None: ...


Standing = tuple[NodeCluster, Administration, Surroundings]  # of a node, alone or among others


class Engine:
    def __init__(
        self,
        config: Config,
        folder: DataFolder,
        store: MetadataStore,
        *,
        identity: NodeIdentity,
        audit: AuditLog,
        clock: Clock,
        tasks: asyncio.TaskGroup,
        open_writer: OpenWriter | None,
        form: Callable[[Engine], Standing],
        host_sinks: Callable[[Engine, ServedTopic], None],
        gauges: Callable[[Engine], Iterable[Metric]],
    ) -> None:
        """`form` makes what depends on whether there are other nodes. `host_sinks` has the sinks
        of the configuration follow a topic, `gauges` are what the node holds at a scrape."""
        self.config, self.folder, self.identity = config, folder, identity
        self.audit, self.clock, self.tasks = audit, clock, tasks
        self._host_sinks = host_sinks
        self.open_writer = open_writer  # reaches other nodes, for sinks that write to them
        self.catalog = Catalog(store)
        self.keys = KeyRing(store, now_ms=clock.now_ms, on_revoked=self.revoke)
        self.cursors = Cursors(store, clock)
        self.confirmations = Confirmations(clock)
        self.metrics = Metrics(node=identity.node, gauges=partial(gauges, self))
        self.writers = WriterPool(config.writer_threads)
        self.syncer = open_syncer(gather=config.cluster.enabled)
        self.cache = ReadCache(config.cache_bytes)
        # Space for snapshots on a full disk.
        self.reserve = Reserve(folder.path / "snapshot.reserve", config.log.reserve_bytes)
        self.unopened = Unopened()
        self.topics = _OpenTopics(self.unopened)
        self.hubs: dict[int, Hub] = {}  # of delta topics that are pushed, by id
        self.hosts: dict[Key, Host] = {}
        self.damages: dict[Key, str] = {}  # what was found, for status and health
        # Part of consumers' names: a lease of an earlier run is no credit of a stream of this one.
        self.run_id = secrets.token_hex(4)
        self.started_ms = clock.now_ms()
        self.stopping = False
        self.fatal = asyncio.Event()
        self.fatal_error: BaseException | None = None
        self.pops: set[asyncio.Event] = set()  # under way: each looks again when set
        self.spawned: set[asyncio.Task[None]] = set()
        self.room = Room(
            folder.path,
            reserve_bytes=config.log.reserve_bytes,
            held=lambda: len(self.hosts),
            waiting=lambda: self.unopened.partitions,
        )
        self._open_door()
        self.cluster, self.administration, self.around = form(self)
        # What every request is answered with; None: it is served.
        self.refusal: Unavailable | None = None
        if not self.cluster.alone:
            self.refusal = Unavailable("the node is starting", elsewhere=True)
        self.router = Router(
            self.cluster, spawn=self.spawn, consumers=f"{identity.node}/{self.run_id}/".encode()
        )

    def _open_door(self) -> None:
        """What bounds what callers may make the node hold, and how much of the loop they get."""

        def refused(reason: str) -> None:
            self.metrics.backpressure.add((reason,))

        def evicted(reason: str) -> None:
            self.metrics.evictions.add((reason,))

        limits = self.config.limits
        self.connections: set[Any] = set()
        self.budget = Budget(limits.held_bytes_max, on_refused=refused, on_evicted=evicted)
        self.doorway = Doorway(limits, on_refused=refused, on_evicted=evicted)
        self.reads = asyncio.Semaphore(READS_MAX)  # held while an answer with messages is made
        self.rota = Rota()  # of connections whose frames wait to be handled
        self.pace = ReadPace()  # of streams that read logs
        self.turns = ReadTurns()  # of subscribers that read on from logs

    def surroundings(self, control: Control, **of_cluster: Any) -> Surroundings:
        return Surroundings(
            node=self.identity.node, clock=self.clock, metrics=self.metrics,
            writers=self.writers, syncer=self.syncer, cache=self.cache, control=control,
            spawn=self.spawn, on_damage=self.on_damage,
            on_mended=self.on_mended, on_fatal=self.on_fatal,
            reserve_bytes=self.config.log.reserve_bytes, **of_cluster,
        )  # fmt: skip

    # --- topics ---

    def configs(self) -> list[TopicConfig]:
        """Of all topics, by name, also of those that cannot be opened for now."""
        opened = [topic.config for topic in self.topics.values()]
        unopened = [trouble.config for trouble in self.unopened if trouble.partition is None]
        return sorted((*opened, *unopened), key=lambda config: config.name)

    def config_of(self, name: str) -> TopicConfig:
        trouble = self.unopened.topic(name)
        return self.topics[name].config if trouble is None else trouble.config

    def queue(self, name: str) -> ServedTopic:
        found = self.topics[name]
        if found.config.kind is TopicKind.DELTA:
            raise reject_delta_topic(name)
        return found

    @property
    def nodes(self) -> Cluster:
        """The cluster that this node is in; raises if it is alone."""
        return self.administration.replica_sets.cluster

    def info(self, *, port: int) -> NodeInfo:
        config, host = self.config, self.config.host
        if config.cluster.advertise:
            host, port = host_port(config.cluster.advertise, field="cluster.advertise", port=port)
        return NodeInfo(
            id=self.identity.node,
            uuid=self.identity.replica_uuid,
            host=host,
            native_port=port,
            zone=config.cluster.zone,
            version=__version__,
            started_ms=self.started_ms,
            draining=self.stopping,
        )

    async def drop_topic(self, topic: ServedTopic) -> None:
        name = topic.config.name
        del self.topics[name]
        self.unopened.forget_topic(topic.config.id)
        await self.drain([topic])
        await self.stop_sinks([topic])
        for connection in list(self.connections):
            connection.streams.drop_topic(topic)
        topic.close()
        self.cursors.forget(topic.config.id)
        await self.live_quiet([topic])
        self.hubs.pop(topic.config.id, None)
        await self.close_hosts(key for key in self.hosts if key[0] == topic.config.id)
        await asyncio.to_thread(self.folder.remove, topic.config.id)
        self.metrics.forget_topic(name)

    async def admit(self, config: TopicConfig) -> None:
        """Have the data folder say that it needs a version which knows topics of this kind."""
        if config.kind is TopicKind.DELTA:
            await asyncio.to_thread(self.folder.raise_format, FORMAT_DELTAS)

    def make_topic(self, config: TopicConfig) -> ServedTopic:
        return ServedTopic(
            config, clock=self.clock, metrics=self.metrics, on_damage=self.on_damage,
            on_fatal=self.on_fatal, router=self.router, atomic=AtomicBatches,
            live=self.config.live if config.kind is TopicKind.DELTA else None,
        )  # fmt: skip

    def hub(self, topic: ServedTopic) -> Hub:
        found = self.hubs.get(topic.config.id)
        if found is None:
            if topic.config.kind is not TopicKind.DELTA:
                raise FailedPrecondition(f"{topic.config.name} is no delta topic")
            found = self.hubs[topic.config.id] = Hub(
                topic, options=self.config.live, cursors=self.cursors, clock=self.clock,
                metrics=self.metrics, turns=self.turns, spawn=self.spawn,
            )  # fmt: skip
        return found

    def add_topic(self, topic: ServedTopic) -> None:
        self.topics[topic.config.name] = topic
        self._host_sinks(self, topic)
        self.metrics.begin_topic(topic.config.name)

    async def open_host(
        self, topic: ServedTopic, index: int, record: PartitionRecord | None = None
    ) -> Host:
        """Recover a replica; it does nothing before it is told of a record. `record` is what the
        metadata say of its partition, if there is one already."""
        record = record or PartitionRecord(voters=(self.identity.node,))
        try:
            opened = await asyncio.to_thread(self._recover, topic.config, index, record)
        except Corruption as error:
            self.on_damage(error)
            raise
        host = Host(topic, index, opened, self.around)
        self.hosts[host.key] = host
        return host

    def _recover(self, config: TopicConfig, index: int, record: PartitionRecord) -> OpenedReplica:
        recorded = record.uuids.get(self.identity.node, "")
        only = record.quorums == ((self.identity.node,),)
        self._check_place(config, index, only=only, recorded=recorded)
        opened = open_replica(
            self.folder.partition(config.id, index), config, index, options=self.config.log,
            accept_rot=self.config.accept_rot, alone=self.around.alone, only=only,
            uuid="" if record.epoch else recorded,
        )  # fmt: skip
        self.folder.inventory.add(config.id, index, name=config.name, uuid=opened.file.uuid)
        return opened

    def _check_place(self, config: TopicConfig, index: int, *, only: bool, recorded: str) -> None:
        """Look at a partition's folder before it is opened, or made. Blocks."""
        folder, accepted = self.folder.partition(config.id, index), self.config.accept_missing
        owner = self.folder.inventory.name(config.id)
        if owner not in ("", config.name):
            raise foreign_log(folder, topic=config.id, partition=index, of=owner)
        if self.folder.inventory.has(config.id, index):
            if not folder.exists() and not self.around.alone:
                log.critical(
                    "the files of a replica are missing; it starts over as a copy of the others",
                    topic=config.name, partition=index, folder=str(folder),
                )  # fmt: skip
                if only and not accepted:
                    raise missing_partition(folder, topic=config.id, partition=index)
        elif folder.exists():
            self.folder.clear_place(config.id, index, recorded=recorded)

    async def close_hosts(self, keys: Iterable[Key]) -> None:
        hosts = [self.hosts.pop(key) for key in list(keys)]
        await asyncio.gather(*(host.close() for host in hosts))

    async def write_config(self, topic: ServedTopic) -> None:
        value: dict[str, Any] = {"config": [msgspec.msgpack.encode(topic.config)]}
        await self.write_records(topic, [(p, Kind.CONFIG, 1, value) for p in topic.local])

    async def write_records(
        self, topic: ServedTopic, records: Iterable[tuple[Partition, Kind, int, dict[str, Any]]]
    ) -> None:
        """Append to partitions' logs, and return when all of it is committed."""
        written = [(p, p.append_record(kind, n, of).last) for p, kind, n, of in records]
        topic.wake()
        await asyncio.gather(*(p.committed(sequence) for p, sequence in written))

    # --- running ---

    def spawn(
        self, work: Coroutine[Any, Any, None], *, name: str = "host", vital: bool = False
    ) -> asyncio.Task[None]:
        """Run `work` beside everything else; what it raises is logged, and ends only itself.

        `vital`: the node is of no use without it. If it fails, the node stops, and others take
        over: one that went on without its ticks would hold partitions and not serve them."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                if vital:
                    self.on_fatal(error)
                else:
                    log.exception("task failed", task=name)

        task = self.tasks.create_task(guarded(), name=name)
        self.spawned.add(task)
        task.add_done_callback(self.spawned.discard)
        # A task that is cancelled before its first step has not begun `work`, which nobody awaits.
        task.add_done_callback(lambda _: work.close())
        return task

    @property
    def damage(self) -> str | None:
        return next(iter(self.damages.values()), None)

    def on_damage(self, error: PenstockError) -> None:
        """Stored bytes are not what was written. The rest of the node goes on; health says so."""
        key = (error.details.get("topic", 0), error.details.get("partition", 0))
        if key in self.damages:
            return  # whoever reads there meets it again, or more of it
        self.damages[key] = error.message
        log.critical("stored data is damaged", error=error.message, **error.details)

    def on_mended(self, key: Key) -> None:
        self.damages.pop(key, None)

    def on_fatal(self, error: BaseException) -> None:
        if self.fatal_error is None:
            self.fatal_error = error
            self.refusal = self.refusal or Unavailable(f"storage failed: {error}")
            log.critical("cannot go on, stopping", error=str(error), exc_info=error)
            self.fatal.set()
            for connection in list(self.connections):
                connection.shut("the node cannot go on")

    async def stop_sinks(self, topics: Iterable[ServedTopic]) -> None:
        await asyncio.gather(*(hub.stop_sinks() for hub in self._hubs_of(topics)))

    async def live_quiet(self, topics: Iterable[ServedTopic]) -> None:
        """Wait until no thread of the live path reads the logs of topics that are closed."""
        await asyncio.gather(*(hub.quiet() for hub in self._hubs_of(topics)))

    def _hubs_of(self, topics: Iterable[ServedTopic]) -> list[Hub]:
        return [hub for topic in topics if (hub := self.hubs.get(topic.config.id)) is not None]

    def stop(self) -> None:
        """Begin nothing new. Pops that wait are answered with what they have leased, or that they
        have leased nothing and may be made elsewhere."""
        self.stopping = True
        self.refusal = Unavailable("the node is stopping", elsewhere=True)
        for pop in self.pops:
            pop.set()

    async def drain(self, topics: Iterable[ServedTopic]) -> None:
        """Let everything under way be answered, within the configured time."""
        partitions = [p for topic in topics for p in topic.local]

        def drained() -> bool:
            pending = self.stopping and any(c.pending for c in self.connections)
            return not pending and all(p.idle for p in partitions)

        await self._until(drained, self.config.drain_s)

    async def part(self, reason: str) -> None:
        """End all connections, those at once whose clients do not end them within a moment."""
        for connection in list(self.connections):
            connection.part(reason)
        await self._until(lambda: not self.connections, PARTING_S)
        for connection in list(self.connections):
            connection.shut(reason)

    async def _until(self, done: Callable[[], bool], within_s: float) -> None:
        """Wait for that long at most, and not at all once the node cannot go on."""
        deadline = time.monotonic() + within_s
        while self.fatal_error is None and time.monotonic() < deadline:
            if done():
                return
            await asyncio.sleep(0.002)

    def revoke(self, key_id: str) -> None:
        """Whoever came in with this key is out, on whichever node it was revoked."""
        for connection in list(self.connections):
            connection.revoke(key_id)

    def check_reach(self, name: str = "", index: int | None = None) -> None:
        """Raise if this node is cut off and cannot serve that; no name: it is about the cluster."""
        if not self.cluster.cut_off:
            return
        topic = self.topics.get(name)
        if topic is None or not topic.reached(index):
            raise _cut_off()

    def end_unreached(self) -> None:
        """This node is cut off: consumers and readers that would wait in vain go elsewhere."""
        for connection in list(self.connections):
            connection.streams.end_unreached(_cut_off())
        for topic in self.topics.values():
            if not topic.reached():
                topic.end_pops(_cut_off())


def _cut_off() -> Unavailable:
    return Unavailable("the node is cut off from the rest of its cluster", elsewhere=True)
