"""From an empty process to a serving engine, and back to a clean stop."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.cluster.catalog import Catalog
from penstock.cluster.embedded import FILE, EmbeddedStore, write_image
from penstock.cluster.etcd import EtcdStore, cluster_prefix
from penstock.cluster.etcd_peers import EtcdOptions
from penstock.cluster.keys import KeyRing
from penstock.cluster.records import Records
from penstock.cluster.reserve import Reserve
from penstock.config import ClusterOptions, Config
from penstock.errors import Corruption, DiskFull, FailedPrecondition, PenstockError, Unavailable
from penstock.log.files import storage_errors, write_whole
from penstock.log.folder import FORMAT_PRODUCERS, DataFolder, decode_file
from penstock.model.version import __version__
from penstock.node.clock import Clock, SystemClock
from penstock.node.cluster.peers import Connect
from penstock.node.door.confirmations import Confirmations
from penstock.node.engine import Engine, NodeIdentity
from penstock.node.join import prepare_cluster
from penstock.node.live.cursors import Cursors
from penstock.node.observe.audit import AuditLog
from penstock.node.observe.logs import get_logger
from penstock.node.observe.metrics import Metrics
from penstock.node.route.ports import AlwaysHere
from penstock.node.serve.message_reader import ReadCache
from penstock.node.storage.syncer import WriterPool, open_syncer
from penstock.node.upkeep.gauges import node_reading
from penstock.node.upkeep.loops import open_again, run_scrub, run_upkeep

if TYPE_CHECKING:
    from penstock.sinks.registry import OpenWriter

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
    joined (`joining.join_cluster`), which it does once others can connect to it. `open_writer` is
    the way of its sinks to nodes outside.
    """
    folder = await asyncio.to_thread(
        partial(DataFolder.open, config.data, accept_missing=config.accept_missing)
    )
    try:
        store = await _open_store(config, folder)
        try:
            async with asyncio.TaskGroup() as tasks:
                engine = await _start(
                    config, folder, store, tasks,
                    clock=clock or SystemClock(), open_writer=open_writer,
                )  # fmt: skip
                if isinstance(store, EtcdStore):
                    await _prepare(engine, store, connect)
                try:
                    yield engine
                finally:
                    await _stop(engine)
        except BaseExceptionGroup as group:
            if len(group.exceptions) > 1:
                raise
            raise group.exceptions[0] from None  # what went wrong, not that it was in a group
        finally:
            await store.close()
    finally:
        folder.close()


async def _open_store(config: Config, folder: DataFolder) -> EmbeddedStore | EtcdStore:
    if not config.cluster.enabled:
        return await asyncio.to_thread(_open_embedded, folder)
    return cluster_store(config.cluster)


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
    """The metadata of a cluster, where its nodes have it."""
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


async def _prepare(engine: Engine, store: EtcdStore, connect: Connect | None) -> None:
    if connect is None:
        raise FailedPrecondition("a node of a cluster is run by `penstock serve`")
    # Replicas get whatever records the nodes that coordinate them write.
    await asyncio.to_thread(engine.folder.raise_format, FORMAT_PRODUCERS)
    prepare_cluster(engine, store, connect)


async def _start(
    config: Config,
    folder: DataFolder,
    store: EmbeddedStore | EtcdStore,
    tasks: asyncio.TaskGroup,
    *,
    clock: Clock,
    open_writer: OpenWriter | None,
) -> Engine:
    identity = await asyncio.to_thread(_identify, config, folder)
    engine = Engine(
        config=config,
        folder=folder,
        identity=identity,
        catalog=Catalog(store),
        records=Records(store),
        keys=KeyRing(store, now_ms=clock.now_ms),
        cursors=Cursors(store, clock),
        audit=await asyncio.to_thread(AuditLog, folder.audit_file, config.audit),
        confirmations=Confirmations(clock),
        clock=clock,
        metrics=Metrics(node=identity.node),
        writers=WriterPool(config.writer_threads),
        syncer=open_syncer(gather=config.cluster.enabled),
        cache=ReadCache(config.cache_bytes),
        reserve=Reserve(folder.path / "snapshot.reserve", config.log.reserve_bytes),
        tasks=tasks,
        cluster=AlwaysHere(identity.node),
        started_ms=clock.now_ms(),
        open_writer=open_writer,
    )
    if config.live.sink:
        from penstock.node.hosted.configuration import check_sinks  # and Arrow with it

        check_sinks(engine)
    await asyncio.to_thread(engine.reserve.hold)
    engine.metrics.read_with(partial(node_reading, engine))
    engine.keys.on_revoked(engine.revoke)
    try:
        if not config.cluster.enabled:
            await engine.keys.load()
            await engine.alone.open_all()
    except BaseException:
        await engine.writers.close()
        raise
    engine.background = [
        tasks.create_task(run_upkeep(engine), name="upkeep"),
        tasks.create_task(run_scrub(engine), name="scrub"),
        tasks.create_task(open_again(engine), name="openings"),
        tasks.create_task(engine.keys.run(), name="keys"),
    ]
    log.info("engine started", version=__version__, node=identity.node, data=str(config.data))
    return engine


async def _stop(engine: Engine) -> None:
    engine.stop()
    await engine.drain(engine.topics.values())
    await engine.stop_sinks(engine.topics.values())
    await engine.part("the node is stopping")
    if engine.config.cluster.enabled:
        engine.nodes.peers.close()
    for task in (*engine.background, *engine.spawned):
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
    with storage_errors(folder.path):
        write_whole(path, [msgspec.json.encode(identity)])
    return identity


def _read_identity(path: Path) -> NodeIdentity:
    identity = decode_file(path, NodeIdentity)
    if not (identity.node and identity.replica_uuid):
        raise Corruption(f"{path} does not say which node this is", file=str(path))
    return identity
