"""The floor follows what is committed, not what is merely durable here."""

from __future__ import annotations

import pytest

from penstock.errors import Corruption
from penstock.log.flush import LogOptions

EAGER = LogOptions(segment_bytes=2048, allocate_bytes=1024, reserve_bytes=0, floor_s=0)


def write(pen, *payloads):
    pen.stage(payloads)
    pen.log.write(pen.log.take())


def test_what_is_only_durable_is_not_committed(open_log, pen_on):
    pen = pen_on(open_log(EAGER))
    for _ in range(40):  # over several segments
        write(pen, b"x" * 100)
    pen.log.persist_floor()
    pen.log.close()
    again = open_log(EAGER)
    assert (again.sequence_committed, again.sequence_durable) == (0, 40)


def test_the_floor_is_what_is_committed_and_durable(open_log, pen_on):
    pen = pen_on(open_log(EAGER))
    write(pen, b"a")
    write(pen, b"b")
    pen.log.advance_commit(1)
    pen.log.persist_floor()
    assert open_log(EAGER).sequence_committed == 1
    pen.stage([b"c"])
    pen.log.advance_commit(3)  # the others have it
    pen.log.persist_floor()
    assert open_log(EAGER).sequence_committed == 2


def test_commit_never_goes_back_and_never_past_the_end(pen):
    pen.put(b"a", b"b")
    pen.log.advance_commit(1)
    assert pen.log.sequence_committed == 2
    with pytest.raises(ValueError, match="past the end"):
        pen.log.advance_commit(3)


def test_a_snapshot_is_of_committed_state(open_log, pen_on):
    pen = pen_on(open_log(EAGER))
    write(pen, b"a", b"b")
    with pytest.raises(ValueError, match="ahead"):
        pen.log.save_snapshot(sequence=2, chain=0, epoch=1, parts=[b"x"])
    pen.log.advance_commit(2)
    pen.log.save_snapshot(sequence=2, chain=0, epoch=1, parts=[b"x"])
    assert open_log(EAGER).sequence_committed == 2


def test_losing_what_was_only_durable_is_no_rot(open_log, pen_on, folder):
    pen = pen_on(open_log(EAGER))
    write(pen, b"committed")
    pen.log.advance_commit(1)
    end = pen.log.segments()[-1].bytes
    write(pen, b"not yet")
    (path,) = folder.glob("*.seg")
    whole = path.read_bytes()
    path.write_bytes(whole[:end] + bytes(len(whole) - end))
    assert open_log(EAGER).sequence_durable == 1
    path.write_bytes(whole[: end - 20] + bytes(len(whole) - end + 20))
    with pytest.raises(Corruption, match="sequence 1 was acknowledged"):
        open_log(EAGER)
