from __future__ import annotations

import pytest

from penstock.errors import Corruption, NotFound, Unavailable
from penstock.log.flush import BatchCache


def test_the_least_recently_used_goes_first(pen):
    batches = [pen.put(b"x" * 1000) for _ in range(4)]
    cache = BatchCache(3 * (len(batches[0].body) + 512))
    cache.durable = 4
    for batch in batches[:3]:
        cache.put(batch)
    cache.get(1)
    cache.put(batches[3])
    assert [cache.get(first) is not None for first in (1, 2, 3, 4)] == [True, False, True, True]


def test_bytes_are_counted_out_again(pen):
    cache = BatchCache(1 << 20)
    batch = pen.put(b"x" * 1000)
    cache.put(batch)
    cache.put(batch)
    assert cache.bytes == len(batch.body) + 512
    cache.forget(1, 1)
    assert cache.bytes == 0 and cache.get(1) is None


def test_a_batch_over_the_bound_is_not_kept(pen):
    cache = BatchCache(100)
    cache.durable = 1
    cache.put(pen.put(b"x" * 1000))
    assert cache.bytes == 0


def test_a_batch_over_the_bound_is_kept_until_it_is_durable(pen):
    cache = BatchCache(100)
    batches = [pen.put(b"x" * 1000) for _ in range(2)]
    cache.put(batches[0])
    assert cache.get(1) is batches[0]
    cache.durable = 1
    cache.put(batches[1])
    assert cache.get(1) is None and cache.get(2) is batches[1]


READS = {
    "read": lambda log: log.reader.read(1, nowait=False),
    "slice": lambda log: log.reader.read_slice(1, through=9, bytes_max=1 << 20, nowait=False),
    "scan": lambda log: list(log.reader.scan(1)),
    "scrub": lambda log: list(log.reader.scrub()),
    "rewrite": lambda log: log.rewrite(1, lambda *_: []),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_damage_is_told_and_raised(pen, read):
    pen.fill(2)
    log = pen.log
    log._cache.forget(0, 1 << 64)
    oldest = min(log.folder.glob("*.seg"))
    data = bytearray(oldest.read_bytes())
    data[200] ^= 1
    oldest.write_bytes(data)
    told: list[Corruption] = []
    log.reader.on_damage = told.append
    with pytest.raises(Corruption) as raised:
        read(log)
    assert told == [raised.value] and told[0].details["file"] == str(oldest)


def test_other_errors_are_not_damage(pen):
    told: list[Corruption] = []
    pen.log.reader.on_damage = told.append
    with pytest.raises(NotFound):
        pen.log.reader.read(99, nowait=False)
    assert told == []


def test_a_closed_log_touches_no_files(pen):
    """Its folder may be another one's by then."""
    pen.fill(2)
    log, first = pen.log, pen.log.segments()[0].first
    log._cache.forget(0, 1 << 64)
    log.close()
    with pytest.raises(NotFound):
        log.reader.read(first, nowait=False)
    with pytest.raises(NotFound):
        list(log.reader.scrub())
    for change in (
        lambda: log.drop_before(99),
        lambda: log.rewrite(first, lambda *_: []),
        lambda: log.save_snapshot(sequence=1, chain=0, epoch=1, parts=[b""]),
    ):
        with pytest.raises(Unavailable):
            change()


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
            assert view.reader.epoch_runs(start) == runs_of(pen.batches, start)


def test_runs_begin_where_the_log_does(log, pen):
    log.drop_before(log.segments()[1].last + 1)
    first = log.sequence_first
    assert log.reader.epoch_runs(1) == runs_of(pen.batches, first)
    assert log.reader.epoch_runs(log.sequence_last + 1) == []


def test_an_empty_log_has_none(open_log):
    assert open_log().reader.epoch_runs(1) == []


def test_staged_batches_are_not_among_them(pen):
    pen.put(b"x", epoch=1)
    pen.stage([b"y"], epoch=2)
    assert pen.log.reader.epoch_runs(1) == [(1, 1)]
