"""A log that is dropped and received anew, from a log whose head is compacted and cut off."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from tests.unit.log.conftest import TINY

from penstock.errors import Corruption, NotFound
from penstock.log.folder import DataFolder
from penstock.log.identity import ReplicaFile
from penstock.log.partition import PartitionLog
from penstock.log.verify import verify_folder
from penstock.model.batch import decode


@pytest.fixture
def source(tmp_path, pen_on):
    """A log that begins late, with compacted batches and a snapshot, and epochs that rise."""
    log = PartitionLog.open(tmp_path / "source", topic=7, partition=3, options=TINY)
    pen = pen_on(log)
    for number in range(90):
        pen.put(b"%d" % number * 20, b"second", epoch=1 + number // 25)
    infos = log.segments()
    snapped = next(b for b in pen.batches if b.last == infos[3].last)
    log.save_snapshot(sequence=snapped.last, chain=snapped.chain, epoch=snapped.epoch, parts=[b"s"])
    log.drop_before(infos[0].last + 1)
    for info in infos[1:3]:
        log.rewrite(info.first, lambda first, last: np.array([first, first + 4], np.uint64))
    return log


@pytest.fixture
def stale(open_log, pen_on):
    """The log that is too far behind."""
    pen = pen_on(open_log())
    pen.fill(1)
    pen.log.save_snapshot(sequence=2, chain=0, epoch=1, parts=[b"old"])
    return pen.log


def copy(source, log, *, through=1 << 40):
    for batch in source.reader.scan(log.sequence_last + 1):
        if batch.last > through:
            break
        if log.room(True) < batch.size:
            log.grow(batch.size)
        log.stage(decode(batch.encode()), received=True)
        log.write(log.take())


def reset(log, base):
    log.reset(first=base.first, chain=base.chain, epoch=base.epoch)


def seed(source, log):
    reset(log, source.base)
    found = source.load_snapshot()
    log.install_snapshot(
        sequence=found.sequence, chain=found.chain, epoch=found.epoch, parts=[found.data]
    )
    copy(source, log)


def encoded(log):
    return [batch.encode() for batch in log.reader.scan(1)]


def test_a_reset_log_is_empty_and_begins_where_it_was_told(stale, open_log, folder):
    stale.reset(first=100, chain=5, epoch=2)
    for log in (stale, open_log()):
        assert (log.sequence_first, log.sequence_last, log.sequence_durable) == (100, 99, 99)
        assert (log.chain_last, log.epoch_last, log.sequence_committed) == (5, 2, 99)
        assert log.base == (100, 5, 2) and log.seeding
        assert log.load_snapshot() is None and list(log.reader.scan(1)) == []
        with pytest.raises(NotFound):
            log.reader.read(1, nowait=False)
    assert {path.suffix for path in folder.iterdir()} <= {"", ".tmp"}


def test_a_seeded_log_is_the_same_as_its_source(source, stale, open_log, pen_on):
    seed(source, stale)
    stale.finish_seeding()
    stale.close()
    log = open_log()
    assert encoded(log) == encoded(source) and any(b.compacted for b in log.reader.scan(1))
    assert (log.chain_last, log.epoch_last) == (source.chain_last, source.epoch_last)
    assert log.load_snapshot().sequence == log.sequence_committed
    assert bytes(log.load_snapshot().data) == b"s" and not log.seeding
    for target in (log, source):
        pen_on(target).put(b"the next", epoch=9)
    assert log.chain_last == source.chain_last and encoded(open_log()) == encoded(source)


def test_an_interrupted_seeding_is_recognised_and_begun_again(source, stale, open_log):
    reset(stale, source.base)
    copy(source, stale, through=source.sequence_last // 2)
    log = open_log()
    assert log.seeding and log.sequence_last > 0
    seed(source, log)
    log.finish_seeding()
    assert not open_log().seeding and encoded(open_log()) == encoded(source)


def test_seeding_is_not_finished_before_the_snapshot_is_reached(source, stale):
    seed(source, stale)
    found = source.load_snapshot()
    reset(stale, source.base)
    stale.install_snapshot(sequence=found.sequence, chain=found.chain, epoch=1, parts=[b"s"])
    copy(source, stale, through=found.sequence - 1)
    with pytest.raises(Corruption, match="does not reach"):
        stale.finish_seeding()
    copy(source, stale)
    with pytest.raises(Corruption, match="is not what the snapshot is of"):
        stale.finish_seeding()  # another epoch than the log had there
    assert stale.seeding


def test_a_snapshot_alone_can_be_a_seed(stale, open_log, pen_on):
    stale.reset(first=51, chain=7, epoch=3)
    stale.install_snapshot(sequence=50, chain=7, epoch=3, parts=[b"state"])
    stale.finish_seeding()
    log = open_log()
    assert log.load_snapshot().sequence == log.sequence_committed == 50
    pen_on(log).put(b"goes on", epoch=3)
    assert open_log().sequence_last == 51


def test_a_log_may_begin_anew_from_nothing(stale, open_log, pen_on):
    stale.reset(first=1, chain=0, epoch=0)
    stale.finish_seeding()
    pen_on(stale).put(b"first")
    assert (open_log().sequence_last, open_log().seeding) == (1, False)


def test_what_is_received_must_follow_the_chain(source, stale):
    reset(stale, source.base)
    copy(source, stale)
    stale.finish_seeding()
    stale.truncate(stale.segments()[-1].first - 1)
    batch = source.reader.read(stale.sequence_last + 1, nowait=False)
    other = msgspec.structs.replace(batch, body=batch.body.replace(b"second", b"SECOND"))
    with pytest.raises(Corruption, match="chain"):
        stale.stage(other, received=True)
    stale.stage(batch, received=True)


def test_a_compacted_batch_is_only_taken_while_seeding(source, stale):
    reset(stale, source.base)
    stale.finish_seeding()
    batch = next(source.reader.scan(1))
    assert batch.compacted
    with pytest.raises(ValueError, match="compacted"):
        stale.stage(batch)


def test_a_log_that_is_seeding_is_not_cut(source, stale):
    reset(stale, source.base)
    copy(source, stale)
    with pytest.raises(ValueError, match="seeding"):
        stale.truncate(stale.segments()[-1].last)
    stale.finish_seeding()
    with pytest.raises(ValueError, match="not seeding"):
        stale.finish_seeding()
    with pytest.raises(ValueError, match="not expected"):
        stale.install_snapshot(sequence=90, chain=0, epoch=1, parts=[b"x"])


def test_a_seeded_log_knows_from_where_it_is_as_it_was_written(source, stale):
    first = source.reader.first_as_written()
    assert source.sequence_first < first == source.segments()[2].first
    seed(source, stale)
    stale.finish_seeding()
    assert stale.reader.first_as_written() == first
    assert not stale.reader.read(first, nowait=False).compacted
    assert stale.reader.read(first - 1, nowait=False).compacted


def test_a_seeded_segment_can_be_cut_and_rewritten(source, stale, open_log, pen_on):
    seed(source, stale)
    stale.finish_seeding()
    kept = next(b.last for b in stale.reader.scan(stale.sequence_committed + 3))
    stale.truncate(kept)
    assert encoded(open_log()) == [b.encode() for b in source.reader.scan(1) if b.last <= kept]
    first = stale.segments()[0].first
    assert stale.rewrite(first, lambda *_: np.empty(0, np.uint64)) > 0
    assert next(open_log().reader.scan(1)).entries == 0


def test_staged_batches_are_dropped_by_a_reset(stale, pen_on, folder):
    pen = pen_on(stale)
    for _ in range(30):
        pen.stage([b"x" * 200])
    stale.reset(first=9, chain=1, epoch=1)
    assert stale.take() is None and stale._cache.bytes == 0
    assert len(list(folder.glob("*.tmp"))) <= 1
    pen.put(b"nine")
    assert stale.reader.read(9, nowait=True) is not None


def test_fsck_accepts_what_is_seeded_and_notes_what_is_not_whole(source, tmp_path):
    with DataFolder.open(tmp_path / "data") as data:
        path = data.partition(7, 3)
        data.inventory.add(7, 3, name="jobs", uuid="")
        log = PartitionLog.open(path, topic=7, partition=3, options=TINY)
        ReplicaFile(path)
        seed(source, log)
        report = verify_folder_of(data)
        assert report.ok and "not whole" in report.notes[0]
        log.finish_seeding()
        log.close()
    report = verify_folder(data.path)
    assert report.ok and report.notes == [] and report.batches == len(encoded(source))


def verify_folder_of(data):
    data.close()
    return verify_folder(data.path)
