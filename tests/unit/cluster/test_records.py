import asyncio

import msgspec
import pytest
from tests.unit.cluster.lines import OpenEtcd

from penstock.cluster.catalog import Catalog
from penstock.cluster.embedded import EmbeddedStore
from penstock.cluster.placement import MOVES_MAX, PLAN, HeldRecord, Move, Plans, Records
from penstock.cluster.store import VALUE_BYTES_MAX, MetadataStore
from penstock.errors import Corruption, FailedPrecondition, NotFound, RevisionConflict
from penstock.replication.assignment import PartitionRecord

THREE = PartitionRecord(voters=("a", "b", "c"))


@pytest.fixture
async def records(either_store: MetadataStore) -> Records:
    records = Records(either_store)
    await records.ensure({(1, 0): THREE})
    return records


async def take(
    records: Records, node: str, *, above: int = 0, place: tuple[int, int] = (1, 0)
) -> HeldRecord:
    return await records.take_epoch(place, await records.get(place), node=node, above=above)


async def test_whoever_takes_an_epoch_knows_its_replica_set(records: Records) -> None:
    taken = await take(records, "b")
    assert taken.record == msgspec.structs.replace(THREE, epoch=1, coordinator="b")
    assert await records.get((1, 0)) == taken
    assert (await take(records, "c")).record.epoch == 2


async def test_takers_on_different_nodes_never_get_the_same_epoch(open_etcd: OpenEtcd) -> None:
    first, second = Records(open_etcd()), Records(open_etcd())
    await first.ensure({(1, 0): THREE})
    takers = (take(r, n) for r, n in ((first, "a"), (second, "b")) for _ in range(10))
    results = await asyncio.gather(*takers, return_exceptions=True)
    epochs = [result.record.epoch for result in results if isinstance(result, HeldRecord)]
    assert sorted(epochs) == list(range(1, len(epochs) + 1))
    assert all(isinstance(r, HeldRecord | RevisionConflict) for r in results)


async def test_an_epoch_is_above_all_that_was_promised(records: Records) -> None:
    assert (await take(records, "a", above=41)).record.epoch == 42


async def test_only_voters_take_epochs(records: Records) -> None:
    with pytest.raises(FailedPrecondition):
        await take(records, "x")
    with pytest.raises(NotFound):
        await take(records, "a", place=(1, 1))


async def test_the_holder_changes_the_set(records: Records) -> None:
    taken = await take(records, "a")
    wider = msgspec.structs.replace(taken.record, joint=("a", "b", "d"))
    changed = await records.change((1, 0), wider, taken.revision)
    assert changed.record == wider
    assert await records.get((1, 0)) == changed


async def test_a_change_loses_against_a_newer_epoch(records: Records) -> None:
    taken = await take(records, "a")
    newer = await take(records, "b")
    wider = msgspec.structs.replace(taken.record, learners=("d",))
    with pytest.raises(RevisionConflict) as lost:
        await records.change((1, 0), wider, taken.revision)
    assert lost.value.details["revision"] == newer.revision
    assert await records.get((1, 0)) == newer


async def test_racing_changes_do_not_overwrite_each_other(records: Records) -> None:
    wishes = [msgspec.structs.replace(THREE, learners=(node,)) for node in "def"]
    held = await records.get((1, 0))
    changes = (records.change((1, 0), wish, held.revision) for wish in wishes)
    results = await asyncio.gather(*changes, return_exceptions=True)
    assert sum(isinstance(result, RevisionConflict) for result in results) == 2
    assert await records.get((1, 0)) in results


async def test_a_target_leaves_the_rest_alone(records: Records) -> None:
    taken = await take(records, "a")
    await records.set_target((1, 0), ("a", "b", "d"))
    record = (await records.get((1, 0))).record
    assert record == msgspec.structs.replace(taken.record, target=("a", "b", "d"))


async def test_what_is_there_is_not_made_again(records: Records) -> None:
    taken = await take(records, "a")
    other = PartitionRecord(voters=("x",))
    await records.ensure({(1, 0): other, (1, 1): other, (12, 0): other})
    assert await records.list() == {(1, 0): taken.record, (1, 1): other, (12, 0): other}
    assert list(await records.list()) == [(1, 0), (1, 1), (12, 0)]
    assert list(await records.list(1)) == [(1, 0), (1, 1)]


