import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import trustme
from tests.unit.cluster.lines import QUICK, Line, OpenEtcd

from penstock.cluster.etcd import EtcdStore, cluster_prefix
from penstock.cluster.store import MetadataChange
from penstock.errors import InvalidArgument, NotFound, RevisionConflict, Unavailable
from penstock.testing.etcd import EtcdProcess, etcd_group

T = TypeVar("T")
PREFIX = cluster_prefix("test")
IN_TIME_S = 20.0  # QUICK gives up after four, on a quiet machine


@pytest.fixture
def store(open_etcd: OpenEtcd) -> EtcdStore:
    return open_etcd()


async def persistently(call: Callable[[], Awaitable[T]]) -> T:
    async with asyncio.timeout(60):
        while True:
            try:
                return await call()
            except Unavailable:
                continue


async def until_back(store: EtcdStore) -> None:
    await persistently(lambda: store.get("x"))


async def take(changes: AsyncIterator[MetadataChange], count: int) -> list[MetadataChange]:
    async with asyncio.timeout(60):
        return [await anext(changes) for _ in range(count)]


async def compact(store: EtcdStore, revision: int) -> None:
    request = store._rpc.CompactionRequest(revision=revision, physical=True)
    await store._peers.call("kv", "Compact", request)


async def test_clusters_do_not_see_each_other(etcd: EtcdProcess, store: EtcdStore) -> None:
    other = EtcdStore([etcd.endpoint], prefix=store.prefix[:-2] + "/", options=QUICK)
    await store.put("topics/a", b"1")
    assert await other.range("") == []
    await other.close()


async def test_every_call_fails_in_time_while_etcd_is_away(
    line: Line, far_store: EtcdStore
) -> None:
    store, lease = far_store, await far_store.grant(60)
    await line.cut()
    for call in (store.get("a"), store.put("a", b""), store.keep_alive(lease), store.grant(2)):
        began = time.monotonic()
        with pytest.raises(Unavailable):
            await call
        assert time.monotonic() - began < IN_TIME_S
    with pytest.raises(Unavailable):
        async with store.watch(""):
            pass
    await line.mend()
    await until_back(store)


async def test_a_call_that_gets_no_answer_fails_in_time(
    etcd: EtcdProcess, store: EtcdStore
) -> None:
    await store.put("a", b"")
    etcd.pause()
    try:
        began = time.monotonic()
        with pytest.raises(Unavailable):
            await store.put("a", b"1")
        assert time.monotonic() - began < IN_TIME_S
    finally:
        etcd.resume()
    await until_back(store)


async def test_nobody_listens_at_all(tmp_path: Path) -> None:
    store = EtcdStore([EtcdProcess(tmp_path).endpoint], prefix=PREFIX, options=QUICK)
    with pytest.raises(Unavailable, match="cannot be reached"):
        await store.get("a")
    await store.close()


async def test_a_watch_goes_on_after_a_restart(etcd: EtcdProcess, store: EtcdStore) -> None:
    await store.put("n/old", b"0")
    async with store.watch("n/") as changes:
        await store.put("n/a", b"1")
        assert [change.key for change in await take(changes, 1)] == ["n/a"]
        etcd.kill()
        etcd.start()
        await until_back(store)
        revision = await store.put("n/b", b"2")
        assert await take(changes, 1) == [MetadataChange("n/b", b"2", revision)]


