"""From an empty process to a serving engine, into a cluster, and back to a clean stop."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.cluster.embedded import FILE, EmbeddedStore, write_image
from penstock.cluster.etcd import EtcdOptions, EtcdStore, cluster_prefix
from penstock.cluster.placement import HeldRecord
from penstock.cluster.store import LeasingStore, MetadataStore, repeat
from penstock.config import ClusterOptions, Config
from penstock.errors import (
    Backpressure,
    Corruption,
    DiskFull,
    FailedPrecondition,
    PenstockError,
    RevisionConflict,
    Unavailable,
)
from penstock.log.files import storage_errors, write_whole
from penstock.log.folder import FORMAT_PRODUCERS, DataFolder, decode_file
from penstock.log.identity import set_aside
from penstock.model.topic import TopicConfig
from penstock.model.version import __version__
from penstock.node.calls.table import Caller, dispatch_call
from penstock.node.clock import Clock, SystemClock
from penstock.node.cluster.administration import ClusterAdministration, Mover, Returner
from penstock.node.cluster.cluster import CLUSTER_UUID, Cluster, DataDisk, until_available
from penstock.node.cluster.transport import Connect
from penstock.node.cluster_of_one import ClusterOfOne
from penstock.node.engine import Engine, NodeIdentity, Standing
from penstock.node.observe.audit import AuditLog
from penstock.node.observe.logs import get_logger
from penstock.node.replica.host import Host
from penstock.node.replica.ports import CopyPace, Key
from penstock.node.serve.topic import ServedTopic
from penstock.node.upkeep import gauges, run_scrub, run_upkeep
from penstock.replication.follower import FollowerState
from penstock.replication.replica import Role
from penstock.replication.takeover import Policy

if TYPE_CHECKING:
    from penstock.sinks.protocol import OpenWriter

SETTLE_S_MAX: Final = 10.0
RETRY_S: Final = 1.0
log = get_logger(__name__)


@asynccontextmanager
async def running_engine(
    config: Config,
    *,
    clock: Clock | None = None,
    connect: Connect | None = None,
    open_writer: OpenWriter | None = None,
) -> AsyncIterator[Engine]:
    """Open the data folder, recover, serve inside the block, and stop cleanly after it.

    A node of a cluster needs `connect`, its way to the others. It holds nothing before it has
    joined (`join_cluster`), which it does once others can connect to it. `open_writer` is
    the way of its sinks to nodes outside.
    """
    opening = partial(DataFolder.open, config.data, accept_missing=config.accept_missing)
    async with AsyncExitStack() as stack:
        folder = await asyncio.to_thread(opening)
        stack.callback(folder.close)
        store, form = await _founded(config, folder, connect)
        stack.push_async_callback(store.close)
        try:
            async with asyncio.TaskGroup() as tasks:
                engine = await _start(
                    config, folder, store, tasks,
                    clock=clock or SystemClock(), open_writer=open_writer, form=form,
                )  # fmt: skip
                try:
                    yield engine
                finally:
                    await _stop(engine)
        except BaseExceptionGroup as group:
            if len(group.exceptions) > 1:
                raise
            raise group.exceptions[0] from None  # what went wrong, not that it was in a group


async def _founded(
    config: Config, folder: DataFolder, connect: Connect | None
) -> tuple[MetadataStore, Callable[[Engine], Standing]]:
    if not config.cluster.enabled:
        embedded = await asyncio.to_thread(_open_embedded, folder)
        return embedded, partial(_alone, store=embedded)
    if connect is None:
        raise FailedPrecondition("a node of a cluster is run by `penstock serve`")
    store = cluster_store(config.cluster)
    return store, partial(_among_others, store=store, connect=connect)


def _alone(engine: Engine, *, store: MetadataStore) -> Standing:
    one = ClusterOfOne(engine, store)
    return one, one, engine.surroundings(one)


def _open_embedded(folder: DataFolder) -> EmbeddedStore:
    if not (folder.meta / FILE).exists():
        write_image(folder.meta, 0, [])  # from now on a missing file was lost
    store = EmbeddedStore(folder.meta)
    try:
        folder.inventory.add_meta()
    except DiskFull as error:
        log.warning("the inventory does not name the metadata yet", error=error.message)
    return store


def cluster_store(options: ClusterOptions) -> EtcdStore:
    return EtcdStore(
        options.etcd,
        prefix=cluster_prefix(options.name),
        options=EtcdOptions(
            lease_ttl_s=options.lease_s,
            ca=options.etcd_ca,
            certificate=options.etcd_cert,
            key=options.etcd_key,
        ),
    )


def _sink_hosting(
    config: Config,
) -> tuple[Callable[[Engine], None], Callable[[Engine, ServedTopic], None]]:
    if not config.live.sink:
        return lambda _: None, lambda *_: None
    from penstock.node.hosted.configuration import check_sinks, host_sinks  # and Arrow with it

    return check_sinks, host_sinks


async def _start(
    config: Config,
    folder: DataFolder,
    store: MetadataStore,
    tasks: asyncio.TaskGroup,
    *,
    clock: Clock,
    open_writer: OpenWriter | None,
    form: Callable[[Engine], Standing],
) -> Engine:
    identity = await asyncio.to_thread(_identify, config, folder)
    if config.cluster.enabled:
        # Replicas get whatever records the nodes that coordinate them write.
        await asyncio.to_thread(folder.raise_format, FORMAT_PRODUCERS)
    check_sinks, host_sinks = _sink_hosting(config)
    engine = Engine(
        config,
        folder,
        store,
        identity=identity,
        audit=await asyncio.to_thread(AuditLog, folder.audit_file, config.audit),
        clock=clock,
        tasks=tasks,
        open_writer=open_writer,
        form=form,
        host_sinks=host_sinks,
        gauges=gauges,
    )
    check_sinks(engine)
    await asyncio.to_thread(engine.reserve.hold)
    try:
        await engine.cluster.open()
    except BaseException:
        await engine.writers.close()
        raise
    engine.spawn(run_upkeep(engine), name="upkeep", vital=True)
    engine.spawn(run_scrub(engine), name="scrub", vital=True)
    engine.spawn(engine.keys.run(), name="keys", vital=True)
    log.info("engine started", version=__version__, node=identity.node, data=str(config.data))
    return engine


async def _stop(engine: Engine) -> None:
    engine.stop()
    await engine.drain(engine.topics.values())
    await engine.stop_sinks(engine.topics.values())
    await engine.part("the node is stopping")
    engine.cluster.close()
    for task in list(engine.spawned):
        task.cancel()
    for topic in engine.topics.values():
        topic.close()
    await engine.live_quiet(engine.topics.values())
    if engine.fatal_error is None:
        await engine.close_hosts(engine.hosts)
    await engine.writers.close()
    if engine.syncer is not None:
        engine.syncer.close()
    await engine.cursors.flush()
    try:
        await engine.keys.flush()
    except PenstockError:
        log.exception("times of last use of API keys were not saved")
    await engine.audit.close()
    log.info("engine stopped", node=engine.identity.node)


def _identify(config: Config, folder: DataFolder) -> NodeIdentity:
    """Who we are: kept with the data, so that a foreign disk is noticed."""
    path = folder.node_file
    cluster = config.cluster.name if config.cluster.enabled else ""
    if path.exists():
        identity = _read_identity(path)
        if identity.cluster != cluster:
            owner = f"of cluster {identity.cluster}" if identity.cluster else "that is alone"
            raise FailedPrecondition(f"data folder {folder.path} belongs to a node {owner}")
        if config.node and config.node != identity.node:
            raise Unavailable(
                f"data folder {folder.path} belongs to node {identity.node}, not {config.node}"
            )
        return identity
    identity = NodeIdentity(
        config.node or f"node-{secrets.token_hex(4)}", secrets.token_hex(16), cluster
    )
    _write_identity(path, identity)
    return identity


def _read_identity(path: Path) -> NodeIdentity:
    identity = decode_file(path, NodeIdentity)
    if not (identity.node and identity.replica_uuid):
        raise Corruption(f"{path} does not say which node this is", file=str(path))
    return identity


# --- in a cluster ---


class EngineLocal:
    def __init__(self, engine: Engine) -> None:
        self._engine, self.hosts = engine, engine.hosts
        self.topic_id_highest = engine.folder.topic_id_highest
        self.on_cut_off = engine.end_unreached

    async def call(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        this = Caller(None, 0, peer=True)
        return await dispatch_call(self._engine, this, method, dict(arguments))

    async def add_topic(self, config: TopicConfig) -> None:
        await self._engine.admit(config)
        self._engine.add_topic(self._engine.make_topic(config))

    async def change_topic(self, config: TopicConfig) -> None:
        """Who serves the topic writes the change into its log."""
        engine = self._engine
        topic = engine.topics[config.name]
        topic.reconfigure(config)
        if any(partition.heap.config != config for partition in topic.local):
            engine.spawn(engine.write_config(topic), name=f"config-{config.name}")

    async def drop_topic(self, config: TopicConfig) -> None:
        topic = self._engine.topics.get(config.name)
        if topic is not None and topic.config.id == config.id:
            await self._engine.drop_topic(topic)

    async def open_replica(self, config: TopicConfig, index: int, held: HeldRecord) -> Host:
        engine = self._engine
        try:
            engine.room.check_files(1)
            host = await engine.open_host(engine.topics[config.name], index, held.record)
        except Backpressure as error:
            engine.unopened.note(config, error, partition=index)
            raise
        engine.unopened.forget(config.id, index)
        return host

    async def renew_replica(self, key: Key) -> None:
        engine = self._engine
        host = engine.hosts.get(key)
        if host is None:
            return  # its topic was deleted meanwhile
        await engine.close_hosts([key])
        kept = await asyncio.to_thread(set_aside, host.log.folder)
        engine.on_mended(key)
        name = host.topic.config.name
        engine.metrics.replicas_renewed.add((name,))
        log.warning("a damaged replica starts over", topic=name, partition=key[1], kept=str(kept))

    async def drop_replica(self, key: Key) -> None:
        engine = self._engine
        engine.unopened.forget(*key)
        if key in engine.hosts:
            await engine.close_hosts([key])
        await asyncio.to_thread(engine.folder.remove, *key)


def _among_others(engine: Engine, *, store: LeasingStore, connect: Connect) -> Standing:
    config = engine.config
    cluster = Cluster(
        engine.identity.node,
        store=store,
        catalog=engine.catalog,
        options=config.cluster,
        replication=config.replication,
        connect=connect,
        disk=DataDisk(
            engine.folder, uuid=engine.identity.replica_uuid, node=engine.identity.node, store=store
        ),
        clock=engine.clock,
        local=EngineLocal(engine),
        spawn=engine.spawn,
        on_fatal=engine.on_fatal,
    )
    around = engine.surroundings(
        cluster.control,
        transport=cluster.transport,
        alone=False,
        options=config.replication,
        pace=CopyPace(config.replication.seed_bytes_per_s),
        policy=Policy(config.cluster.policy),
        clocks=cluster.clocks,
        barred=lambda: cluster.clocks.barred or cluster.leaving,
        cut_off=lambda: cluster.cut_off,
    )
    return cluster, ClusterAdministration(cluster), around


async def join_cluster(engine: Engine, *, port: int) -> None:
    """Take part, now that others can connect to `port`."""
    cluster = engine.nodes
    await until_available(engine.keys.load)
    await until_available(lambda: _check_identity(engine, cluster.store))
    await until_available(cluster.protect_ids)
    accepted = engine.config.cluster.accept_rollback
    await until_available(lambda: cluster.disk.claim(accept_rollback=accepted))
    await cluster.start(engine.info(port=port), uuid=engine.identity.cluster_uuid)
    if not engine.stopping and engine.fatal_error is None:
        engine.refusal = None
    for name, work in (
        ("administration", engine.administration.replica_sets.run),
        ("moves", Mover(cluster).run),
        ("returning", Returner(cluster, engine.hosts).run),
    ):
        trouble = f"{name} failed and begins anew"
        engine.spawn(repeat(work, trouble=trouble, pause_s=RETRY_S), name=name)
    await until_available(lambda: _remove_deleted(engine, cluster))
    await _settled(engine, cluster)


async def _check_identity(engine: Engine, store: LeasingStore) -> None:
    """Raise unless the metadata are those that the folder's topics are from. Other metadata may
    have given the same ids to other topics, whose logs must not be mixed."""
    try:
        await store.put(CLUSTER_UUID, secrets.token_hex(16).encode(), expected_revision=0)
    except RevisionConflict:
        log.debug("the cluster has an id")
    entry = await store.get(CLUSTER_UUID)
    assert entry is not None
    found, identity = entry.value.decode(), engine.identity
    if not identity.cluster_uuid:
        engine.identity = msgspec.structs.replace(identity, cluster_uuid=found)
        await asyncio.to_thread(_write_identity, engine.folder.node_file, engine.identity)
    elif identity.cluster_uuid != found:
        raise FailedPrecondition(
            f"data folder {engine.folder.path} is of another cluster named {identity.cluster}: "
            "were the contents of etcd lost?"
        )


def _write_identity(path: Path, identity: NodeIdentity) -> None:
    with storage_errors(path.parent):
        write_whole(path, [msgspec.json.encode(identity)])


async def _remove_deleted(engine: Engine, cluster: Cluster) -> None:
    held = {topic for topic, _, _ in engine.folder.partitions()}
    # Some of those that exist may not be followed yet, for trouble on this node.
    existing = {config.id for config in await cluster.catalog.list()}
    for topic in held - existing - cluster.control.topics.keys():
        if await cluster.deleted(topic):
            log.info("removing a deleted topic's files", topic=topic)
            await asyncio.to_thread(engine.folder.remove, topic)


async def _settled(engine: Engine, cluster: Cluster) -> None:
    """Until the replicas here follow or serve, bounded in time: a node that says that it is ready
    is known to the others. What it missed may take longer; who restarts one node after the other
    waits for that, too (`penstock cluster wait`)."""
    deadline = time.monotonic() + SETTLE_S_MAX
    while time.monotonic() < deadline:
        ours = [k for k, h in cluster.control.records.items() if cluster.node in h.record.members]
        if all(key in engine.hosts and _in_place(engine.hosts[key]) for key in ours):
            return
        await asyncio.sleep(0.05)
    log.warning("not all replicas have found their place yet")


def _in_place(host: Host) -> bool:
    follower = host.replica.follower
    streaming = follower is not None and follower.state is FollowerState.STREAMING
    return host.partition is not None or streaming or host.role is Role.HALTED
