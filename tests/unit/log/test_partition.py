from __future__ import annotations

import pytest

from penstock.errors import DiskFull, NotFound
from penstock.log.flush import LogOptions
from penstock.model.batch import Kind


def encoded(batches):
    return [batch.encode() for batch in batches]


def test_an_empty_log_has_nothing(open_log):
    log = open_log()
    assert (log.sequence_first, log.sequence_last, log.sequence_durable) == (1, 0, 0)
    assert (log.epoch_last, log.chain_last, log.take()) == (0, 0, None)
    assert list(log.reader.scan(1)) == []
    assert log.reader.read_slice(1, through=10, bytes_max=1000, nowait=False) == []
    log.close()
    assert open_log().sequence_last == 0


def test_what_was_written_is_read_again_after_reopening(pen, open_log):
    for count in (1, 3, 10, 2):
        pen.put(*[b"x" * 90] * count)
    log = open_log()
    assert log.sequence_durable == 16
    assert (log.chain_last, log.epoch_last) == (pen.log.chain_last, 1)
    assert encoded(log.reader.scan(1)) == encoded(pen.batches)


def test_only_durable_batches_are_readable(pen):
    pen.put(b"one")
    pen.stage([b"two"])
    assert pen.log.sequence_last == 2
    with pytest.raises(NotFound):
        pen.log.reader.read(2, nowait=False)
    assert encoded(pen.log.reader.scan(1)) == encoded(pen.batches[:1])
    pen.flush()
    assert pen.log.reader.read(2, nowait=True).encode() == pen.batches[1].encode()


def test_every_sequence_is_found_across_segments(pen, open_log):
    pen.fill(4)
    pen.log.close()
    log = open_log()
    for batch in pen.batches:
        for sequence in range(batch.first, batch.last + 1):
            assert log.reader.read(sequence, nowait=False).encode() == batch.encode()


def test_one_flush_may_cross_segments(pen, open_log):
    for number in range(40):
        pen.stage([b"%d" % number * 100])
    flush = pen.log.take()
    assert len(flush.pieces) > 2
    assert pen.log.write(flush) == 40
    assert encoded(open_log().reader.scan(1)) == encoded(pen.batches)


def test_a_batch_over_a_segment_gets_its_own(pen, open_log):
    pen.put(b"small")
    pen.put(b"x" * 10_000)
    pen.put(b"small again")
    log = open_log()
    assert [info.first for info in log.segments()] == [1, 2, 3]
    assert encoded(log.reader.scan(1)) == encoded(pen.batches)


def test_a_slice_respects_bytes_and_the_watermark(pen, open_log):
    pen.fill(2)
    log = open_log()
    one = log.reader.read_slice(3, through=log.sequence_durable, bytes_max=1, nowait=False)
    assert encoded(one) == encoded(pen.batches[1:2])
    upto = log.reader.read_slice(1, through=6, bytes_max=1 << 20, nowait=False)
    assert encoded(upto) == encoded(pen.batches[:3])
    assert log.reader.read_slice(1, through=1, bytes_max=1 << 20, nowait=False) == []


def test_slices_tile_the_log(pen, open_log):
    pen.fill(3)
    for log in (pen.log, open_log()):
        at, found = 1, []
        while piece := log.reader.read_slice(at, through=1 << 40, bytes_max=700, nowait=False):
            found += piece
            at = piece[-1].last + 1
        assert encoded(found) == encoded(pen.batches)


def test_a_scan_may_begin_inside_a_batch(pen, open_log):
    pen.fill(2)
    log = open_log()
    for sequence in (2, 5, 6, log.sequence_durable):
        found = list(log.reader.scan(sequence))
        assert encoded(found) == encoded(b for b in pen.batches if b.last >= sequence)


def test_a_batch_that_does_not_follow_is_refused(pen):
    batch = pen.put(b"one")
    with pytest.raises(ValueError, match="does not follow"):
        pen.log.stage(batch)


def test_staging_past_the_room_changes_nothing(pen):
    batch = pen.batch([b"x" * 50_000])
    with pytest.raises(DiskFull):
        pen.log.stage(batch)
    assert pen.log.sequence_last == 0 and pen.log.take() is None
    pen.log.grow(batch.size)
    pen.log.stage(batch)


def test_room_is_exact(pen):
    while pen.log.room(False) > 400:
        pen.log.stage(pen.batch([b"x" * 100]))
    payload = pen.log.room(False) - pen.batch([b""]).size
    with pytest.raises(DiskFull):
        pen.log.stage(pen.batch([b"x" * (payload + 40)]))
    pen.log.stage(pen.batch([b"x" * payload]))
    pen.flush()


def test_enqueues_leave_the_reserve(open_log):
    log = open_log(LogOptions(segment_bytes=1 << 20, allocate_bytes=1 << 16, reserve_bytes=4096))
    assert log.room(False) - log.room(True) == 4096
    log.grow(log.room(True) + 1000)
    assert log.room(False) - log.room(True) == 4096


