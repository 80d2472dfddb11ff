"""Topics of a node that is alone: made, opened, changed and deleted, one at a time.

A topic is recorded before its files are made, because its id comes from the record. So whether it
will fit is looked at before, and one that found no room after all is taken back. One that is
recorded and cannot be opened, after a crash in between or on a disk that filled up since, leaves
the node running: it is listed, can be deleted, and is tried again.
"""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

from penstock.errors import Backpressure, DiskFull, InvalidArgument, PenstockError
from penstock.log.folder import FORMAT_DELTAS
from penstock.model.topic import TopicConfig, TopicKind, topic_config
from penstock.node.atomic.driver import resolve_in_doubt
from penstock.node.engine import Engine
from penstock.node.observe.logs import get_logger
from penstock.node.replica.host import Host
from penstock.node.serve.topic import ServedTopic
from penstock.node.storage.room import Trouble

log = get_logger(__name__)


class LocalTopics:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()  # one topic is changed at a time

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
            if wanted.kind is TopicKind.DELTA:
                await asyncio.to_thread(engine.folder.raise_format, FORMAT_DELTAS)
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
                await asyncio.to_thread(engine.folder.remove_topic, config.id)

    # --- opening ---

    async def open_all(self) -> None:
        for config in await self._engine.catalog.list():
            async with self._lock:
                await self._open_or_note(config)

    async def open_again(self, trouble: Trouble) -> None:
        async with self._lock:
            if self._engine.unopened.topic(trouble.config.name) is trouble:
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
                await asyncio.to_thread(engine.folder.remove_topic, config.id)
            raise

    async def _open(self, config: TopicConfig) -> None:
        """Recover a topic's partitions, enter a new epoch in each, and serve."""
        engine = self._engine
        topic = engine.make_topic(config)
        started = time.perf_counter()
        try:
            opened = await self._open_hosts(topic)
            await engine.local.enter(opened)
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
        known = await engine.records.list(topic.config.id)
        uuids = {key[1]: record.uuids for key, record in known.items()}
        opening = (
            engine.open_host(
                topic, index, recorded=uuids.get(index, {}).get(engine.identity.node, "")
            )
            for index in indices
        )
        found = await asyncio.gather(*opening, return_exceptions=True)
        failure = next((each for each in found if isinstance(each, BaseException)), None)
        del found  # the failure's traceback would keep the hosts, and they their files
        if failure is not None:
            raise failure
        return [engine.hosts[topic.key(index)] for index in indices]
