"""A node becomes part of a cluster: its engine does what the metadata store says."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

from penstock.cluster.membership import NodeInfo
from penstock.cluster.store import LeasingStore
from penstock.config import Config, host_port
from penstock.log.folder import FORMAT_DELTAS
from penstock.model.topic import TopicConfig, TopicKind
from penstock.model.version import __version__
from penstock.node.calls import Caller, dispatch_call
from penstock.node.engine import Engine
from penstock.node.replicas.administration import Administration
from penstock.node.replicas.cluster import Cluster, until_available
from penstock.node.replicas.control import Held
from penstock.node.replicas.host import Host
from penstock.node.replicas.peers import Connect
from penstock.node.replicas.ports import Key
from penstock.node.replicas.returning import Returning
from penstock.replication.nomination import Policy


class EngineLocal:
    """`control.Local` over an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def hosts(self) -> Mapping[Key, Host]:
        return self._engine.hosts

    async def add_topic(self, config: TopicConfig) -> None:
        engine = self._engine
        if config.kind is TopicKind.DELTA:
            await asyncio.to_thread(engine.folder.raise_format, FORMAT_DELTAS)
        engine.add_topic(engine.make_topic(config))

    async def change_topic(self, config: TopicConfig) -> None:
        self._engine.reconfigure_topic(config)

    async def drop_topic(self, config: TopicConfig) -> None:
        topic = self._engine.topics.get(config.name)
        if topic is not None and topic.config.id == config.id:
            await self._engine.drop_topic(topic)

    async def open_replica(self, config: TopicConfig, index: int, held: Held) -> Host:
        engine, record = self._engine, held.record
        uuid = record.uuids.get(engine.identity.node, "") if record.epoch == 0 else ""
        return await engine.open_host(engine.topic(config.name), index, uuid=uuid)

    def promised(self, key: Key) -> int:
        host = self._engine.hosts.get(key)
        return host.replica.promised if host else 0

    async def drop_replica(self, key: Key) -> None:
        engine = self._engine
        if key in engine.hosts:
            await engine.close_hosts([key])
        await asyncio.to_thread(engine.folder.remove_partition, *key)


def prepare_cluster(engine: Engine, store: LeasingStore, connect: Connect) -> Cluster:
    """Give the engine a cluster that it has not joined yet."""
    config = engine.config
    cluster = Cluster(
        _info(engine, port=0),
        store=store,
        catalog=engine.catalog,
        options=config.cluster,
        replication=config.replication,
        connect=connect,
        spawn=engine.spawn,
    )
    cluster.serve(EngineLocal(engine))
    engine.around = dataclasses.replace(
        engine.around,
        control=cluster.control,
        transport=cluster.transport,
        options=config.replication,
        policy=Policy(config.cluster.policy),
    )

    async def call_self(method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return await dispatch_call(engine, Caller(None, 0, peer=True), method, dict(arguments))

    cluster.call_self = call_self
    cluster.administration = Administration(cluster, spawn=engine.spawn)
    engine.nodes = engine.cluster = cluster
    return cluster


async def join_cluster(engine: Engine, *, port: int) -> None:
    """Take part, now that others can connect to `port`."""
    cluster = engine.nodes
    assert cluster is not None
    await until_available(engine.keys.load)
    await cluster.start(_info(engine, port=port))
    engine.spawn(cluster.administration.run(), name="administration")
    engine.spawn(Returning(cluster, engine.hosts).run(), name="returning")


def _info(engine: Engine, *, port: int) -> NodeInfo:
    config: Config = engine.config
    host = config.host
    if config.cluster.advertise:
        host, port = host_port(config.cluster.advertise, field="cluster.advertise", port=port)
    return NodeInfo(
        id=engine.identity.node,
        uuid=engine.identity.replica_uuid,
        host=host,
        native_port=port,
        zone=config.cluster.zone,
        version=__version__,
        started_ms=engine.started_ms,
    )
