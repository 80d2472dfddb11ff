from __future__ import annotations

import pytest

from penstock.errors import NotFound


def staged(log, from_sequence, *, through=1 << 40, bytes_max=1 << 20):
    found = log.reader.read_slice(
        from_sequence, through=through, bytes_max=bytes_max, nowait=True, staged=True
    )
    return [(batch.first, batch.last) for batch in found]


def test_staged_batches_are_read_by_who_asks_for_them(pen):
    pen.put(b"durable")
    pen.stage([b"a", b"b"])
    pen.stage([b"c"])
    assert staged(pen.log, 2) == [(2, 3), (4, 4)]
    assert staged(pen.log, 3) == [(2, 3), (4, 4)]
    assert pen.log.reader.read_slice(2, through=9, bytes_max=999, nowait=True) == []


def test_they_are_read_while_they_are_being_written(pen):
    pen.stage([b"a"])
    flush = pen.log.take()
    assert staged(pen.log, 1) == [(1, 1)]
    pen.log.write(flush)
    assert staged(pen.log, 1) == [(1, 1)]
    assert pen.log._cache.durable == 1


def test_a_slice_of_staged_batches_respects_its_bounds(pen):
    for _ in range(4):
        pen.stage([b"x" * 100, b"y"])
    assert staged(pen.log, 1, bytes_max=1) == [(1, 2)]
    assert staged(pen.log, 3, through=5) == [(3, 4)]
    assert staged(pen.log, 1, through=1) == []
    assert staged(pen.log, 9) == []


def test_slices_tile_durable_and_staged_batches(pen):
    pen.fill(2)
    for _ in range(5):
        pen.stage([b"a", b"b"])
    at, found = 1, []
    while piece := pen.log.reader.read_slice(
        at, through=1 << 40, bytes_max=700, nowait=False, staged=True
    ):
        found += piece
        at = piece[-1].last + 1
    assert [b.encode() for b in found] == [b.encode() for b in pen.batches]


def test_a_begun_flush_is_let_go_when_it_is_finished(pen):
    import os

    pen.put(b"first")
    pen.log._writer.floor_due_at = float("inf")
    pen.stage([b"second"])
    flush = pen.log.take()
    os.fdatasync(pen.log.begin(flush))
    assert pen.log._cache.durable == 1
    pen.log.finish(flush, None)
    assert pen.log._cache.durable == 2 and staged(pen.log, 2) == [(2, 2)]


def test_what_others_have_committed_is_read_before_the_disk_has_it(pen):
    pen.put(b"durable")
    pen.stage([b"a", b"b"])
    pen.stage([b"c"])
    pen.log.advance_commit(3)
    assert pen.log.reader.read(3, nowait=True) is pen.batches[1]
    assert pen.log.reader.first_of(3) == 2
    with pytest.raises(NotFound):
        pen.log.reader.read(4, nowait=True)
    pen.flush()
    assert pen.log.reader.read(4, nowait=True).encode() == pen.batches[2].encode()
