from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import Corruption


@pytest.fixture
def log(pen):
    for _ in range(4):
        pen.put(b"a", b"b")
    return pen.log


def save(log, sequence, *parts):
    return log.save_snapshot(sequence=sequence, chain=sequence * 11, epoch=1, parts=parts)


def test_a_log_without_one_has_none(pen):
    assert pen.log.load_snapshot() is None


def test_the_newest_comes_back_as_it_was(log, open_log):
    save(log, 2, b"old")
    size = save(log, 6, b"head", np.arange(3, dtype=np.uint64).tobytes(), memoryview(b"tail"))
    found = open_log().load_snapshot()
    assert (found.sequence, found.chain, found.epoch) == (6, 66, 1)
    assert bytes(found.data) == b"head" + np.arange(3, dtype=np.uint64).tobytes() + b"tail"
    assert size == len(found.data) + 80 and found.time_ms > 1_600_000_000_000


def test_the_last_two_are_kept(log):
    for sequence in (2, 4, 6, 8):
        save(log, sequence, b"state")
    assert log.snapshot_sequences() == [6, 8]


def test_any_damage_falls_back_to_the_older_one(log, folder):
    save(log, 4, b"old")
    save(log, 8, b"new state")
    path = max(folder.glob("*.snap"))
    whole = path.read_bytes()
    for offset in range(len(whole)):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 4]) + whole[offset + 1 :])
        assert log.load_snapshot().sequence == 4, offset
    path.write_bytes(whole[:-1])
    assert log.load_snapshot().sequence == 4


def test_a_snapshot_ahead_of_the_durable_log_is_refused(log):
    with pytest.raises(ValueError, match="ahead"):
        save(log, 9, b"x")


def test_saving_raises_the_floor(log, open_log, folder):
    save(log, 4, b"x")
    (path,) = folder.glob("*.seg")
    data = bytearray(path.read_bytes())
    data[log.segments()[-1].bytes - 12] ^= 1
    path.write_bytes(data)
    with pytest.raises(Corruption, match="was acknowledged"):
        open_log()
