"""A node becomes part of a cluster: its engine does what the metadata store says."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.cluster.store import LeasingStore, repeat
from penstock.errors import Backpressure, FailedPrecondition, RevisionConflict
from penstock.log.files import storage_errors, write_whole
from penstock.log.folder import FORMAT_DELTAS
from penstock.log.identity import set_aside
from penstock.model.topic import TopicConfig, TopicKind
from penstock.node.calls.table import Caller, dispatch_call
from penstock.node.cluster.administration import ClusterAdministration
from penstock.node.cluster.cluster import CLUSTER_UUID, Cluster, until_available
from penstock.node.cluster.control import HeldRecord
from penstock.node.cluster.disk import DataDisk
from penstock.node.cluster.moves import Mover, Returner
from penstock.node.cluster.peers import Connect
from penstock.node.engine import Engine, NodeIdentity
from penstock.node.observe.logs import get_logger
from penstock.node.replica.host import Host
from penstock.node.replica.ports import CopyPace, Key
from penstock.replication.follower import FollowerState
from penstock.replication.replica import Role
from penstock.replication.takeover import Policy

SETTLE_S_MAX: Final = 10.0
RETRY_S: Final = 1.0
log = get_logger(__name__)


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
        """Who serves the topic writes the change into its log."""
        engine = self._engine
        topic = engine.topic(config.name)
        topic.reconfigure(config)
        if any(partition.heap.config != config for partition in topic.local):
            engine.spawn(engine.write_config(topic), name=f"config-{config.name}")

    async def drop_topic(self, config: TopicConfig) -> None:
        topic = self._engine.topics.get(config.name)
        if topic is not None and topic.config.id == config.id:
            await self._engine.drop_topic(topic)

    async def open_replica(self, config: TopicConfig, index: int, held: HeldRecord) -> Host:
        engine, record = self._engine, held.record
        uuid = record.uuids.get(engine.identity.node, "") if record.epoch == 0 else ""
        only = record.quorums == ((engine.identity.node,),)
        try:
            engine.room.check_files(1)
            host = await engine.open_host(
                engine.topic(config.name), index, uuid=uuid, only=only,
                recorded=record.uuids.get(engine.identity.node, ""),
            )  # fmt: skip
        except Backpressure as error:
            engine.unopened.note(config, error, partition=index)
            raise
        engine.unopened.forget(config.id, index)
        return host

    def promised(self, key: Key) -> int:
        host = self._engine.hosts.get(key)
        return host.replica.promised if host else 0

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
        await asyncio.to_thread(engine.folder.remove_partition, *key)


def prepare_cluster(engine: Engine, store: LeasingStore, connect: Connect) -> None:
    """Give the engine a cluster that it has not joined yet."""
    config = engine.config
    cluster = Cluster(
        engine.info(port=0),
        store=store,
        catalog=engine.catalog,
        options=config.cluster,
        replication=config.replication,
        connect=connect,
        disk=DataDisk(
            engine.folder, uuid=engine.identity.replica_uuid, node=engine.identity.node, store=store
        ),
        clock=engine.clock,
        spawn=engine.spawn,
        spawn_vital=engine.spawn_vital,
        on_fatal=engine.on_fatal,
    )
    cluster.serve(EngineLocal(engine))
    around = dataclasses.replace(
        engine.around,
        control=cluster.control,
        transport=cluster.transport,
        alone=False,
        options=config.replication,
        pace=CopyPace(config.replication.seed_bytes_per_s),
        policy=Policy(config.cluster.policy),
        clocks=cluster.clocks,
        barred=lambda: cluster.clocks.barred or cluster.leaving,
        cut_off=lambda: cluster.cut_off,
    )
    cluster.topic_id_highest = engine.folder.topic_id_highest
    cluster.on_cut_off = engine.end_unreached

    async def call_self(method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return await dispatch_call(engine, Caller(None, 0, peer=True), method, dict(arguments))

    cluster.call_self = call_self
    cluster.administration = ClusterAdministration(cluster)
    engine.join(cluster, around)


async def join_cluster(engine: Engine, *, port: int) -> None:
    """Take part, now that others can connect to `port`."""
    cluster = engine.nodes
    await until_available(engine.keys.load)
    await until_available(lambda: _check_identity(engine, cluster.store))
    cluster.uuid = engine.identity.cluster_uuid
    await until_available(cluster.protect_ids)
    accepted = engine.config.cluster.accept_rollback
    await until_available(lambda: cluster.disk.claim(accept_rollback=accepted))
    await cluster.start(engine.info(port=port))
    for name, work in (
        ("administration", cluster.administration.run),
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
    """Remove files of topics that were deleted while this node was away."""
    held = {topic for topic, _, _ in engine.folder.partitions()}
    # Some of those that exist may not be followed yet, for trouble on this node.
    existing = {config.id for config in await cluster.catalog.list()}
    for topic in held - existing - cluster.control.topics.keys():
        if await cluster.deleted(topic):
            log.info("removing a deleted topic's files", topic=topic)
            await asyncio.to_thread(engine.folder.remove_topic, topic)


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
