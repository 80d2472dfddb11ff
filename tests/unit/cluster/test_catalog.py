import asyncio
from pathlib import Path

import pytest

from penstock.cluster.catalog import TOPIC_ID, Catalog
from penstock.cluster.embedded import EmbeddedStore
from penstock.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from penstock.model.ids import TOPICS_MAX
from penstock.model.topic import Mode


@pytest.fixture
def store(tmp_path: Path) -> EmbeddedStore:
    return EmbeddedStore(tmp_path)


@pytest.fixture
def catalog(store: EmbeddedStore) -> Catalog:
    return Catalog(store)


async def test_a_created_topic_is_found(catalog: Catalog) -> None:
    created = await catalog.create({"name": "jobs", "mode": "max", "partitions": 4})
    assert (created.id, created.mode, created.partitions) == (1, Mode.MAX, 4)
    assert await catalog.get("jobs") == created
    assert await catalog.list() == [created]


async def test_ids_are_not_used_again(catalog: Catalog) -> None:
    first = await catalog.create({"name": "jobs"})
    await catalog.delete("jobs")
    assert (await catalog.create({"name": "jobs"})).id > first.id


async def test_many_topics_at_once_get_ids_of_their_own(catalog: Catalog) -> None:
    topics = await asyncio.gather(*(catalog.create({"name": f"t{n}"}) for n in range(150)))
    assert len({topic.id for topic in topics}) == 150


async def test_a_caller_cannot_choose_the_id(catalog: Catalog) -> None:
    assert (await catalog.create({"name": "jobs", "id": 77})).id == 1


async def test_ids_run_out(catalog: Catalog, store: EmbeddedStore) -> None:
    await store.put(TOPIC_ID, b"%d" % (TOPICS_MAX - 2))
    assert (await catalog.create({"name": "last"})).id == TOPICS_MAX - 1
    with pytest.raises(FailedPrecondition):
        await catalog.create({"name": "more"})


async def test_a_name_is_taken_once(catalog: Catalog) -> None:
    creations = (catalog.create({"name": "jobs"}) for _ in range(5))
    results = await asyncio.gather(*creations, return_exceptions=True)
    assert sum(isinstance(result, AlreadyExists) for result in results) == 4


async def test_exists_ok_compares_what_was_asked_for(catalog: Catalog) -> None:
    held = await catalog.create({"name": "jobs", "mode": "max", "partitions": 4})
    assert await catalog.create({"name": "jobs"}, exists_ok=True) == held
    assert await catalog.create({"name": "jobs", "partitions": 4}, exists_ok=True) == held
    with pytest.raises(AlreadyExists, match="partitions=4"):
        await catalog.create({"name": "jobs", "partitions": 2}, exists_ok=True)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": "../etc"}, "name"),
        ({"name": "jobs", "partitions": 0}, "partitions"),
        ({"name": "jobs", "colour": "red"}, "colour"),
        ({"name": "jobs", "k": "many"}, "k"),
    ],
)
async def test_a_bad_field_is_named(catalog: Catalog, fields: dict, field: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        await catalog.create(fields)
    assert refusal.value.field == field
    assert await catalog.list() == []


async def test_updates_at_once_both_last(catalog: Catalog) -> None:
    await catalog.create({"name": "jobs"})
    changes = ({"k": 7}, {"paused": True})
    await asyncio.gather(*(catalog.update("jobs", change) for change in changes))
    topic = await catalog.get("jobs")
    assert (topic.k, topic.paused) == (7, True)


async def test_fixed_attributes_stay(catalog: Catalog) -> None:
    await catalog.create({"name": "jobs"})
    with pytest.raises(InvalidArgument):
        await catalog.update("jobs", {"partitions": 2})


async def test_what_is_not_there(catalog: Catalog) -> None:
    for call in (catalog.get("x"), catalog.update("x", {"k": 1}), catalog.delete("x")):
        with pytest.raises(NotFound):
            await call


async def test_a_deleted_topic_takes_its_epochs_along(
    catalog: Catalog, store: EmbeddedStore
) -> None:
    topic = await catalog.create({"name": "jobs", "partitions": 2})
    for key in (f"{topic.id}/0", f"{topic.id}/1", f"{topic.id * 10}/0"):
        await store.put(f"epochs/{key}", b"1")
    assert await catalog.delete("jobs") == topic
    assert [entry.key for entry in await store.range("epochs/")] == [f"epochs/{topic.id * 10}/0"]


async def test_partitions_grow_and_never_shrink(catalog: Catalog) -> None:
    await catalog.create({"name": "jobs", "partitions": 4})
    assert (await catalog.grow("jobs", 6)).partitions == 6
    assert (await catalog.grow("jobs", 2)).partitions == 6
    with pytest.raises(InvalidArgument):
        await catalog.grow("jobs", 1 << 40)
    assert (await catalog.get("jobs")).partitions == 6
