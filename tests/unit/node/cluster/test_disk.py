"""The generation of a data folder, on disk and in the metadata."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from penstock.cluster.embedded import EmbeddedStore
from penstock.errors import FailedPrecondition, Unavailable
from penstock.log.folder import DataFolder
from penstock.log.identity import STRIDE, GenerationFile, ReplicaFile
from penstock.node.cluster.cluster import DataDisk


class DeafStore(EmbeddedStore):
    """A store whose next change takes effect, or does not, and is not answered."""

    lost: str = ""  # "answer" or "request"

    async def put(self, key: str, value: bytes, *, expected_revision: int | None = None) -> int:
        lost, self.lost = self.lost, ""
        if lost != "request":
            revision = await super().put(key, value, expected_revision=expected_revision)
        if lost:
            raise Unavailable("no answer")
        return revision


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[DeafStore]:
    made = DeafStore(tmp_path / "meta")
    yield made
    await made.close()


def disk_on(path: Path, store: DeafStore) -> DataDisk:
    with DataFolder.open(path) as folder:
        return DataDisk(folder, uuid="u", node="n1", store=store)


async def claimed(path: Path, store: DeafStore, *, accept_rollback: bool = False) -> DataDisk:
    disk = disk_on(path, store)
    await disk.claim(accept_rollback=accept_rollback)
    return disk


async def test_a_folder_that_goes_on_is_not_rolled_back(tmp_path: Path, store: DeafStore) -> None:
    for generation in (1, 3, 5):
        disk = await claimed(tmp_path / "data", store)
        assert (disk.rolled_back, disk.generation) == (False, generation)
        await disk.renew()


async def test_an_older_copy_is_found_and_its_replicas_get_another_uuid(
    tmp_path: Path, store: DeafStore
) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    await claimed(data, store)
    ReplicaFile(data / "topics/00000001/0000", uuid="old").promise(7)
    shutil.copytree(data, copy)
    await claimed(data, store)
    found = await claimed(copy, store)
    replica = ReplicaFile(copy / "topics/00000001/0000")
    assert found.rolled_back and replica.uuid != "old" and replica.promised == 7
    again = await claimed(copy, store)
    assert not again.rolled_back, "it was dealt with"


async def test_an_older_copy_of_the_same_run_is_found_after_a_renewal(
    tmp_path: Path, store: DeafStore
) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    disk = await claimed(data, store)
    shutil.copytree(data, copy)
    await disk.renew()
    assert (await claimed(copy, store)).rolled_back


async def test_a_folder_without_its_generation_is_older_than_what_is_known(
    tmp_path: Path, store: DeafStore
) -> None:
    await claimed(tmp_path / "data", store)
    (tmp_path / "data/generation").unlink()
    assert (await claimed(tmp_path / "data", store)).rolled_back


async def test_one_damaged_record_does_no_harm_and_two_are_an_older_folder(
    tmp_path: Path, store: DeafStore
) -> None:
    data = tmp_path / "data"
    for spoiled, rolled_back in (((0,), False), ((STRIDE,), False), ((0, STRIDE), True)):
        await claimed(data, store)
        content = bytearray((data / "generation").read_bytes())
        for at in spoiled:
            content[at + 20] ^= 1
        (data / "generation").write_bytes(content)
        assert (await claimed(data, store)).rolled_back is rolled_back


@pytest.mark.parametrize("lost", ["answer", "request"])
async def test_a_raise_that_was_cut_short_is_no_rollback(
    tmp_path: Path, store: DeafStore, lost: str
) -> None:
    """Whether the metadata heard of it or not: the folder has both."""
    data = tmp_path / "data"
    disk = await claimed(data, store)
    store.lost = lost
    with pytest.raises(Unavailable):
        await disk.renew()
    assert not (await claimed(data, store)).rolled_back
    disk = disk_on(data, store)
    store.lost = lost
    with pytest.raises(Unavailable):
        await disk.claim(accept_rollback=False)
    await disk.claim(accept_rollback=False)
    await disk.renew()
    assert not disk.rolled_back


async def test_a_change_that_arrives_late_is_known_again(tmp_path: Path, store: DeafStore) -> None:
    """It was taken for lost, and told again; then it arrives after all."""
    disk = await claimed(tmp_path / "data", store)
    store.lost = "request"
    with pytest.raises(Unavailable):
        await disk.renew()
    told = GenerationFile(tmp_path / "data").record.intended
    store.lost = "request"
    with pytest.raises(Unavailable):
        await disk.renew()
    assert GenerationFile(tmp_path / "data").record.intended == told


async def test_a_copy_with_a_pending_intention_differs_from_what_went_on(
    tmp_path: Path, store: DeafStore
) -> None:
    """The copy intends the number that the metadata have by now, and another token."""
    data, copy = tmp_path / "data", tmp_path / "copy"
    disk = await claimed(data, store)
    store.lost = "request"
    with pytest.raises(Unavailable):
        await disk.renew()
    shutil.copytree(data, copy)
    await claimed(data, store)
    assert (await claimed(copy, store)).rolled_back


async def test_older_metadata_are_no_rollback(tmp_path: Path, store: DeafStore) -> None:
    data = tmp_path / "data"
    disk = await claimed(data, store)
    entry = await store.get("disks/u")
    assert entry is not None
    await disk.renew()
    await store.put("disks/u", entry.value)
    found = await claimed(data, store)
    assert not found.rolled_back and found.generation > disk.generation
    await store.delete("disks/u")
    assert not (await claimed(data, store)).rolled_back


async def test_an_accepted_copy_keeps_its_replicas(tmp_path: Path, store: DeafStore) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    await claimed(data, store)
    ReplicaFile(data / "topics/00000001/0000", uuid="old")
    shutil.copytree(data, copy)
    await claimed(data, store)
    found = await claimed(copy, store, accept_rollback=True)
    assert not found.rolled_back
    assert ReplicaFile(copy / "topics/00000001/0000").uuid == "old"


async def test_who_runs_on_a_folder_notices_that_a_copy_runs_too(
    tmp_path: Path, store: DeafStore
) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    first = await claimed(data, store)
    shutil.copytree(data, copy)
    second = await claimed(copy, store)
    with pytest.raises(FailedPrecondition, match="another node runs on a copy"):
        await first.renew()
    await second.renew()
