import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.node.replica.fakes import FakeHost, Spawning

from penstock.cluster.catalog import Catalog
from penstock.cluster.embedded import EmbeddedStore
from penstock.cluster.placement import HeldRecord, Records, record_key
from penstock.cluster.store import Versioned
from penstock.errors import FailedPrecondition, PenstockError, Unavailable
from penstock.model.topic import TopicConfig
from penstock.node.cluster import control
from penstock.node.cluster.control import ClusterControl
from penstock.node.replica.ports import Key
from penstock.replication.assignment import PartitionRecord

OURS = PartitionRecord(voters=("a", "b", "c"))
THEIRS = PartitionRecord(voters=("b", "c"))
KEY = (1, 0)


class Away(EmbeddedStore):
    """A store that can be away, or answer with a refusal."""

    away = False
    answer: PenstockError = Unavailable("away")

    async def get(self, key: str) -> Versioned | None:
        self._check()
        return await super().get(key)

    async def put(self, *args: object, **how: object) -> int:
        self._check()
        return await super().put(*args, **how)  # type: ignore[arg-type]

    def _check(self) -> None:
        if self.away:
            raise self.answer


class FakeLocal:
    def __init__(self) -> None:
        self.hosts: dict[Key, FakeHost] = {}
        self.topics: list[str] = []
        self.dropped: list[object] = []
        self.renewed: list[FakeHost] = []
        self.removing: asyncio.Event | None = None  # what removing files waits for
        self.troubles: list[Exception] = []  # of the next attempts to add or change a topic

    async def add_topic(self, config: TopicConfig) -> None:
        self._fail()
        self.topics.append(config.name)

    def _fail(self) -> None:
        if self.troubles:
            raise self.troubles.pop(0)

    async def change_topic(self, config: TopicConfig) -> None:
        self._fail()
        self.topics.append(f"{config.name}/{config.max_retries}")

    async def drop_topic(self, config: TopicConfig) -> None:
        self.dropped.append(config.name)

    async def open_replica(self, config: TopicConfig, index: int, held: HeldRecord) -> FakeHost:
        return self.hosts.setdefault((config.id, index), FakeHost((config.id, index)))

    async def renew_replica(self, key: Key) -> None:
        self.renewed.append(self.hosts.pop(key))

    async def drop_replica(self, key: Key) -> None:
        self.hosts.pop(key, None)
        if self.removing is not None:
            await self.removing.wait()
        self.dropped.append(key)


class Scene:
    """The control of node a over a store that it shares with others."""

    def __init__(self, folder: Path) -> None:
        self.store = Away(folder)
        self.catalog, self.records = Catalog(self.store), Records(self.store)
        self.local, self.spawn = FakeLocal(), Spawning()
        self.control = ClusterControl(
            "a", store=self.store, records=self.records, catalog=self.catalog, local=self.local,
            ages=lambda: {"a": 1}, deleted=self._was_deleted, spawn=self.spawn,
        )  # fmt: skip
        self.lost = False  # the store has not what it once had

    async def _was_deleted(self, topic: int) -> bool:
        return not self.lost

    async def start(self, *records: PartitionRecord) -> None:
        await self.catalog.create({"name": "jobs", "partitions": max(1, len(records))})
        await self.records.ensure({(1, index): record for index, record in enumerate(records)})
        self._running = asyncio.get_running_loop().create_task(self.control.run())
        await self.control.ready()
        await self.spawn.done()

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self.spawn.close()
        await self.store.close()

    async def moved(self, record: PartitionRecord) -> None:
        """The record is another one now, and the control has heard of it."""
        held = await self.records.get(KEY)
        self.control.on_record(KEY, await self.records.change(KEY, record, held.revision))

    def told(self, kind: str) -> list[tuple[object, ...]]:
        return [each for each in self.local.hosts[KEY].told if each[0] == kind]


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    await scene.close()