async def test_what_a_broken_watch_missed_is_reported(
    line: Line, far_store: EtcdStore, store: EtcdStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The history is gone too, so that only reading again can tell."""
    for key in ("n/changed", "n/deleted", "n/same"):
        await store.put(key, b"0")
    async with far_store.watch("n/") as changes:
        await line.cut()
        made = await store.put("n/made", b"1")
        await store.put("n/changed", b"1")
        changed = await store.put("n/changed", b"2")
        await store.delete("n/deleted")
        await compact(store, changed + 1)
        await line.mend()
        seen = await take(changes, 3)
        later = await store.put("n/same", b"1")
        assert await take(changes, 1) == [MetadataChange("n/same", b"1", later)]
    assert seen[:2] == [
        MetadataChange("n/made", b"1", made),
        MetadataChange("n/changed", b"2", changed),
    ]
    assert seen[2].key == "n/deleted" and seen[2].value is None and seen[2].revision > changed
    ours = [record for record in caplog.records if record.name.startswith("penstock")]
    assert [record.levelname for record in ours] == ["WARNING"]


async def test_a_watch_behind_a_compaction_reads_again(store: EtcdStore) -> None:
    async with store.watch("n/") as changes:
        await store.put("n/a", b"1")
        last = await store.put("n/a", b"2")
        await compact(store, last)
        assert [change.value for change in await take(changes, 2)] == [b"1", b"2"]
        await store.put("n/a", b"3")
        assert [change.value for change in await take(changes, 1)] == [b"3"]


async def test_closing_ends_watches(store: EtcdStore) -> None:
    async with store.watch("n/") as changes:
        waiting = asyncio.ensure_future(anext(changes))
        await store.close()
        with pytest.raises(Unavailable, match="closed"):
            await waiting


async def test_keys_vanish_with_their_lease(store: EtcdStore) -> None:
    lease = await store.grant(60)
    await store.put("n/a", b"", expected_revision=0, lease=lease)
    assert await store.keep_alive(lease)
    async with store.watch("n/") as changes:
        await store.revoke(lease)
        assert (await take(changes, 1))[0].value is None
    assert not await store.keep_alive(lease)
    await store.revoke(lease)
    with pytest.raises(NotFound):
        await store.put("n/a", b"", lease=lease)


async def test_a_swap_says_where_the_entry_is(store: EtcdStore) -> None:
    revision = await store.put("a", b"1")
    with pytest.raises(RevisionConflict) as lost:
        await store.put("a", b"2", expected_revision=revision - 1)
    assert lost.value.details["revision"] == revision


@pytest.mark.parametrize("fail", [EtcdProcess.kill, EtcdProcess.pause], ids=["killed", "hangs"])
async def test_a_lost_member_is_replaced_by_another(
    tmp_path: Path, fail: Callable[[EtcdProcess], None]
) -> None:
    with etcd_group(tmp_path) as servers:
        endpoints = [server.endpoint for server in servers]
        store = EtcdStore(endpoints, prefix=PREFIX, options=QUICK)
        await store.put("n/a", b"0")
        async with store.watch("n/") as changes:
            fail(servers[store._peers._first])
            revision = await persistently(lambda: store.put("n/a", b"1"))
            while await take(changes, 1) != [MetadataChange("n/a", b"1", revision)]:
                pass  # of a try without an answer
        await store.close()


async def test_members_and_nodes_can_ask_each_other_for_certificates(
    etcd: EtcdProcess, tmp_path: Path
) -> None:
    authority, tls = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(tls)
    authority.configure_trust(tls)
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.set_alpn_protocols(["h2"])
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    ours = authority.issue_cert("node")
    ours.private_key_and_cert_chain_pem.write_to_path(tmp_path / "node.pem")
    line = Line(etcd.port, tls=tls)
    await line.mend()
    endpoint = "https://" + line.endpoint.replace("127.0.0.1", "localhost")
    trusting = msgspec.structs.replace(QUICK, ca=tmp_path / "ca.pem")
    shown = {"certificate": tmp_path / "node.pem", "key": tmp_path / "node.pem"}
    for options in (QUICK, trusting, msgspec.structs.replace(trusting, **shown)):
        store = EtcdStore([endpoint], prefix=PREFIX, options=options)
        if options.certificate:
            assert await store.put("a", b"1") > 0
        else:
            with pytest.raises(Unavailable):
                await store.put("a", b"1")
        await store.close()
    await line.cut()


@pytest.mark.parametrize("endpoints", [[], ["localhost"], ["http://:2379"], ["a:b"], ["a:1/b:2"]])
def test_endpoints_are_checked(endpoints: list[str]) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        EtcdStore(endpoints, prefix=PREFIX)
    assert refusal.value.field == "endpoints"


@pytest.mark.parametrize("name", ["", "a/b", "..", "x" * 256])
def test_a_clusters_name_is_checked(name: str) -> None:
    with pytest.raises(InvalidArgument):
        cluster_prefix(name)