def test_a_view_as_body_is_copied(pen):
    data = bytearray(pen.batch([b"payload"]).encode())
    from penstock.model.batch import decode

    pen.log.stage(decode(data))
    data[:] = bytes(len(data))
    pen.flush()
    assert pen.log.reader.read(1, nowait=True).columns().binary("payload")[0] == b"payload"


def test_all_kinds_and_epochs_are_kept(pen, open_log):
    pen.put(b"a")
    pen.put(b"b", kind=Kind.ACK, epoch=4)
    log = open_log()
    assert [batch.kind for batch in log.reader.scan(1)] == [Kind.ENQ, Kind.ACK]
    assert (log.epoch_last, log.time_ms_last) == (4, pen.time_ms)


def test_the_cache_serves_new_batches_without_the_file(pen):
    batch = pen.put(b"hot")
    pen.log.folder.joinpath(f"{1:016x}.seg").write_bytes(b"")
    assert pen.log.reader.read(1, nowait=True).encode() == batch.encode()


def test_bytes_total_is_what_the_files_hold(pen, open_log):
    pen.fill(2)
    sizes = [path.stat().st_size for path in sorted(pen.log.folder.glob("*.seg"))]
    infos = pen.log.segments()
    assert [info.bytes for info in infos[:2]] == sizes[:2]
    assert pen.log.bytes_total == sum(info.bytes for info in infos) == open_log().bytes_total


def test_a_damaged_or_missing_index_is_rebuilt(pen, open_log):
    pen.fill(3)
    first, second, third = sorted(pen.log.folder.glob("*.idx"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1] + b"\xff")
    third.write_bytes(first.read_bytes() if first.exists() else b"")
    log = open_log()
    assert encoded(log.reader.read(b.first, nowait=False) for b in pen.batches) == encoded(
        pen.batches
    )
    assert first.exists()


def test_cold_reads_do_not_wait(pen, open_log):
    pen.fill(1)
    log = open_log()
    assert log.reader.read(1, nowait=True) is None  # the index is not loaded yet
    assert log.reader.read(1, nowait=False) is not None
    assert log.reader.read(1, nowait=True) is not None


def test_a_time_is_found_across_segments(pen, open_log):
    for step in range(120):
        pen.time_ms = 1_700_000_000_000 + step // 3 * 10  # three batches share a time
        pen.put(b"%d" % step * 10, b"second")
    reopened = open_log()
    assert len(reopened.segments()) > 3
    for wanted in range(pen.batches[0].time_ms - 5, pen.time_ms + 20, 5):
        fitting = (b.first for b in pen.batches if b.time_ms >= wanted)
        expected = next(fitting, reopened.sequence_last + 1)
        assert reopened.reader.find_time(wanted, through=reopened.sequence_last) == expected


def test_a_time_is_not_found_past_the_watermark(pen):
    first = pen.put(b"old")
    pen.time_ms += 1000
    staged = pen.stage([b"new"])
    assert pen.log.reader.find_time(staged.time_ms, through=staged.last) == first.last + 1
    assert pen.log.reader.find_time(0, through=0) == 1
    pen.flush()
    assert pen.log.reader.find_time(staged.time_ms, through=staged.last) == staged.first


def test_an_extent_has_whole_batches_within_both_bounds(pen):
    batches = [pen.put(*[b"x" * 100] * 3) for _ in range(5)]
    start, end = batches[0].first, batches[-1].last
    last, size = pen.log.reader.extent(start, through=end, entries_max=7, bytes_max=1 << 40)
    assert last == batches[1].last and size >= 2 * batches[0].size
    assert pen.log.reader.extent(start, through=end, entries_max=99, bytes_max=size) == (last, size)
    assert pen.log.reader.extent(start, through=end, entries_max=99, bytes_max=size - 1)[0] < last
    assert pen.log.reader.extent(start, through=end, entries_max=99, bytes_max=1 << 40)[0] == end


def test_an_extent_has_at_least_a_batch_and_ends_where_it_must(pen):
    [first, second] = [pen.put(b"a", b"b", b"c") for _ in range(2)]
    assert (
        pen.log.reader.extent(first.first, through=99, entries_max=1, bytes_max=1)[0] == first.last
    )
    inside = second.first + 1
    found = pen.log.reader.extent(first.first, through=inside, entries_max=99, bytes_max=1 << 40)
    assert found[0] == inside
    assert pen.log.reader.extent(second.last + 1, through=99, entries_max=9, bytes_max=9) == (
        second.last,
        0,
    )


def test_an_extent_goes_over_segments(pen):
    batches = [pen.put(b"x" * 3000) for _ in range(40)]
    assert len(list(pen.log.folder.glob("*.seg"))) > 1
    last, size = pen.log.reader.extent(1, through=10**6, entries_max=10**6, bytes_max=1 << 40)
    assert last == batches[-1].last and size >= 40 * 3000
    half, _ = pen.log.reader.extent(1, through=10**6, entries_max=10**6, bytes_max=size // 2)
    assert batches[15].last <= half <= batches[20].last
