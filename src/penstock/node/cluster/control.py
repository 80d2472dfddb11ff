"""What the metadata store says about partitions, and what hosts change in it.

Two watches, of topics and of partition records, feed one picture. Where it names this node as a
replica, a host is opened; every host hears of each new version of its record. A version that is
not newer than the one known is left out, wherever it comes from: a watch, or the answer to a swap.

A store that is away or refuses us takes nothing from this node: the picture stays as it was, hosts
go on, and what they ask for fails, as it would if somebody else had been faster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol

from penstock.cluster.catalog import Catalog
from penstock.cluster.placement import (
    PARTITIONS,
    HeldRecord,
    Records,
    held_record,
    place_of,
    record_key,
)
from penstock.cluster.store import MetadataStore, follow, repeat
from penstock.errors import Backpressure, NotFound, PenstockError, RevisionConflict
from penstock.model.topic import TopicConfig
from penstock.node.observe.logs import get_logger
from penstock.node.replica.host import Host
from penstock.node.replica.ports import Key
from penstock.replication.assignment import PartitionRecord

TICK_S: Final = 0.1
RETRY_S: Final = 0.5  # between attempts to watch, or to follow a topic
OPENING_MAX: Final = 8  # replicas that are opened at the same time
log = get_logger(__name__)


class Local(Protocol):
    @property
    def hosts(self) -> Mapping[Key, Host]: ...

    async def add_topic(self, config: TopicConfig) -> None:
        """The topic exists from now on; its replicas are opened one by one."""

    async def change_topic(self, config: TopicConfig) -> None: ...

    async def drop_topic(self, config: TopicConfig) -> None:
        """The topic is deleted: end its streams, close its hosts, remove its folder."""

    async def open_replica(self, config: TopicConfig, index: int, held: HeldRecord) -> Host: ...

    async def renew_replica(self, key: Key) -> None:
        """Close the host and set its folder aside: what is opened next is another replica."""

    async def drop_replica(self, key: Key) -> None:
        """Close the host and remove its folder: others hold the partition."""

    async def call(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]: ...

    def topic_id_highest(self) -> int: ...

    def on_cut_off(self) -> None:
        """Neither the store nor a majority of the members is reached; said again while it is so."""


class ClusterControl:
    """`ports.Control`, and the picture that it is made from."""

    def __init__(
        self,
        node: str,
        *,
        store: MetadataStore,
        records: Records,
        catalog: Catalog,
        local: Local,
        ages: Callable[[], Mapping[str, int]],
        deleted: Callable[[int], Awaitable[bool]],
        spawn: Callable[..., object],
    ) -> None:
        self.node = node
        self.topics: dict[int, TopicConfig] = {}
        self.records: dict[Key, HeldRecord] = {}
        self.quiet: set[Key] = set()  # partitions that this node does not try to coordinate
        self._store, self._records, self._catalog = store, records, catalog
        self._local, self._ages, self._spawn = local, ages, spawn
        self._deleted = deleted  # whether a topic that is not there was deleted, by its id
        self._unfollowed: dict[int, TopicConfig] = {}  # in trouble here; tried again and again
        self._unopened: set[Key] = set()  # replicas of ours, the same
        self._following = asyncio.Lock()  # one topic at a time is added, changed or dropped
        self._opening: set[Key] = set()
        self._retiring: set[Key] = set()  # their files are being removed, or set aside
        self._openings = asyncio.Semaphore(OPENING_MAX)
        self._news: dict[Key, asyncio.Event] = {}  # for those who wait for another record
        self._read = {"topics": asyncio.Event(), "records": asyncio.Event()}

    # --- what hosts ask for ---

    def take_epoch(self, key: Key) -> None:
        self._spawn(self._take_epoch(key), name=f"epoch-{key[0]}-{key[1]}")

    def change_record(self, key: Key, record: PartitionRecord, revision: int) -> None:
        self._spawn(self._change_record(key, record, revision), name=f"record-{key[0]}-{key[1]}")

    def renew(self, key: Key, *, uuid: str, epoch: int) -> None:
        if key not in self._retiring:
            self._retiring.add(key)
            self._spawn(self._renew(key, uuid, epoch), name=f"renew-{key[0]}-{key[1]}")

    def retire(self, key: Key) -> None:
        if key not in self._retiring:  # it may have heard of two records that do not name it
            self._retiring.add(key)
            self._spawn(self._retire(key), name=f"retire-{key[0]}-{key[1]}")

    async def _take_epoch(self, key: Key) -> None:
        known = self.records.get(key)
        if known is None or key in self.quiet:
            return
        try:
            held = await self._records.get(key)
            if held.record.epoch != known.record.epoch or not held.record.is_voter(self.node):
                return  # somebody was faster, or we are replaced; the watch tells the host
            host = self._local.hosts.get(key)
            promised = host.replica.promised if host is not None else 0
            taken = await self._records.take_epoch(key, held, node=self.node, above=promised)
        except (RevisionConflict, NotFound):
            return
        except PenstockError as error:
            log.warning("no epoch was taken", topic=key[0], partition=key[1], error=error.message)
            return
        log.info("epoch taken", topic=key[0], partition=key[1], epoch=taken.record.epoch)
        self._learn(key, taken)
        host = self._local.hosts.get(key)
        if host is not None:
            host.on_epoch_taken(*taken)

    async def _change_record(self, key: Key, record: PartitionRecord, revision: int) -> None:
        host = self._local.hosts.get(key)
        try:
            changed = await self._records.change(key, record, revision)
        except PenstockError as error:
            log.info("record not changed", topic=key[0], partition=key[1], error=error.message)
            if host is not None:
                host.on_change_lost()
            return
        self.on_record(key, changed)

    async def _renew(self, key: Key, uuid: str, epoch: int) -> None:
        try:
            if key not in self._local.hosts or not await self._disowned(key, uuid, epoch):
                return
            await self._local.renew_replica(key)
        except PenstockError as error:
            log.warning("not renewed", topic=key[0], partition=key[1], error=error.message)
        finally:
            self._retiring.discard(key)
        self._open_if_ours(key)

    async def _disowned(self, key: Key, uuid: str, epoch: int) -> bool:
        """Have the record count on this disk no more, before anything of it is dropped."""
        held = await self._records.get(key)
        without = held.record.disowned(self.node, uuid=uuid, epoch=epoch)
        if without is not None and without is not held.record:
            self.on_record(key, await self._records.change(key, without, held.revision))
        return without is not None

    async def _retire(self, key: Key) -> None:
        try:
            if await self._is_ours(key):
                return
            log.info("replica retired", topic=key[0], partition=key[1])
            await self._local.drop_replica(key)
        finally:
            self._retiring.discard(key)
        self._open_if_ours(key)  # given back while its files were removed

    async def _is_ours(self, key: Key) -> bool:
        """Whether the partition counts on this node. A watch may tell of a record from long before
        it came back to us, and we may hold the only copy: the store itself is asked."""
        while True:
            try:
                self.on_record(key, await self._records.get(key))
            except NotFound:
                return True  # its topic is deleted, and takes the files along
            except PenstockError as error:
                log.warning("a replica stays", partition=key[1], error=error.message)
                await asyncio.sleep(RETRY_S)
                continue
            return self.node in self.records[key].record.members

    # --- the picture ---

    def coordinator(self, key: Key) -> str:
        held = self.records.get(key)
        return held.record.coordinator if held else ""

    async def changed(self, key: Key) -> None:
        """Returns when there is another version of the partition's record."""
        await self._news.setdefault(key, asyncio.Event()).wait()

    def wake(self) -> None:
        for key in list(self._news):
            self._news.pop(key).set()

    def on_record(self, key: Key, held: HeldRecord) -> None:
        if not self._learn(key, held):
            return
        host = self._local.hosts.get(key)
        if host is not None:
            host.on_record(*held)
        else:
            self._open_if_ours(key)

    def on_members(self, ages: Mapping[str, int]) -> None:
        for host in list(self._local.hosts.values()):
            host.on_members(ages)

    def _learn(self, key: Key, held: HeldRecord) -> bool:
        known = self.records.get(key)
        if known is not None and held.revision <= known.revision:
            return False
        self.records[key] = held
        if key in self._news:
            self._news.pop(key).set()
        return True

    def _open_if_ours(self, key: Key) -> None:
        held, config = self.records.get(key), self.topics.get(key[0])
        if held is None or config is None or key in self._opening or key in self._retiring:
            return
        if self.node in held.record.members and key not in self._local.hosts:
            self._opening.add(key)
            self._spawn(self._open(key, config), name=f"open-{key[0]}-{key[1]}")

    async def _open(self, key: Key, config: TopicConfig) -> None:
        try:
            async with self._openings:
                host = await self._local.open_replica(config, key[1], self.records[key])
        except Backpressure:
            self._unopened.add(key)  # whoever refused it has said why
            return
        finally:
            self._opening.discard(key)
        self._unopened.discard(key)
        held = self.records.get(key)
        if held is None or key[0] not in self.topics:
            await self._local.drop_replica(key)
            return
        host.on_members(self._ages())
        host.on_record(*held)

    # --- running ---

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for name, work in (
                ("topics", self._follow_topics),
                ("records", self._follow_records),
                ("topics in trouble", self._follow_again),
            ):
                trouble = f"{name} are not followed for now"
                repeating = repeat(work, trouble=trouble, pause_s=RETRY_S)
                tasks.create_task(repeating, name=f"{name}-follow")
            tasks.create_task(self._tick(), name="replicas-tick")

    async def ready(self) -> None:
        for event in self._read.values():
            await event.wait()

    async def _follow_topics(self) -> None:
        known = [*self.topics.values(), *self._unfollowed.values()]
        listed = {config.id for config in await self._catalog.list()}
        async with self._catalog.watch(known) as changes:
            self._read_if_all(listed)
            async for config, deleted in changes:
                async with self._following:
                    await (self._on_deleted(config) if deleted else self._follow(config))
                listed.discard(config.id)
                self._read_if_all(listed)

    def _read_if_all(self, listed: set[int]) -> None:
        if not listed - self.topics.keys() - self._unfollowed.keys():
            self._read["topics"].set()

    async def _follow(self, config: TopicConfig) -> None:
        try:
            if config.id in self.topics:
                await self._local.change_topic(config)
            else:
                await self._local.add_topic(config)
        except (PenstockError, OSError) as error:  # one topic's trouble is not the others'
            if config.id not in self._unfollowed:
                log.error("topic not followed for now", topic=config.name, error=str(error))
            self._unfollowed[config.id] = config
            return
        self._unfollowed.pop(config.id, None)
        self.topics[config.id] = config
        for key in [key for key in self.records if key[0] == config.id]:
            self._open_if_ours(key)

    async def _follow_again(self) -> None:
        """Another attempt at topics and replicas in trouble: a disk that was full may have room."""
        await asyncio.sleep(RETRY_S)
        for key in list(self._unopened):
            self._unopened.discard(key)
            self._open_if_ours(key)
        for topic in list(self._unfollowed):
            async with self._following:
                if topic in self._unfollowed:
                    await self._follow(self._unfollowed[topic])

    async def _on_deleted(self, config: TopicConfig) -> None:
        """Files are removed only where it is sure that somebody deleted the topic: a store that
        lost its contents, or was restored from an older copy, lacks topics too."""
        if not await self._deleted(config.id):
            log.critical("a topic vanished that nobody deleted; it is kept", topic=config.name)
            return
        self.topics.pop(config.id, None)
        self._unfollowed.pop(config.id, None)
        try:
            await self._local.drop_topic(config)
        except PenstockError as error:
            log.error("topic not removed", topic=config.name, error=error.message)
        for key in [key for key in self.records if key[0] == config.id]:
            self.records.pop(key)

    async def _follow_records(self) -> None:
        for entry in await self._store.range(PARTITIONS):
            self.on_record(place_of(entry.key), held_record(entry))
        self._read["records"].set()
        known = [record_key(key) for key in self.records]
        async with follow(self._store, PARTITIONS, known=known) as changes:
            async for change in changes:
                key = place_of(change.key)
                if change.value is None:
                    if key[0] not in self.topics:  # else it goes with its topic
                        self.records.pop(key, None)
                else:
                    self.on_record(key, held_record(change))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for key, host in list(self._local.hosts.items()):
                if key not in self.quiet:
                    host.on_tick()
