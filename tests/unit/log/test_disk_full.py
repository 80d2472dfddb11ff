from __future__ import annotations

import numpy as np
import pytest
from tests.unit.log.mounts import fill, tmpfs

from penstock.errors import DiskFull
from penstock.log.flush import LogOptions
from penstock.log.partition import PartitionLog
from penstock.model.batch import Kind

OPTIONS = LogOptions(segment_bytes=256 << 10, allocate_bytes=64 << 10, reserve_bytes=32 << 10)


@pytest.fixture
def disk(tmp_path):
    with tmpfs(tmp_path / "disk", size=1 << 20) as path:
        yield path


def open_on(disk):
    return PartitionLog.open(disk / "1" / "0000", topic=1, partition=0, options=OPTIONS)


def enqueue_until_full(pen):
    with pytest.raises(DiskFull):
        put_forever(pen)


def put_forever(pen):
    while True:
        pen.put(b"x" * 5000)


def test_a_full_disk_refuses_enqueues_and_still_settles(disk, pen_on):
    pen = pen_on(open_on(disk))
    enqueue_until_full(pen)
    settled = 0
    while pen.log.room(False) >= 200:
        pen.log.stage(pen.batch([b""] * 5, kind=Kind.ACK))
        pen.flush()
        settled += 5
    assert settled * 8 > OPTIONS.reserve_bytes // 4
    assert pen.log.sequence_durable == pen.log.sequence_last


def test_nothing_is_lost_on_a_full_disk(disk, pen_on):
    pen = pen_on(open_on(disk))
    enqueue_until_full(pen)
    fill(disk)
    pen.log.close()
    log = open_on(disk)
    assert [b.encode() for b in log.reader.scan(1)] == [b.encode() for b in pen.batches]
    for batch in pen.batches:
        assert log.reader.read(batch.first, nowait=False).header == batch.header


def test_the_reserve_survives_a_restart_on_a_full_disk(disk, pen_on):
    pen = pen_on(open_on(disk))
    enqueue_until_full(pen)
    fill(disk)
    again = pen_on(open_on(disk))
    assert again.log.room(False) >= OPTIONS.reserve_bytes - 8192
    again.log.stage(again.batch([b""] * 5, kind=Kind.ACK))
    again.flush()


def test_dropped_segments_make_room_again(disk, pen_on):
    pen = pen_on(open_on(disk))
    enqueue_until_full(pen)
    filler = fill(disk)
    assert pen.log.drop_before(pen.log.segments()[1].last + 1) > 0
    pen.put(b"x" * 5000)
    filler.unlink()
    pen.put(b"y" * 5000)


def test_a_snapshot_or_a_rewrite_without_space_leaves_nothing_behind(disk, pen_on):
    pen = pen_on(open_on(disk))
    enqueue_until_full(pen)
    fill(disk)
    before = sorted(pen.log.folder.iterdir())
    with pytest.raises(DiskFull):
        pen.log.save_snapshot(sequence=1, chain=0, epoch=1, parts=[b"x" * 100_000])
    with pytest.raises(DiskFull):
        pen.log.rewrite(1, lambda first, last: np.arange(first, last, 2, dtype=np.uint64))
    assert sorted(pen.log.folder.iterdir()) == before
    assert pen.log.reader.read(1, nowait=False).first == 1


def test_a_new_partition_on_a_full_disk_is_refused(disk):
    fill(disk)
    with pytest.raises(DiskFull):
        open_on(disk)