async def test_forgetting_takes_one_topics_records(records: Records) -> None:
    await records.ensure({(1, 1): THREE, (12, 0): THREE})
    await records.forget(1)
    assert list(await records.list()) == [(12, 0)]


async def test_epochs_of_before_are_carried_on(either_store: MetadataStore) -> None:
    records = Records(either_store)
    await either_store.put("epochs/7/0", b"3")
    alone = PartitionRecord(voters=("me",))
    await records.ensure({(7, 0): alone, (7, 1): alone})
    assert [record.epoch for record in (await records.list()).values()] == [3, 0]
    assert (await take(records, "me", place=(7, 0))).record.epoch == 4
    assert await either_store.range("epochs/") == []


async def test_a_deleted_topic_takes_its_records_along(either_store: MetadataStore) -> None:
    catalog, records = Catalog(either_store), Records(either_store)
    topic = await catalog.create({"name": "jobs", "partitions": 2})
    await records.ensure({(topic.id, n): THREE for n in range(2)} | {(topic.id * 10, 0): THREE})
    await catalog.delete("jobs")
    assert list(await records.list()) == [(topic.id * 10, 0)]


async def test_many_epochs_at_once_cost_few_writes(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node with a thousand partitions opens as fast as it did."""
    writes = []
    stored = EmbeddedStore._write_staged

    async def counted(self: EmbeddedStore) -> None:
        writes.append(1)
        await stored(self)

    monkeypatch.setattr(EmbeddedStore, "_write_staged", counted)
    records = Records(EmbeddedStore(tmp_path))
    places = {(1, n): PartitionRecord(voters=("me",)) for n in range(200)}
    await records.ensure(places)
    await asyncio.gather(*(take(records, "me", place=place) for place in places))
    assert len(writes) <= 6


async def test_a_record_that_cannot_be_read_is_named(either_store: MetadataStore) -> None:
    await either_store.put("partitions/1/0", b'{"voters":[]}')
    with pytest.raises(Corruption, match="partitions/1/0"):
        await Records(either_store).get((1, 0))


async def test_records_of_a_deleted_topic_are_forgotten(records: Records) -> None:
    await records.ensure({(1, 1): THREE, (11, 0): THREE})
    await records.forget(1)
    assert list(await records.list()) == [(11, 0)]


FIRST, SECOND, LAST = (Move(1, partition, ("a", "b")) for partition in range(3))


async def test_moves_wait_in_order_until_they_begin(either_store: MetadataStore) -> None:
    plans = Plans(either_store)
    assert await plans.waiting() == []
    await plans.replace([FIRST, SECOND, LAST])
    await plans.begun(SECOND)
    assert await plans.waiting() == [FIRST, LAST]
    await plans.begun(FIRST)
    await plans.begun(LAST)
    assert await plans.waiting() == [] and await either_store.get(PLAN) is None


async def test_a_later_plan_takes_the_place_of_an_earlier_one(either_store: MetadataStore) -> None:
    plans = Plans(either_store)
    await plans.replace([FIRST, SECOND])
    await plans.replace([LAST])
    await plans.begun(FIRST)  # by a node that has not heard of the later one
    await plans.begun(Move(LAST.topic, LAST.partition, ("b", "a")))
    assert await plans.waiting() == [LAST]
    await plans.replace([])
    assert await plans.waiting() == []


async def test_the_longest_plan_fits(either_store: MetadataStore) -> None:
    longest = tuple(f"{number}{'n' * 63}" for number in range(5))
    moves = [Move(2**31, partition, longest) for partition in range(MOVES_MAX)]
    await Plans(either_store).replace(moves)
    entry = await either_store.get(PLAN)
    assert entry is not None and len(entry.value) <= VALUE_BYTES_MAX
    assert await Plans(either_store).waiting() == moves


async def test_a_plan_that_cannot_be_read_is_said_so(either_store: MetadataStore) -> None:
    await either_store.put(PLAN, b"{")
    with pytest.raises(Corruption, match="cluster/plan"):
        await Plans(either_store).waiting()
