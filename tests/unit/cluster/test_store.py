"""Topics and keys as nodes see them that did not change them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.cluster.lines import Line, OpenEtcd

from penstock.cluster import store as repeating
from penstock.cluster.catalog import Catalog, TopicChange
from penstock.cluster.embedded import EmbeddedStore
from penstock.cluster.etcd import EtcdStore
from penstock.cluster.keys import KeyRing
from penstock.cluster.store import MetadataChange, MetadataStore, Versioned, follow, repeat
from penstock.errors import FailedPrecondition, PenstockError, StorageFailed, Unavailable

Spawn = Callable[[Awaitable[None]], asyncio.Future[None]]


async def test_what_is_there_comes_before_what_changes(either_store: MetadataStore) -> None:
    old = await either_store.put("n/old", b"1")
    async with asyncio.timeout(60), follow(either_store, "n/", known=["n/x"]) as story:
        new = await either_store.put("n/new", b"2")
        assert [await anext(story) for _ in range(3)] == [
            MetadataChange("n/x", None, 0),
            MetadataChange("n/old", b"1", old),
            MetadataChange("n/new", b"2", new),
        ]


class BusyStore(EmbeddedStore):
    """Somebody writes just before a range is read."""

    async def range(self, prefix: str) -> list[Versioned]:
        await self.put("n/a", b"1")
        return await super().range(prefix)


async def test_what_was_read_is_not_told_again(tmp_path: Path) -> None:
    store = BusyStore(tmp_path)
    async with asyncio.timeout(60), follow(store, "n/") as story:
        assert (await anext(story)).value == b"1"
        await store.put("n/a", b"2")
        assert (await anext(story)).value == b"2"


async def test_topics_made_elsewhere_are_heard_of(either_store: MetadataStore) -> None:
    catalog = Catalog(either_store)
    old = await catalog.create({"name": "old"})
    async with asyncio.timeout(60), catalog.watch() as changes:
        assert await anext(changes) == (old, False)
        new = await catalog.create({"name": "new"})
        assert await anext(changes) == (new, False)
        paused = await catalog.update("new", {"paused": True})
        assert await anext(changes) == (paused, False)
        await catalog.delete("new")
        assert await anext(changes) == TopicChange(paused, deleted=True)


async def test_a_watch_begins_with_how_topics_differ(either_store: MetadataStore) -> None:
    catalog = Catalog(either_store)
    names = ("deleted", "remade", "same", "updated")
    known = [await catalog.create({"name": name}) for name in names]
    await catalog.delete("deleted")
    await catalog.delete("remade")
    remade = await catalog.create({"name": "remade"})
    updated = await catalog.update("updated", {"k": 9})
    async with asyncio.timeout(60), catalog.watch(known) as changes:
        seen = [await anext(changes) for _ in range(4)]
        assert seen == [
            (known[0], True),
            (known[1], True),
            (remade, False),
            (updated, False),
        ]


async def test_ids_are_shared_by_all_nodes(open_etcd: OpenEtcd) -> None:
    catalogs = [Catalog(open_etcd()) for _ in range(2)]
    creations = (catalogs[n % 2].create({"name": f"t{n}"}) for n in range(20))
    topics = await asyncio.gather(*creations)
    assert sorted(topic.id for topic in topics) == list(range(1, 21))


async def test_a_revocation_is_heard_of_on_other_nodes(open_etcd: OpenEtcd, spawn: Spawn) -> None:
    revoked: asyncio.Queue[str] = asyncio.Queue()
    here, there = KeyRing(open_etcd()), KeyRing(open_etcd(), on_revoked=revoked.put_nowait)
    good, bad = await here.create("good"), await here.create("bad")
    await there.load()
    spawn(there.run())
    assert there.verify(bad.text) == bad.record.id
    await here.revoke(bad.record.id)
    async with asyncio.timeout(60):
        assert await revoked.get() == bad.record.id
    assert there.live(good.record.id) and not there.live(bad.record.id)
    await here.revoke(bad.record.id)
    assert revoked.empty()


async def test_a_revocation_while_a_node_was_cut_off_is_heard_of_after(
    open_etcd: OpenEtcd, line: Line, far_store: EtcdStore, spawn: Spawn
) -> None:
    revoked: asyncio.Queue[str] = asyncio.Queue()
    here, far = KeyRing(open_etcd()), KeyRing(far_store, on_revoked=revoked.put_nowait)
    key = await here.create("one")
    await far.load()
    spawn(far.run())
    await line.cut()
    await here.revoke(key.record.id)
    assert far.verify(key.text)  # it cannot know
    await line.mend()
    async with asyncio.timeout(60):
        assert await revoked.get() == key.record.id


async def test_a_revocation_here_is_told_here(either_store: MetadataStore) -> None:
    revoked = list[str]()
    ring = KeyRing(either_store, on_revoked=revoked.append)
    key = await ring.create("one")
    await ring.revoke(key.record.id)
    assert revoked == [key.record.id]


class Work:
    """Fails as it is told to, then waits for ever."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self._outcomes: Iterator[Exception | None] = iter(outcomes)
        self.through = asyncio.Event()

    async def __call__(self) -> None:
        for outcome in self._outcomes:
            if outcome is None:
                return
            raise outcome
        self.through.set()
        await asyncio.Event().wait()


async def through(*outcomes: Exception | None) -> None:
    """Until the work has come through all of them."""
    work = Work(*outcomes)
    running = asyncio.ensure_future(repeat(work, trouble="trouble", pause_s=0))
    async with asyncio.timeout(60):
        await work.through.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    "error", [Unavailable("away"), FailedPrecondition("refused"), ValueError()]
)
async def test_work_goes_on_whatever_it_fails_with(error: Exception) -> None:
    await through(error, error)


async def test_a_disk_that_failed_ends_it() -> None:
    with pytest.raises(StorageFailed):
        await repeat(Work(StorageFailed("broken")), trouble="trouble", pause_s=0)


async def test_trouble_that_lasts_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    await through(*[Unavailable("away")] * 5)
    assert [record.getMessage() for record in caplog.records] == ["trouble: away"]


async def test_trouble_is_told_again_after_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeating, "TELL_S", 0.0)
    await through(*[Unavailable("away")] * 3)
    assert len(caplog.records) == 3


@pytest.mark.parametrize("other", [None, FailedPrecondition("refused")])
async def test_new_trouble_is_told_at_once(
    caplog: pytest.LogCaptureFixture, other: PenstockError | None
) -> None:
    await through(Unavailable("away"), other, Unavailable("away again"))
    assert caplog.records[-1].getMessage() == "trouble: away again"


async def test_what_nobody_foresaw_is_told_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await through(ValueError("odd"))
    [record] = caplog.records
    assert record.levelname == "ERROR" and record.exc_info is not None
