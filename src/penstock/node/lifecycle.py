"""From an empty process to a serving engine, and back to a clean stop."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from penstock.cluster.catalog import Catalog
from penstock.cluster.embedded import EmbeddedStore
from penstock.cluster.etcd import EtcdStore, cluster_prefix
from penstock.cluster.etcd_peers import EtcdOptions
from penstock.cluster.keys import KeyRing
from penstock.cluster.records import Records
from penstock.cluster.reserve import Reserve
from penstock.config import Config
from penstock.errors import FailedPrecondition, PenstockError, Unavailable
from penstock.log.files import write_whole
from penstock.log.folder import FORMAT_CLUSTER, DataFolder
from penstock.model.version import __version__
from penstock.node.audit import AuditLog
from penstock.node.caretaking import run_scrub, run_upkeep
from penstock.node.clock import Clock, SystemClock
from penstock.node.confirmations import Confirmations
from penstock.node.engine import Engine, NodeIdentity
from penstock.node.live.cursors import Cursors
from penstock.node.logs import get_logger
from penstock.node.metrics import Metrics
from penstock.node.reading import ReadCache
from penstock.node.readings import node_reading
from penstock.node.replicas.joining import prepare_cluster
from penstock.node.replicas.peers import Connect
from penstock.node.routing.ports import AlwaysHere
from penstock.node.syncer import open_syncer
from penstock.node.writer import WriterPool

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
    folder = await asyncio.to_thread(DataFolder.open, config.data)
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
    options = config.cluster
    if not options.enabled:
        return await asyncio.to_thread(EmbeddedStore, folder.meta)
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
    await asyncio.to_thread(engine.folder.raise_format, FORMAT_CLUSTER)
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
        from penstock.node.live.hosting import check_sinks  # and Arrow with it

        check_sinks(engine)
    await asyncio.to_thread(engine.reserve.hold)
    engine.metrics.read_with(partial(node_reading, engine))
    engine.keys.on_revoked(engine.revoke)
    try:
        if not config.cluster.enabled:
            await engine.keys.load()
            for topic in await engine.catalog.list():
                await engine.open_topic(topic)
    except BaseException:
        await engine.writers.close()
        raise
    engine.background = [
        tasks.create_task(run_upkeep(engine), name="upkeep"),
        tasks.create_task(run_scrub(engine), name="scrub"),
        tasks.create_task(engine.keys.run(), name="keys"),
    ]
    log.info("engine started", version=__version__, node=identity.node, data=str(config.data))
    return engine


async def _stop(engine: Engine) -> None:
    engine.stop()
    await engine.drain(engine.topics.values())
    await engine.stop_sinks(engine.topics.values())
    for connection in list(engine.connections):
        connection.shut("the node is stopping")
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
        identity = msgspec.json.decode(path.read_bytes(), type=NodeIdentity)
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
    write_whole(path, [msgspec.json.encode(identity)])
    return identity
