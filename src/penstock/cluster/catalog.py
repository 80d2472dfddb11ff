"""Topics and their ids, as typed entries of the metadata store.

    topics/<name>                  the topic's configuration, JSON
    counters/topic_id              the last topic id given out
    counters/topic_id_skipped      ids up to that one which were not: folders had them before

Ids only ever grow, by compare and swap: no two callers get the same one, and an id is not given out
again after its topic is deleted, so nothing of a deleted topic can be mistaken for a new one. A
number whose caller failed is skipped.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, NamedTuple

import msgspec

from penstock.cluster.store import MetadataChange, MetadataStore, follow, until_won
from penstock.errors import AlreadyExists, FailedPrecondition, NotFound, RevisionConflict
from penstock.model.ids import TOPICS_MAX
from penstock.model.topic import FIXED, TopicConfig, topic_config

TOPICS: Final = "topics/"
TOPIC_ID: Final = "counters/topic_id"
TOPIC_ID_SKIPPED: Final = "counters/topic_id_skipped"
Ranges = list[tuple[int, int]]  # the first and the last id of each
_decoder: Final = msgspec.json.Decoder(TopicConfig)


class TopicChange(NamedTuple):
    """What a watch of the topics reports; of a deleted topic, what it was."""

    config: TopicConfig
    deleted: bool = False


class Catalog:
    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._counting = asyncio.Lock()  # creations of this node take turns instead of racing

    async def create(
        self, fields: Mapping[str, Any], *, exists_ok: bool = False, above: int = 0
    ) -> TopicConfig:
        """Create the topic that `fields` describe, with an id over `above`: the highest one that
        some data folder is known to have. With `exists_ok` a topic of that name is returned as it
        is, if it has the fixed attributes that `fields` name."""
        wanted = topic_config({**fields, "id": 0})
        try:
            held = await self.get(wanted.name)
        except NotFound:
            await self.skip_ids(above)
            config = msgspec.structs.replace(wanted, id=await self._next_topic_id())
            try:
                value = msgspec.json.encode(config)
                await self._store.put(TOPICS + config.name, value, expected_revision=0)
            except RevisionConflict:
                held = await self.get(wanted.name)
            else:
                return config
        if not exists_ok:
            raise AlreadyExists(f"topic {wanted.name} exists", topic=wanted.name)
        for name in sorted((FIXED - {"id"}) & fields.keys()):
            found = getattr(held, name)
            if found != getattr(wanted, name):
                text = f"topic {wanted.name} exists with {name}={found}"
                raise AlreadyExists(text, topic=wanted.name, field=name)
        return held

    async def get(self, name: str) -> TopicConfig:
        config, _ = await self._read(name)
        return config

    async def list(self) -> builtins.list[TopicConfig]:
        return [_decoder.decode(entry.value) for entry in await self._store.range(TOPICS)]

    async def update(self, name: str, changes: Mapping[str, Any]) -> TopicConfig:
        """Apply `changes`; two updates of different attributes at once both last."""
        return await self._change(name, lambda held: held.updated(dict(changes)))

    async def grow(self, name: str, partitions: int) -> TopicConfig:
        """Give the topic more partitions; fewer than it has change nothing."""

        def grown(held: TopicConfig) -> TopicConfig:
            count = max(held.partitions, partitions)
            return msgspec.structs.replace(held, partitions=count).validate()

        return await self._change(name, grown)

    async def _change(self, name: str, change: Callable[[TopicConfig], TopicConfig]) -> TopicConfig:
        async def swap() -> TopicConfig:
            held, revision = await self._read(name)
            config = change(held)
            value = msgspec.json.encode(config)
            await self._store.put(TOPICS + name, value, expected_revision=revision)
            return config

        return await until_won(swap)

    async def delete(self, name: str) -> TopicConfig:
        """Forget the topic, its epochs, partition records and cursors; returns what it was."""

        async def swap() -> TopicConfig:
            held, revision = await self._read(name)
            await self._store.delete(TOPICS + name, expected_revision=revision)
            return held

        config = await until_won(swap)
        for prefix in (f"{part}/{config.id}/" for part in ("partitions", "epochs", "cursors")):
            entries = await self._store.range(prefix)
            await asyncio.gather(*(self._store.delete(entry.key) for entry in entries))
        return config

    @asynccontextmanager
    async def watch(
        self, known: Iterable[TopicConfig] = ()
    ) -> AsyncIterator[AsyncIterator[TopicChange]]:
        """How the topics differ from those that the caller knows, now and from now on.

        A topic that was deleted and made again under its name has another id; it is reported as
        both. When it ends with `Unavailable`, enter it again with what is known by then.
        """
        held = {config.name: config for config in known}
        keys = [TOPICS + name for name in held]
        async with (
            follow(self._store, TOPICS, known=keys) as changes,
            aclosing(_topic_changes(changes, held)) as told,
        ):
            yield told

    async def skip_ids(self, through: int) -> int:
        """Give out no id up to `through`, which some data folder has: the store does not know of it
        if it was restored from an older copy. Returns how many it had not given out.

        Those are remembered as skipped before the counter moves, so that nobody takes them for ids
        of topics that were deleted, and removes their files.
        """

        async def swap() -> int:
            entry = await self._store.get(TOPIC_ID)
            given = int(entry.value) if entry else 0
            if given >= through:
                return 0
            await self._remember_skipped(given + 1, through)
            revision = entry.revision if entry else 0
            await self._store.put(TOPIC_ID, b"%d" % through, expected_revision=revision)
            return through - given

        async with self._counting:
            return await until_won(swap)

    async def given(self, topic: int) -> bool:
        entry = await self._store.get(TOPIC_ID)
        if entry is None or topic > int(entry.value):
            return False
        skipped = await self._store.get(TOPIC_ID_SKIPPED)
        ranges = msgspec.json.decode(skipped.value, type=Ranges) if skipped else []
        return not any(first <= topic <= last for first, last in ranges)

    async def _remember_skipped(self, first: int, last: int) -> None:
        async def swap() -> None:
            entry = await self._store.get(TOPIC_ID_SKIPPED)
            ranges = msgspec.json.decode(entry.value, type=Ranges) if entry else []
            if (first, last) not in ranges:
                value = msgspec.json.encode([*ranges, (first, last)])
                revision = entry.revision if entry else 0
                await self._store.put(TOPIC_ID_SKIPPED, value, expected_revision=revision)

        await until_won(swap)

    async def _next_topic_id(self) -> int:
        async def swap() -> int:
            entry = await self._store.get(TOPIC_ID)
            number = int(entry.value) + 1 if entry else 1
            revision = entry.revision if entry else 0
            await self._store.put(TOPIC_ID, b"%d" % number, expected_revision=revision)
            return number

        async with self._counting:
            number = await until_won(swap)
        if number >= TOPICS_MAX:
            raise FailedPrecondition(
                f"all {TOPICS_MAX - 1} topic ids were given out", limit=TOPICS_MAX - 1
            )
        return number

    async def _read(self, name: str) -> tuple[TopicConfig, int]:
        entry = await self._store.get(TOPICS + name)
        if entry is None:
            raise NotFound(f"no topic {name}", topic=name)
        return _decoder.decode(entry.value), entry.revision


async def _topic_changes(
    changes: AsyncIterator[MetadataChange], held: dict[str, TopicConfig]
) -> AsyncGenerator[TopicChange, None]:
    async for change in changes:
        name = change.key.removeprefix(TOPICS)
        before = held.pop(name, None)
        config = None if change.value is None else _decoder.decode(change.value)
        if before is not None and (config is None or config.id != before.id):
            yield TopicChange(before, deleted=True)
        if config is not None:
            held[name] = config
            if before != config:
                yield TopicChange(config)
