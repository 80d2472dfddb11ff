"""A node that is alone: a cluster of one, which is its own majority and takes epochs from nobody.

Topics are made, opened, changed and deleted one at a time. A topic is recorded before its files are
made, because its id comes from the record. So whether it will fit is looked at before, and one that
found no room after all is taken back. One that is recorded and cannot be opened, after a crash in
between or on a disk that filled up since, leaves the node running: it is listed, can be deleted,
and is tried again.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from penstock.cluster.membership import NodeInfo
from penstock.cluster.placement import Records
from penstock.cluster.store import MetadataStore
from penstock.errors import (
    Backpressure,
    DiskFull,
    FailedPrecondition,
    InvalidArgument,
    PenstockError,
)
from penstock.model.topic import TopicConfig, topic_config
from penstock.node.atomic import resolve_in_doubt
from penstock.node.cluster.administration import ClusterAdministration
from penstock.node.engine import Engine
from penstock.node.observe.logs import get_logger
from penstock.node.replica.host import Host
from penstock.node.replica.ports import Key
from penstock.node.route import PeerPort
from penstock.node.serve.topic import ServedTopic
from penstock.replication.assignment import PartitionRecord

OPEN_AGAIN_S: Final = 1.0  # between attempts at topics that could not be opened
log = get_logger(__name__)


class ClusterOfOne:
    """What an engine asks of its cluster, of its administration, and of the control of replicas."""

    alone = True
    cut_off = False
    available = True
    rolled_back = False

    def __init__(self, engine: Engine, store: MetadataStore) -> None:
        self.node = engine.identity.node
        self.ages: Mapping[str, int] = {}
        self._engine, self._records = engine, Records(store)
        self._lock = asyncio.Lock()  # one topic is changed at a time

    # --- who is there ---

    @property
    def alive(self) -> Mapping[str, NodeInfo]:
        return {self.node: self._engine.info(port=self._engine.config.native_port or 0)}

    @property
    def replica_sets(self) -> ClusterAdministration:
        raise FailedPrecondition("this node is alone: it is in no cluster")

    def coordinator(self, key: Key) -> str:
        return self.node

    def live(self, node: str) -> PeerPort | None:
        return None

    async def changed(self, key: Key) -> None:
        await asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """There are no connections to other nodes."""

    # --- what callers ask for ---

    async def create_topic(self, fields: dict[str, Any], *, exists_ok: bool) -> TopicConfig:
        if fields.get("replication_factor", 1) != 1:
            raise InvalidArgument(
                "this node is a cluster of one: replication_factor must be 1",
                field="replication_factor",
                limit=1,
            )
        engine, wanted = self._engine, topic_config({**fields, "id": 0})
        async with self._lock:
            await engine.admit(wanted)
            new = wanted.name not in engine.topics and engine.unopened.topic(wanted.name) is None
            if new:
                await asyncio.to_thread(engine.room.check, wanted.partitions)
            config = await engine.catalog.create(
                fields, exists_ok=exists_ok, above=engine.folder.topic_id_highest()
            )
            if new:
                await self._open_new(config)
            return engine.topics[config.name].config

    async def update_topic(self, name: str, changes: dict[str, Any]) -> TopicConfig:
        """Change the catalogue first, then tell each partition's log."""
        async with self._lock:
            topic = self._engine.topics[name]
            topic.reconfigure(await self._engine.catalog.update(name, changes))
            await self._engine.write_config(topic)
            return topic.config

    async def delete_topic(self, name: str) -> None:
        engine = self._engine
        async with self._lock:
            config = engine.config_of(name)
            await engine.catalog.delete(name)
            if name in engine.topics:
                await engine.drop_topic(engine.topics[name])
            else:
                engine.unopened.forget_topic(config.id)
                await asyncio.to_thread(engine.folder.remove, config.id)

    # --- opening ---

    async def open(self) -> None:
        await self._engine.keys.load()
        for config in await self._engine.catalog.list():
            async with self._lock:
                await self._open_or_note(config)
        self._engine.spawn(self._open_again(), name="openings", vital=True)

    async def _open_again(self) -> None:
        """Try topics that could not be opened, until cancelled: there may be room by now."""
        unopened = self._engine.unopened
        while True:
            await asyncio.sleep(OPEN_AGAIN_S)
            for trouble in unopened:
                async with self._lock:
                    known = unopened.topic(trouble.config.name) is trouble
                    if known and not self._engine.stopping:
                        await self._open_or_note(trouble.config)

    async def _open_or_note(self, config: TopicConfig) -> None:
        unopened = self._engine.unopened
        try:
            try:
                await self._open(config)
            except DiskFull:
                if not await asyncio.to_thread(self._give_up_reserve, config.id):
                    raise
                await self._open(config)
        except Backpressure as error:
            unopened.note(config, error)
        else:
            unopened.forget(config.id)

    def _give_up_reserve(self, topic: int) -> bool:
        """Give up the last space for a topic that has messages: settling them is the way out."""
        return self._engine.folder.has_log(topic) and self._engine.reserve.release()

    async def _open_new(self, config: TopicConfig) -> None:
        """Open a topic that was recorded just now, or have it recorded no more."""
        engine = self._engine
        try:
            await self._open(config)
        except Backpressure as error:  # no room after all: others have taken it meanwhile
            log.warning("a topic is not created", topic=config.name, error=error.message)
            try:
                await engine.catalog.delete(config.name)
            except Backpressure:
                engine.unopened.note(config, error)  # it exists, then, and can be deleted
            else:
                await asyncio.to_thread(engine.folder.remove, config.id)
            raise

    async def _open(self, config: TopicConfig) -> None:
        engine = self._engine
        topic = engine.make_topic(config)
        started = time.perf_counter()
        try:
            opened = await self._open_hosts(topic)
            await self.enter(opened)
            resolved = await resolve_in_doubt(topic)
        except PenstockError:
            topic.close()
            await engine.close_hosts(key for key in engine.hosts if key[0] == config.id)
            gc.collect()  # files close with the hosts, which know each other: free them now
            raise
        if resolved:
            log.info("atomic batches resolved", topic=topic.config.name, count=resolved)
        engine.add_topic(topic)
        log.info(
            "topic open",
            topic=config.name,
            partitions=config.partitions,
            batches_replayed=sum(host.replayed for host in opened),
            seconds=round(time.perf_counter() - started, 3),
        )

    async def _open_hosts(self, topic: ServedTopic) -> list[Host]:
        """All partitions of a topic; if one of them fails, the others are left to be closed."""
        engine, indices = self._engine, range(topic.config.partitions)
        engine.room.check_files(topic.config.partitions)
        known = await self._records.list(topic.config.id)
        opening = (engine.open_host(topic, index, known.get(topic.key(index))) for index in indices)
        found = await asyncio.gather(*opening, return_exceptions=True)
        failure = next((each for each in found if isinstance(each, BaseException)), None)
        del found  # the failure's traceback would keep the hosts, and they their files
        if failure is not None:
            raise failure
        return [engine.hosts[topic.key(index)] for index in indices]

    # --- what hosts ask for ---

    async def enter(self, hosts: Iterable[Host]) -> None:
        alone = {
            host: PartitionRecord(voters=(self.node,), uuids={self.node: host.replica.uuid})
            for host in hosts
        }
        await self._records.ensure({host.key: record for host, record in alone.items()})
        await asyncio.gather(
            *(self._take(host, record) for host, record in alone.items()),
            *(host.serving() for host in alone),
        )

    async def _take(self, host: Host, alone: PartitionRecord) -> None:
        held = await self._records.get(host.key)
        if held.record.voters != alone.voters or held.record.uuids != alone.uuids:
            # A folder that was renamed or restored: whatever is in it, there is nothing else.
            own = msgspec.structs.replace(alone, epoch=held.record.epoch)
            held = await self._records.change(host.key, own, held.revision)
        promised = host.replica.promised
        taken = await self._records.take_epoch(host.key, held, node=self.node, above=promised)
        host.on_epoch_taken(*taken)

    def take_epoch(self, key: Key) -> None:
        self._engine.spawn(self.enter([self._engine.hosts[key]]))

    def change_record(self, key: Key, record: PartitionRecord, revision: int) -> None:
        """There is nothing to change: the only replica is named from the start."""
        self._engine.hosts[key].on_change_lost()

    def renew(self, key: Key, *, uuid: str, epoch: int) -> None:
        """There is nobody to copy from."""

    def retire(self, key: Key) -> None:
        """Nobody else could hold it."""
