import pytest

from penstock.heap.dedup import UNKNOWN, Dedup, ProducerRun

HOUR = 3_600_000


def record(dedup: Dedup, first: int, count: int, **more: int | bytes) -> None:
    values = {"producer": b"p", "epoch": 1, "message": 1000 + first, "time_ms": 0, **more}
    run = ProducerRun(values["producer"], values["epoch"], first, count, 0)
    dedup.record([run], message=values["message"], time_ms=values["time_ms"], dedup_ms=HOUR)
    dedup.validate()


def find(dedup: Dedup, sequence: int) -> tuple[int, int] | None:
    return dedup.producers[b"p"].find(sequence)


def test_an_entry_is_found_where_it_was_placed() -> None:
    dedup = Dedup()
    record(dedup, 5, 10, time_ms=7)
    assert [find(dedup, s) for s in (4, 5, 14, 15)] == [None, (1005, 7), (1014, 7), None]


def test_touching_runs_of_one_batch_are_one_place() -> None:
    dedup = Dedup()
    for i in range(100):
        record(dedup, i, 1)
    assert dedup.places == 1
    record(dedup, 100, 1, message=5000)
    assert dedup.places == 2


def test_late_entries_fill_the_holes_and_keep_what_was_there() -> None:
    dedup = Dedup()
    record(dedup, 10, 2)
    record(dedup, 20, 2)
    record(dedup, 8, 20, message=1)
    assert [find(dedup, s) for s in (8, 10, 12, 21, 22)] == [
        (1, 0), (1010, 0), (5, 0), (1021, 0), (15, 0),
    ]  # fmt: skip


def test_a_higher_epoch_starts_afresh_and_a_lower_is_passed_over() -> None:
    dedup = Dedup()
    record(dedup, 0, 5)
    record(dedup, 0, 2, epoch=2, message=9)
    record(dedup, 3, 2, epoch=1, message=50)
    assert dedup.epoch_of(b"p") == 2
    assert [find(dedup, s) for s in (0, 3)] == [(9, 0), None]


def test_places_expire_by_the_time_of_the_log() -> None:
    dedup = Dedup()
    record(dedup, 0, 5, time_ms=0)
    record(dedup, 5, 5, time_ms=HOUR, message=2000)
    assert find(dedup, 0) == (1000, 0)
    record(dedup, 10, 1, time_ms=HOUR + 1, message=3000)
    assert find(dedup, 0) is None
    assert find(dedup, 5) == (2000, HOUR)


def test_a_silent_producer_is_forgotten() -> None:
    dedup = Dedup()
    record(dedup, 0, 5)
    record(dedup, 0, 1, producer=b"q", time_ms=HOUR)
    assert set(dedup.producers) == {b"p", b"q"}
    record(dedup, 1, 1, producer=b"q", time_ms=HOUR + 1)
    assert set(dedup.producers) == {b"q"}


def test_many_places_are_folded_without_forgetting_what_was_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.heap.dedup.PLACES_MAX", 8)
    dedup = Dedup()
    for i in range(40):
        record(dedup, 2 * i, 2, message=10 * i, time_ms=i)
    assert dedup.places <= 8
    assert find(dedup, 0) == UNKNOWN
    assert find(dedup, 79) == (391, 39)
    assert all(find(dedup, s) is not None for s in range(80))
    assert len(dedup.producers[b"p"].archive) == 1


def test_all_producers_share_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.heap.dedup.PLACES_TOTAL_MAX", 40)
    dedup = Dedup()
    record(dedup, 0, 1, producer=b"small")
    for i in range(100):
        record(dedup, i, 1, message=10 * i, time_ms=i)
    assert dedup.places <= 41
    assert dedup.producers[b"small"].find(0) == (1000, 0)
    assert all(find(dedup, s) is not None for s in range(100))


def test_an_archive_with_too_many_holes_forgets_the_lowest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.heap.dedup.PLACES_MAX", 4)
    monkeypatch.setattr("penstock.heap.dedup.ARCHIVE_MAX", 8)
    dedup = Dedup()
    for i in range(40):
        record(dedup, 3 * i, 1)
    assert find(dedup, 0) is None
    assert find(dedup, 3 * 39) == (1117, 0)


def test_the_archive_expires_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.heap.dedup.PLACES_MAX", 4)
    dedup = Dedup()
    for i in range(5):
        record(dedup, 2 * i, 1, time_ms=i)
    assert find(dedup, 0) == UNKNOWN
    record(dedup, 100, 1, time_ms=HOUR + 1)
    assert find(dedup, 0) is None


def test_the_producer_that_was_silent_longest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.heap.dedup.PRODUCERS_MAX", 2)
    dedup = Dedup()
    for name in (b"a", b"b", b"a", b"c"):
        record(dedup, len(dedup.producers) * 10, 1, producer=name)
    assert list(dedup.producers) == [b"a", b"c"]


def test_an_aborted_entry_is_fresh_again() -> None:
    dedup = Dedup()
    record(dedup, 0, 10)
    dedup.retract(ProducerRun(b"p", 1, 3, 4, 0), message=1003)
    dedup.validate()
    assert [s for s in range(10) if find(dedup, s) is None] == [3, 4, 5, 6]
    dedup.retract(ProducerRun(b"p", 1, 0, 2, 0), message=77)  # those were other messages
    assert find(dedup, 0) == (1000, 0)
    record(dedup, 2, 6, message=5000)
    assert [find(dedup, s) for s in (2, 3, 7)] == [(1002, 0), (5001, 0), (1007, 0)]


def test_it_survives_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.heap.dedup.PLACES_MAX", 4)
    dedup = Dedup()
    for i in range(9):
        record(dedup, 5 * i, 1, message=i, time_ms=i)
    again = Dedup.load(dedup.dump())
    again.validate()
    assert again.dump() == dedup.dump()
