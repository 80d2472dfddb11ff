"""Partition records and planned moves in the metadata store: who holds a partition, and who will.

    partitions/<topic id>/<partition>  a `PartitionRecord`, JSON
    cluster/plan    `{"moves": [{"topic": 3, "partition": 0, "target": ["n2", "n3", "n4"]}]}`, JSON

Every change is a compare and swap of the whole record, so two nodes that want the same epoch cannot
both get it, and a change made to an older version loses. Losing is not repeated here: whoever
lost decided on what is no longer so, and has to look again.

The plan holds the moves of replicas that wait for their turn. A move leaves it when it begins: from
then on the partition's own record has its target. So whichever node carries the plan out, nothing
of it is lost with another. A later plan takes the place of all that waits.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Final, NamedTuple

import msgspec

from penstock.cluster.placement import Move, Place
from penstock.cluster.store import MetadataChange, MetadataStore, Versioned, follow, until_won
from penstock.errors import Corruption, FailedPrecondition, NotFound, RevisionConflict
from penstock.replication.assignment import PartitionRecord, decode_record, encode_record

PARTITIONS: Final = "partitions/"
EPOCHS: Final = "epochs/"  # where epochs were before there were records
PLAN: Final = "cluster/plan"
MOVES_MAX: Final = 2000  # a plan is one value of the store, whose size has a bound


class RecordChange(NamedTuple):
    """What a watch reports; no record: the partition's topic was deleted."""

    topic: int
    partition: int
    record: PartitionRecord | None


class Records:
    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def get(self, topic: int, partition: int) -> PartitionRecord:
        return _decode(await self._entry(topic, partition))

    async def list(self, topic: int | None = None) -> dict[Place, PartitionRecord]:
        """All records, or those of one topic, in the order of topics and partitions."""
        found = {
            _place(entry.key): _decode(entry) for entry in await self._store.range(_prefix(topic))
        }
        return dict(sorted(found.items()))

    async def ensure(self, wanted: Mapping[Place, PartitionRecord]) -> dict[Place, PartitionRecord]:
        """Make the records that are not there yet; returns what is there then.

        A partition that was given epochs before there were records keeps counting from them.
        """
        topics = {topic for topic, _ in wanted}
        held = await self._list_all(topics)
        missing = [place for place in wanted if place not in held]
        if not missing:
            return {place: held[place] for place in wanted}
        epochs = await self._old_epochs(topics)
        made = await asyncio.gather(
            *(self._create(place, wanted[place], epochs.get(place, 0)) for place in missing)
        )
        held.update(zip(missing, made, strict=True))
        return {place: held[place] for place in wanted}

    async def take_epoch(
        self, topic: int, partition: int, node: str, *, above: int = 0
    ) -> PartitionRecord:
        """Give `node` the next epoch; the record that is returned holds its replica set.

        `above` is the highest epoch that some replica has promised: should the store have
        been restored from a copy that is older, no epoch is given out a second time.
        Raises `RevisionConflict` if another was faster.
        """
        entry = await self._entry(topic, partition)
        held = _decode(entry)
        if not held.is_voter(node):
            raise FailedPrecondition(f"{node} is no voter of {entry.key}", node=node)
        epoch = max(held.epoch, above) + 1
        record = msgspec.structs.replace(held, epoch=epoch, coordinator=node)
        await self._swap(entry, record)
        return record

    async def change(
        self, topic: int, partition: int, record: PartitionRecord, expected: PartitionRecord
    ) -> PartitionRecord:
        """Replace `expected` by `record`, in the same epoch. Raises `RevisionConflict` if another
        version, or another epoch, is held by now."""
        if record.epoch != expected.epoch:
            raise ValueError("only taking an epoch changes it")
        entry = await self._entry(topic, partition)
        held = _decode(entry)
        if held != expected:
            raise RevisionConflict(
                f"{entry.key} was changed by another", key=entry.key, epoch=held.epoch
            )
        await self._swap(entry, record)
        return record

    async def set_target(
        self, topic: int, partition: int, target: Iterable[str]
    ) -> PartitionRecord:
        """Say where the replicas should go; the coordinator brings them there."""
        wanted = tuple(target)

        async def swap() -> PartitionRecord:
            entry = await self._entry(topic, partition)
            record = msgspec.structs.replace(_decode(entry), target=wanted)
            await self._swap(entry, record)
            return record

        return await until_won(swap)

    async def forget(self, topic: int) -> None:
        """Remove the records of a topic that was deleted."""
        entries = await self._store.range(_prefix(topic))
        await asyncio.gather(*(self._store.delete(entry.key) for entry in entries))

    @asynccontextmanager
    async def watch(
        self, topic: int | None = None, *, known: Iterable[Place] = ()
    ) -> AsyncIterator[AsyncIterator[RecordChange]]:
        """All records there are, or those of one topic, then each change of them.

        Partitions that the caller knows and that are gone are reported first. When it ends with
        `Unavailable`, enter it again.
        """
        keys = [_key(*place) for place in known]
        async with (
            follow(self._store, _prefix(topic), known=keys) as changes,
            aclosing(_record_changes(changes)) as told,
        ):
            yield told

    async def _list_all(self, topics: Iterable[int]) -> dict[Place, PartitionRecord]:
        lists = await asyncio.gather(*(self.list(topic) for topic in topics))
        return {place: record for part in lists for place, record in part.items()}

    async def _old_epochs(self, topics: Iterable[int]) -> dict[Place, int]:
        ranges = await asyncio.gather(*(self._store.range(f"{EPOCHS}{t}/") for t in topics))
        return {_place(entry.key): int(entry.value) for part in ranges for entry in part}

    async def _create(self, place: Place, record: PartitionRecord, epoch: int) -> PartitionRecord:
        record = msgspec.structs.replace(record, epoch=max(record.epoch, epoch))
        try:
            await self._store.put(_key(*place), encode_record(record), expected_revision=0)
        except RevisionConflict:
            return await self.get(*place)
        if epoch:
            await self._store.delete(f"{EPOCHS}{place[0]}/{place[1]}")
        return record

    async def _swap(self, entry: Versioned, record: PartitionRecord) -> None:
        await self._store.put(entry.key, encode_record(record), expected_revision=entry.revision)

    async def _entry(self, topic: int, partition: int) -> Versioned:
        entry = await self._store.get(_key(topic, partition))
        if entry is None:
            raise NotFound(f"no record of partition {partition} of topic {topic}")
        return entry


