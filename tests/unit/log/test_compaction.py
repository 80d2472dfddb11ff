from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from penstock.errors import FailedPrecondition, NotFound
from penstock.log.flush import LogOptions
from penstock.log.folder import DataFolder
from penstock.log.partition import PartitionLog
from penstock.log.verify import verify_folder
from penstock.model.batch import SCHEMAS, Codec, Kind, compress, seal


def alive(*sequences):
    def within(first, last):
        return np.array([s for s in sequences if first <= s <= last], np.uint64)

    return within


def messages(log):
    """Every message in the log: sequence -> (time, priority, payload)."""
    found = {}
    for batch in log.reader.scan(1):
        if batch.kind not in (Kind.ENQ, Kind.PREPARE) or not batch.entries:
            continue
        columns = batch.columns()
        sequences = range(batch.first, batch.last + 1)
        if batch.compacted:
            sequences = columns.fixed("sequence").tolist()
        rows = zip(columns.fixed("priority").tolist(), columns.binary("payload"), strict=True)
        found |= {s: (batch.time_ms, *row) for s, row in zip(sequences, rows, strict=True)}
    return found


@pytest.fixture
def filled(pen):
    """Three sealed segments of messages, every batch with its own time, and some ACKs."""
    while sum(info.sealed for info in pen.log.segments()) < 3:
        pen.time_ms += pen.log.sequence_last % 3
        pen.put(b"%d" % pen.log.sequence_last, b"x" * 60, b"third")
        pen.put(b"t", kind=Kind.ACK)
    return pen


def test_only_living_messages_stay_with_their_time(filled, open_log):
    log, before = filled.log, messages(filled.log)
    target = log.segments()[1]
    keep = [s for s in before if target.first <= s <= target.last][::5]
    saved = log.rewrite(target.first, alive(*keep))
    assert saved > 0
    expected = {s: row for s, row in before.items() if s in keep}
    expected |= {s: row for s, row in before.items() if not target.first <= s <= target.last}
    for view in (log, open_log()):
        assert messages(view) == expected


def test_ranges_and_chain_stay_provable(filled, open_log):
    log = filled.log
    chain, last, infos = log.chain_last, log.sequence_last, log.segments()
    for info in infos[:3]:
        log.rewrite(info.first, alive(info.first, info.last))
    ranges = [(batch.first, batch.last) for batch in open_log().reader.scan(1)]
    assert ranges[0][0] == 1 and ranges[-1][1] == last
    assert all(a[1] + 1 == b[0] for a, b in pairwise(ranges))
    assert open_log().chain_last == chain
    assert all(info.compacted for info in log.segments()[:3])


def test_every_living_message_is_read_by_its_sequence(filled):
    log = filled.log
    first = log.segments()[0]
    log.reader.read(1, nowait=False)  # so that the cache knows the old batch
    keep = [s for s in messages(log) if s <= first.last][::5]
    log.rewrite(first.first, alive(*keep))
    for sequence in keep:
        batch = log.reader.read(sequence, nowait=False)
        assert batch.first <= sequence <= batch.last
        kept = batch.columns().fixed("sequence").tolist() if batch.compacted else [sequence]
        assert sequence in kept


def test_a_dead_segment_becomes_one_empty_batch(filled):
    log = filled.log
    info = log.segments()[0]
    log.rewrite(info.first, alive())
    batch = log.reader.read(info.last, nowait=False)
    assert (batch.first, batch.last, batch.entries) == (info.first, info.last, 0)
    assert log.segments()[0].bytes < 300


def test_a_rewritten_segment_can_be_rewritten_again(filled, open_log):
    log, info = filled.log, filled.log.segments()[0]
    rows = {s: row for s, row in messages(log).items() if s <= info.last}
    log.rewrite(info.first, alive(*list(rows)[::2]))
    assert log.rewrite(info.first, alive(*list(rows)[::4])) > 0
    found = {s: row for s, row in messages(open_log()).items() if s <= info.last}
    assert found == {s: rows[s] for s in list(rows)[::4]}


def test_nothing_to_gain_leaves_the_file_alone(filled, folder):
    info = filled.log.segments()[0]
    filled.log.rewrite(info.first, alive(1))
    before = min(folder.glob("*.seg")).read_bytes()
    assert filled.log.rewrite(info.first, alive(1)) == 0
    assert min(folder.glob("*.seg")).read_bytes() == before
    assert not list(folder.glob("*.seg.tmp"))


def test_a_prepared_batch_with_a_living_message_stays_whole(pen):
    values = {"priority": [1, 2], "payload": [b"p", b"q"], "transaction": [b"t1"], "home": [0]}
    log = pen.log
    prepare = seal(
        Kind.PREPARE, SCHEMAS[Kind.PREPARE].encode(2, values), topic=7, partition=3, epoch=1,
        epoch_previous=0, first=1, count=2, time_ms=5, chain_previous=0,
    )  # fmt: skip
    log.stage(prepare)
    pen.fill(1)
    log.rewrite(1, alive(2))
    assert log.reader.read(1, nowait=False).encode() == prepare.encode()
    log.rewrite(1, alive())
    assert log.reader.read(1, nowait=False).entries == 0


@pytest.mark.parametrize("codec", list(Codec))
def test_bodies_stay_compressed(pen, codec):
    raw = SCHEMAS[Kind.ENQ].encode(3, {"payload": [b"a" * 500, b"b" * 500, b"c" * 500]})
    body = compress(codec, raw)
    batch = seal(
        Kind.ENQ, body, topic=7, partition=3, epoch=1, epoch_previous=0, first=1, count=3,
        time_ms=5, chain_previous=0, codec=codec, raw_length=len(raw),
    )  # fmt: skip
    pen.log.grow(batch.size)
    pen.log.stage(batch)
    pen.fill(1)
    pen.log.rewrite(1, alive(2))
    found = pen.log.reader.read(2, nowait=False)
    assert found.codec is codec
    assert list(found.columns().binary("payload")) == [b"b" * 500]


def test_only_sealed_segments_are_rewritten(pen):
    pen.put(b"x")
    with pytest.raises(FailedPrecondition):
        pen.log.rewrite(1, alive())
    with pytest.raises(NotFound):
        pen.log.rewrite(2, alive())


def test_fsck_accepts_a_rewritten_log(tmp_path, pen_on):
    with DataFolder.open(tmp_path / "data") as data:
        options = LogOptions(segment_bytes=2048, allocate_bytes=1024, reserve_bytes=0)
        data.inventory.add(1, 0, name="jobs", uuid="")
        log = PartitionLog.open(data.partition(1, 0), topic=1, partition=0, options=options)
        pen = pen_on(log)
        pen.fill(3)
        for info in log.segments()[:3]:
            log.rewrite(info.first, alive(info.first))
        log.close()
    report = verify_folder(data.path)
    assert report.ok and report.notes == []


def test_drop_deletes_whole_segments_at_the_head(filled, open_log, folder):
    log, infos = filled.log, filled.log.segments()
    assert log.drop_before(infos[1].last) == infos[0].bytes
    assert log.sequence_first == infos[1].first
    with pytest.raises(NotFound):
        log.reader.read(1, nowait=False)
    again = open_log()
    assert again.sequence_first == infos[1].first
    assert next(again.reader.scan(1)).first == infos[1].first
    assert len(list(folder.glob("*.seg"))) == len(list(folder.glob("*.idx"))) + 1 == 3


def test_drop_never_takes_the_newest_segment(filled, open_log):
    filled.log.drop_before(1 << 40)
    log = open_log()
    assert log.sequence_last == filled.log.sequence_last
    assert len(log.segments()) == 1