async def test_a_replica_is_opened_where_the_record_names_this_node(scene: Scene) -> None:
    await scene.start(OURS, THEIRS)
    assert scene.local.topics == ["jobs"]
    assert list(scene.local.hosts) == [KEY]
    assert [each[0] for each in scene.local.hosts[KEY].told] == ["members", "record"]


async def test_a_replica_is_opened_when_the_record_comes_to_name_this_node(scene: Scene) -> None:
    await scene.start(THEIRS)
    learning = msgspec.structs.replace(THEIRS, learners=("a",))
    changed = scene.control.changed(KEY)
    _, revision = await scene.records.get(KEY)
    await asyncio.gather(changed, scene.records.change(KEY, learning, revision))
    await scene.spawn.done()
    assert list(scene.local.hosts) == [KEY]


async def test_a_version_is_told_once_and_an_older_one_never(scene: Scene) -> None:
    await scene.start(OURS)
    held = scene.control.records[KEY]
    scene.control.on_record(KEY, held)
    scene.control.on_record(KEY, HeldRecord(THEIRS, held.revision - 1))
    assert scene.told("record") == [("record", 0, held.revision)]
    scene.control.on_record(KEY, HeldRecord(OURS, held.revision + 1))
    assert len(scene.told("record")) == 2


async def test_an_epoch_that_is_won_is_told(scene: Scene) -> None:
    await scene.start(OURS)
    scene.control.take_epoch(KEY)
    await scene.spawn.done()
    assert [epoch for _, epoch, _ in scene.told("taken")] == [1]
    record = (await scene.records.get(KEY)).record
    assert (record.epoch, record.coordinator) == (1, "a")
    assert scene.control.coordinator(KEY) == "a"


async def test_an_epoch_is_above_what_was_promised(scene: Scene) -> None:
    await scene.start(OURS)
    scene.local.hosts[KEY].replica.promised = 41
    scene.control.take_epoch(KEY)
    await scene.spawn.done()
    assert (await scene.records.get(KEY)).record.epoch == 42


async def test_who_has_not_heard_of_the_last_epoch_takes_none(scene: Scene) -> None:
    await scene.start(OURS)
    known = scene.control.records[KEY]
    await scene.records.take_epoch(KEY, await scene.records.get(KEY), node="b")
    scene.control.records[KEY] = known  # the news is still on its way
    scene.control.take_epoch(KEY)
    await scene.spawn.done()
    assert scene.told("taken") == []
    assert (await scene.records.get(KEY)).record.coordinator == "b"


async def test_a_node_that_resigned_takes_nothing_back(scene: Scene) -> None:
    await scene.start(OURS)
    scene.control.quiet.add(KEY)
    scene.control.take_epoch(KEY)
    await scene.spawn.done()
    assert (await scene.records.get(KEY)).record.epoch == 0


@pytest.mark.parametrize("answer", [Unavailable("away"), FailedPrecondition("refused")])
async def test_a_store_that_is_away_or_refuses_changes_nothing(
    scene: Scene, answer: PenstockError
) -> None:
    await scene.start(OURS)
    scene.store.away, scene.store.answer = True, answer
    scene.control.take_epoch(KEY)
    scene.control.change_record(KEY, THEIRS, scene.control.records[KEY].revision)
    await scene.spawn.done()
    assert scene.told("taken") == [] and scene.told("change lost") == [("change lost",)]


async def test_a_record_is_changed_only_if_it_is_the_one_known(scene: Scene) -> None:
    await scene.start(OURS)
    revision = scene.control.records[KEY].revision
    scene.control.change_record(KEY, msgspec.structs.replace(OURS, target=("b",)), revision)
    await scene.spawn.done()
    assert (await scene.records.get(KEY)).record.target == ("b",)
    scene.control.change_record(KEY, OURS, revision)
    await scene.spawn.done()
    assert (await scene.records.get(KEY)).record.target == ("b",)
    assert scene.told("change lost") == [("change lost",)]


