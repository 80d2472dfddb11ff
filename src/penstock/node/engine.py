"""The engine: topics of one node over one data folder, from recovery to a clean stop."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.cluster.catalog import Catalog
from penstock.cluster.keys import KeyRing
from penstock.cluster.records import Records
from penstock.cluster.reserve import Reserve
from penstock.config import Config
from penstock.errors import Corruption, InvalidArgument, PenstockError, Unavailable
from penstock.log.folder import FORMAT_DELTAS, DataFolder
from penstock.model.batch import Kind
from penstock.model.topic import TopicConfig, TopicKind, topic_config
from penstock.node.atomic import committed, resolve_in_doubt
from penstock.node.audit import AuditLog
from penstock.node.clock import Clock
from penstock.node.confirmations import Confirmations
from penstock.node.ingesting import Ingesting
from penstock.node.live.cursors import Cursors
from penstock.node.live.hub import Hub
from penstock.node.live.turns import Turns
from penstock.node.logs import get_logger
from penstock.node.metrics import Metrics
from penstock.node.reading import ReadCache
from penstock.node.replicas.host import Host
from penstock.node.replicas.local import LocalControl
from penstock.node.replicas.opening import Opened, open_replica
from penstock.node.replicas.ports import Key
from penstock.node.replicas.surroundings import Surroundings
from penstock.node.routing.ports import AlwaysHere, ClusterView
from penstock.node.routing.router import Router
from penstock.node.syncer import Syncer
from penstock.node.topic import Topic, reject_delta_topic, topic_not_found
from penstock.node.writer import WriterPool

if TYPE_CHECKING:
    from penstock.node.replicas.cluster import Cluster
    from penstock.sinks.registry import OpenWriter

log = get_logger(__name__)


class NodeIdentity(msgspec.Struct, frozen=True):
    """Content of `node.json`: who this data belongs to."""

    node: str
    replica_uuid: str
    cluster: str = ""  # its name; empty: the node is alone
    cluster_uuid: str = ""  # of the metadata that the topics' ids are from


@dataclass
class Engine:
    config: Config
    folder: DataFolder
    identity: NodeIdentity
    catalog: Catalog
    records: Records
    keys: KeyRing
    cursors: Cursors
    audit: AuditLog
    confirmations: Confirmations
    clock: Clock
    metrics: Metrics
    writers: WriterPool
    syncer: Syncer | None
    cache: ReadCache
    reserve: Reserve  # space for snapshots on a full disk
    tasks: asyncio.TaskGroup
    cluster: ClusterView = field(default_factory=AlwaysHere)
    router: Router = field(init=False)
    around: Surroundings = field(init=False)  # of hosts; a cluster puts in its own
    local: LocalControl = field(init=False)
    topics: dict[str, Topic] = field(default_factory=dict)
    turns: Turns = field(default_factory=Turns)  # of subscribers that read on from logs
    hosts: dict[Key, Host] = field(default_factory=dict)
    connections: set[Any] = field(default_factory=set)
    fatal: asyncio.Event = field(default_factory=asyncio.Event)
    fatal_error: BaseException | None = None
    damages: dict[Key, str] = field(default_factory=dict)  # what was found, for status and health
    started_ms: int = 0
    # Part of consumers' names: a lease of an earlier run is no credit of a stream of this one.
    run_id: str = field(default_factory=lambda: secrets.token_hex(4))
    stopping: bool = False
    pops: set[asyncio.Event] = field(default_factory=set)  # under way: each looks again when set
    spawned: set[asyncio.Task[None]] = field(default_factory=set)  # each ends by itself
    background: list[asyncio.Task[None]] = field(default_factory=list)  # none does
    nodes: Cluster | None = None  # the other ones; None: this one is alone
    open_writer: OpenWriter | None = None  # reaches other nodes, for sinks that write to them
    inflight_bytes: int = 0  # of requests without an answer, and of large frames not yet whole
    _administering: asyncio.Lock = field(default_factory=asyncio.Lock)  # one topic change at a time

    def __post_init__(self) -> None:
        self.router = Router(
            lambda: self.cluster,
            spawn=self.spawn,
            consumers=f"{self.identity.node}/{self.run_id}/".encode(),
        )
        self.local = LocalControl(
            self.identity.node, self.records, self.hosts, spawn=self.spawn_for_host
        )
        self.around = Surroundings(
            node=self.identity.node, clock=self.clock, metrics=self.metrics,
            writers=self.writers, syncer=self.syncer, cache=self.cache, control=self.local,
            transport=None, spawn=self.spawn_for_host, on_damage=self.on_damage,
            on_mended=self.on_mended, on_fatal=self.on_fatal,
            reserve_bytes=self.config.log.reserve_bytes,
        )  # fmt: skip

    # --- topics ---

    def topic(self, name: str) -> Topic:
        found = self.topics.get(name)
        if found is None:
            raise topic_not_found(name)
        return found

    def queue(self, name: str) -> Topic:
        """A topic whose messages are leased and settled."""
        found = self.topic(name)
        if found.config.kind is TopicKind.DELTA:
            raise reject_delta_topic(name)
        return found

    async def create_topic(self, fields: dict[str, Any], *, exists_ok: bool) -> TopicConfig:
        if self.nodes is not None:
            return await self.nodes.administration.create_topic(fields, exists_ok=exists_ok)
        if fields.get("replication_factor", 1) != 1:
            raise InvalidArgument(
                "this node is a cluster of one: replication_factor must be 1",
                field="replication_factor",
                limit=1,
            )
        async with self._administering:
            if topic_config({**fields, "id": 0}).kind is TopicKind.DELTA:
                await asyncio.to_thread(self.folder.raise_format, FORMAT_DELTAS)
            config = await self.catalog.create(fields, exists_ok=exists_ok)
            if config.name not in self.topics:
                await self.open_topic(config)
            return self.topics[config.name].config

    async def update_topic(self, name: str, changes: dict[str, Any]) -> TopicConfig:
        """Change the catalogue first, then tell each partition's log."""
        if self.nodes is not None:
            return await self.nodes.administration.update_topic(name, changes)
        async with self._administering:
            topic = self.topic(name)
            topic.reconfigure(await self.catalog.update(name, changes))
            await self._write_config(topic)
            return topic.config

    async def delete_topic(self, name: str) -> None:
        if self.nodes is not None:
            await self.nodes.administration.delete_topic(name)
            return
        async with self._administering:
            topic = self.topic(name)
            await self.catalog.delete(name)
            await self.drop_topic(topic)

    def reconfigure_topic(self, config: TopicConfig) -> None:
        """The topic was changed, here or elsewhere; who serves it writes that into its log."""
        topic = self.topic(config.name)
        topic.reconfigure(config)
        if any(partition.heap.config != config for partition in topic.local):
            self.spawn(self._write_config(topic), name=f"config-{config.name}")

    async def drop_topic(self, topic: Topic) -> None:
        """Forget a topic that was deleted, and remove its files."""
        name = topic.config.name
        del self.topics[name]
        await self.drain([topic])
        await self.stop_sinks([topic])
        for connection in list(self.connections):
            connection.drop_topic(topic)
        topic.close()
        self.cursors.forget(topic.config.id)
        await self.live_quiet([topic])
        await self.close_hosts(key for key in self.hosts if key[0] == topic.config.id)
        await asyncio.to_thread(self.folder.remove_topic, topic.config.id)
        self.metrics.forget_topic(name)

    async def open_topic(self, config: TopicConfig) -> None:
        """Recover a topic's partitions, enter a new epoch in each, and serve."""
        topic = self.make_topic(config)
        started = time.perf_counter()
        opened = await asyncio.gather(
            *(self.open_host(topic, index) for index in range(config.partitions))
        )
        await self.local.enter(opened)
        resolved = await resolve_in_doubt(topic)
        if resolved:
            log.info("atomic batches resolved", topic=topic.config.name, count=resolved)
        self.add_topic(topic)
        log.info(
            "topic open",
            topic=config.name,
            partitions=config.partitions,
            batches_replayed=sum(host.replayed for host in opened),
            seconds=round(time.perf_counter() - started, 3),
        )

    def make_topic(self, config: TopicConfig) -> Topic:
        topic = Topic(
            config, clock=self.clock, metrics=self.metrics, on_damage=self.on_damage,
            on_fatal=self.on_fatal, router=self.router,
        )  # fmt: skip
        topic.open_hub = self._open_hub
        if config.kind is TopicKind.DELTA:
            topic.ingesting = Ingesting(
                topic, options=self.config.live, clock=self.clock, metrics=self.metrics
            )
        return topic

    def _open_hub(self, topic: Topic) -> Hub:
        return Hub(
            topic, options=self.config.live, cursors=self.cursors, clock=self.clock,
            metrics=self.metrics, turns=self.turns, spawn=self.spawn,
        )  # fmt: skip

    def add_topic(self, topic: Topic) -> None:
        """Requests find the topic from now on."""
        self.topics[topic.config.name] = topic
        if self.config.live.sink:
            from penstock.node.live.hosting import host_sinks  # and Arrow with it

            host_sinks(self, topic)
        self.metrics.begin_topic(topic.config.name)

    async def open_host(
        self, topic: Topic, index: int, *, uuid: str = "", only: bool = False
    ) -> Host:
        """Recover a replica; it does nothing before it is told of a record."""
        alone = self.around.transport is None

        def recover() -> Opened:
            return open_replica(
                self.folder.partition(topic.config.id, index), topic.config, index,
                options=self.config.log, accept_rot=self.config.accept_rot, alone=alone, only=only,
                uuid=uuid,
            )  # fmt: skip

        try:
            opened = await asyncio.to_thread(recover)
        except Corruption as error:
            self.on_damage(error)
            raise
        host = Host(topic, index, opened, self.around)
        self.hosts[host.key] = host
        return host

    async def close_hosts(self, keys: Iterable[Key]) -> None:
        """End what they do and let go of their files."""
        hosts = [self.hosts.pop(key) for key in list(keys)]
        await asyncio.gather(*(host.close() for host in hosts))

    async def _write_config(self, topic: Topic) -> None:
        value: dict[str, Any] = {"config": [msgspec.msgpack.encode(topic.config)]}
        written = [(p, p.journal.append_record(Kind.CONFIG, 1, value).last) for p in topic.local]
        topic.wake()
        await asyncio.gather(*(committed(p, sequence) for p, sequence in written))

    # --- running ---

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        """Run `work` beside everything else; what it raises is logged, and ends only itself."""
        self._start(work, name)

    def spawn_vital(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        """Run `work` that the node is of no use without: if it fails, the node stops, and others
        take over. One that went on without its ticks would hold partitions and not serve them."""

        async def vital() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - it is logged there
                self.on_fatal(error)

        self._start(vital(), name)

    def spawn_for_host(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._start(work, "host")

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await work
            except Exception:
                log.exception("task failed", task=name)

        task = self.tasks.create_task(guarded(), name=name)
        self.spawned.add(task)
        task.add_done_callback(self.spawned.discard)
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
        """A partition's log was replaced."""
        self.damages.pop(key, None)

    def on_fatal(self, error: BaseException) -> None:
        if self.fatal_error is None:
            self.fatal_error = error
            log.critical("cannot go on, stopping", error=str(error), exc_info=error)
            self.fatal.set()
            for connection in list(self.connections):
                connection.shut("the node cannot go on")

    async def stop_sinks(self, topics: Iterable[Topic]) -> None:
        await asyncio.gather(*(t.live.stop_sinks() for t in topics if t.live is not None))

    async def live_quiet(self, topics: Iterable[Topic]) -> None:
        """Wait until no thread of the live path reads the logs of topics that are closed."""
        await asyncio.gather(*(t.live.quiet() for t in topics if t.live is not None))

    def stop(self) -> None:
        """Begin nothing new. Pops that wait are answered with what they have leased, or that they
        have leased nothing and may be made elsewhere."""
        self.stopping = True
        for pop in self.pops:
            pop.set()

    async def drain(self, topics: Iterable[Topic]) -> None:
        """Let everything under way be answered, within the configured time."""
        deadline = time.monotonic() + self.config.drain_s
        partitions = [p for topic in topics for p in topic.local]
        while self.fatal_error is None and time.monotonic() < deadline:
            pending = self.stopping and any(c.pending for c in self.connections)
            if not pending and all(p.idle for p in partitions):
                return
            await asyncio.sleep(0.002)

    def revoke(self, key_id: str) -> None:
        """Whoever came in with this key is out, on whichever node it was revoked."""
        for connection in list(self.connections):
            connection.revoke(key_id)

    def check_reach(self, name: str = "", index: int | None = None) -> None:
        """Raise if this node is cut off and cannot serve the topic, or that partition of it,
        either. No name: what is asked for is how the cluster is."""
        if not self.cluster.cut_off:
            return
        topic = self.topics.get(name)
        if topic is None or not topic.reached(index):
            raise _cut_off()

    def end_unreached(self) -> None:
        """This node is cut off: consumers and readers that would wait in vain go elsewhere."""
        for connection in list(self.connections):
            connection.end_unreached(_cut_off())
        for topic in self.topics.values():
            if not topic.reached():
                topic.end_pops(_cut_off())

    def check_serving(self) -> None:
        if self.stopping:
            raise Unavailable("the node is stopping", elsewhere=True)
        if self.nodes is not None and not self.nodes.ready:
            raise Unavailable("the node is starting", elsewhere=True)
        if self.fatal_error is not None:
            raise Unavailable(f"storage failed: {self.fatal_error}")


def _cut_off() -> Unavailable:
    return Unavailable("the node is cut off from the rest of its cluster", elsewhere=True)
