"""What is particular to the store in a folder; the rest is in tests/conformance."""

import asyncio
import errno
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from penstock.cluster import embedded
from penstock.cluster.embedded import FILE, EmbeddedStore, read_image, write_image
from penstock.cluster.store import Versioned
from penstock.errors import Corruption, DiskFull, FailedPrecondition, StorageFailed

ENTRIES = [Versioned("a", b"\x00\x01", 3, 1), Versioned("b/c", b"", 2, 2)]


def test_an_image_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_image(tmp_path, 3, ENTRIES)
    revision, entries = read_image(tmp_path)
    assert revision == 3
    assert list(entries.values()) == ENTRIES


def test_no_image_is_an_empty_one(tmp_path: Path) -> None:
    assert read_image(tmp_path) == (0, {})


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    write_image(tmp_path, 3, ENTRIES)
    path = tmp_path / FILE
    good = path.read_bytes()
    for bit in range(len(good) * 8):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises((Corruption, FailedPrecondition)):
            read_image(tmp_path)


@pytest.mark.parametrize("cut", [0, 10, 24, 30])
def test_a_short_image_is_found(tmp_path: Path, cut: int) -> None:
    write_image(tmp_path, 3, ENTRIES)
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(Corruption):
        read_image(tmp_path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    write_image(tmp_path, 3, ENTRIES)
    path = tmp_path / FILE
    data = bytearray(path.read_bytes())
    data[11] = 2
    path.write_bytes(data)
    with pytest.raises(FailedPrecondition, match="format 2"):
        read_image(tmp_path)


def test_half_a_new_image_does_not_touch_the_old_one(tmp_path: Path) -> None:
    write_image(tmp_path, 3, ENTRIES)
    (tmp_path / (FILE + ".new")).write_bytes(b"PSTK")
    assert read_image(tmp_path)[0] == 3
    write_image(tmp_path, 4, ENTRIES)
    assert read_image(tmp_path)[0] == 4


def test_a_folder_that_is_gone_is_a_storage_failure(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed):
        write_image(tmp_path / "gone", 1, ENTRIES)


class Disk:
    """Counts the images that are written, and fails when told to."""

    def __init__(self) -> None:
        self.writes = 0
        self.failure: Exception | None = None

    def write(self, folder: Path, revision: int, entries: Iterable[Versioned]) -> None:
        self.writes += 1
        if self.failure:
            raise self.failure
        write_image(folder, revision, entries)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(embedded, "write_image", disk.write)
    return disk


async def test_changes_that_come_together_share_a_write(tmp_path: Path, disk: Disk) -> None:
    store = EmbeddedStore(tmp_path)
    await asyncio.gather(*(store.put(f"epochs/1/{n}", b"1") for n in range(1000)))
    assert disk.writes <= 2
    assert len(read_image(tmp_path)[1]) == 1000


async def test_nothing_is_read_before_it_is_stored(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path)
    putting = asyncio.ensure_future(store.put("a", b"1"))
    await asyncio.sleep(0)
    assert await store.get("a") is None or putting.done()
    await putting
    assert "a" in read_image(tmp_path)[1]


async def test_a_cancelled_caller_stops_nobody_else(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path)
    first = asyncio.ensure_future(store.put("a", b"1"))
    second = asyncio.ensure_future(store.put("b", b"1"))
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert sorted(read_image(tmp_path)[1]) == ["a", "b"]


async def test_a_full_disk_refuses_and_recovers(tmp_path: Path, disk: Disk) -> None:
    store = EmbeddedStore(tmp_path)
    await store.put("a", b"1")
    disk.failure = DiskFull("full")
    puts = [store.put("a", b"2"), store.put("b", b"1"), store.delete("a")]
    results = await asyncio.gather(*puts, return_exceptions=True)
    assert [type(result) for result in results] == [DiskFull] * 3
    disk.failure = None
    assert [entry.value for entry in await store.range("")] == [b"1"]
    await store.put("b", b"2", expected_revision=0)
    assert list(read_image(tmp_path)[1]) == ["a", "b"]


async def test_a_failed_write_ends_the_store(tmp_path: Path, disk: Disk) -> None:
    store = EmbeddedStore(tmp_path)
    async with store.watch("") as changes:
        disk.failure = StorageFailed("broken")
        with pytest.raises(StorageFailed):
            await store.put("a", b"1")
        disk.failure = None
        with pytest.raises(StorageFailed):
            await store.put("b", b"1")
        with pytest.raises(StorageFailed):
            await anext(changes)
    assert disk.writes == 1
    assert await store.get("a") is None


async def test_a_lost_folder_is_told(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path / "meta")
    shutil.rmtree(tmp_path / "meta")
    with pytest.raises(StorageFailed):
        await store.put("a", b"1")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
async def test_no_space_leaves_the_old_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store = EmbeddedStore(tmp_path)
    await store.put("a", b"1")

    def refuse(descriptor: int) -> None:
        raise OSError(code, "no space")

    with monkeypatch.context() as patch:
        patch.setattr("penstock.cluster.embedded.os.fsync", refuse)
        with pytest.raises(DiskFull):
            await store.put("a", b"2")
    assert read_image(tmp_path)[1]["a"].value == b"1"
    assert not (tmp_path / "store.bin.new").exists()
