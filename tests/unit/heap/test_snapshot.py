import struct
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.errors import Corruption
from penstock.heap.machine import Heap
from penstock.heap.state import Totals
from penstock.heap.transactions import SharePlace, pack_places
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
        again.apply(busy.batches[-1], busy.batches[-1].columns())
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


def test_a_newer_snapshot_is_refused(busy) -> None:
    with pytest.raises(Corruption, match="version 4"):
        restored(busy, rewritten(saved(busy), version=4))


def test_a_commit_that_may_be_asked_for_is_kept(busy) -> None:
    places = pack_places([SharePlace(1, 5)])
    values = {"transaction": [b"kept"], "commit": [1], "participants": [places]}
    busy.write(Kind.DECIDE, 1, values)
    again = restored(busy, saved(busy))
    assert again.transactions.unconfirmed[b"kept"].places == (SharePlace(1, 5),)
    assert again.digest() == busy.heap.digest()


def test_totals_are_kept(busy) -> None:
    assert busy.heap.totals == Totals(enqueued=24, acked=2, retried=2, dead=1)
    assert restored(busy, saved(busy)).totals == busy.heap.totals


@pytest.mark.parametrize("version", [1, 2])
def test_a_snapshot_from_before_there_were_totals_tells_what_it_holds(busy, version: int) -> None:
    again = restored(busy, rewritten(saved(busy), version=version, totals=None))
    again.validate()
    assert again.totals == Totals(enqueued=22, dead=1)  # two are acknowledged, and gone
    again.totals = busy.heap.totals
    assert again.digest() == busy.heap.digest()


def rewritten(data: bytes, **changes: Any) -> bytes:
    """A snapshot with another head; what is None is left out of it."""
    (size,) = struct.unpack_from("<I", data, 4)
    head = msgspec.msgpack.decode(data[8 : 8 + size]) | changes
    packed = msgspec.msgpack.encode({n: value for n, value in head.items() if value is not None})
    prefix = data[:4] + struct.pack("<I", len(packed)) + packed
    return prefix + bytes(-len(prefix) & 7) + data[(8 + size + 7) & ~7 :]


def test_many_pages_come_back(log) -> None:
    for _ in range(30):
        log.put(*range(1000))
    log.write(Kind.ACK, 1, {"through": [9000]})
    again = restored(log, saved(log))
    again.validate()
    assert again.digest() == log.heap.digest()
    assert np.array_equal(again.alive(1, 1 << 40), log.heap.alive(1, 1 << 40))
