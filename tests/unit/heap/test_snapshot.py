import struct

import msgspec
import numpy as np
import pytest

from penstock.errors import Corruption
from penstock.heap import Heap
from penstock.heap.transactions import Place, pack_places
from penstock.model.batch import Kind


@pytest.fixture
def busy(log):
    """A heap with something of everything."""
    log.put(*range(20), delay_ms=[0, 700] * 10, max_retries=[-1, 4] * 10)
    log.put_runs((b"p", 3, 0, 4))
    tokens = log.lease(8)
    log.ack(*tokens[:2])
    log.nack(*tokens[2:4], not_before_ms=log.now + 10)
    log.die(tokens[4], detail=b"why")
    log.write(Kind.EXTEND, 1, {"token": [tokens[5]], "extend_ms": [90_000]})
    log.write(Kind.PREPARE, 2, {"priority": [1, 2], "transaction": [b"open"], "home": [1]}, runs=0)
    log.write(Kind.DECIDE, 1, {"transaction": [b"done"], "commit": [1]})
    log.now += 50
    log.write(Kind.BARRIER, 1, {"node": [b"n"]})
    return log


def saved(log) -> bytes:
    return b"".join(log.heap.snapshot())


def restored(log, data: bytes) -> Heap:
    return Heap.restore(log.config, data, partition=0)


def test_a_restored_heap_is_the_same_heap(busy) -> None:
    again = restored(busy, saved(busy))
    again.validate()
    assert b"".join(again.snapshot()) == saved(busy)
    assert again.digest() == busy.heap.digest()
    assert again.next_wakeup() == busy.heap.next_wakeup()
    for now in (busy.now, busy.now + 1000):
        assert again.select(99, now).tolist() == busy.heap.select(99, now).tolist()


def test_a_restored_heap_goes_on(busy) -> None:
    again = restored(busy, saved(busy))
    for kind, count, values in (
        (Kind.ENQ, 2, {"priority": [3, -1]}),
        (Kind.DECIDE, 1, {"transaction": [b"open"], "commit": [1]}),
        (Kind.BARRIER, 1, {"node": [b"n"]}),
    ):
        busy.write(kind, count, values)
        again.apply(busy.batches[-1], busy.batches[-1].columns(), 0)
    again.validate()
    assert again.digest() == busy.heap.digest()


def test_a_snapshot_does_not_change_with_the_heap(busy) -> None:
    parts = busy.heap.snapshot()
    before = b"".join(parts)
    busy.lease(5)
    busy.write(Kind.ACK, 1, {"through": [1000]})
    assert b"".join(parts) == before


def test_an_empty_heap_has_a_snapshot(log) -> None:
    again = restored(log, saved(log))
    assert again.digest() == log.heap.digest()
    assert again.select(1, 0).tolist() == []


def test_the_digest_ignores_who_has_looked(log) -> None:
    log.put(1, delay_ms=[10])
    before = log.heap.digest()
    log.now += 10
    assert log.select() == [1]
    assert (log.heap.ready, log.heap.delayed) == (1, 0)
    assert log.heap.digest() == before


def test_the_digest_sees_every_difference(busy) -> None:
    seen = {busy.heap.digest()}
    for kind, values in (
        (Kind.ENQ, {"priority": [1]}),
        (Kind.BARRIER, {"node": [b"n"]}),
        (Kind.ACK, {"token": [28]}),
        (Kind.REPLAY, {"message": busy.heap.dead_list(0, 1)[0][:1]}),
    ):
        busy.write(kind, 1, values)
        seen.add(busy.heap.digest())
    assert len(seen) == 5


@pytest.mark.parametrize("keep", [0, 3, 40, -20])
def test_a_cut_snapshot_is_damage(busy, keep: int) -> None:
    with pytest.raises(Corruption):
        restored(busy, saved(busy)[:keep])


def test_a_foreign_snapshot_is_refused(busy) -> None:
    with pytest.raises(Corruption, match="another partition"):
        Heap.restore(busy.config, saved(busy), partition=1)
    with pytest.raises(Corruption, match="not a heap snapshot"):
        restored(busy, b"\0" * 100)


def test_a_newer_snapshot_is_refused(busy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.heap.snapshot.VERSION", 3)
    data = saved(busy)
    monkeypatch.undo()
    with pytest.raises(Corruption, match="version 3"):
        restored(busy, data)


def test_a_commit_that_may_be_asked_for_raises_the_version(busy) -> None:
    """A version that would not keep it must not take the snapshot."""
    assert _version(saved(busy)) == 1
    places = pack_places([Place(1, 5)])
    values = {"transaction": [b"kept"], "commit": [1], "participants": [places]}
    busy.write(Kind.DECIDE, 1, values)
    assert _version(saved(busy)) == 2
    again = restored(busy, saved(busy))
    assert again.transactions.unconfirmed[b"kept"].places == (Place(1, 5),)
    assert again.digest() == busy.heap.digest()
    busy.write(Kind.DECIDE, 1, {"transaction": [b"kept"], "commit": [2]})
    assert _version(saved(busy)) == 1


def _version(data: bytes) -> int:
    (size,) = struct.unpack_from("<I", data, 4)
    return msgspec.msgpack.decode(data[8 : 8 + size])["version"]


def test_many_pages_come_back(log) -> None:
    for _ in range(30):
        log.put(*range(1000))
    log.write(Kind.ACK, 1, {"through": [9000]})
    again = restored(log, saved(log))
    again.validate()
    assert again.digest() == log.heap.digest()
    assert np.array_equal(again.alive(1, 1 << 40), log.heap.alive(1, 1 << 40))
