import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cluster.embedded import FILE, EmbeddedStore
from penstock.cluster.keys import KeyRing
from penstock.errors import DiskFull, InvalidArgument, NotFound, Unauthenticated


class Clock:
    def __init__(self) -> None:
        self.ms = 1000

    def __call__(self) -> int:
        self.ms += 1
        return self.ms


@pytest.fixture
def store(tmp_path: Path) -> EmbeddedStore:
    return EmbeddedStore(tmp_path)


@pytest.fixture
def ring(store: EmbeddedStore) -> KeyRing:
    return KeyRing(store, now_ms=Clock())


async def test_a_key_verifies_as_its_id(ring: KeyRing) -> None:
    first, second = await ring.create("one"), await ring.create("two")
    assert ring.verify(first.text) == first.record.id
    assert ring.verify(second.text) == second.record.id
    assert first.record.id != second.record.id


async def test_a_key_has_256_bits_and_three_parts(ring: KeyRing) -> None:
    key = await ring.create("one")
    prefix, id, secret = key.text.split("_")
    assert (prefix, id) == ("pk", key.record.id)
    assert len(bytes.fromhex(secret)) == 32


async def test_the_secret_is_stored_nowhere(ring: KeyRing, tmp_path: Path) -> None:
    key = await ring.create("one")
    secret = key.text.split("_")[2]
    assert secret.encode() not in (tmp_path / FILE).read_bytes()
    assert secret not in repr(key) and secret not in repr(ring.list())
    assert "digest" not in key.record.public()


WRONG: list[Callable[[str], str | None]] = [
    lambda text: None,
    lambda text: "",
    lambda text: "pk",
    lambda text: "pk__",
    lambda text: text[:-1],
    lambda text: text + "0",
    lambda text: text.upper(),
    lambda text: "sk" + text[2:],
    lambda text: text[:-1] + ("1" if text[-1] == "0" else "0"),
    lambda text: "pk_other_" + text.split("_")[2],
    lambda text: "pk_" + text.split("_")[1] + "_",
    lambda text: text + "\ud800\x00é",
]


@pytest.mark.parametrize("wrong", WRONG)
async def test_anything_else_does_not_verify(
    ring: KeyRing, wrong: Callable[[str], str | None]
) -> None:
    key = await ring.create("one")
    with pytest.raises(Unauthenticated) as refusal:
        ring.verify(wrong(key.text))
    assert "key_id" not in refusal.value.details


async def test_a_revoked_key_does_not_verify(ring: KeyRing) -> None:
    key = await ring.create("one")
    ring.verify(key.text)
    assert ring.live(key.record.id)
    revoked = await ring.revoke(key.record.id)
    assert revoked.revoked_ms and revoked.last_used_ms
    assert not ring.live(key.record.id)
    with pytest.raises(Unauthenticated, match="revoked"):
        ring.verify(key.text)


async def test_revoking_again_keeps_the_first_time(ring: KeyRing) -> None:
    key = await ring.create("one")
    first = await ring.revoke(key.record.id)
    assert (await ring.revoke(key.record.id)).revoked_ms == first.revoked_ms
    with pytest.raises(NotFound):
        await ring.revoke("unknown")


async def test_a_restart_keeps_keys_and_revocations(ring: KeyRing, tmp_path: Path) -> None:
    good, bad = await ring.create("good"), await ring.create("bad")
    await ring.revoke(bad.record.id)
    again = KeyRing(EmbeddedStore(tmp_path))
    await again.load()
    assert again.verify(good.text) == good.record.id
    with pytest.raises(Unauthenticated):
        again.verify(bad.text)
    assert [record.name for record in again.list()] == ["good", "bad"]


async def test_the_last_use_is_written_back(ring: KeyRing, store: EmbeddedStore) -> None:
    key = await ring.create("one")
    assert ring.list()[0].last_used_ms is None
    ring.verify(key.text)
    used = ring.list()[0].last_used_ms
    assert used is not None and used > key.record.created_ms
    await ring.flush()
    again = KeyRing(store)
    await again.load()
    assert again.list()[0].last_used_ms == used


async def test_other_nodes_hear_of_it(store: EmbeddedStore) -> None:
    here, there = KeyRing(store), KeyRing(store)
    async with store.watch("keys/") as changes:
        running = asyncio.ensure_future(there.run())
        await asyncio.sleep(0)
        key = await here.create("one")
        await anext(changes)
        assert there.verify(key.text) == key.record.id
        await here.revoke(key.record.id)
        await anext(changes)
        assert not there.live(key.record.id)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_old_news_does_not_revive_a_key(ring: KeyRing) -> None:
    key = await ring.create("one")
    await ring.revoke(key.record.id)
    ring._keep(key.record, 1)
    assert not ring.live(key.record.id)


class RefusingStore(EmbeddedStore):
    """Refuses the next changes."""

    refusals = 0

    async def put(self, key: str, value: bytes, *, expected_revision: int | None = None) -> int:
        if self.refusals:
            self.refusals -= 1
            raise DiskFull("full")
        return await super().put(key, value, expected_revision=expected_revision)


async def test_a_full_disk_does_not_end_the_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = RefusingStore(tmp_path)
    ring = KeyRing(store)
    key = await ring.create("one")
    ring.verify(key.text)
    store.refusals = 2
    running = asyncio.ensure_future(ring.run(flush_seconds=0.001))
    async with asyncio.timeout(60), store.watch("keys/") as changes:
        change = await anext(changes)
    assert change.value is not None and b'"last_used_ms":null' not in change.value
    assert len(caplog.records) == 1  # that there is trouble is said once, not each time
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("name", ["", "x" * 256])
async def test_a_name_has_bounds(ring: KeyRing, name: str) -> None:
    with pytest.raises(InvalidArgument):
        await ring.create(name)
