from __future__ import annotations

import shutil

import pytest

from penstock.errors import Corruption
from penstock.log.files import MARK_SIZE, Mark, SegmentHeader
from penstock.log.flush import LogOptions

NO_FLOOR = LogOptions(segment_bytes=1 << 16, allocate_bytes=1 << 12, reserve_bytes=0, floor_s=1e9)


def encoded(batches):
    return [batch.encode() for batch in batches]


def only_segment(folder):
    (path,) = folder.glob("*.seg")
    return path


def flip(path, offset, bit=0):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


@pytest.fixture
def crashed(open_log, pen_on):
    """Three synced writes, the floor persisted by the first only, and no clean close."""
    pen = pen_on(open_log(NO_FLOOR))
    pen.put(b"first")
    pen.put(b"second", b"third")
    start = pen.log.segments()[-1].bytes
    pen.put(b"last one", b"of all")
    return pen, start, pen.log.segments()[-1].bytes


def test_a_tail_cut_at_any_byte_is_torn(crashed, open_log, folder):
    pen, start, end = crashed
    whole = only_segment(folder).read_bytes()
    for cut in range(start, end):
        only_segment(folder).write_bytes(whole[:cut])
        log = open_log(NO_FLOOR)
        assert log.sequence_durable == 3, cut
        assert encoded(log.reader.scan(1)) == encoded(pen.batches[:2])


@pytest.mark.parametrize("rest", [b"\x00", b"\xff"], ids=["zeros", "ones"])
def test_a_tail_lost_from_any_byte_is_torn(crashed, open_log, folder, rest):
    _, start, end = crashed
    whole = only_segment(folder).read_bytes()
    for cut in range(start, end):
        lost = whole[:cut] + rest * (end - cut) + whole[end:]
        if lost == whole:
            continue  # the bytes were zeros anyway
        only_segment(folder).write_bytes(lost)
        assert open_log(NO_FLOOR).sequence_durable == 3, cut


def test_a_cleared_tail_is_written_over_and_stays_whole(crashed, open_log, pen_on, folder):
    pen, start, end = crashed
    flip(only_segment(folder), end - 20)
    again = pen_on(open_log(NO_FLOOR))
    assert again.log.segments()[-1].bytes == start
    again.put(b"x")
    log = open_log(NO_FLOOR)
    assert encoded(log.reader.scan(1)) == encoded([*pen.batches[:2], *again.batches])
    assert not any(only_segment(folder).read_bytes()[log.segments()[-1].bytes :])


def test_part_of_a_torn_group_is_kept_and_appended_to(open_log, pen_on, folder):
    pen = pen_on(open_log(NO_FLOOR))
    pen.put(b"durable")
    for text in (b"one", b"two", b"three"):
        pen.stage([text])
    pen.flush()
    flip(only_segment(folder), pen.log.segments()[-1].bytes - 10)
    again = pen_on(open_log(NO_FLOOR))
    assert again.log.sequence_durable == 3
    again.put(b"after")
    log = open_log(NO_FLOOR)
    assert encoded(log.reader.scan(1)) == encoded([*pen.batches[:3], *again.batches])


def test_a_hole_in_an_unsynced_group_is_torn(open_log, pen_on, folder):
    """A disk may keep a later block of a write that it never finished and lose an earlier one."""
    pen = pen_on(open_log(NO_FLOOR))
    pen.put(b"durable")
    start = pen.log.segments()[-1].bytes
    for text in (b"lost", b"kept", b"kept too"):
        pen.stage([text])
    pen.flush()
    flip(only_segment(folder), start + MARK_SIZE + 80)
    assert open_log(NO_FLOOR).sequence_durable == 1


def test_damage_before_a_later_write_is_rot(crashed, open_log, folder):
    _, start, _ = crashed
    whole = only_segment(folder).read_bytes()
    for offset in range(64, start):
        flip(only_segment(folder), offset)
        with pytest.raises(Corruption) as caught:
            open_log(NO_FLOOR)
        assert caught.value.details["sequence"] <= 3
        assert caught.value.details["offset"] <= offset
        only_segment(folder).write_bytes(whole)


