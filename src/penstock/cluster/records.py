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
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from penstock.cluster.placement import Move, Place
from penstock.cluster.store import MetadataChange, MetadataStore, Versioned, until_won
from penstock.errors import Corruption, FailedPrecondition, NotFound, RevisionConflict
from penstock.replication.assignment import PartitionRecord, decode_record, encode_record

PARTITIONS: Final = "partitions/"
EPOCHS: Final = "epochs/"  # where epochs were before there were records
PLAN: Final = "cluster/plan"
MOVES_MAX: Final = 2000  # a plan is one value of the store, whose size has a bound


class HeldRecord(NamedTuple):
    """A partition's record, and the revision that a change of it has to name."""

    record: PartitionRecord
    revision: int


class Records:
    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def get(self, place: Place) -> HeldRecord:
        entry = await self._store.get(record_key(place))
        if entry is None:
            raise NotFound(f"no record of partition {place[1]} of topic {place[0]}")
        return held_record(entry)

    async def list(self, topic: int | None = None) -> dict[Place, PartitionRecord]:
        """All records, or those of one topic, in the order of topics and partitions."""
        found = {
            place_of(entry.key): held_record(entry).record
            for entry in await self._store.range(_prefix(topic))
        }
        return dict(sorted(found.items()))

    async def ensure(self, wanted: Mapping[Place, PartitionRecord]) -> None:
        """Make the records that are not there yet. A partition that was given epochs before there
        were records keeps counting from them."""
        topics = {topic for topic, _ in wanted}
        held = await asyncio.gather(*(self.list(topic) for topic in topics))
        missing = wanted.keys() - {place for part in held for place in part}
        if missing:
            epochs = await self._old_epochs(topics)
            await asyncio.gather(
                *(self._create(place, wanted[place], epochs.get(place, 0)) for place in missing)
            )

    async def take_epoch(
        self, place: Place, held: HeldRecord, *, node: str, above: int = 0
    ) -> HeldRecord:
        """Give `node` the next epoch; the record that is returned holds its replica set.

        `above` is the highest epoch that some replica has promised: should the store have
        been restored from a copy that is older, no epoch is given out a second time.
        """
        if not held.record.is_voter(node):
            raise FailedPrecondition(f"{node} is no voter of {record_key(place)}", node=node)
        epoch = max(held.record.epoch, above) + 1
        taken = msgspec.structs.replace(held.record, epoch=epoch, coordinator=node)
        return await self.change(place, taken, held.revision)

    async def change(self, place: Place, record: PartitionRecord, revision: int) -> HeldRecord:
        """Write the record. Raises `RevisionConflict` if what is there has another revision."""
        value = encode_record(record)
        swapped = await self._store.put(record_key(place), value, expected_revision=revision)
        return HeldRecord(record, swapped)

    async def set_target(self, place: Place, target: tuple[str, ...]) -> None:
        """Say where the replicas should go; the coordinator brings them there."""

        async def swap() -> None:
            held = await self.get(place)
            record = msgspec.structs.replace(held.record, target=target)
            await self.change(place, record, held.revision)

        await until_won(swap)

    async def forget(self, topic: int) -> None:
        entries = await self._store.range(_prefix(topic))
        await asyncio.gather(*(self._store.delete(entry.key) for entry in entries))

    async def _old_epochs(self, topics: Iterable[int]) -> dict[Place, int]:
        ranges = await asyncio.gather(*(self._store.range(f"{EPOCHS}{t}/") for t in topics))
        return {place_of(entry.key): int(entry.value) for part in ranges for entry in part}

    async def _create(self, place: Place, record: PartitionRecord, epoch: int) -> None:
        record = msgspec.structs.replace(record, epoch=max(record.epoch, epoch))
        try:
            await self.change(place, record, 0)
        except RevisionConflict:
            return  # another has made it
        if epoch:
            await self._store.delete(f"{EPOCHS}{place[0]}/{place[1]}")


def _prefix(topic: int | None) -> str:
    return PARTITIONS if topic is None else f"{PARTITIONS}{topic}/"


def record_key(place: Place) -> str:
    return f"{PARTITIONS}{place[0]}/{place[1]}"


def place_of(key: str) -> Place:
    _, topic, partition = key.split("/")
    return int(topic), int(partition)


def held_record(entry: Versioned | MetadataChange) -> HeldRecord:
    """What is stored; raises `Corruption` if that is no record."""
    try:
        return HeldRecord(decode_record(entry.value or b""), entry.revision)
    except msgspec.DecodeError as error:
        raise Corruption(f"{entry.key} is no partition record: {error}", key=entry.key) from error


class _Plan(msgspec.Struct, frozen=True):
    moves: list[Move] = []


class Plans:
    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def waiting(self) -> list[Move]:
        """The moves that wait, in the order in which they are to begin."""
        return (await self._read())[0]

    async def replace(self, moves: list[Move]) -> None:
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
            return msgspec.json.decode(entry.value, type=_Plan).moves, entry.revision
        except msgspec.DecodeError as error:
            raise Corruption(f"{PLAN} cannot be read: {error}") from error


def _encode(moves: list[Move]) -> bytes:
    return msgspec.json.encode(_Plan(moves))
