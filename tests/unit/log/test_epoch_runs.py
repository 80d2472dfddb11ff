from __future__ import annotations

import pytest


@pytest.fixture
def log(pen):
    """Epochs that change inside of segments and at their ends."""
    for number in range(120):
        pen.put(b"%d" % number * 20, b"second", epoch=1 + number // 7 * 2)
    return pen.log


def runs_of(batches, from_sequence):
    runs = []
    for batch in batches:
        if batch.last >= from_sequence and (not runs or runs[-1][0] != batch.epoch):
            runs.append((batch.epoch, max(batch.first, from_sequence)))
    return runs


def test_runs_are_those_of_the_headers(log, pen, open_log):
    for view in (log, open_log()):
        for start in (1, 2, 15, 100, 101, log.sequence_last):
            assert view.epoch_runs(start) == runs_of(pen.batches, start)


def test_runs_begin_where_the_log_does(log, pen):
    log.drop_before(log.segments()[1].last + 1)
    first = log.sequence_first
    assert log.epoch_runs(1) == runs_of(pen.batches, first)
    assert log.epoch_runs(log.sequence_last + 1) == []


def test_an_empty_log_has_none(open_log):
    assert open_log().epoch_runs(1) == []


def test_staged_batches_are_not_among_them(pen):
    pen.put(b"x", epoch=1)
    pen.stage([b"y"], epoch=2)
    assert pen.log.epoch_runs(1) == [(1, 1)]