async def _record_changes(
    changes: AsyncIterator[MetadataChange],
) -> AsyncGenerator[RecordChange, None]:
    async for change in changes:
        record = None
        if change.value is not None:
            record = _decode(Versioned(change.key, change.value, change.revision, 0))
        yield RecordChange(*_place(change.key), record)


def _prefix(topic: int | None) -> str:
    return PARTITIONS if topic is None else f"{PARTITIONS}{topic}/"


def _key(topic: int, partition: int) -> str:
    return f"{PARTITIONS}{topic}/{partition}"


def _place(key: str) -> Place:
    parts: builtins.list[str] = key.split("/")
    return int(parts[1]), int(parts[2])


def _decode(entry: Versioned) -> PartitionRecord:
    try:
        return decode_record(entry.value)
    except msgspec.DecodeError as error:
        raise Corruption(f"{entry.key} is no partition record: {error}", key=entry.key) from error


class _Move(msgspec.Struct, frozen=True):
    topic: int
    partition: int
    target: tuple[str, ...]


class _WaitingMoves(msgspec.Struct, frozen=True):
    moves: tuple[_Move, ...] = ()


class Plans:
    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def waiting(self) -> list[Move]:
        """The moves that wait, in the order in which they are to begin."""
        found, _ = await self._read()
        return found

    async def replace(self, moves: Sequence[Move]) -> None:
        """Let these moves wait, and no others."""
        if not moves:
            await self._store.delete(PLAN)
            return
        await self._store.put(PLAN, _encode(moves))

    async def begun(self, move: Move) -> None:
        """Take a move that has begun out of the plan. If that is another plan by now, it is left as
        it is, unless it has the same move."""

        async def swap() -> None:
            held, revision = await self._read()
            left = [each for each in held if each != move]
            if left == held:
                return
            if left:
                await self._store.put(PLAN, _encode(left), expected_revision=revision)
            else:
                await self._store.delete(PLAN, expected_revision=revision)

        await until_won(swap)

    async def _read(self) -> tuple[list[Move], int]:
        entry = await self._store.get(PLAN)
        if entry is None:
            return [], 0
        try:
            plan = msgspec.json.decode(entry.value, type=_WaitingMoves)
        except msgspec.DecodeError as error:
            raise Corruption(f"{PLAN} cannot be read: {error}") from error
        return [Move(m.topic, m.partition, m.target) for m in plan.moves], entry.revision


def _encode(moves: Sequence[Move]) -> bytes:
    return msgspec.json.encode(_WaitingMoves(tuple(_Move(*move) for move in moves)))
