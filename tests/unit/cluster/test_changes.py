"""Topics and keys as nodes see them that did not change them."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.unit.cluster.lines import Line, OpenEtcd

from penstock.cluster.catalog import Catalog, TopicChange, TopicNews
from penstock.cluster.changes import follow
from penstock.cluster.embedded import EmbeddedStore
from penstock.cluster.etcd import EtcdStore
from penstock.cluster.keys import KeyRing
from penstock.cluster.store import Change, MetadataStore, Versioned

Spawn = Callable[[Awaitable[None]], asyncio.Future[None]]


async def test_what_is_there_comes_before_what_changes(either_store: MetadataStore) -> None:
    old = await either_store.put("n/old", b"1")
    async with asyncio.timeout(60), follow(either_store, "n/", known=["n/x"]) as story:
        new = await either_store.put("n/new", b"2")
        assert [await anext(story) for _ in range(3)] == [
            Change("n/x", None, 0),
            Change("n/old", b"1", old),
            Change("n/new", b"2", new),
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
        assert await anext(changes) == (TopicNews.CREATED, old)
        new = await catalog.create({"name": "new"})
        assert await anext(changes) == (TopicNews.CREATED, new)
        paused = await catalog.update("new", {"paused": True})
        assert await anext(changes) == (TopicNews.UPDATED, paused)
        await catalog.delete("new")
        assert await anext(changes) == TopicChange(TopicNews.DELETED, paused)


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
            (TopicNews.DELETED, known[0]),
            (TopicNews.DELETED, known[1]),
            (TopicNews.CREATED, remade),
            (TopicNews.UPDATED, updated),
        ]


async def test_ids_are_shared_by_all_nodes(open_etcd: OpenEtcd) -> None:
    catalogs = [Catalog(open_etcd()) for _ in range(2)]
    creations = (catalogs[n % 2].create({"name": f"t{n}"}) for n in range(20))
    topics = await asyncio.gather(*creations)
    assert sorted(topic.id for topic in topics) == list(range(1, 21))


async def test_a_revocation_is_heard_of_on_other_nodes(open_etcd: OpenEtcd, spawn: Spawn) -> None:
    here, there = KeyRing(open_etcd()), KeyRing(open_etcd())
    revoked: asyncio.Queue[str] = asyncio.Queue()
    there.on_revoked(revoked.put_nowait)
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
    here, far = KeyRing(open_etcd()), KeyRing(far_store)
    revoked: asyncio.Queue[str] = asyncio.Queue()
    far.on_revoked(revoked.put_nowait)
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
    ring, revoked = KeyRing(either_store), list[str]()
    ring.on_revoked(revoked.append)
    key = await ring.create("one")
    await ring.revoke(key.record.id)
    assert revoked == [key.record.id]