def test_damage_below_the_floor_is_rot(crashed, open_log, folder):
    pen, start, end = crashed
    pen.log.close()
    whole = only_segment(folder).read_bytes()
    for damaged in (whole[:start], whole[: end - 9], whole[:start] + bytes(len(whole) - start)):
        only_segment(folder).write_bytes(damaged)
        with pytest.raises(Corruption):
            open_log(NO_FLOOR)


def test_the_floor_is_persisted_while_writing(open_log, pen_on, folder):
    pen = pen_on(open_log(LogOptions(segment_bytes=1 << 16, reserve_bytes=0, floor_s=0)))
    pen.put(b"acknowledged")
    end = pen.log.segments()[-1].bytes
    pen.put(b"when this was written")
    flip(only_segment(folder), end - 10)
    with pytest.raises(Corruption, match="sequence 1 was acknowledged"):
        open_log(NO_FLOOR)


def test_a_mark_inside_a_payload_proves_nothing(open_log, pen_on, folder):
    pen = pen_on(open_log(NO_FLOOR))
    pen.put(b"durable")
    start = pen.log.segments()[-1].bytes
    header = SegmentHeader(7, 3, 1, 0, 0)
    forged = b"".join(Mark(64, 99, 2, 1).encode(header, at) for at in range(0, 800, 8))
    pen.put(forged)
    flip(only_segment(folder), start)  # the group's own mark: its length is unknown now
    assert open_log(NO_FLOOR).sequence_durable == 1


def test_a_missing_or_foreign_segment_is_rot(pen, open_log, folder):
    pen.fill(3)
    paths = sorted(folder.glob("*.seg"))
    for path in paths:
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(Corruption):
            open_log()
        path.write_bytes(paths[0].read_bytes() if path != paths[0] else data[:10])
        with pytest.raises(Corruption):
            open_log()
        path.write_bytes(data)
    assert open_log().sequence_durable == pen.log.sequence_durable


def test_a_lost_footer_below_the_newest_segment_is_rot(pen, open_log, folder):
    pen.fill(2)
    first, *_ = sorted(folder.glob("*.seg"))
    flip(first, first.stat().st_size - 1)
    with pytest.raises(Corruption, match="footer"):
        open_log()


def test_a_missing_floor_is_rot(pen, open_log, folder):
    pen.put(b"x")
    (folder / "floor").unlink()
    with pytest.raises(Corruption, match="floor"):
        open_log()
    assert open_log(accept_rot=True).sequence_durable == 1


@pytest.mark.parametrize("where", ["header", "batch", "footer"])
def test_accepted_rot_ends_the_log_there_and_keeps_the_rest(
    pen, pen_on, open_log, folder, where, caplog
):
    pen.fill(3)
    pen.log.close()
    second = sorted(folder.glob("*.seg"))[1]
    flip(second, {"header": 20, "batch": 700, "footer": second.stat().st_size - 9}[where])
    damaged = second.read_bytes()
    log = open_log(accept_rot=True)
    assert "ROT ACCEPTED" in caplog.text
    kept = [batch for batch in pen.batches if batch.last <= log.sequence_durable]
    assert encoded(log.reader.scan(1)) == encoded(kept) and 0 < len(kept) < len(pen.batches)
    assert second.with_name(second.name + ".rot").read_bytes() == damaged
    again = pen_on(log)
    again.put(b"life goes on")
    log.close()
    assert encoded(open_log().reader.scan(1)) == encoded([*kept, *again.batches])


def test_damage_inside_a_sealed_segment_is_met_by_the_scan(pen, open_log, folder):
    pen.fill(2)
    flip(min(folder.glob("*.seg")), 700)
    log = open_log()
    with pytest.raises(Corruption) as caught:
        list(log.reader.scan(1))
    assert caught.value.details["partition"] == 3


def test_a_read_of_a_damaged_batch_says_so(pen, open_log, folder):
    pen.fill(1)
    flip(min(folder.glob("*.seg")), 64 + MARK_SIZE + 80)
    with pytest.raises(Corruption) as caught:
        open_log().reader.read(1, nowait=False)
    assert caught.value.details["sequence"] == 1


def test_leftovers_of_a_crash_are_swept_away(pen, open_log, folder):
    pen.fill(2)
    shutil.copy(min(folder.glob("*.seg")), folder / "spare1.tmp")
    (folder / "00000000000000ff.snap.tmp").write_bytes(b"half")
    open_log(NO_FLOOR).close()
    assert not list(folder.glob("*.tmp"))