async def test_a_replica_that_was_moved_away_is_dropped(scene: Scene) -> None:
    await scene.start(OURS)
    scene.control.retire(KEY)
    await scene.spawn.done()
    assert scene.local.dropped == []  # the record still names us
    await scene.moved(THEIRS)
    scene.control.retire(KEY)
    await scene.spawn.done()
    assert scene.local.dropped == [KEY]


async def test_a_replica_that_has_come_back_since_is_kept(scene: Scene) -> None:
    await scene.start(OURS)
    back = msgspec.structs.replace(OURS, epoch=7)
    old = scene.control.records[KEY].revision + 1
    await scene.moved(THEIRS)
    await scene.moved(back)
    scene.control.records[KEY] = HeldRecord(THEIRS, old)  # a watch that lags
    told = len(scene.told("record"))
    scene.control.retire(KEY)
    await scene.spawn.done()
    assert scene.local.dropped == []
    assert [epoch for _, epoch, _ in scene.told("record")[told:]] == [back.epoch]


async def test_a_replica_stays_until_the_store_can_be_asked(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "RETRY_S", 0.01)
    await scene.start(OURS)
    await scene.moved(THEIRS)
    scene.store.away, scene.store.answer = True, FailedPrecondition("refused")
    scene.control.retire(KEY)
    await asyncio.sleep(0.1)
    assert scene.local.dropped == []
    scene.store.away = False
    await scene.spawn.done()
    assert scene.local.dropped == [KEY]


async def test_the_files_of_a_deleted_topic_are_left_to_its_deletion(scene: Scene) -> None:
    await scene.start(OURS)
    scene.control.records[KEY] = HeldRecord(THEIRS, scene.control.records[KEY].revision + 1)
    await scene.store.delete(record_key(KEY))
    scene.control.retire(KEY)
    await scene.spawn.done()
    assert scene.local.dropped == []


async def test_a_replica_that_hears_twice_that_it_is_moved_away_is_dropped_once(
    scene: Scene,
) -> None:
    await scene.start(OURS)
    await scene.moved(THEIRS)
    scene.control.retire(KEY)
    scene.control.retire(KEY)
    await scene.spawn.done()
    assert scene.local.dropped == [KEY]


async def test_a_replica_that_comes_back_is_opened_when_its_old_files_are_gone(
    scene: Scene,
) -> None:
    await scene.start(OURS)
    scene.local.removing = asyncio.Event()
    await scene.moved(THEIRS)
    scene.control.retire(KEY)
    async with asyncio.timeout(60):
        while scene.local.hosts:
            await asyncio.sleep(0)
    await scene.moved(OURS)
    assert (scene.local.hosts, scene.local.dropped) == ({}, [])
    scene.local.removing.set()
    await scene.spawn.done()
    assert (list(scene.local.hosts), scene.local.dropped) == ([KEY], [KEY])


UUIDS = {"a": "u1", "b": "u2", "c": "u3"}
SERVED = PartitionRecord(voters=("a", "b", "c"), epoch=4, coordinator="b", uuids=UUIDS)


async def renew(scene: Scene, record: PartitionRecord) -> PartitionRecord:
    """Ask for a new replica in place of disk u1, because epoch 4 is served; the record then."""
    await scene.start(record)
    scene.control.renew(KEY, uuid="u1", epoch=4)
    scene.control.renew(KEY, uuid="u1", epoch=4)
    await scene.spawn.done()
    return (await scene.records.get(KEY)).record


async def test_a_disk_that_is_given_up_is_counted_on_no_more(scene: Scene) -> None:
    record = await renew(scene, SERVED)
    assert record == msgspec.structs.replace(SERVED, uuids={"b": "u2", "c": "u3"})
    [old] = scene.local.renewed
    assert list(scene.local.hosts) == [KEY] and scene.local.hosts[KEY] is not old
    assert scene.told("record")[-1] == ("record", 4, scene.control.records[KEY].revision)


