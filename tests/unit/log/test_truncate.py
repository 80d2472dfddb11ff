"""A log that is cut ends where it was cut, in memory and on disk, and goes on from there."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.log.conftest import TINY

from penstock.errors import NotFound
from penstock.log.flush import LogOptions
from penstock.log.folder import DataFolder
from penstock.log.partition import PartitionLog
from penstock.log.verify import verify_folder


def encoded(batches):
    return [batch.encode() for batch in batches]


def write(pen, groups, batches=3):
    """Durable and not committed: so many groups of so many batches of two messages."""
    for _ in range(groups):
        for number in range(batches):
            pen.stage([b"%d" % number * 60, b"second"])
        pen.log.write(pen.log.take())


def check_end(log, batches):
    """Everything that the log says of its end is that of `batches`."""
    last = batches[-1]
    assert (log.sequence_last, log.sequence_durable) == (last.last, last.last)
    assert (log.epoch_last, log.chain_last, log.time_ms_last) == (
        last.epoch, last.chain, last.time_ms,
    )  # fmt: skip
    assert encoded(log.reader.scan(1)) == encoded(batches)
    assert sum(log.reader.scrub()) == sum(info.bytes for info in log.segments() if info.sealed)
    assert log.bytes_total == sum(info.bytes for info in log.segments())
    with pytest.raises(NotFound):
        log.reader.read(last.last + 1, nowait=False)
    assert log.reader.read_slice(last.last + 1, through=999, bytes_max=999, nowait=False) == []


@pytest.mark.parametrize("kept", range(1, 36))
def test_a_cut_behind_any_batch_leaves_the_log_before_it(open_log, pen_on, kept):
    pen = pen_on(open_log())
    write(pen, groups=12)
    assert len(pen.log.segments()) > 3
    pen.log.truncate(pen.batches[kept - 1].last)
    check_end(pen.log, pen.batches[:kept])
    check_end(open_log(), pen.batches[:kept])


@pytest.mark.parametrize("kept", [1, 5, 9, 20, 33, 35])
def test_appending_goes_on_behind_a_cut(open_log, pen_on, kept):
    pen = pen_on(open_log())
    write(pen, groups=12)
    pen.log.truncate(pen.batches[kept - 1].last)
    del pen.batches[kept:]
    pen.time_ms += 10
    for _ in range(20):
        pen.put(b"again" * 20, b"x", epoch=2)
    check_end(pen.log, pen.batches)
    pen.log.close()
    check_end(open_log(), pen.batches)


def test_everything_may_go_while_nothing_is_committed(open_log, pen_on, folder):
    pen = pen_on(open_log())
    write(pen, groups=9)
    pen.log.truncate(0)
    for log in (pen.log, open_log()):
        assert (log.sequence_first, log.sequence_last, log.sequence_durable) == (1, 0, 0)
        assert (log.epoch_last, log.chain_last, log.time_ms_last) == (0, 0, 0)
        assert list(log.reader.scan(1)) == [] and log.segments() == []
    assert not list(folder.glob("*.seg")) and not list(folder.glob("*.idx"))
    again = pen_on(log)
    again.put(b"first again", epoch=3)
    check_end(open_log(), again.batches)


def test_a_log_without_its_head_may_lose_all_the_rest(open_log, pen_on):
    pen = pen_on(open_log())
    pen.fill(2)
    pen.log.drop_before(pen.log.segments()[0].last + 1)
    base = pen.log.base
    pen.log._writer.committed = base.first - 1
    pen.log.truncate(base.first - 1)
    for log in (pen.log, open_log()):
        assert (log.base, log.sequence_last) == (base, base.first - 1)
        assert (log.chain_last, log.epoch_last) == (base.chain, base.epoch)
    again = pen_on(log)
    again.put(b"goes on")
    assert encoded(open_log().reader.scan(1)) == encoded(again.batches)


def test_committed_batches_are_never_cut(open_log, pen_on):
    pen = pen_on(open_log())
    write(pen, groups=4)
    pen.log.advance_commit(8)
    with pytest.raises(ValueError, match="committed"):
        pen.log.truncate(6)
    pen.log.truncate(8)
    check_end(open_log(), pen.batches[:4])


def test_a_cut_is_only_made_between_batches_of_the_log(open_log, pen_on):
    pen = pen_on(open_log())
    write(pen, groups=4)
    for wrong in (7, 25, 99):
        with pytest.raises(ValueError, match=r"cut after|no batch ends"):
            pen.log.truncate(wrong)
    check_end(pen.log, pen.batches)


def test_a_cut_at_the_end_changes_nothing(open_log, pen_on, folder):
    pen = pen_on(open_log())
    write(pen, groups=4)
    before = {path: path.read_bytes() for path in folder.glob("*.seg")}
    pen.log.truncate(pen.log.sequence_last)
    assert before == {path: path.read_bytes() for path in folder.glob("*.seg")}


def test_staged_batches_are_cut_too(open_log, pen_on):
    pen = pen_on(open_log())
    write(pen, groups=1)
    for _ in range(30):  # over segments that do not exist yet
        pen.stage([b"staged" * 10, b"second"])
    pen.log.truncate(pen.batches[10].last)
    check_end(pen.log, pen.batches[:11])
    assert pen.log.take() is None
    assert pen.log.reader.read_slice(23, through=99, bytes_max=9, nowait=True, staged=True) == []
    check_end(open_log(), pen.batches[:11])


def test_a_cut_may_follow_a_cut(open_log, pen_on):
    pen = pen_on(open_log())
    write(pen, groups=12)
    for kept in (31, 30, 17, 2):
        pen.log.truncate(pen.batches[kept - 1].last)
        del pen.batches[kept:]
        check_end(pen.log, pen.batches)
    check_end(open_log(), pen.batches)


def test_a_cut_behind_a_rewritten_segment(open_log, pen_on):
    pen = pen_on(open_log())
    pen.fill(2)
    sealed = pen.log.segments()[0]
    pen.log.rewrite(sealed.first, lambda first, last: np.array([first], np.uint64))
    pen.log._writer.committed = sealed.last
    chain = next(b.chain for b in pen.batches if b.last == sealed.last)
    pen.log.truncate(sealed.last)
    for log in (pen.log, open_log()):
        assert (log.sequence_last, log.chain_last) == (sealed.last, chain)
    pen_on(log).put(b"goes on")
    assert open_log().sequence_last == sealed.last + 1


def test_a_scrub_that_is_under_way_does_not_take_a_cut_for_rot(open_log, pen_on):
    pen = pen_on(open_log(LogOptions(segment_bytes=4 << 20, reserve_bytes=0)))
    for _ in range(5):
        pen.stage([bytes(1 << 20)])
        pen.log.write(pen.log.take())
    assert pen.log.segments()[0].sealed
    steps = pen.log.reader.scrub()
    assert next(steps) < pen.log.segments()[0].bytes  # it stands inside of the segment
    pen.log.truncate(1)
    assert sum(steps) < (4 << 20)  # and nothing is raised


def test_fsck_accepts_a_log_that_was_cut(tmp_path, pen_on):
    with DataFolder.open(tmp_path / "data") as data:
        data.inventory.add(7, 3, name="jobs", uuid="")
        log = PartitionLog.open(data.partition(7, 3), topic=7, partition=3, options=TINY)
        pen = pen_on(log)
        write(pen, groups=12)
        log.truncate(pen.batches[7].last)
        log.close()
    report = verify_folder(data.path)
    assert report.ok and report.notes == [] and report.batches == 8
