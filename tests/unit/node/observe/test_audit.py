import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.config import AuditOptions
from penstock.errors import DiskFull, NotFound, StorageFailed
from penstock.node.observe import audit as module
from penstock.node.observe.audit import AuditLog

OPTIONS = AuditOptions(file_bytes_max=1 << 20, files_max=2)


def lines(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


async def test_an_act_is_on_disk_when_its_call_returns(path: Path) -> None:
    audit = AuditLog(path, OPTIONS, now_ms=lambda: 1_700_000_000_123)
    await audit.record("topic_delete", who="abc", subject="jobs", request_id="r1")
    assert lines(path) == [
        {
            "time": "2023-11-14T22:13:20.123+00:00",
            "who": "abc",
            "act": "topic_delete",
            "subject": "jobs",
            "outcome": "ok",
            "request_id": "r1",
        }
    ]
    await audit.close()


async def test_a_caller_without_key_is_anonymous(path: Path) -> None:
    audit = AuditLog(path, OPTIONS)
    await audit.record("topic_create", subject="jobs\nwith a line break")
    await audit.close()
    (line,) = lines(path)
    assert line["who"] == "anonymous" and line["subject"] == "jobs\nwith a line break"


async def test_the_outcome_is_how_the_block_ends(path: Path) -> None:
    audit = AuditLog(path, OPTIONS)
    async with audit.act("purge", subject="a", who="k"):
        pass
    with pytest.raises(NotFound):
        async with audit.act("purge", subject="b"):
            raise NotFound("no topic b")
    with pytest.raises(ZeroDivisionError):
        async with audit.act("purge", subject="c"):
            raise ZeroDivisionError
    await audit.close()
    assert [line["outcome"] for line in lines(path)] == ["ok", "not_found", "internal"]


async def test_many_acts_share_a_sync(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs: list[int] = []
    sync = os.fdatasync

    def counted(file: int) -> None:
        syncs.append(file)
        sync(file)

    monkeypatch.setattr("penstock.node.observe.audit.os.fdatasync", counted)
    audit = AuditLog(path, OPTIONS)
    await asyncio.gather(*(audit.record("a", subject=str(n)) for n in range(200)))
    await audit.close()
    assert [line["subject"] for line in lines(path)] == [str(n) for n in range(200)]
    assert len(syncs) < 200


async def test_the_trail_goes_on_after_a_restart(path: Path) -> None:
    for n in range(2):
        audit = AuditLog(path, OPTIONS)
        await audit.record("a", subject=str(n))
        await audit.close()
    assert [line["subject"] for line in lines(path)] == ["0", "1"]


async def test_half_a_line_stays_alone(path: Path) -> None:
    path.write_bytes(b'{"time": "20')
    audit = AuditLog(path, OPTIONS)
    await audit.record("a", subject="whole")
    await audit.close()
    torn, whole = path.read_bytes().splitlines()
    assert torn == b'{"time": "20'
    assert msgspec.json.decode(whole)["subject"] == "whole"


async def test_files_are_rotated_by_size(path: Path) -> None:
    audit = AuditLog(path, AuditOptions(file_bytes_max=1024, files_max=2))
    for n in range(40):
        await audit.record("a", subject=f"{n:03}")
    await audit.close()
    names = sorted(file.name for file in path.parent.iterdir() if file.suffix != ".reserve")
    assert names == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    kept = [line["subject"] for name in reversed(names) for line in lines(path.parent / name)]
    assert kept == [f"{n:03}" for n in range(40)][-len(kept) :]
    assert all((path.parent / name).stat().st_size <= 1024 for name in names)


async def test_no_old_files_need_be_kept(path: Path) -> None:
    audit = AuditLog(path, AuditOptions(file_bytes_max=1024, files_max=0))
    for n in range(40):
        await audit.record("a", subject=f"{n:03}")
    await audit.close()
    assert not path.with_name("audit.jsonl.1").exists()
    assert lines(path)[-1]["subject"] == "039"


def _failing(code: int) -> Any:
    def write(file: int, data: Any) -> int:
        os.pwrite(file, b"half", 0)
        raise OSError(code, os.strerror(code))

    return write


async def test_a_full_disk_is_told_and_nothing_is_forgotten(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = AuditLog(path, OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "write", _failing(errno.ENOSPC))
        with pytest.raises(DiskFull):
            await audit.record("a", subject="first")
    await audit.record("a", subject="second")
    await audit.close()
    assert [line["subject"] for line in lines(path)] == ["first", "second"]


async def test_a_failed_write_ends_the_trail(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = AuditLog(path, OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "write", _failing(errno.EIO))
        with pytest.raises(StorageFailed):
            await audit.record("a", subject="first")
    with pytest.raises(StorageFailed):
        await audit.record("a", subject="second")
    with pytest.raises(StorageFailed):
        await audit.close()


def test_a_folder_that_is_not_there_is_told(path: Path) -> None:
    with pytest.raises(StorageFailed):
        AuditLog(path.parent / "gone" / "audit.jsonl", OPTIONS)