async def test_a_disk_that_does_not_count_is_given_up_without_a_change(scene: Scene) -> None:
    unnamed = msgspec.structs.replace(SERVED, uuids={**UUIDS, "a": "u9"})
    assert await renew(scene, unnamed) == unnamed
    assert len(scene.local.renewed) == 1


KEPT = {
    "another epoch was taken": {"epoch": 5},
    "it was taken by us": {"coordinator": "a"},
    "the coordinator is replaced": {"voters": ("a",), "uuids": {"a": "u1"}},
    "another replica starts over": {"uuids": {"a": "u1", "b": "u2"}},
}


@pytest.mark.parametrize("change", KEPT.values(), ids=KEPT)
async def test_a_disk_is_not_given_up_when(scene: Scene, change: dict[str, Any]) -> None:
    record = msgspec.structs.replace(SERVED, **change)
    assert await renew(scene, record) == record
    assert scene.local.renewed == []


async def test_a_disk_is_not_given_up_while_the_store_is_away(scene: Scene) -> None:
    await scene.start(SERVED)
    scene.store.away = True
    scene.control.renew(KEY, uuid="u1", epoch=4)
    await scene.spawn.done()
    assert scene.local.renewed == []
    scene.store.away = False
    scene.control.renew(KEY, uuid="u1", epoch=4)
    await scene.spawn.done()
    assert len(scene.local.renewed) == 1


async def test_topics_are_followed(scene: Scene) -> None:
    await scene.start(OURS)
    await scene.catalog.update("jobs", {"max_retries": 7})
    await scene.catalog.delete("jobs")
    async with asyncio.timeout(60):
        while not scene.local.dropped:
            await asyncio.sleep(0.01)
    assert scene.local.topics == ["jobs", "jobs/7"] and scene.local.dropped == ["jobs"]
    assert scene.control.records == {}


@pytest.mark.parametrize("trouble", [OSError("no space"), Unavailable("not now")])
async def test_a_topic_that_could_not_be_added_is_added_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    monkeypatch.setattr(control, "RETRY_S", 0.01)
    scene.local.troubles = [trouble] * 2
    async with asyncio.timeout(60):
        await scene.start(OURS)
        await scene.catalog.create({"name": "later"})
        while sorted(scene.local.topics) != ["jobs", "later"] or KEY not in scene.local.hosts:
            await asyncio.sleep(0.01)
        scene.local.troubles = [trouble]
        await scene.catalog.update("jobs", {"max_retries": 7})
        while scene.local.topics[2:] != ["jobs/7"]:
            await asyncio.sleep(0.01)
    assert scene.control.topics[1].max_retries == 7


async def test_the_trouble_of_a_topic_is_not_that_of_others(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.local.troubles = [OSError("no space")]
    async with asyncio.timeout(60):
        await scene.start(OURS)  # and is ready
        await scene.catalog.create({"name": "later"})
        while scene.local.topics != ["later"]:
            await asyncio.sleep(0.01)
        await scene.catalog.delete("jobs")
        while scene.local.dropped != ["jobs"]:
            await asyncio.sleep(0.01)
    monkeypatch.setattr(control, "RETRY_S", 0.0)
    await scene.catalog.create({"name": "last"})
    async with asyncio.timeout(60):
        while scene.local.topics != ["later", "last"]:
            await asyncio.sleep(0.01)


async def test_what_a_store_has_lost_is_kept(scene: Scene) -> None:
    await scene.start(OURS)
    scene.lost = True
    await scene.catalog.delete("jobs")
    await scene.catalog.create({"name": "later"})
    async with asyncio.timeout(60):
        while scene.local.topics != ["jobs", "later"]:
            await asyncio.sleep(0.01)
    assert scene.local.dropped == [] and scene.control.records[KEY].record == OURS
