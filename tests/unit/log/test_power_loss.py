"""Power cuts and disks that lie: what was synced stays, what was not may vanish in any pattern."""

from __future__ import annotations

import random
import shutil

import numpy as np
import pytest
from tests.unit.log.mounts import cut_power, ext4, fill, make_ext4, tmpfs

from penstock.errors import StorageFailed
from penstock.log.flush import LogOptions
from penstock.log.partition import PartitionLog

OPTIONS = LogOptions(segment_bytes=64 << 10, allocate_bytes=32 << 10, reserve_bytes=0, floor_s=0)
SECTOR = 512


def open_on(disk):
    return PartitionLog.open(disk / "1" / "0000", topic=1, partition=0, options=OPTIONS)


@pytest.fixture
def image(tmp_path):
    make_ext4(tmp_path / "image", size=16 << 20)
    return tmp_path / "image"


def write_and_cut(disk, pen_on):
    """In a function of its own, so that no open file outlives it and the disk can be unmounted."""
    pen = pen_on(open_on(disk))
    pen.fill(3)
    (disk / "unsynced").write_bytes(b"never synced")
    cut_power(disk)
    with pytest.raises(StorageFailed):
        pen.put(b"too late")
    return pen.log.sequence_durable, pen.batches[:-1]


def test_what_was_acknowledged_survives_a_power_cut(image, tmp_path, pen_on):
    with ext4(image, tmp_path / "disk") as disk:
        durable, batches = write_and_cut(disk, pen_on)
    with ext4(image, tmp_path / "disk") as disk:
        assert not (disk / "unsynced").exists()  # the cut did cut
        log = open_on(disk)
        assert log.sequence_durable == durable == batches[-1].last
        assert [b.encode() for b in log.reader.scan(1)] == [b.encode() for b in batches]
        del log


def test_snapshots_and_rewrites_survive_a_power_cut(image, tmp_path, pen_on):
    with ext4(image, tmp_path / "disk") as disk:
        pen = pen_on(open_on(disk))
        pen.fill(2)
        pen.log.save_snapshot(sequence=4, chain=9, epoch=1, parts=[b"state"])
        saved = pen.log.rewrite(1, lambda a, b: np.arange(a, b, 9, dtype=np.uint64))
        cut_power(disk)
        del pen
    with ext4(image, tmp_path / "disk") as disk:
        log = open_on(disk)
        assert saved > 0 and log.segments()[0].compacted
        assert bytes(log.load_snapshot().data) == b"state"
        assert list(log.reader.scan(1))[-1].last == log.sequence_durable
        del log


def cut_and_cut(disk, pen_on):
    pen = pen_on(open_on(disk))
    pen.fill(1)
    committed = pen.log.sequence_committed
    for _ in range(200):
        pen.stage([b"of a coordinator that is gone"] * 10)
        pen.log.write(pen.log.take())
    pen.log.truncate(pen.batches[-80].last)
    cut_power(disk)
    return committed, pen.batches[:-79]


def test_a_cut_survives_a_power_cut(image, tmp_path, pen_on):
    with ext4(image, tmp_path / "disk") as disk:
        committed, batches = cut_and_cut(disk, pen_on)
    with ext4(image, tmp_path / "disk") as disk:
        log = open_on(disk)
        assert log.sequence_durable == batches[-1].last > log.sequence_committed >= committed - 2
        assert [b.encode() for b in log.reader.scan(1)] == [b.encode() for b in batches]
        del log


def put_many(pen):
    for _ in range(100):
        pen.put(b"x" * 8000)


def write_until_a_sync_fails(disk, below, pen_on):
    pen = pen_on(open_on(disk))
    pen.put(b"acknowledged")
    filler = fill(below)
    with pytest.raises(StorageFailed):
        put_many(pen)
    for action in (pen.log.persist_floor, lambda: pen.log.grow(1), lambda: put_many(pen)):
        with pytest.raises(StorageFailed, match="earlier"):
            action()
    assert pen.log.room(False) == 0
    filler.unlink()
    return pen.log.sequence_durable, pen.batches


def test_a_failed_sync_is_final(tmp_path, pen_on):
    """The file system promises space that the disk below does not have: only the sync can tell.

    A second sync of the same file would succeed, because the kernel drops what it could not write.
    """
    with tmpfs(tmp_path / "below", size=12 << 20) as below:
        make_ext4(below / "image", size=24 << 20)
        with ext4(below / "image", tmp_path / "disk") as disk:
            durable, batches = write_until_a_sync_fails(disk, below, pen_on)
        with ext4(below / "image", tmp_path / "disk") as disk:
            log = open_on(disk)
            assert log.sequence_durable >= durable >= 1
            kept = [b.encode() for b in log.reader.scan(1)]
            assert kept == [b.encode() for b in batches][: len(kept)]
            del log


def test_any_subset_of_unsynced_sectors_may_be_lost(tmp_path, pen_on):
    """The disk's view of a cut: of the last, unsynced write each sector is there or is not."""
    pen = pen_on(open_on(tmp_path))
    pen.put(b"durable" * 300)
    path = next(pen.log.folder.glob("*.seg"))
    before, floor = path.read_bytes(), (pen.log.folder / "floor").read_bytes()
    durable = pen.log.sequence_durable
    for size in (10, 700, 1500, 40, 900):
        pen.stage([b"unsynced" * (size // 8)])
    pen.flush()
    after = path.read_bytes()
    dice = random.Random(7)
    outcomes = set()
    for round in range(300):
        share = dice.random()
        sectors = [
            (after if dice.random() < share else before)[at : at + SECTOR]
            for at in range(0, len(after), SECTOR)
        ]
        folder = tmp_path / "cut" / f"{round:04x}"
        folder.mkdir(parents=True)
        (folder / path.name).write_bytes(b"".join(sectors))
        (folder / "floor").write_bytes(floor)
        log = PartitionLog.open(folder, topic=1, partition=0, options=OPTIONS)
        assert log.sequence_durable >= durable
        kept = [batch.encode() for batch in log.reader.scan(1)]
        assert kept == [batch.encode() for batch in pen.batches][: len(kept)]
        outcomes.add(len(kept))
        shutil.rmtree(folder)
    assert {1, 6} < outcomes and len(outcomes) > 3
