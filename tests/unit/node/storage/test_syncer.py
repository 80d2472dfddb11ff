"""Syncing in the kernel: done means durable, and a failure arrives as one."""

import asyncio
import os
from pathlib import Path

import pytest
from tests.unit.log.mounts import cut_power, ext4, make_ext4

from penstock.node.storage.log_io import REQUESTS_MAX, Syncer, open_syncer

AIO_MAX = Path("/proc/sys/fs/aio-max-nr")


async def synced(syncer: Syncer, descriptor: int) -> OSError | None:
    done: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
    syncer.sync(descriptor, done.set_result)
    return await asyncio.wait_for(done, 60)


@pytest.mark.parametrize("gather", [False, True])
async def test_many_syncs_all_report(tmp_path: Path, gather: bool) -> None:
    syncer = open_syncer(gather=gather)
    assert syncer is not None
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.write(file, b"x" * 5000)
    results = await asyncio.gather(*(synced(syncer, file) for _ in range(100)))
    os.close(file)
    syncer.close()
    assert results == [None] * 100
    assert not syncer.full


async def test_a_failed_sync_is_told_with_its_error(tmp_path: Path) -> None:
    syncer = open_syncer()
    assert syncer is not None
    make_ext4(tmp_path / "image", size=32 << 20)
    with ext4(tmp_path / "image", tmp_path / "disk") as disk:
        file = os.open(disk / "file", os.O_RDWR | os.O_CREAT)
        os.write(file, b"x" * 5000)
        assert await synced(syncer, file) is None
        os.write(file, b"y" * 5000)
        cut_power(disk)
        error = await synced(syncer, file)
        os.close(file)
    syncer.close()
    assert isinstance(error, OSError)
    assert error.strerror == "Input/output error"


async def test_a_sync_that_is_not_even_begun_is_told_too() -> None:
    syncer = open_syncer()
    assert syncer is not None
    error = await synced(syncer, 12345)  # no such descriptor
    syncer.close()
    assert isinstance(error, OSError)
    assert not syncer.full


async def test_a_sync_that_is_not_begun_takes_none_of_its_turn_with_it(tmp_path: Path) -> None:
    syncer = open_syncer(gather=True)
    assert syncer is not None
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.write(file, b"x" * 5000)
    wrong = 12345
    results = await asyncio.gather(*(synced(syncer, fd) for fd in (file, wrong, file, wrong, file)))
    os.close(file)
    syncer.close()
    assert [isinstance(result, OSError) for result in results] == [False, True, False, True, False]
    assert not syncer.full


async def test_a_closed_one_leaves_the_kernel_what_it_had(tmp_path: Path) -> None:
    """More than all processes together may have at a time, one after the other."""
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    closed = []  # somebody still refers to them
    for _ in range(int(AIO_MAX.read_text()) // REQUESTS_MAX + 1):
        syncer = open_syncer()
        assert syncer is not None
        assert await synced(syncer, file) is None
        syncer.close()
        closed.append(syncer)
    os.close(file)


async def test_where_the_kernel_has_none_left_threads_do_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("caio.linux_aio", None)
    assert open_syncer() is None
