"""What a feed is handed before it is committed."""

import pytest

from penstock.model.batch import SCHEMAS, Batch, Codec, Kind
from penstock.node.live.partition import StagedDeltas


def batch(first: int, count: int) -> Batch:
    body = SCHEMAS[Kind.ENQ].encode(count, {"payload": [b"x"] * count})
    return Batch(
        Kind.ENQ, Codec.NONE, False, 1, 0, 1, 1, first, first + count - 1, count, 0, len(body), 0,
        b"", body,
    )  # fmt: skip


def holding(*batches: Batch) -> StagedDeltas:
    staged = StagedDeltas()
    for one in batches:
        assert staged.add(one, one.columns())
    return staged


def firsts(staged: StagedDeltas, following: int, *, through: int, rows_max: int = 100) -> list[int]:
    found = staged.take(following, through=through, rows_max=rows_max)
    assert found is not None
    return [one.first for one, _ in found]


def test_batches_come_in_the_order_of_the_log_up_to_the_commit() -> None:
    staged = holding(batch(1, 2), batch(3, 2), batch(5, 2))
    assert firsts(staged, 1, through=5) == [1, 3]
    assert firsts(staged, 5, through=5) == []  # half of it is committed
    assert firsts(staged, 5, through=6) == [5]
    assert staged.rows == 0


def test_a_large_batch_comes_alone() -> None:
    staged = holding(batch(1, 1), batch(2, 9), batch(11, 1))
    assert firsts(staged, 1, through=11, rows_max=4) == [1]
    assert firsts(staged, 2, through=11, rows_max=4) == [2]
    assert firsts(staged, 11, through=11, rows_max=4) == [11]


def test_what_was_read_from_the_log_meanwhile_is_dropped() -> None:
    staged = holding(batch(1, 2), batch(3, 2))
    assert firsts(staged, 3, through=4) == [3]
    assert staged.rows == 0


@pytest.mark.parametrize("following", [1, 4, 7])
def test_a_gap_has_to_be_read_from_the_log(following: int) -> None:
    staged = holding(batch(3, 2), batch(5, 2))
    assert staged.take(following, through=9, rows_max=100) is None


def test_it_holds_no_more_than_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = batch(1, 1), batch(2, 1)
    monkeypatch.setattr("penstock.node.live.partition.STAGED_BYTES_MAX", first.size)
    staged = holding(first)
    assert not staged.add(second, second.columns())
    assert firsts(staged, 1, through=2) == [1]
    assert staged.add(second, second.columns())
