"""Whatever reads a log tells its owner of damage."""

import pytest

from penstock.errors import Corruption, NotFound, Unavailable

READS = {
    "read": lambda log: log.read(1, nowait=False),
    "slice": lambda log: log.read_slice(1, through=9, bytes_max=1 << 20, nowait=False),
    "scan": lambda log: list(log.scan(1)),
    "scrub": lambda log: list(log.scrub()),
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
    log.watch.tell = told.append
    with pytest.raises(Corruption) as raised:
        read(log)
    assert told == [raised.value] and told[0].details["file"] == str(oldest)


def test_other_errors_are_not_damage(pen):
    told: list[Corruption] = []
    pen.log.watch.tell = told.append
    with pytest.raises(NotFound):
        pen.log.read(99, nowait=False)
    assert told == []


def test_a_closed_log_touches_no_files(pen):
    """Its folder may be another one's by then."""
    pen.fill(2)
    log, first = pen.log, pen.log.segments()[0].first
    log._cache.forget(0, 1 << 64)
    log.close()
    with pytest.raises(NotFound):
        log.read(first, nowait=False)
    with pytest.raises(NotFound):
        list(log.scrub())
    for change in (
        lambda: log.drop_before(99),
        lambda: log.rewrite(first, lambda *_: []),
        lambda: log.save_snapshot(sequence=1, chain=0, epoch=1, parts=[b""]),
    ):
        with pytest.raises(Unavailable):
            change()
