"""What every metadata store promises; see penstock.cluster.store.

Leases are not among it: who else should notice that a node alone is gone? Only a `LeasingStore` has
them, which is etcd; its leases are in tests/unit/cluster/test_etcd.py.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from penstock.cluster.store import (
    KEY_BYTES_MAX,
    VALUE_BYTES_MAX,
    ChangeQueue,
    MetadataChange,
    MetadataStore,
    until_won,
)
from penstock.errors import InvalidArgument, RevisionConflict, Unavailable

OpenStore = Callable[[], Awaitable[MetadataStore]]


async def test_what_was_put_is_read_with_its_revisions(store: MetadataStore) -> None:
    first = await store.put("topics/a", b"1")
    second = await store.put("topics/a", b"2")
    entry = await store.get("topics/a")
    assert entry == ("topics/a", b"2", second, first)
    assert second > first > 0


async def test_what_was_never_put_is_not_there(store: MetadataStore) -> None:
    assert await store.get("topics/a") is None
    assert await store.range("topics/") == []
    assert await store.delete("topics/a") is False


async def test_a_range_is_by_prefix_and_sorted(store: MetadataStore) -> None:
    for key in ("topics/b", "topics/a", "topic", "topics", "topicsx/c", "keys/a"):
        await store.put(key, b"x")
    assert [entry.key for entry in await store.range("topics/")] == ["topics/a", "topics/b"]


async def test_revisions_increase_over_all_keys(store: MetadataStore) -> None:
    revisions = [await store.put(key, b"") for key in ("a", "b", "a", "c")]
    await store.delete("a")
    revisions.append(await store.put("a", b""))
    assert revisions == sorted(set(revisions))


async def test_a_swap_needs_the_revision_that_was_read(store: MetadataStore) -> None:
    revision = await store.put("a", b"1", expected_revision=0)
    assert await store.put("a", b"2", expected_revision=revision) > revision
    with pytest.raises(RevisionConflict):
        await store.put("a", b"3", expected_revision=revision)
    entry = await store.get("a")
    assert entry is not None and entry.value == b"2"


async def test_revision_zero_means_that_there_is_none(store: MetadataStore) -> None:
    with pytest.raises(RevisionConflict):
        await store.put("a", b"1", expected_revision=7)
    await store.put("a", b"1", expected_revision=0)
    with pytest.raises(RevisionConflict):
        await store.put("a", b"2", expected_revision=0)
    await store.delete("a")
    await store.put("a", b"3", expected_revision=0)


async def test_a_delete_can_be_conditional(store: MetadataStore) -> None:
    revision = await store.put("a", b"1")
    with pytest.raises(RevisionConflict):
        await store.delete("a", expected_revision=revision + 1)
    assert await store.get("a") is not None
    assert await store.delete("a", expected_revision=revision) is True
    assert await store.get("a") is None


async def test_a_key_that_is_made_again_has_a_new_creation(store: MetadataStore) -> None:
    await store.put("a", b"1")
    await store.delete("a")
    revision = await store.put("a", b"2")
    entry = await store.get("a")
    assert entry is not None and entry.revision_created == revision


async def test_racing_swaps_lose_no_update(store: MetadataStore) -> None:
    async def increase() -> None:
        entry = await store.get("n")
        value, revision = (int(entry.value), entry.revision) if entry else (0, 0)
        await store.put("n", b"%d" % (value + 1), expected_revision=revision)

    await asyncio.gather(*(until_won(increase) for _ in range(20)))
    entry = await store.get("n")
    assert entry is not None and entry.value == b"20"


async def test_one_of_many_creations_wins(store: MetadataStore) -> None:
    puts = (store.put("a", b"%d" % n, expected_revision=0) for n in range(20))
    results = await asyncio.gather(*puts, return_exceptions=True)
    lost = [result for result in results if isinstance(result, RevisionConflict)]
    assert len(lost) == 19


async def test_all_is_there_after_a_restart(store: MetadataStore, open_store: OpenStore) -> None:
    await store.put("a", b"\x00\xff")
    await store.put("b", b"2")
    await store.delete("b")
    before = await store.range("")
    await store.close()
    again = await open_store()
    assert await again.range("") == before
    assert await again.put("c", b"") > before[0].revision + 2
    await again.close()


async def test_a_watch_reports_changes_in_order(store: MetadataStore) -> None:
    await store.put("topics/old", b"0")
    async with store.watch("topics/") as changes:
        first = await store.put("topics/a", b"1")
        await store.put("keys/a", b"not of interest")
        second = await store.put("topics/a", b"2")
        await store.delete("topics/a")
        seen = [await anext(changes) for _ in range(3)]
    assert seen[0] == MetadataChange("topics/a", b"1", first)
    assert seen[1] == MetadataChange("topics/a", b"2", second)
    assert seen[2].value is None and seen[2].revision > second


async def test_watches_are_independent(store: MetadataStore) -> None:
    async with store.watch("") as all_changes:
        async with store.watch("a") as some_changes:
            await store.put("a", b"1")
            assert (await anext(some_changes)).key == "a"
        await store.put("b", b"1")
        assert [(await anext(all_changes)).key for _ in range(2)] == ["a", "b"]


async def test_a_watch_waits_for_the_next_change(store: MetadataStore) -> None:
    async with store.watch("a") as changes:
        waiting = asyncio.ensure_future(anext(changes))
        await store.put("b", b"")
        assert not waiting.done()
        await store.put("a", b"")
        assert (await waiting).key == "a"


async def _take_half(store: MetadataStore, changes: AsyncIterator[MetadataChange]) -> None:
    """Two come for one that is taken: the last of those before may still be on their way."""
    while True:
        await store.put("n/0", b"")
        await store.put("n/0", b"")
        await anext(changes)


async def test_a_watch_that_falls_behind_is_told(
    store: MetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChangeQueue, "limit", 100)
    async with store.watch("n/") as changes:
        await asyncio.gather(*(store.put(f"n/{n}", b"") for n in range(101)))
        with pytest.raises(Unavailable):
            await _take_half(store, changes)


async def test_a_refused_change_is_not_watched(store: MetadataStore) -> None:
    async with store.watch("a") as changes:
        with pytest.raises(RevisionConflict):
            await store.put("a", b"lost", expected_revision=9)
        await store.put("a", b"won")
        assert (await anext(changes)).value == b"won"


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("", b"", "key"),
        ("k" * (KEY_BYTES_MAX + 1), b"", "key"),
        ("k", bytes(VALUE_BYTES_MAX + 1), "value"),
    ],
    ids=["empty key", "long key", "long value"],
)
async def test_bounds_are_named(store: MetadataStore, key: str, value: bytes, field: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        await store.put(key, value)
    assert refusal.value.field == field


async def test_a_closed_store_refuses_changes(store: MetadataStore) -> None:
    await store.close()
    with pytest.raises(Unavailable):
        await store.put("a", b"")
