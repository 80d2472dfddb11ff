"""The event loop, the writer and upkeep at work on one log at the same time."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np

from penstock.errors import NotFound
from penstock.log.flush import LogOptions

OPTIONS = LogOptions(
    segment_bytes=16 << 10, allocate_bytes=4096, reserve_bytes=0, cache_bytes=8 << 10,
    index_bytes=256,
)  # fmt: skip


def upkeep(log, done):
    """Rewrite and drop whatever is sealed, keeping every third message."""
    work = 0
    while not done.is_set():
        sealed = [info for info in log.segments() if info.sealed]
        for info in sealed[-3:]:
            if not info.compacted:
                log.rewrite(info.first, lambda a, b: np.arange(a, b + 1, dtype=np.uint64)[::3])
                work += 1
        if len(sealed) > 6:
            log.drop_before(sealed[2].first)
        work += sum(1 for _ in log.reader.scrub())
    return work


def read(log, done):
    """Read and scan at random; every batch that is held must be right."""
    dice, found = random.Random(1), 0
    while not done.is_set():
        if log.sequence_durable == 0:
            continue
        sequence = dice.randint(log.sequence_first, log.sequence_durable)
        try:
            batch = log.reader.read(sequence, nowait=dice.random() < 0.5)
            slice_ = log.reader.read_slice(sequence, through=1 << 40, bytes_max=3000, nowait=False)
        except NotFound:
            continue  # dropped between the look and the read
        assert batch is None or batch.first <= sequence <= batch.last
        assert slice_[0].first <= sequence <= slice_[0].last
        found += 1
    return found


def test_readers_and_upkeep_do_not_disturb_the_writer(open_log, pen_on):
    pen, done = pen_on(open_log(OPTIONS)), Event()
    with ThreadPoolExecutor(4) as pool:
        upkept = pool.submit(upkeep, pen.log, done)
        readers = [pool.submit(read, pen.log, done) for _ in range(2)]
        for number in range(150):
            for _ in range(number % 4 + 1):
                pen.stage([b"%d" % number * 40] * 3)
            pool.submit(pen.log.write, pen.log.take()).result()
        done.set()
        assert upkept.result() > 0
        assert all(reader.result() > 0 for reader in readers)
    log = open_log(OPTIONS)
    assert list(log.reader.scan(1))[-1].chain == pen.batches[-1].chain


def scrub(log, done):
    rounds = 0
    while not done.is_set():
        rounds += 1
        for _ in log.reader.scrub():
            pass
    return rounds


def read_committed(log, done, expected):
    """What is committed is read as it was written, whatever happens behind it."""
    dice, found = random.Random(2), 0
    while not done.is_set():
        through = log.sequence_committed
        sequence = dice.randint(1, through)
        batch = log.reader.read(sequence, nowait=False)
        [first, *_] = log.reader.read_slice(sequence, through=through, bytes_max=3000, nowait=False)
        assert batch.chain == first.chain == expected[sequence]
        found += 1
    return found


def test_cuts_do_not_disturb_readers_of_what_is_committed(open_log, pen_on):
    pen, done, expected = pen_on(open_log(OPTIONS)), Event(), {}
    batch = pen.put(b"first")
    expected[1] = batch.chain
    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read_committed, pen.log, done, expected) for _ in range(2)]
        scrubber = pool.submit(scrub, pen.log, done)
        for number in range(60):
            kept = pen.stage([b"%d" % number * 40] * 3)
            for _ in range(12):
                pen.stage([b"%d goes" % number * 40] * 3)
            pool.submit(pen.log.write, pen.log.take()).result()
            pool.submit(pen.log.truncate, kept.last).result()
            expected |= dict.fromkeys(range(kept.first, kept.last + 1), kept.chain)
            pen.log.advance_commit(kept.last)
        done.set()
        assert all(reader.result() > 0 for reader in [*readers, scrubber])
    assert open_log(OPTIONS).sequence_last == pen.log.sequence_last == 181
